"""``python -m benchmarks.estimators``: this project's estimators and losses beside verl's and TRL's on the same inputs.

    benchmarks/estimators/setup.sh                          # .venv-peers with TRL and verl, once
    .venv-peers/bin/python -m benchmarks.estimators [--seeds 3] [--json FILE] [--text FILE]

Exit codes: 0 all that is defined alike agrees, 1 something differs without a reason, 2 no peer is installed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.estimators.batch import make_batch
from benchmarks.estimators.ours import ALONE, CASES
from benchmarks.estimators.table import Row, compare, render

PEERS = ("verl", "trl")


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
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
