"""The work: random batches of four shapes, packed by the token budget and by two simpler rules."""

from __future__ import annotations

import heapq
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from verl_memopt.memory.token_packing import lower_bound, pack

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
