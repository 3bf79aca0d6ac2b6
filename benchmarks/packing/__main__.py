"""``python -m benchmarks.packing``: packs 1,000 random batches of each shape and prints what came out; ``--json`` keeps it.

Batches are packed by the token budget and by two simpler rules.
"""

from __future__ import annotations

import argparse
import heapq
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import load, text_table, write_json
from verl_memopt.memory.token_packing import lower_bound, pack

MOST_SECONDS = 0.05
WITHIN_ONE = 0.99


SHAPES = ("uniform", "log-normal", "all equal", "one giant")
LONGEST = 8192
MOST_ROWS = 512
LARGE = 10_000
LARGE_BUDGET = 16_384

Rule = Callable[[Sequence[int], int], list[list[int]]]


def lengths_of(shape: str, rows: int, draw: random.Random) -> list[int]:
    """Gives the tokens of each row of a batch."""
    if shape == "all equal":
        return [draw.randint(1, LONGEST)] * rows
    if shape == "one giant":
        return [LONGEST, *(draw.randint(1, LONGEST // 16) for _ in range(rows - 1))]
    if shape == "log-normal":
        return [max(1, min(LONGEST, int(draw.lognormvariate(6.5, 0.8)))) for _ in range(rows)]
    return [draw.randint(1, LONGEST) for _ in range(rows)]


def batches(shape: str, count: int) -> Iterator[tuple[list[int], int]]:
    """Yields (lengths, cap) of random batches, the same for the same shape: 4 to 512 rows, a cap of 1 to 16 times the longest."""
    draw = random.Random(shape)
    for _ in range(count):
        lengths = lengths_of(shape, draw.randint(4, MOST_ROWS), draw)
        yield lengths, int(max(lengths) * 16 ** draw.random())


@dataclass(frozen=True)
class Packed:
    """How a batch was packed. over_cap: bins with more tokens than the cap; bound: bins that no packing can beat."""

    bins: int
    bound: int
    over_cap: int


def measure(lengths: Sequence[int], budget: int, rule: Rule = pack) -> Packed:
    """Packs one batch. Errors: AssertionError when a row is missing or there twice."""
    bins = rule(lengths, budget)
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    over = sum(sum(lengths[row] for row in rows) > budget for rows in bins)
    return Packed(len(bins), lower_bound(lengths, budget), over)


def next_fit(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Fills bins with rows in their order, the next one when a row does not fit."""
    bins: list[list[int]] = [[]]
    room = budget
    for row, length in enumerate(lengths):
        if length > room:
            bins.append([])
            room = budget
        bins[-1].append(row)
        room -= length
    return bins


def even_parts(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Cuts the batch into as many even parts as its tokens need caps: the cap holds on average, not for each part."""
    parts: list[list[int]] = [[] for _ in range(-(-sum(lengths) // budget))]
    heap = [(0, part) for part in range(len(parts))]
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        total, part = heap[0]
        parts[part].append(row)
        heapq.heapreplace(heap, (total + lengths[row], part))
    return parts


RULES: dict[str, Rule] = {"token budget": pack, "in order": next_fit, "even parts": even_parts}


def seconds_to_pack(shape: str, repeats: int) -> tuple[float, float]:
    """Gives the median seconds, on the clock and on the processor, of packing 10,000 rows under a cap of 16,384 tokens."""
    lengths = lengths_of(shape, LARGE, random.Random(shape))
    clock, processor = [], []
    for _ in range(repeats):
        start, spent = time.perf_counter(), time.process_time()
        pack(lengths, LARGE_BUDGET)
        clock.append(time.perf_counter() - start)
        processor.append(time.process_time() - spent)
    return statistics.median(clock), statistics.median(processor)


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
    rules = {name: {shape: quality(shape, count, rule) for shape in SHAPES} for name, rule in RULES.items()}
    times = {shape: dict(zip(("clock", "processor"), seconds_to_pack(shape, repeats), strict=True)) for shape in SHAPES[:2]}
    machine = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load": load(),
    }
    return {"schema": 1, "rules": rules, "seconds_to_pack_10000": times, "repeats": repeats, "machine": machine}


def table(record: dict[str, Any]) -> str:
    heads = ("rule", "batches", "over the cap", "at the bound", "within 1 bin", "worst", "bins / bound")
    rows = [
        [
            name, shape, str(found["batches_over_cap"]), f"{found['at_bound']:.1%}", f"{found['within_one_bin']:.1%}",
            f"{found['bins_over_bound_at_most']:+}", f"{found['bins_per_bound']:.3f}",
        ]
        for name, shapes in record["rules"].items()
        for shape, found in shapes.items()
    ]  # fmt: skip
    lines = [text_table(heads, rows, left=(0, 1))]
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
        write_json(parsed.json, record)
    return 0 if holds(record) else 1


if __name__ == "__main__":
    sys.exit(main())
