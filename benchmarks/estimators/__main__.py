"""``python -m benchmarks.estimators``: this project's estimators and losses beside verl's and TRL's on the same inputs.

    benchmarks/estimators/setup.sh                          # .venv-peers with TRL and verl, once
    .venv-peers/bin/python -m benchmarks.estimators [--seeds 3] [--json FILE] [--text FILE]

Exit codes: 0 all that is defined alike agrees, 1 something differs without a reason, 2 no peer is installed.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from benchmarks.common import write_json
from benchmarks.estimators.batch import make_batch
from benchmarks.estimators.ours import ALONE, CASES

PEERS = ("verl", "trl")
BOUND = 1e-6
"""Largest difference of sides that define the same thing."""

REASONS: dict[tuple[str, str], str] = {
    ("verl", "advantages rloo_vectorized, groups of one"): "rloo here, the reward itself; 0 in verl, whose own rloo keeps it",
    ("trl", "advantages grpo"): "TRL adds 1e-4 to the standard deviation, verl and this project 1e-6",
}
"""(peer, case) -> why the two differ by definition."""


@dataclass(frozen=True)
class Row:
    """One case beside one peer."""

    function: str
    peer: str
    version: str
    difference: float
    """Largest absolute difference, over the largest absolute value or 1."""
    where: str
    """The value with that difference."""
    reason: str

    @property
    def holds(self) -> bool:
        """True if the difference is in its bound, or has a reason."""
        return self.difference <= BOUND or bool(self.reason)


def compare(function: str, peer: str, version: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Row:
    """Compares all values of a case. A value that one side lacks is an infinite difference."""
    differences = {name: _difference(ours.get(name), theirs.get(name)) for name in sorted(ours.keys() | theirs.keys())}
    where = max(differences, key=lambda name: differences[name])
    reason = REASONS.get((peer, function), "")
    return Row(function, peer, version, differences[where], where, reason)


def _difference(ours: Any, theirs: Any) -> float:
    if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return 0.0 if ours == theirs else float("inf")
    if ours.shape != theirs.shape:
        return float("inf")
    gap = (ours.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp(min=1)
    return float(gap)


def render(rows: Sequence[Row], without_peer: Sequence[str]) -> str:
    lines = [f"{'function':58}{'peer':14}{'difference':>11}  {'value':12} reason"]
    for row in rows:
        mark = row.reason or ("" if row.holds else "NOT THE SAME")
        cells = f"{row.function:58}{row.peer + ' ' + row.version:14}{row.difference:>11.1e}  {row.where:12} {mark}"
        lines.append(cells.rstrip())
    beyond = sum(not row.holds for row in rows)
    explained = sum(bool(row.reason) for row in rows)
    lines.append(f"{len(rows)} comparisons: {explained} with a reason to differ, {beyond} others beyond {BOUND:g}")
    if without_peer:
        lines.append("no peer's function: " + "; ".join(without_peer))
    return "\n".join(lines)


def peer_side(name: str) -> ModuleType | None:
    """Gives a peer's values, None where it is not installed."""
    try:
        return importlib.import_module(f"benchmarks.estimators.{name}_side")
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] in (name, "accelerate"):
            return None
        raise


def rows_beside(name: str, side: Any, seeds: int) -> list[Row]:
    """Gives the row with the largest difference over the seeds, for each case that the peer has."""
    rows = []
    for function, theirs in side.VALUES.items():
        found = []
        for seed in range(seeds):
            batch = make_batch(seed, function.endswith(ALONE))
            found.append(compare(function, name, side.VERSION, CASES[function](batch), theirs(batch)))
        rows.append(max(found, key=lambda row: row.difference))
    return rows


def report(sides: Mapping[str, Any], seeds: int) -> tuple[list[Row], str]:
    """Gives the rows beside all peers, and the table."""
    rows = [row for name, side in sides.items() for row in rows_beside(name, side, seeds)]
    return rows, render(rows, cases_of_ours_alone(sides))


def cases_of_ours_alone(sides: Mapping[str, Any]) -> list[str]:
    """Gives the cases for which no peer has a function."""
    return [function for function in CASES if all(function not in side.VALUES for side in sides.values())]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.estimators", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--text", type=Path)
    options = parser.parse_args(arguments)
    sides = {name: side for name in PEERS if (side := peer_side(name)) is not None}
    if not sides:
        print("benchmarks.estimators: neither verl nor TRL is installed. Run benchmarks/estimators/setup.sh.", file=sys.stderr)
        return 2
    rows, text = report(sides, options.seeds)
    print(text)
    if options.text:
        options.text.write_text(text + "\n")
    if options.json:
        record = {"schema": 1, "rows": [asdict(row) for row in rows], "without": cases_of_ours_alone(sides)}
        write_json(options.json, record)
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
