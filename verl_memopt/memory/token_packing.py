"""Pack rows into micro-batches by tokens, under a hard cap.

Bytes saved: let T be the tokens that are computed at once without a cap, and t those of the fullest micro-batch under the cap.
Activations fall by

(T - t) x (L x A / T + 2 x (I + h) x b) bytes,

where L counts the blocks and A / T is what a block keeps per token. The second term is what the backward of an MLP holds: I is
its width, h the hidden size, and b the bytes per element. No micro-batch has more tokens than the cap, whatever the lengths of
its rows. Micro-batches of a fixed number of rows would be more. Padded to the longest row, they compute 4.9 to 9.2 times as many
tokens.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, repeat, zip_longest
from typing import TypeAlias

import numpy as np

from verl_memopt.errors import ConfigError
from verl_memopt.memory.pass_order import Cut, InParts, Nodes, common_word, pieces
from verl_memopt.memory.token_budget import BUDGET_KEY

REFINEMENT_WORK = 200_000
"""Most candidates that one call examines, over all refinements. 10,000 rows take 20 to 40 ms on one core."""

SCAN_WORK = 16
"""Cost of placing one row without its candidates, in the same unit."""

FINEST = 16
"""Largest k in :func:`lower_bound`. Larger values hardly improve the bound."""

MOST_SWAPS = 100
"""Most swaps in :func:`balance`. Usually there are a few."""

REFINEMENTS = ((32, False), (64, True), (128, False), (256, True), (4, False), (16, False))
"""(candidates per bin, whether they are spread over all rows or the largest that fit). They are tried in order until one reaches
the lower bound."""


def pack(
    lengths: Sequence[int], budget: int, num_bins_at_least: int = 1, names: Sequence[str] | None = None, key: str = BUDGET_KEY
) -> list[list[int]]:
    """Pack rows into micro-batches (ascending lists of row indices) of at most ``budget`` tokens each.

    The algorithm is best-fit-decreasing. If it needs more bins than :func:`lower_bound`, a second algorithm fills each bin as
    tightly as possible with single rows and pairs, and the result with fewer bins is used. Equal ``lengths`` always give equal
    bins. With fewer rows than ``num_bins_at_least`` the last bins are empty.

    Raises:
        ConfigError: A row exceeds the budget. The message names ``key``, the row, its length and the smallest budget that works.
    """
    lengths = [int(length) for length in lengths]
    problem = _over_cap(lengths, budget, names, key)
    if problem is not None:
        raise ConfigError(problem)
    bins = _best_fit_decreasing(lengths, budget)
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
    assert rows_per_bin > 0, rows_per_bin
    rows = range(num_rows)
    return [list(rows[start : start + rows_per_bin]) for start in rows[::rows_per_bin]]


def split_to_count(bins: Sequence[Sequence[int]], count: int, lengths: Sequence[int]) -> list[list[int]]:
    """Split the largest bins until there are exactly ``count``, so that all ranks run equally many micro-batches.

    ``count`` is at least the number of bins. A bin of one row cannot be split, so with fewer rows than ``count`` the last bins
    are empty lists. The size of a bin is the sum of the ``lengths`` of its rows.
    """
    return _split(bins, count, lambda rows: sum(lengths[row] for row in rows), lambda rows: _halve(rows, lengths))


def _split(
    bins: Sequence[Sequence[int]],
    count: int,
    size: Callable[[list[int]], int],
    halve: Callable[[list[int]], tuple[list[int], list[int]]],
) -> list[list[int]]:
    assert count >= len(bins), (count, len(bins))
    result = [list(rows) for rows in bins]

    def entry(position: int) -> tuple[int, int]:
        return -size(result[position]), position

    heap = [entry(position) for position, rows in enumerate(result) if len(rows) > 1]
    heapq.heapify(heap)
    while len(result) < count and heap:
        position = heapq.heappop(heap)[1]
        result[position], moved = halve(result[position])
        result.append(moved)
        for place in (position, len(result) - 1):
            if len(result[place]) > 1:
                heapq.heappush(heap, entry(place))
    return result + [[] for _ in range(count - len(result))]


def lower_bound(lengths: Sequence[int], budget: int) -> int:
    """Return a lower bound on the number of bins: the bound of Fekete and Schepers from dual feasible functions.

    Each function maps x, the length of a row divided by the budget, to a weight. The weights of the rows in one bin sum to at
    most 1, so the sum of all weights is a lower bound. There is a threshold a, which is 0 or any length up to half the budget.
    Rows shorter than a weigh 0, and rows longer than ``budget - a`` weigh 1. All other rows weigh x, which gives the bound L2 of
    Martello and Toth, or

    floor((k + 1) x) / k, or x itself if (k + 1) x is a whole number.

    With k = 2, for example, two rows over a third of the budget fill a bin. Source: S. Fekete, J. Schepers, Mathematical
    Programming 91 (2001).
    """
    rows = np.sort(np.asarray(lengths, dtype=np.int64))
    if not rows.size:
        return 0
    thresholds = np.concatenate([[0], np.unique(rows[2 * rows <= budget])])
    first, last = np.searchsorted(rows, thresholds, "left"), np.searchsorted(rows, budget - thresholds, "right")
    bound = 0
    for parts in range(1, FINEST + 1):
        # All weights are multiplied by parts * budget, so that they are whole numbers.
        scaled = (parts + 1) * rows
        rounded = np.where(scaled % budget == 0, parts * rows, scaled // budget * budget)
        for weights in (rounded, parts * rows) if parts == 1 else (rounded,):
            sums = np.concatenate([[0], np.cumsum(weights)])
            total = int(((rows.size - last) * parts * budget + sums[last] - sums[first]).max())
            bound = max(bound, -(-total // (parts * budget)))
    return bound


def balance(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Divide units over ``num_parts`` ranks, as ascending index lists of equal length and nearly equal total cost.

    Units go, most expensive first, to the cheapest part that still has room. Then units are swapped between the most expensive
    and the cheapest part as long as that helps. With log-normal rows and 8 parts, the most expensive part is less than 0.1 %
    above the mean; Karmarkar-Karp with equal counts leaves 9 %. The number of units must be a multiple of ``num_parts``.
    """
    assert len(costs) % num_parts == 0, (len(costs), num_parts)
    weights = list(map(float, costs))
    parts = _dearest_to_cheapest(weights, num_parts)
    for _ in range(MOST_SWAPS):
        if not _swap_once(weights, parts):
            break
    return [sorted(units) for units in parts]


