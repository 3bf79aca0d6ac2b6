"""Write which model fits which card into every page, profile and script that says it, from ``verl-memopt fit``.

``python -m tools.cards`` fills what stands between the markers ``<cards>`` and ``</cards>`` of each file of :data:`FILES`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from verl_memopt.config.keys import shown
from verl_memopt.config.loader import PACKAGED, load_settings
from verl_memopt.memory import profiles
from verl_memopt.memory.formulas import PUBLISHED
from verl_memopt.observe.phase import GIB
from verl_memopt.trainer.fit import Card
from verl_memopt.trainer.fit_search import PLANS, Change, Search, silent

ROOT = Path(__file__).parents[1]
EXAMPLES = "examples/memory_optimization"
RANK, BASE = "actor_rollout_ref.model.lora_rank=32", "actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16"
WAYS: dict[str, tuple[str, ...]] = {
    "all": (),
    "lora": (RANK, BASE),
    "qlora": (RANK, BASE, "actor_rollout_ref.model.quantization=nf4"),
}
"""Way of training -> settings beside those of a card's profile."""
LEAST_BYTES = {"all": 2.0, "lora": 2.0, "qlora": 0.5}
"""Of a weight on the card while it generates, whatever is set: a model above that is not tried."""


HEAD = """| profile | all weights, with it alone | all weights | LoRA | LoRA on 4 bits | host GiB |
|---|---|---|---|---|---:|
"""
FOOT = """
The largest preset that fits one card by the formulas of `verl-memopt fit`, generation included, for prompts and responses of 512
tokens each. No card has measured it. LoRA has rank 32 on bfloat16 weights, or on a base in nf4. All but the second
column may need more settings than the profile, none of which changes a number. They are printed by
`verl-memopt fit --config-name rloo_trainer model=... memory=...`. The host memory is that of the third column.

\\* With these settings:

"""


@dataclass(frozen=True)
class Largest:
    """The largest preset that fits a card, and what `fit` adds to the profile for it."""

    model: str
    changes: tuple[Change, ...] = ()
    host_gib: int = 0
    binding: str = ""

    @property
    def command(self) -> str:
        """The settings that it adds."""
        return " ".join(f"{key}={shown(value)}" for change in self.changes for key, value in change.keys.items())


@dataclass(frozen=True)
class Row:
    """What fits a card: with its profile alone, and with what `fit` adds, none of which changes a number."""

    card: str
    alone: Largest
    all: Largest
    lora: Largest
    qlora: Largest

    @property
    def line(self) -> str:
        """The row of the table."""
        added = "" if self.all.model == self.alone.model else " *"
        cells = (
            f"`memory={self.card}`", f"`{self.alone.model}`", f"`{self.all.model}`{added}", f"`{self.lora.model}`",
            f"`{self.qlora.model}`", f"{self.all.host_gib}",
        )  # fmt: skip
        return f"| {' | '.join(cells)} |"


@cache
def presets() -> dict[str, int]:
    """Return preset -> parameters, the largest first, of the models of ``model=``."""
    found = {}
    for file in (PACKAGED / "model").glob("*.yaml"):
        path = yaml.safe_load(file.read_text())["actor_rollout_ref"]["model"]["path"]
        if path in PUBLISHED:
            found[file.stem] = PUBLISHED[path].params
    return dict(sorted(found.items(), key=lambda each: -each[1]))


@cache
def row(card: str) -> Row:
    """Return what fits a card."""
    ways = {way: _largest(card, way, searches=True) for way in WAYS}
    return Row(card, _largest(card, "all", searches=False), **ways)


def _largest(card: str, way: str, searches: bool) -> Largest:
    size = Card.of(profiles.gigabytes(card))
    for model, params in presets().items():
        if LEAST_BYTES[way] * params > size.num_bytes:
            continue
        files = ["data.train_files=none", "data.val_files=null", f"memory={card}", f"model={model}"]
        with silent():
            search = Search(load_settings("rloo_trainer", [*files, *WAYS[way]]), size, None if searches else ())
        changes, after = search.changes(PLANS[:1])
        if after.fits:
            return Largest(model, changes, math.ceil(after.host_bytes / GIB), after.peaks.binding)
    raise AssertionError((card, way))


def table() -> str:
    """Return the table of all cards, as Markdown, with the settings that are added."""
    rows = [row(card) for card in profiles.CARDS]
    marked = [each for each in rows if each.all.model != each.alone.model]
    body = "".join(f"{each.line}\n" for each in rows)
    added = "".join(f"- `model={each.all.model} memory={each.card} {each.all.command}`\n" for each in marked)
    return f"{HEAD}{body}{FOOT}{added}"


def profile_lines(card: str) -> str:
    """Return the comment of a card's profile."""
    found = row(card)
    more = "" if found.all.model == found.alone.model else f", {found.all.model} with what fit adds"
    return (
        f"# Largest presets by `verl-memopt fit`, not measured: all weights {found.alone.model}{more};\n"
        f"# LoRA of rank 32 {found.lora.model}, on a base in 4 bits {found.qlora.model}, with what fit adds.\n"
        f"# Binding phase of the first: {found.alone.binding}. Its host memory: {found.alone.host_gib} GiB.\n"
    )


def script_lines(card: str) -> str:
    """Return the comment of a script for a card."""
    return f"# The largest preset that fits with its profile alone, by `verl-memopt fit`: model={row(card).alone.model}.\n"


FILES: dict[str, tuple[str, str]] = {
    "README.md": ("table", ""),
    f"{EXAMPLES}/README.md": ("table", ""),
    "docs/out_of_memory.md": ("table", ""),
    f"{EXAMPLES}/run_rtx5090_rloo.sh": ("script", "32g"),
    **{f"verl_memopt/config/yaml/memory/{card}.yaml": ("profile", card) for card in profiles.CARDS},
}
"""File -> what stands between its markers, and for which card."""
MARKED = re.compile(r"(<cards>[^\n]*\n)(.*?)([^\n]*</cards>)", re.DOTALL)


def filled(name: str) -> str:
    """Return a file with what fits between its markers."""
    kind, card = FILES[name]
    text = {"table": table, "script": lambda: script_lines(card), "profile": lambda: profile_lines(card)}[kind]()
    filled, count = MARKED.subn(lambda found: f"{found[1]}{text}{found[3]}", (ROOT / name).read_text())
    assert count == 1, f"{name}: {count} pairs of <cards> and </cards>"
    return filled


if __name__ == "__main__":
    for each in FILES:
        (ROOT / each).write_text(filled(each))
