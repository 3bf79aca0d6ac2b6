"""What each knob saved in one measured ladder.

``python -m verl_memopt.knobs.example LADDER.json`` prints ``verl_memopt/knobs/example.json`` anew.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

MIB = 2**20
_FILE = Path(__file__).with_name("example.json")


@dataclass(frozen=True)
class Saved:
    """The bytes by which one kind fell in one phase when the knob was switched on, measured."""

    phase: str
    kind: str
    num_bytes: int


@dataclass(frozen=True)
class Example:
    """A measured ladder in short."""

    work: str
    """Model and batch, in words."""
    savings: dict[str, Saved]
    """Name of a knob -> its largest saving, which may be 0 or less; a knob without a formula is left out."""


@cache
def example() -> Example:
    """Return the example that the project ships."""
    stored = json.loads(_FILE.read_text())
    return Example(stored["work"], {name: Saved(**saved) for name, saved in stored["savings"].items()})


def example_of(ladder: dict[str, Any]) -> Example:
    """Return the example of a ladder, as ``verl-memopt knobs --measure --json`` writes it."""
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