def _dearest_to_cheapest(weights: list[float], num_parts: int) -> list[list[int]]:
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    heap = [(0.0, part) for part in range(num_parts)]
    for unit in sorted(range(len(weights)), key=lambda unit: (-weights[unit], unit)):
        total, part = heapq.heappop(heap)
        parts[part].append(unit)
        # A part that has its full number of units leaves the heap, so that no part gets more units than another.
        if len(parts[part]) * num_parts < len(weights):
            heapq.heappush(heap, (total + weights[unit], part))
    return parts


def _swap_once(weights: list[float], parts: list[list[int]]) -> bool:
    totals = [sum(weights[unit] for unit in units) for units in parts]
    dear, cheap = parts[totals.index(max(totals))], parts[totals.index(min(totals))]
    gap = max(totals) - min(totals)
    cheap.sort(key=lambda unit: (weights[unit], unit))
    values = [weights[unit] for unit in cheap]
    # A gain within the rounding error of the sums does not count. Otherwise two parts could swap the same units forever.
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


def _over_cap(lengths: list[int], budget: int, names: Sequence[str] | None, key: str) -> str | None:
    # Return the error for a row over the budget. None = there is none.
    longest = max(range(len(lengths)), key=lengths.__getitem__, default=None)
    if longest is None or lengths[longest] <= budget:
        return None
    name = names[longest] if names is not None else f"row {longest}"
    return (
        f"{key}={budget}: {name} has {lengths[longest]} tokens, more than one micro-batch may hold. "
        f"Raise it to at least {lengths[longest]}, or lower data.max_prompt_length or data.max_response_length."
    )


def _longest_first(lengths: list[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))


def _best_fit_decreasing(lengths: list[int], budget: int) -> list[list[int]]:
    # Add each row, longest first, to the fullest bin that has room for it.
    bins: list[list[int]] = []
    # The bins in order of room, each as one number: room * number of rows + index of the bin.
    stride, rooms = max(len(lengths), 1), list[int]()
    for row in _longest_first(lengths):
        length = lengths[row]
        place = bisect_left(rooms, length * stride)
        if place == len(rooms):
            bins.append([row])
            insort(rooms, (budget - length) * stride + len(bins) - 1)
        else:
            room = rooms.pop(place)
            bins[room % stride].append(row)
            insort(rooms, room - length * stride)
    return bins


