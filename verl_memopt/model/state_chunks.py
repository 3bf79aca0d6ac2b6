"""Cut the tokens of a pack into chunks for layers that carry a state from token to token.

Tokens form trees (``prefix_layout.py``): a token follows the one before it on its path. Chunks are runs of such tokens. The first
token of a chunk follows the last token of another chunk (its parent), or begins a row. Round 0 has the chunks without a parent,
and each following round has the chunks whose parents are in the round before, across branches too. So a loop over rounds computes
the states of all rows, and only the states of one round exist at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor

from verl_memopt.distributed.device import sent_together
from verl_memopt.model.prefix_layout import PrefixLayout, on_host, ranges

TAIL = 3
"""Number of earlier tokens that the convolution reads."""

SIZES = (64, 32)
"""Numbers of tokens in a full chunk, the first one preferred."""

PIECE = 64
"""Number of tokens that kernels compute at once."""

LARGER = 1.1
"""A smaller chunk is taken if the larger one has more than so many times its padded tokens."""


@dataclass(frozen=True, eq=False)
class Part:
    """Some chunks of one round.

    The states that other chunks begin with, in the order of their chunks, are the border of a round.

    Attributes:
        chunks: Places of the n chunks.
        read: int64 [n], the place of each chunk's first state in the border before the round.
        before: Number of states in the border before the round.
        passed: int64, those of the n chunks whose last states are in the border of the round, at the places ``border``.
        border: See ``passed``.
        first: Whether it is the first part of its round.
        last: Whether it is the last part of its round.
        found: int64, those of the n chunks whose last states are results.
        results: int64, the numbers of these results.
    """

    chunks: slice
    read: Tensor
    before: int
    passed: Tensor
    border: slice
    first: bool
    last: bool
    found: Tensor
    results: Tensor


@dataclass(frozen=True, eq=False)
class Batch:
    """Neighbouring chunks that are computed together: whole rounds, or a part of one.

    Attributes:
        chunks: Places of the n chunks of C tokens.
        parts: The rounds, or the part.
        places: int64 [t], places of tokens among the n x C of the chunks. The others are padding.
        tokens: int64 [t], the same places among the tokens of the pack.
    """

    chunks: slice
    parts: tuple[Part, ...]
    places: Tensor
    tokens: Tensor


@dataclass(frozen=True, eq=False)
class Call:
    """Chunks of one round that kernels compute in one call. They have n chunks and t tokens, without padding.

    Attributes:
        part: The chunks.
        rows: int64 [t + TAIL x n], for each chunk the rows of the TAIL tokens before it, and of its own.
        tails: int64 [TAIL x n], places in ``rows`` of the tokens before each chunk.
        own: int64 [t], places in ``rows`` of the chunks' own tokens.
        tokens: int64 [t], the same tokens among those of the pack.
        cu_seqlens: int64 [n + 1], where each chunk begins among the t tokens.
        pieces: int64 [m, 2], chunk and number of each piece of ``PIECE`` tokens, as kernels cut the chunks.
    """

    part: Part
    rows: Tensor
    tails: Tensor
    own: Tensor
    tokens: Tensor
    cu_seqlens: Tensor
    pieces: Tensor


@dataclass(frozen=True, eq=False)
class StateChunks:
    """The chunks of a pack, in the order of their rounds.

    Rows are rows of a table: a row of zeros, then TAIL rows of each given state, then the T tokens.

    Attributes:
        size: C, the tokens of a full chunk.
        tokens: T, the number of tokens in the pack.
        given: Number of states that are given.
        rows: int64 [N, TAIL + C], for each chunk the rows of the tokens before it, and of its own. Row 0 where there are none.
        tails: int64 [results, TAIL], the rows of the last tokens of each result.
        tail_rows: int64 [R], the rows before a chunk or in ``tails``, each once.
        tail_places: int64 [N + results, TAIL], where the rows before each chunk, and those of ``tails``, are in ``tail_rows``.
        starts: First row of each chunk's own, int64 [N] on the host.
        counts: Number of tokens of each chunk, int64 [N] on the host.
        rounds: Round of each chunk, int64 [N] on the host, ascending.
        parent: Place of each chunk's parent, int64 [N] on the host. -1 = it begins with zeros, -2 - n = with the given state n.
        results_of: Place of the chunk with each result, int64 on the host.
    """

    size: int
    tokens: int
    given: int
    rows: Tensor
    tails: Tensor
    tail_rows: Tensor
    tail_places: Tensor
    starts: np.ndarray
    counts: np.ndarray
    rounds: np.ndarray
    parent: np.ndarray
    results_of: np.ndarray

    @property
    def first_row(self) -> int:
        return 1 + TAIL * self.given

    @property
    def own(self) -> Tensor:
        # int64 [N, C], rows of the chunks' own tokens.
        return self.rows[:, TAIL:]

    @cached_property
    def _batches(self) -> dict[int, tuple[Batch, ...]]:
        return {}

    def batches(self, most: int) -> tuple[Batch, ...]:
        """Return batches of at most ``most`` chunks."""
        if most not in self._batches:
            self._batches[most] = tuple(self._batch(parts) for parts in self._cut(most))
        return self._batches[most]

    @cached_property
    def _calls(self) -> dict[int, tuple[Call, ...]]:
        return {}

    def calls(self, most: int) -> tuple[Call, ...]:
        """Return the chunks, round by round, in calls of at most ``most`` tokens each. A longer chunk is a call of its own."""
        if most not in self._calls:
            self._calls[most] = tuple(self._call(part) for part in self._cut_by_tokens(most))
        return self._calls[most]

    def _each_round(self) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
        # The chunks of a round, the chunks that they follow, and those of them that others follow.
        borders = [0, *(np.flatnonzero(np.diff(self.rounds)) + 1).tolist(), len(self.rounds)]
        for number, (first, end) in enumerate(pairwise(borders)):
            children = slice(end, borders[min(number + 2, len(borders) - 1)])
            yield slice(first, end), np.unique(self.parent[first:end]), np.unique(self.parent[children])

    def _cut_by_tokens(self, most: int) -> Iterator[Part]:
        for whole, *sides in self._each_round():
            start = whole.start
            while start < whole.stop:
                fitting = int(np.searchsorted(self.counts[start : whole.stop].cumsum(), most, "right"))
                stop = start + max(fitting, 1)
                yield self._part(slice(start, stop), whole, *sides)
                start = stop

    def _call(self, part: Part) -> Call:
        counts = self.counts[part.chunks]
        wide, number, pieces = counts + TAIL, np.arange(len(counts)), -(-counts // PIECE)
        first, tails = np.cumsum(wide) - wide, np.full(len(counts), TAIL)
        arrays = (
            ranges(number * (TAIL + self.size), wide),
            ranges(first, tails),
            ranges(first + TAIL, counts),
            ranges(self.starts[part.chunks], counts) - self.first_row,
            np.append(0, np.cumsum(counts)),
            np.stack([np.repeat(number, pieces), ranges(np.zeros_like(pieces), pieces)], 1),
        )
        places, *rest = sent_together([on_host(array) for array in arrays], self.rows.device)
        return Call(part, self.rows[part.chunks].flatten().index_select(0, places), *rest)

    def _cut(self, most: int) -> Iterator[list[Part]]:
        waiting: list[Part] = []
        for whole, *sides in self._each_round():
            first, end = whole.start, whole.stop
            parts = [self._part(slice(start, min(start + most, end)), whole, *sides) for start in range(first, end, most)]
            if waiting and end - waiting[0].chunks.start > most:
                yield waiting
                waiting = []
            # Backward needs the states of a whole round to go on to the next one.
            if len(parts) > 1:
                yield from ([part] for part in parts)
            else:
                waiting += parts
        if waiting:
            yield waiting

    def _batch(self, parts: Sequence[Part]) -> Batch:
        chunks = slice(parts[0].chunks.start, parts[-1].chunks.stop)
        counts = self.counts[chunks]
        places, tokens = ranges(np.arange(len(counts)) * self.size, counts), ranges(self.starts[chunks], counts) - self.first_row
        return Batch(chunks, tuple(parts), *sent_together([on_host(places), on_host(tokens)], self.rows.device))

    def _part(self, chunks: slice, whole: slice, reading: np.ndarray, passing: np.ndarray) -> Part:
        parents, before = self.parent[chunks], len(reading)
        if whole.start == 0:
            read, before = np.maximum(-1 - parents, 0), 1 + self.given  # zeros, then the given states
        else:
            read = np.searchsorted(reading, parents)
        low, high = np.searchsorted(passing, (chunks.start, chunks.stop)).tolist()
        results = np.flatnonzero((self.results_of >= chunks.start) & (self.results_of < chunks.stop))
        indices = read, passing[low:high] - chunks.start, self.results_of[results] - chunks.start, results
        read_at, passed, found, numbers = sent_together([on_host(index) for index in indices], self.rows.device)
        ends = chunks.start == whole.start, chunks.stop == whole.stop
        return Part(chunks, read_at, before, passed, slice(low, high), *ends, found, numbers)


def state_chunks(layout: PrefixLayout, given: np.ndarray | None = None, sizes: Sequence[int] = SIZES) -> StateChunks:
    """Cut the queries of a layout into chunks, cached in the layout. The results are the states after its ``branches``.

    Args:
        layout: All tokens must be queries, except a path before them (:mod:`verl_memopt.model.prefix_kv`).
        given: int64, the tokens of that path whose states are given, ascending. None = none.
        sizes: Tokens of a full chunk. Of several the one is taken that suits the lengths.
    """
    given = np.zeros(0, dtype=np.int64) if given is None else given
    key = "chunks", given.tobytes(), tuple(sizes)
    if key not in layout.plans:
        first, branches = int(layout.query_places[0]), layout.branches
        cut = _Cut(_Segments(layout.stops, first, given, branches), sizes)
        layout.plans[key] = _sent(cut.chunks(first, len(given), np.searchsorted(cut.ends, branches)), layout)
    found: StateChunks = layout.plans[key]
    return found


@dataclass(frozen=True, eq=False)
class StateTile:
    """Neighbouring tokens, their chunks, and which states go from tile to tile.

    Attributes:
        rows: The tokens.
        chunks: Their chunks.
        given: int64, numbers of the states of earlier tiles that these chunks begin with.
        results: Numbers of the states that later tiles begin with.
    """

    rows: slice
    chunks: StateChunks
    given: Tensor
    results: slice


def state_tiles(layout: PrefixLayout, size: int, sizes: Sequence[int] = SIZES) -> tuple[StateTile, ...]:
    """Cut the tokens of a layout into tiles of ``size``, cached in the layout. All tokens must be queries.

    ``sizes`` are as in :func:`state_chunks`.
    """
    key = "state tiles", size, tuple(sizes)
    if key not in layout.plans:
        layout.plans[key] = tuple(_tiles(layout, size, sizes))
    found: tuple[StateTile, ...] = layout.plans[key]
    return found


def _tiles(layout: PrefixLayout, size: int, sizes: Sequence[int]) -> Iterator[StateTile]:
    none = np.zeros(0, dtype=np.int64)
    cut = _Cut(_Segments(layout.stops, 0, none, none, size), sizes)
    tile = cut.starts // size
    borders = np.searchsorted(tile, np.arange(int(tile[-1]) + 2)).tolist()
    handed = np.unique(cut.parent[(cut.parent >= 0) & (tile[cut.parent] != tile)])
    for low, high in pairwise(borders):
        own = cut.parent[low:high]
        earlier = np.unique(own[(own >= 0) & (own < low)])
        parent = np.where(own >= low, own - low, np.where(own < 0, -1, -2 - np.searchsorted(earlier, own)))
        results = slice(*np.searchsorted(handed, (low, high)).tolist())
        part = _Cut.of(cut.size, cut.starts[low:high], cut.lengths[low:high], parent)
        chunks = _sent(part.chunks(int(part.starts[0]), len(earlier), handed[results] - low), layout)
        (given,) = sent_together([on_host(np.searchsorted(handed, earlier))], layout.cu_seqlens.device)
        yield StateTile(slice(int(part.starts[0]), int(part.ends[-1]) + 1), chunks, given, results)


def _sent(chunks: StateChunks, layout: PrefixLayout) -> StateChunks:
    tensors = {name: value for name, value in vars(chunks).items() if isinstance(value, Tensor)}
    sent: dict[str, Any] = dict(zip(tensors, sent_together(list(tensors.values()), layout.cu_seqlens.device), strict=True))
    return replace(chunks, **sent)


class _Segments:
    """Runs of tokens without a branch inside: a token with several followers, or with a result, is the last of its segment.

    Attributes:
        starts, lengths: int64 [S], first token and number of tokens of each segment.
        parent: int64 [S], the segment before each. -1 = it begins a row, -2 - n = it follows the given state n.
    """

    def __init__(self, stops: np.ndarray, first: int, given: np.ndarray, results: np.ndarray, tile: int | None = None) -> None:
        """``tile``: a segment also ends after every so many tokens."""
        end = len(stops)
        # A token follows its neighbour if it sees it.
        cuts = first + 1 + np.flatnonzero(stops[first : end - 1] <= np.arange(first + 1, end))
        begins = [first, *cuts.tolist()]
        before = self._tokens_before(stops, begins, end)
        branches = [token + 1 for token in (*before, *results.tolist()) if first <= token < end - 1]
        tiles = () if tile is None else range(first, end, tile)
        self.starts = np.unique(np.array([*begins, *branches, *tiles], dtype=np.int64))
        self.lengths = np.diff(self.starts, append=end)
        # A segment that does not begin a run follows the segment before it.
        self.parent = np.arange(len(self.starts)) - 1
        for start, token in zip(begins, before, strict=True):
            place = int(np.searchsorted(self.starts, start))
            if token < 0:
                self.parent[place] = -1
            elif token >= first:
                self.parent[place] = int(np.searchsorted(self.starts, token, "right")) - 1
            else:
                number = int(np.searchsorted(given, token))
                assert number < len(given), f"the state after token {token} is not given"
                assert given[number] == token, f"the state after token {token} is not given"
                self.parent[place] = -2 - number

    @staticmethod
    def _tokens_before(stops: np.ndarray, begins: Sequence[int], end: int) -> list[int]:
        # The token before the first token of each run on its path, -1 if it begins a row.
        open_runs, found = [(0, begins[0])] if begins[0] else [], []
        for start, stop in zip(begins, [*begins[1:], end], strict=True):
            token = -1
            while open_runs and token < 0:
                low, high = open_runs.pop()
                # Along a path the stops do not increase.
                seen = int(np.searchsorted(-stops[low:high], -start, "left"))
                if seen:
                    token = low + seen - 1
                    open_runs.append((low, low + seen))  # no later token sees the rest of this run
            found.append(token)
            open_runs.append((start, stop))
        return found


class _Cut:
    """Segments cut into chunks, in the order of their tokens.

    Attributes:
        size: Tokens of a full chunk.
        starts, lengths: int64 [N], first token and number of tokens of each chunk.
        parent: int64 [N], as in :class:`_Segments`.
    """

    def __init__(self, segments: _Segments, sizes: Sequence[int]) -> None:
        # Large chunks of kernels need no more places than the longest segment has tokens.
        self.size = min(_suitable(segments.lengths, sizes), max(SIZES[0], int(segments.lengths.max())))
        counts = -(-segments.lengths // self.size)
        of, begin = np.repeat(np.arange(len(counts)), counts), np.cumsum(counts) - counts
        place = np.arange(len(of)) - begin[of]
        self.starts = segments.starts[of] + place * self.size
        self.lengths = np.minimum(segments.lengths[of] - place * self.size, self.size)
        self.parent = np.arange(len(of)) - 1
        last = (begin + counts - 1)[np.maximum(segments.parent, 0)]
        self.parent[begin] = np.where(segments.parent >= 0, last, segments.parent)

    @classmethod
    def of(cls, size: int, starts: np.ndarray, lengths: np.ndarray, parent: np.ndarray) -> _Cut:
        cut = cls.__new__(cls)
        cut.size, cut.starts, cut.lengths, cut.parent = size, starts, lengths, parent
        return cut

    @property
    def ends(self) -> np.ndarray:
        return self.starts + self.lengths - 1

    def chunks(self, first: int, given: int, results: np.ndarray) -> StateChunks:
        """Return the chunks of tokens from ``first`` on, with tensors on the host. ``results``, int64, are chunks."""
        rounds, parents = [0] * len(self.parent), self.parent.tolist()
        for chunk, above in enumerate(parents):
            if above >= 0:
                rounds[chunk] = rounds[above] + 1
        rows = self._rows(first, given, parents)
        tails = rows[results[:, None], self.lengths[results][:, None] + np.arange(TAIL)]
        order = np.argsort(rounds, kind="stable")
        number = np.empty_like(order)
        number[order] = np.arange(len(order))
        rows = rows[order]
        tail_rows, places = np.unique(np.concatenate([rows[:, :TAIL], tails]), return_inverse=True)
        return StateChunks(
            size=self.size,
            tokens=int(self.lengths.sum()),
            given=given,
            rows=on_host(rows),
            tails=on_host(tails),
            tail_rows=on_host(tail_rows),
            tail_places=on_host(places.reshape(-1, TAIL)),
            starts=rows[:, TAIL],
            counts=self.lengths[order],
            rounds=np.array(rounds)[order],
            parent=np.where(self.parent >= 0, number[np.maximum(self.parent, 0)], self.parent)[order],
            results_of=number[results],
        )

    def _rows(self, first: int, given: int, parents: Sequence[int]) -> np.ndarray:
        rows = self.starts[:, None] + np.arange(-TAIL, self.size) + 1 + TAIL * given - first
        rows[:, TAIL:][np.arange(self.size) >= self.lengths[:, None]] = 0
        for chunk, above in enumerate(parents):
            if above == -1:
                rows[chunk, :TAIL] = 0
            elif above < 0:
                rows[chunk, :TAIL] = 1 + TAIL * (-2 - above) + np.arange(TAIL)
            elif above != chunk - 1 or self.lengths[above] < TAIL:  # other tokens than its neighbours. Parents come earlier.
                rows[chunk, :TAIL] = rows[above, self.lengths[above] : self.lengths[above] + TAIL]
        return rows


def _suitable(lengths: np.ndarray, sizes: Sequence[int]) -> int:
    best = sizes[0]
    for size in sizes[1:]:
        if _padded(lengths, best) > LARGER * _padded(lengths, size):
            best = size
    return best


def _padded(lengths: np.ndarray, size: int) -> int:
    return int((-(-lengths // size)).sum()) * size
