"""The published memory figures, the formula that predicts them, and the published plateaus of bytes per logit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MIB = 2**20
GIB = 2**30

IDLE_BYTES = 641 * MIB
"""Published level of the process before its first update: the CUDA context, the libraries and the models. A given constant."""
DESKTOP_BYTES = int(1109.9 * MIB)
"""Memory that the desktop of the published machine held. The published figures contain it."""
BYTES_PER_LOGIT = 14
"""Of every position of prompt and response: three fp32 tensors and the cached bf16 block of the head's output."""
BYTES_PER_RESPONSE_LOGIT = 8
"""Of every response position: the fp32 scores of the generation, which are kept, and a gradient of the same size."""


def predicted_bytes(rows: int, prompt: int, response: int, vocab: int) -> int:
    """Return the peak that the formula ``641 MiB + B V (14 T + 8 R)`` predicts above the desktop, in bytes.

    Args:
        rows: Rows of one forward, B.
        prompt: Tokens of a prompt, P. ``T = P + R``.
        response: Tokens of a response, R.
        vocab: Size of the vocabulary, V.
    """
    tokens = prompt + response
    return IDLE_BYTES + rows * vocab * (BYTES_PER_LOGIT * tokens + BYTES_PER_RESPONSE_LOGIT * response)


def device_bytes(process_bytes: float) -> float:
    """Return the used memory of the whole published device while a process holds ``process_bytes`` of it."""
    return process_bytes + DESKTOP_BYTES


def reduction(before: float, after: float) -> float:
    """Return by which share of ``before`` the whole-device figure fell. Both arguments are bytes of the process."""
    return 1 - device_bytes(after) / device_bytes(before)


@dataclass(frozen=True)
class PublishedRun:
    """A run of the published experiment. ``peak_mib`` is above the desktop; None = it ran out of memory."""

    prompt_handling: str
    """``full`` or ``truncated``."""
    k: int
    prompt: int
    """Tokens of a prompt."""
    peak_mib: float | None


PUBLISHED_RUNS = (
    PublishedRun("full", 2, 3015, 13_615),
    PublishedRun("full", 4, 3015, 26_529),
    PublishedRun("full", 8, 3015, None),
    PublishedRun("truncated", 2, 1024, 5_439),
    PublishedRun("truncated", 4, 1024, 10_169),
    PublishedRun("truncated", 8, 1024, 19_627),
)
"""The raw samples of the published runs, reduced to peaks."""

PLATEAUS = (4.0, 6.2, 8.0, 12.0, 14.2)
"""Published plateaus of the device memory, in bytes per logit: above the level between updates, divided by B T V."""


def bytes_per_logit(reserved: Sequence[int], between: int, logits: int) -> list[float]:
    """Return levels of the device memory in the unit of the plateaus.

    Args:
        reserved: Bytes that the allocator held at each turning point.
        between: Bytes that it held between two updates.
        logits: Number of logits of one forward, B T V.
    """
    return [(level - between) / logits for level in reserved]


def nearest_levels(levels: Sequence[float], plateaus: Sequence[float] = PLATEAUS) -> dict[float, float]:
    """Return for each published plateau the measured level that is nearest to it.

    Args:
        levels: Measured levels, in bytes per logit.
        plateaus: The plateaus to find.
    """
    return {plateau: min(levels, key=lambda level: abs(level - plateau)) for plateau in plateaus}
