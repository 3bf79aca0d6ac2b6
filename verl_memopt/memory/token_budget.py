"""Micro-batches packed by tokens under a hard cap.

Saves: activation memory: no micro-batch ever holds more tokens than the cap, whatever the lengths of its rows.
    Fewer micro-batches than fixed row counts, and no padding (fixed micro-batches padded to the longest row compute
    4.9 to 9.2 times as many tokens).
Costs: nothing in the result (losses are normalised by global counts); a few milliseconds of packing per batch.
Pairs with: chunked log-probs and activation checkpointing, which lower the bytes a token needs and so allow a higher cap.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from verl_memopt.errors import ConfigError

BUDGET_KEY = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"

REFINEMENT_WORK = 200_000
"""Most candidates looked at per call, over all refinements: 10,000 rows take 30 to 50 ms on one core."""

SCAN_WORK = 16
"""What placing one row costs before any candidate is looked at, in the same unit."""

MOST_SWAPS = 100
"""Bound on the swaps :func:`balance` makes; a handful is usual."""

REFINEMENTS = ((32, False), (64, True), (128, False), (256, True), (4, False), (16, False))
"""(candidates per bin, spread over all rows or the largest that fit), tried in turn until one reaches the lower bound."""


def pack(
    lengths: Sequence[int],
    budget: int,
    num_bins_at_least: int = 1,
    names: Sequence[str] | None = None,
    key: str = BUDGET_KEY,
) -> list[list[int]]:
    """Gives micro-batches as lists of row indices, none with more than ``budget`` tokens.

    First-fit-decreasing; where that needs more bins than :func:`lower_bound`, each bin is also filled as tightly as
    singles and pairs allow, and the fewest bins win. Rows ascend inside a bin. Deterministic: equal lengths give equal
    bins. With fewer rows than ``num_bins_at_least`` the last bins are empty.

    Errors: ConfigError naming ``key``, the row (``names[row]`` or its index), its length and the smallest budget that works.
    """
    lengths = [int(length) for length in lengths]
    _check_cap(lengths, budget, names, key)
    bins = _first_fit_decreasing(lengths, budget)
    bound = lower_bound(lengths, budget)
    work_left = REFINEMENT_WORK
    for candidates, spread in REFINEMENTS:
        work = len(lengths) * (candidates + SCAN_WORK)
        if len(bins) > bound and work <= work_left:
            bins = min(bins, _tight_fill(lengths, budget, candidates, spread), key=len)
            work_left -= work
    bins = [sorted(rows) for rows in bins]
    return split_to_count(bins, max(len(bins), num_bins_at_least), lengths)


def pack_fixed(num_rows: int, rows_per_bin: int) -> list[list[int]]:
    """Gives micro-batches of ``rows_per_bin`` consecutive rows (``ppo_micro_batch_size_per_gpu``); the last may be shorter."""
    assert rows_per_bin > 0, rows_per_bin
    rows = range(num_rows)
    return [list(rows[start : start + rows_per_bin]) for start in rows[::rows_per_bin]]


def split_to_count(bins: Sequence[Sequence[int]], count: int, lengths: Sequence[int] | None = None) -> list[list[int]]:
    """Gives exactly ``count`` bins by splitting the largest, so that every rank runs as many micro-batches as the busiest.

    Size is the sum of ``lengths`` of a bin's rows, or its number of rows. A bin of one row cannot be split: with fewer
    rows than ``count`` the last bins are empty lists.
    """
    assert count >= len(bins), (count, len(bins))
    result = [list(rows) for rows in bins]
    heap = [_bin_entry(rows, position, lengths) for position, rows in enumerate(result) if len(rows) > 1]
    heapq.heapify(heap)
    while len(result) < count and heap:
        position = heapq.heappop(heap)[1]
        kept, moved = _halve(result[position], lengths)
        result[position] = kept
        result.append(moved)
        for place in (position, len(result) - 1):
            if len(result[place]) > 1:
                heapq.heappush(heap, _bin_entry(result[place], place, lengths))
    return result + [[] for _ in range(count - len(result))]


def lower_bound(lengths: Sequence[int], budget: int) -> int:
    """Gives a number of bins that no packing can beat: Martello and Toth's L2, which is never below ceil(sum / budget).

    For each threshold a: rows longer than ``budget - a`` stand alone, rows over half the budget need a bin each, and what
    rows between a and half the budget do not find room for beside those needs further bins. Linear after a sort.
    """
    big = sorted(length for length in lengths if 2 * length > budget)
    small = sorted((length for length in lengths if 2 * length <= budget), reverse=True)
    host_tokens = [0, *accumulate(big)]
    overflow, small_tokens = 0, 0
    for threshold in small:
        small_tokens += threshold
        hosts = bisect_right(big, budget - threshold)
        overflow = max(overflow, small_tokens - (hosts * budget - host_tokens[hosts]))
    return max(len(big) - (-overflow // budget), -(-sum(lengths) // budget))


def balance(costs: Sequence[float], num_parts: int, group: int = 1) -> list[list[int]]:
    """Gives each rank the same number of rows and nearly the same total cost, as ``num_parts`` ascending lists of row indices.

    ``group`` consecutive rows (the samples of one prompt) stay together. The dearest group goes to the cheapest part that
    still has a place; then groups are swapped between the dearest and the cheapest part while that helps. (Karmarkar-Karp
    under equal counts leaves 9 % more on the dearest of 8 parts of log-normal rows, this under 0.1 %.)
    The number of rows must be a multiple of ``num_parts * group``.
    """
    assert len(costs) % (num_parts * group) == 0, (len(costs), num_parts, group)
    weights = [float(sum(costs[start : start + group])) for start in range(0, len(costs), group)]
    parts = _dearest_to_cheapest(weights, num_parts)
    for _ in range(MOST_SWAPS):
        if not _swap_once(weights, parts):
            break
    return [[unit * group + offset for unit in sorted(units) for offset in range(group)] for units in parts]


def _dearest_to_cheapest(weights: list[float], num_parts: int) -> list[list[int]]:
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    heap = [(0.0, part) for part in range(num_parts)]
    for unit in sorted(range(len(weights)), key=lambda unit: (-weights[unit], unit)):
        total, part = heapq.heappop(heap)
        parts[part].append(unit)
        if len(parts[part]) * num_parts < len(weights):
            heapq.heappush(heap, (total + weights[unit], part))
    return parts


def _swap_once(weights: list[float], parts: list[list[int]]) -> bool:
    """Swaps the pair of units that most nearly evens out the dearest and the cheapest part; False when none helps."""
    totals = [sum(weights[unit] for unit in units) for units in parts]
    dear, cheap = parts[totals.index(max(totals))], parts[totals.index(min(totals))]
    gap = max(totals) - min(totals)
    cheap.sort(key=lambda unit: (weights[unit], unit))
    values = [weights[unit] for unit in cheap]
    best, choice = gap * (1 - 1e-9), None
    for place, unit in enumerate(dear):
        nearest = bisect_right(values, weights[unit] - gap / 2)
        for other in range(max(nearest - 1, 0), min(nearest + 1, len(values))):
            gap_left = abs(gap - 2 * (weights[unit] - values[other]))
            if gap_left < best:
                best, choice = gap_left, (place, other)
    if choice is not None:
        place, other = choice
        dear[place], cheap[other] = cheap[other], dear[place]
    return choice is not None


def _check_cap(lengths: list[int], budget: int, names: Sequence[str] | None, key: str) -> None:
    longest = max(range(len(lengths)), key=lengths.__getitem__, default=None)
    if longest is None or lengths[longest] <= budget:
        return
    name = names[longest] if names is not None else f"row {longest}"
    raise ConfigError(
        f"{key}={budget}: {name} has {lengths[longest]} tokens, more than one micro-batch may hold. "
        f"Raise it to at least {lengths[longest]}, or lower data.max_prompt_length or data.max_response_length."
    )


def _longest_first(lengths: list[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))


def _first_fit_decreasing(lengths: list[int], budget: int) -> list[list[int]]:
    """Puts each row, longest first, into the first bin with room; a tree of maxima finds it in log time."""
    leaves = 1 << max(len(lengths) - 1, 0).bit_length()
    room = [budget] * (2 * leaves)
    bins: list[list[int]] = []
    for row in _longest_first(lengths):
        length, node = lengths[row], 1
        while node < leaves:
            node *= 2
            if room[node] < length:
                node += 1
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(row)
        room[node] -= length
        for parent in _ancestors(node):
            most = max(room[2 * parent], room[2 * parent + 1])
            if room[parent] == most:
                break
            room[parent] = most
    return bins


def _ancestors(node: int) -> Iterator[int]:
    while node > 1:
        node //= 2
        yield node


def _tight_fill(lengths: list[int], budget: int, candidates: int, spread: bool) -> list[list[int]]:
    """Fills one bin at a time: the longest row left, then again and again the single row or pair that leaves least room."""
    rows = _longest_first(lengths)[::-1]
    left = [lengths[row] for row in rows]
    bins = []
    while left:
        bins.append([rows.pop()])
        room = budget - left.pop()
        while left and left[0] <= room:
            for place in _best_single_or_pair(left, room, candidates, spread):
                room -= left.pop(place)
                bins[-1].append(rows.pop(place))
    return bins


def _best_single_or_pair(left: list[int], room: int, candidates: int, spread: bool) -> tuple[int, ...]:
    """Gives positions, descending, in the ascending list ``left`` whose sum comes closest to ``room``."""
    largest = bisect_right(left, room) - 1
    choice: tuple[int, ...] = (largest,)
    best = left[largest]
    step = max(1, largest // candidates) if spread else 1
    for first in range(largest, max(0, largest - candidates * step), -step):
        if best == room:
            break
        second = bisect_right(left, room - left[first], 0, first) - 1
        if second >= 0 and left[first] + left[second] > best:
            best, choice = left[first] + left[second], (first, second)
    return choice


def _bin_entry(rows: list[int], position: int, lengths: Sequence[int] | None) -> tuple[float, int]:
    return -_size(rows, lengths), position


def _size(rows: list[int], lengths: Sequence[int] | None) -> float:
    return len(rows) if lengths is None else sum(int(lengths[row]) for row in rows)


def _halve(rows: list[int], lengths: Sequence[int] | None) -> tuple[list[int], list[int]]:
    """Cuts a bin of at least two rows in two non-empty halves of nearly equal size, the heavier first."""
    halves: tuple[list[int], list[int]] = ([], [])
    sizes = [0, 0]
    for row in sorted(rows, key=lambda row: (-_size([row], lengths), row)):
        lighter = 0 if sizes[0] <= sizes[1] and not (halves[0] and not halves[1]) else 1
        halves[lighter].append(row)
        sizes[lighter] += int(_size([row], lengths))
    return sorted(halves[0]), sorted(halves[1])
