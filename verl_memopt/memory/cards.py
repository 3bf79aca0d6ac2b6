"""Cards that are known by name or size, and how sizes are parsed. Imports no torch, because settings are checked without it."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from verl_memopt.errors import ConfigError

CARDS = {"12g": 12_282, "16g": 15_360, "24g": 23_028, "32g": 32_607, "48g": 46_068, "80g": 81_559, "141g": 143_771}
"""Size of a card -> MiB that nvidia-smi reports for it. If cards of one size differ, it is one of the smaller figures (an A10 for
24g)."""

LARGEST = 1000
"""GB that no card reaches."""


class Datasheet(NamedTuple):
    """Figures from the datasheet of a card, not measured."""

    name: str
    half: float  # dense TFLOP/s in bfloat16
    fp32: float  # TFLOP/s
    memory: float  # GB/s of its own memory
    bus: float  # GB/s one way


PCIE_4, PCIE_5 = 31.5, 63.0
"""GB/s of 16 lanes, in one direction."""
DATASHEETS = {
    "12g": (Datasheet("RTX 4070", 58.3, 29.1, 504, PCIE_4),),
    "16g": (Datasheet("RTX 4080", 97.5, 48.7, 717, PCIE_4),),
    "24g": (
        Datasheet("RTX 3090", 71, 35.6, 936, PCIE_4),
        Datasheet("RTX 4090", 165, 82.6, 1008, PCIE_4),
        Datasheet("L4", 121, 30.3, 300, PCIE_4),
    ),
    "32g": (Datasheet("RTX 5090", 209.5, 104.8, 1792, PCIE_5),),
    "40g": (Datasheet("A100 40 GB", 312, 19.5, 1555, PCIE_4),),
    "48g": (Datasheet("L40S", 362, 91.6, 864, PCIE_4),),
    "80g": (Datasheet("A100 80 GB", 312, 19.5, 2039, PCIE_4), Datasheet("H100", 989, 67, 3350, PCIE_5)),
    "141g": (Datasheet("H200", 989, 67, 4800, PCIE_5),),
    "180g": (Datasheet("B200", 2250, 75, 8000, PCIE_5),),
}
"""Size of a card -> datasheets of cards of that size."""

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:g|gb|gib)?", re.IGNORECASE)


def names_card(text: str) -> bool:
    """Return whether a text is a size or the name of a card."""
    return bool(SIZE.fullmatch(text.strip()) or _sizes_of(text))


def gigabytes(size: str) -> float:
    """Parse a size (32, 32g, 32GB, "32 GB" or 32GiB) or the name of a card into the number of GB with which it is sold.

    Raises:
        ValueError: It is not a size above 0, or cards of this name have several sizes.
    """
    if sizes := _sizes_of(size):
        if len(sizes) > 1:
            raise ValueError(f"{size} is made with {' and '.join(card_size.upper() + 'B' for card_size in sizes)}. Write which")
        size = sizes[0]
    found = SIZE.fullmatch(size.strip())
    number = float(found[1]) if found else 0.0
    if not 0 < number < math.inf:
        raise ValueError(f"{size} is no number of GB above 0, and no card that is known here")
    return number


def _sizes_of(name: str) -> list[str]:
    sizes = [size for size, cards in DATASHEETS.items() if any(_short(card.name) == _short(name) for card in cards)]
    unit = re.search(r"(\d+)\s*gi?b$", name.lower())
    return [f"{unit[1]}g"] if unit is not None and f"{unit[1]}g" in sizes else sizes


def _short(card: str) -> str:
    # For example "NVIDIA GeForce RTX 4090 24GB" becomes 4090.
    return re.sub(r"nvidia|geforce|rtx|[\s_-]|\d+\s*gi?b$", "", card.lower())


def check_card(number: float) -> None:
    """Refuse a number of GB that no card has.

    Raises:
        ConfigError: It is too large.
    """
    if number > LARGEST:
        raise ConfigError(f"no card has {number:g} GB. If these are MB, write {number / 1024:.0f}.")
