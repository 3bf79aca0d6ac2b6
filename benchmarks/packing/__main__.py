"""``python -m benchmarks.packing``: packs 1,000 random batches of each shape and prints what came out; ``--json`` keeps it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.packing.contest import RULES, SHAPES, Rule, batches, measure, seconds_to_pack

MOST_SECONDS = 0.05
WITHIN_ONE = 0.99


def quality(shape: str, count: int, rule: Rule) -> dict[str, Any]:
    """Gives how a rule packed ``count`` batches of a shape."""
    packed = [measure(lengths, budget, rule) for lengths, budget in batches(shape, count)]
    return {
        "batches": count,
        "batches_over_cap": sum(result.over_cap > 0 for result in packed),
        "within_one_bin": sum(result.bins <= result.bound + 1 for result in packed) / count,
        "at_bound": sum(result.bins == result.bound for result in packed) / count,
        "bins_over_bound_at_most": max(result.bins - result.bound for result in packed),
        "bins_per_bound": sum(result.bins for result in packed) / sum(result.bound for result in packed),
    }


def run(count: int, repeats: int) -> dict[str, Any]:
    """Gives the whole record."""
    rules = {name: {shape: quality(shape, count, rule) for shape in SHAPES} for name, rule in RULES.items()}
    times = {shape: dict(zip(("clock", "processor"), seconds_to_pack(shape, repeats), strict=True)) for shape in SHAPES[:2]}
    machine = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }
    return {"schema": 1, "rules": rules, "seconds_to_pack_10000": times, "repeats": repeats, "machine": machine}


def table(record: dict[str, Any]) -> str:
    """Gives the record as text."""
    head = (
        f"{'rule':14}{'batches':12}{'over the cap':>13}{'at the bound':>14}{'within 1 bin':>14}{'worst':>7}{'bins / bound':>14}"
    )
    lines = [head]
    for name, shapes in record["rules"].items():
        for shape, found in shapes.items():
            shares = f"{found['at_bound']:>14.1%}{found['within_one_bin']:>14.1%}"
            lines.append(
                f"{name:14}{shape:12}{found['batches_over_cap']:>13}{shares}{found['bins_over_bound_at_most']:>+7}"
                f"{found['bins_per_bound']:>14.3f}"
            )
    for shape, times in record["seconds_to_pack_10000"].items():
        clock, processor = times["clock"] * 1000, times["processor"] * 1000
        lines.append(f"10,000 rows, {shape}: {clock:.0f} ms on the clock, {processor:.0f} ms on the processor (medians)")
    return "\n".join(lines)


def holds(record: dict[str, Any]) -> bool:
    """Says whether the token budget kept its promises; time is the processor's, which other work does not lengthen."""
    ours = record["rules"]["token budget"].values()
    quick = all(times["processor"] < MOST_SECONDS for times in record["seconds_to_pack_10000"].values())
    return quick and all(found["batches_over_cap"] == 0 and found["within_one_bin"] >= WITHIN_ONE for found in ours)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; the exit code is 1 when a promise is broken."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packing", description=__doc__)
    parser.add_argument("--batches", type=int, default=1000, help="batches of each shape (default: 1000)")
    parser.add_argument("--repeats", type=int, default=15, help="timed calls on 10,000 rows (default: 15)")
    parser.add_argument("--json", type=Path, default=None, help="write the record here")
    parsed = parser.parse_args(argv)
    record = run(parsed.batches, parsed.repeats)
    print(table(record))
    if parsed.json is not None:
        parsed.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if holds(record) else 1


if __name__ == "__main__":
    sys.exit(main())