def _tight_fill(lengths: list[int], budget: int, candidates: int, spread: bool) -> list[list[int]]:
    # Fill one bin after another: first with the longest row left, then repeatedly with the single row or pair that leaves the
    # least room.
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
    # Return one or two positions, descending, in the ascending list `left`. Their values sum to as much of `room` as possible.
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


def _halve(rows: list[int], lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    # Cut a bin of at least two rows into two non-empty halves of nearly equal size.
    halves: tuple[list[int], list[int]] = ([], [])
    sizes = [0, 0]
    for row in sorted(rows, key=lambda row: (-lengths[row], row)):
        # The last clause gives the second half a row even if the first row has length 0.
        lighter = 0 if sizes[0] <= sizes[1] and not (halves[0] and not halves[1]) else 1
        halves[lighter].append(row)
        sizes[lighter] += lengths[row]
    return sorted(halves[0]), sorted(halves[1])


# Count the tokens that rows compute, and cut rows into micro-batches. Rows of a group compute their prompt only once.
#
# The caller determines which rows form a group. A row that is alone in its group computes its prompt by itself.

SKIPPED_SHARE = 1 / 8
"""Smallest share of a micro-batch's tokens that is worth skipping. With a smaller share, copies of the other tokens take more
bytes than skipping saves."""


def skipped_if_many(skipped: int, tokens: int) -> int:
    return skipped if skipped and skipped >= tokens * SKIPPED_SHARE else 0


Path: TypeAlias = tuple[tuple[int, int], ...]
"""The nodes of a row, ascending, each with the number of its tokens that the row computes. See
:meth:`verl_memopt.model.forest.Forest.paths`."""


@dataclass(frozen=True)
class RowTokens:
    """The tokens that a pass computes for some rows, one entry per row."""

    prompts: tuple[int, ...]
    """Tokens of the prompt. Prompt and answer are 0 for a row with an empty response, which is not computed."""
    answers: tuple[int, ...]
    """Tokens of the response, except the last token, which predicts nothing."""
    groups: tuple[int, ...]
    """Group of each row. Rows with the same number compute their prompt once, together."""
    paths: tuple[Path, ...] | None = None
    """The nodes of each conversation. None = each row is a prompt and an answer."""
    parents: tuple[int, ...] = ()
    """The number of each node's parent, -1 = a root. Conversations in parts need it."""

    @classmethod
    def alone(cls, tokens: Sequence[int]) -> RowTokens:
        return cls(tuple(tokens), (0,) * len(tokens), tuple(range(len(tokens))))

    @classmethod
    def of_paths(
        cls,
        paths: tuple[Path, ...],
        groups: Sequence[int],
        prompts: Sequence[int] | None = None,
        parents: Sequence[int] = (),
    ) -> RowTokens:
        """Return the tokens of conversations.

        ``prompts`` are the prompts of rows with a single turn. A conversation of several turns has none here, so no micro-batch
        carries prefix KV for it. None = all rows are conversations.
        Nodes are numbered depth first. So if rows are sorted by path, those that share many tokens are neighbours.
        """
        alone = [sum(tokens for _, tokens in path) for path in paths]
        own = (0,) * len(paths) if prompts is None else tuple(prompts)
        answers = tuple(whole - prompt for whole, prompt in zip(alone, own, strict=True))
        return cls(own, answers, tuple(groups), paths, tuple(parents))

    def __len__(self) -> int:
        return len(self.prompts)

    def select(self, rows: Sequence[int]) -> RowTokens:
        paths = None if self.paths is None else tuple(self.paths[row] for row in rows)
        prompts, answers, groups = (tuple(part[row] for row in rows) for part in (self.prompts, self.answers, self.groups))
        return RowTokens(prompts, answers, groups, paths, self.parents)

    @cached_property
    def nodes(self) -> tuple[Path, ...]:
        if self.paths is not None:
            return self.paths
        # A prompt is a node of its group, with an odd number, and an answer is a node of its row.
        pairs = enumerate(zip(self.groups, self.prompts, self.answers, strict=True))
        return tuple(((2 * group + 1, prompt), (2 * row, answer)) for row, (group, prompt, answer) in pairs)

    def union(self, rows: Iterable[int]) -> dict[int, int]:
        """Return the computed tokens of each node of some rows."""
        tokens: dict[int, int] = {}
        for row in rows:
            for node, computed in self.nodes[row]:
                if computed > tokens.get(node, 0):
                    tokens[node] = computed
        return tokens

    def pieces(self, budget: int) -> Nodes:
        """Return the computed nodes of all rows, in pieces of at most ``budget`` tokens."""
        tokens = self.union(range(len(self)))
        chosen = sorted(tokens)
        number = {node: place for place, node in enumerate(chosen)}
        need = np.array([tokens[node] for node in chosen], dtype=np.int64)
        parents = np.array([number.get(self.parents[node], -1) for node in chosen], dtype=np.int64)
        cut, above = pieces(need, parents, budget)
        return cut.tolist(), above.tolist()

    def cost(self, rows: Iterable[int]) -> int:
        return sum(self.union(rows).values())

    def skipped(self, rows: Sequence[int]) -> int:
        prompts = {self.groups[row]: self.prompts[row] for row in rows if self.prompts[row]}
        return skipped_if_many(sum(prompts.values()) - len(prompts), self.cost(rows))

    def suffixes(self, rows: Sequence[int]) -> int:
        group_sizes = Counter(self.groups[row] for row in rows)
        return sum(self.answers[row] for row in rows if group_sizes[self.groups[row]] > 1)

    def segments(self, rows: Sequence[int]) -> int:
        group_sizes = Counter(self.groups[row] for row in rows)
        return len(rows) + sum(size > 1 for size in group_sizes.values())

    def row_lengths(self) -> list[int]:
        return [prompt + answer for prompt, answer in zip(self.prompts, self.answers, strict=True)]

    def families(self, rows: Iterable[int] | None = None) -> list[list[int]]:
        """Return the rows that have a group or a node in common, directly or through other rows. None = all rows."""
        chosen = range(len(self)) if rows is None else rows
        return _connected({row: {-1 - self.groups[row], *self._shared[row]} for row in chosen})

    def groups_over(self, budget: int) -> list[list[int]]:
        """Return the groups of answers that compute more than ``budget`` tokens, if rows may also share tokens with other groups.

        Parts of such a group can reuse the keys and values of its prompt, which spares more than what it shares with others.
        """
        if self.paths is None:
            return []
        groups, alone = _connected({row: [self.groups[row]] for row in range(len(self))}), self.row_lengths()
        return [
            rows
            for rows in groups
            if self.are_answers(rows) and self.cost(rows) > budget and max(alone[row] for row in rows) <= budget
        ]

    def are_answers(self, rows: Iterable[int]) -> bool:
        # Whether no row is a conversation of several turns.
        return all(self.prompts[row] or not self.answers[row] for row in rows)

    def split(self, bins: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Split the largest bins until there are exactly ``count``, see :func:`split_to_count`."""
        if self.paths is None:
            return split_to_count(bins, count, self.row_lengths())
        return _split(bins, count, self.cost, self._halve)

    def _halve(self, rows: Sequence[int]) -> tuple[list[int], list[int]]:
        # Cut conversations between two neighbours. Both halves compute the tokens that they share.
        order = sorted(rows, key=self.nodes.__getitem__)
        first = self._growing(order)
        second = self._growing(order[::-1])[::-1]
        end = min(range(1, len(order)), key=lambda end: (max(first[end - 1], second[end]), first[end - 1] + second[end]))
        return sorted(order[:end]), sorted(order[end:])

    def _growing(self, rows: Sequence[int]) -> list[int]:
        # The tokens of the first row, of the first two rows, and so on.
        tokens: dict[int, int] = {}
        costs = [0]
        for row in rows:
            costs.append(costs[-1])
            for node, computed in self.nodes[row]:
                costs[-1] += max(computed - tokens.get(node, 0), 0)
                tokens[node] = max(computed, tokens.get(node, 0))
        return costs[1:]

    @cached_property
    def _shared(self) -> tuple[tuple[int, ...], ...]:
        # The nodes of each row that have tokens.
        return tuple(tuple(node for node, tokens in path if tokens) for path in self.nodes)

    def parts(self, rows: list[int], budget: int) -> list[list[int]]:
        """Cut rows with common nodes into parts that compute at most ``budget`` tokens. No row alone may compute more.

        Rows that also share later nodes stay together if they fit. Each part computes the common nodes.
        """
        if len(rows) == 1 or self.cost(rows) <= budget:
            return [rows]
        common = set.intersection(*(set(self._shared[row]) for row in rows if self._shared[row]))
        room = budget - sum(tokens for node, tokens in self.union(rows).items() if node in common)
        found = _connected({row: set(self._shared[row]) - common for row in rows})
        units = [part for members in found for part in self.parts(members, budget)] if len(found) > 1 else []
        costs = [sum(tokens for node, tokens in self.union(unit).items() if node not in common) for unit in units]
        # Rows that need different parts of a common node may not fit beside all of it.
        if not units or max(costs) > room:
            return self._neighbours(rows, budget)
        return [[row for place in places for row in units[place]] for places in pack(costs, room)]

    def _neighbours(self, rows: Sequence[int], budget: int) -> list[list[int]]:
        # Fill one part after another.
        found: list[list[int]] = []
        for row in sorted(rows, key=self.nodes.__getitem__):
            if found and self.cost([*found[-1], row]) <= budget:
                found[-1].append(row)
            else:
                found.append([row])
        return found


def _connected(keys: Mapping[int, Iterable[int]]) -> list[list[int]]:
    # Lists of rows that have a key in common, directly or through other rows, in the order of their first rows.
    above = {row: row for row in keys}

    def first(row: int) -> int:
        while above[row] != row:
            above[row] = row = above[above[row]]
        return row

    owner: dict[int, int] = {}
    for row, own in keys.items():
        for key in own:
            one, other = first(owner.setdefault(key, row)), first(row)
            above[max(one, other)] = min(one, other)
    members: dict[int, list[int]] = {}
    for row in keys:
        members.setdefault(first(row), []).append(row)
    return list(members.values())


def largest_pass(tokens: RowTokens, rows: Sequence[int]) -> int:
    return rows.budget if isinstance(rows, InParts) else tokens.cost(rows)


def pack_groups_under(
    tokens: RowTokens, budget: int, names: Sequence[str], key: str = BUDGET_KEY, in_parts: bool = False
) -> list[list[int]]:
    """Pack rows into micro-batches that compute at most ``budget`` tokens each.

    A group stays whole if it fits. Otherwise it is cut into as few parts as its answers allow, and each part includes the prompt.
    Conversations are cut alike, wherever they share tokens. With ``in_parts`` a conversation over the budget is no error: it is
    a micro-batch of :class:`InParts`, together with those that share tokens with it.

    Raises:
        ConfigError: A single row exceeds the budget. The message names ``key`` and the row.
    """
    units: list[list[int]] = []
    chained: list[list[int]] = []
    lengths, alone = tokens.row_lengths(), tokens.groups_over(budget)
    others = set(range(len(tokens))).difference(*alone)
    for family in [*alone, *tokens.families(sorted(others))]:
        if tokens.cost(family) > budget:
            problem = _over_cap([lengths[row] for row in family], budget, [names[row] for row in family], key)
            if problem is not None and in_parts and tokens.paths is not None:
                chained.append(InParts(family, budget, problem))
                continue
            if problem is not None and len(family) > 1:
                raise ConfigError(problem)
        parts = tokens.parts(family, budget)
        # Parts that reuse the keys and values of one prompt stay neighbours, and share no micro-batch with other rows.
        (chained if len(parts) > 1 and chains(parts, tokens) == [parts] else units).extend(parts)
    costs = [tokens.cost(unit) for unit in units]
    bins = pack(costs, budget, 0 if chained else 1, names=[names[unit[0]] for unit in units], key=key)
    return [sorted(row for unit in chosen for row in units[unit]) for chosen in bins] + chained


def chains(micro_batches: Sequence[Sequence[int]], tokens: RowTokens) -> list[list[Sequence[int]]]:
    """Return the micro-batches in order, in lists (chains) that reuse the keys and values of one prompt (prefix KV).

    A chain consists of neighbours of one group. In each of them the answers are no longer than the prompt, so that computing the
    prompt again would cost more than the answers do.
    """

    def prompt_of(rows: Sequence[int]) -> object:
        groups = {tokens.groups[row] for row in rows}
        answers = sum(tokens.answers[row] for row in rows)
        reused = len(groups) == 1 and 0 < answers <= max(tokens.prompts[row] for row in rows) and tokens.are_answers(rows)
        return groups.pop() if reused else object()  # equal to no other key, so that these rows are a chain of their own

    return [list(chain) for _, chain in groupby(micro_batches, prompt_of)]


def spans(micro_batches: Sequence[Sequence[int]], tokens: RowTokens) -> list[tuple[Sequence[Sequence[int]], int | None]]:
    """Group micro-batches, in order, by carried prompt. Return each group and how many of its first micro-batches read it.

    On several ranks that number may be 0. None = a micro-batch without a carried prompt.
    """
    if not isinstance(micro_batches, Cut):
        return [(chain, len(chain) if len(chain) > 1 else None) for chain in chains(micro_batches, tokens)]
    found: list[tuple[Sequence[Sequence[int]], int | None]] = []
    start = 0
    for length in micro_batches.spans:
        span = micro_batches[start : start + length]
        first = len(chains(span, tokens)[0])
        found.append((span, first if first > 1 else 0))
        start += length
    return found + [([rows], None) for rows in micro_batches[start:]]


def alike(cut: Sequence[list[list[int]]], tokens_per_rank: Sequence[RowTokens]) -> Sequence[list[list[int]]]:
    """Reorder the micro-batches of all ranks, so that all have the same order of forwards and backwards (arXiv 2606.01143).

    Chains come first: the longest chain of each rank in the first span, the second longest in the second span, and so on. A rank
    without a chain for a span, or with a shorter one, fills the span with its other micro-batches, and then with empty ones. The
    remaining micro-batches follow, split so that all ranks have equally many. A single rank keeps its order.

    If a conversation of any rank is computed in parts, each rank computes all its rows as one micro-batch in parts, in the same
    order of passes.
    """
    if len(cut) == 1:
        return cut
    in_parts = [rows for bins in cut for rows in bins if isinstance(rows, InParts)]
    if in_parts:
        budget, problem = min((rows.budget, rows.problem) for rows in in_parts)
        word = common_word([tokens.pieces(budget) for tokens in tokens_per_rank], budget)
        return [Cut([InParts(range(len(tokens)), budget, problem, word)]) for tokens in tokens_per_rank]
    chained: list[list[list[list[int]]]] = []
    others: list[list[list[int]]] = []
    for bins, tokens in zip(cut, tokens_per_rank, strict=True):
        found = [[list(rows) for rows in chain] for chain in chains(bins, tokens)]
        chained.append(sorted((chain for chain in found if len(chain) > 1), key=len, reverse=True))
        others.append([rows for chain in found if len(chain) == 1 for rows in chain])
    lengths = [max(map(len, slot)) for slot in zip_longest(*chained, fillvalue=())]
    aligned = [Cut(spans=lengths) for _ in cut]
    for rank, own in enumerate(aligned):
        for length, chain in zip(lengths, (*chained[rank], *repeat([], len(lengths))), strict=False):
            own += chain
            own += [others[rank].pop() if others[rank] else [] for _ in range(length - len(chain))]
    count = max(map(len, others))
    for rank, own in enumerate(aligned):
        own += tokens_per_rank[rank].split(others[rank], count)
    return aligned


# Sizes to which the tokens of a micro-batch are padded where kernels are recorded for one size (CUDA graphs).


SIZES_IN_OCTAVE = 8
"""Sizes between a power of two and the next one, so at most an eighth of the tokens is padding."""

SMALLEST_SHARE = 4
"""Micro-batches with fewer tokens than the largest size divided by this are padded to that many."""


def bucket_of(tokens: int, largest: int = 0) -> int:
    """Return the size to which ``tokens`` are padded, if ``largest`` is the largest size so far."""
    tokens = max(tokens, -(-largest // SMALLEST_SHARE), SIZES_IN_OCTAVE)
    step = max(2 ** ((tokens - 1).bit_length() - 1) // SIZES_IN_OCTAVE, 1)
    return -(-tokens // step) * step
