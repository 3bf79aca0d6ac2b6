"""The output of ``verl-memopt knobs``: a table of all knobs, or the full text of one knob."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_memopt.memory.knob import PARTS, Knob, in_yaml, knobs, text_of

WIDE = 120
"""Least width of a terminal, in characters, for which the table of knobs is printed. Below it, knobs are printed as a list."""


def print_knobs(console: Console) -> None:
    rows = []
    for knob in knobs():
        saved, key = example().savings.get(knob.name), knob.first_key
        default = in_yaml(knob.defaults()[key]) if key in knob.defaults() else ""
        amount = "" if saved is None else f"{saved.num_bytes / MIB:,.0f}"
        rows.append((knob.name, key.removeprefix("actor_rollout_ref."), default, amount, knob.cost))
    if console.width >= WIDE:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
        for head in ("knob", "key (below actor_rollout_ref)", "default"):
            table.add_column(head, no_wrap=True)
        table.add_column("saves\nMiB", justify="right", no_wrap=True)
        table.add_column("costs")
        for row in rows:
            table.add_row(*map(escape, row))
        console.print(table, highlight=False)
    else:
        for name, key, default, amount, cost in rows:
            console.print(f"[bold]{name}[/bold]", highlight=False)
            console.print(
                f"  {escape(key)}" + (f"  (default {escape(default)})" if default else ""), highlight=False, soft_wrap=True
            )
            console.print((f"  saves {amount} MiB; " if amount else "  ") + f"costs: {escape(cost)}", highlight=False)
        console.print("\nKeys are below actor_rollout_ref.", highlight=False)
    console.print(f"The savings were measured on {example().work}.", highlight=False)
    console.print(
        "For one knob in full: verl-memopt knobs NAME. For savings on your model: verl-memopt knobs --measure --model FOLDER.",
        highlight=False,
    )


def print_knob(knob: Knob, console: Console) -> None:
    text = text_of(knob.name)
    console.print(f"[bold]{knob.name}[/bold]: {escape(_plain(text['']))}", highlight=False)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for number, key in enumerate(knob.keys):
        default = f" = {in_yaml(knob.defaults()[key])}" if key in knob.defaults() else ""
        table.add_row("" if number else "  keys", escape(key + default))
    for name in knob.besides:
        table.add_row("  or", escape(name))
    for part in PARTS:
        table.add_row(f"  {part.lower()}", escape(_plain(text[part])))
        saved = example().savings.get(knob.name) if part == "Saves" else None
        if saved is not None:
            table.add_row("", f"{saved.num_bytes / MIB:,.0f} MiB of {saved.kind} in {saved.phase} ({example().work})")
    for refusal in knob.refuses:
        table.add_row("  refuses", escape(f"{' with '.join(refusal.keys)}: {refusal.because}"))
    console.print(table, highlight=False)


def _plain(text: str) -> str:
    return text.replace("``", "")


# The savings of each knob in one measured ladder, stored in ``example.json``.
#
# ``python -m verl_memopt.plan.list_knobs LADDER.json`` prints the new content of that file for another ladder.

MIB = 2**20
_FILE = Path(__file__).with_name("example.json")


@dataclass(frozen=True)
class Saved:
    phase: str
    kind: str
    num_bytes: int


@dataclass(frozen=True)
class Example:
    work: str
    """Model and batch, in words."""
    savings: dict[str, Saved]
    """Name of a knob -> its largest saving, which may be 0 or negative. Knobs without a formula are missing."""


@cache
def example() -> Example:
    stored = json.loads(_FILE.read_text())
    return Example(stored["work"], {name: Saved(**saved) for name, saved in stored["savings"].items()})


def example_of(ladder: dict[str, Any]) -> Example:
    """Convert a ladder that ``verl-memopt knobs --measure --json`` wrote."""
    work = ladder["work"]
    words = (
        f"{ladder['model']}, {work['rows']} rows of {work['prompt']} + {work['response']} tokens that share a prompt; "
        "each knob is added to those before it in the ladder; on a CPU with fp32 compute"
    )
    savings = {}
    for row in (*ladder["rungs"], *ladder["branches"]):
        measured = [saved for saved in row["savings"] if saved["measured_bytes"] is not None]
        if measured:
            largest = max(measured, key=lambda saved: saved["measured_bytes"])
            savings[row["knob"]] = Saved(largest["phase"], largest["kind"], largest["measured_bytes"])
    return Example(words, savings)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(example_of(json.loads(Path(sys.argv[1]).read_text()))), indent=1) + "\n")
