"""Which tokens of a pack see which, and the index tensors that attention over them needs.

A pack is one row of tokens. It consists of trees, one after another. A tree is a run of tokens followed by its subtrees,
each of which is such a tree again. A token sees itself and the tokens before it on its path from the root. So token i sees token
j if j <= i < stop of j, where the stop of a token is the end of all subtrees that follow it.

Attention takes segments and rounds. A segment is a slice of neighbouring queries on one path, and each sees the keys of the
segment up to its own. A span is a slice of queries that see a slice of other keys whole. A round has spans of which no two have
a query in common. A group of answers that share a prompt is a tree of two levels: its segments are the prompt and each answer,
and its only span has all answers as queries and the prompt as keys.

Some tokens may be no queries: their outputs are then not computed, and they are only keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from verl_memopt.distributed.device import sent_together
from verl_memopt.memory.recompute_elementwise_torch import Rows
from verl_memopt.memory.sequence_parallel_torch import TokenSplit

PrefixGroup: TypeAlias = tuple[int, tuple[int, ...]]
"""Number of tokens of the prefix, and number of tokens of each suffix, in the order of the tokens."""


@dataclass(frozen=True)
class SegmentRun:
    start: int
    count: int
    length: int

    @property
    def places(self) -> slice:
        return slice(self.start, self.start + self.count * self.length)


@dataclass(frozen=True)
class PrefixSpan:
    """Neighbouring queries that all see the same neighbouring keys.

    ``keys`` are places among all tokens, ``queries`` places among the queries. They differ if some tokens are no queries.
    """

    keys: SegmentRun
    queries: SegmentRun


@dataclass(frozen=True, eq=False)
class Round:
    """Spans of which no two have a query in common, in the order of their queries.

    Attributes:
        spans: The spans.
        index_q: int64, the queries of all spans, in order.
        index_k: int64, the keys of all spans, in order.
        cu_seqlens_q: int32 [spans + 1], where the queries of each span begin in ``index_q``.
        cu_seqlens_k: int32 [spans + 1], where the keys of each span begin in ``index_k``.
    """

    spans: tuple[PrefixSpan, ...]
    index_q: Tensor
    index_k: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor

    @classmethod
    def of(cls, spans: Sequence[PrefixSpan]) -> Round:
        sides = [[span.queries for span in spans], [span.keys for span in spans]]
        indices, ends = [on_host(_places(side)) for side in sides], [_cumulative(run.length for run in side) for side in sides]
        return cls(tuple(spans), *indices, *ends)

    @property
    def places(self) -> tuple[slice, slice] | tuple[Tensor, Tensor]:
        # Places of queries and keys: slices if there is one span, so that no rows are copied, else indices.
        if len(self.spans) > 1:
            return self.index_q, self.index_k
        (span,) = self.spans
        return span.queries.places, span.keys.places


@dataclass(frozen=True, eq=False)
class WindowCall:
    """Neighbouring segments, and the keys that each sees in a sliding window: those before it on its path, then its own.

    Attributes:
        queries: The queries of the segments.
        index: int64, the keys of all segments, one segment after another.
        cu_seqlens_q: int32 [segments + 1], where the queries of each segment begin in ``queries``.
        cu_seqlens_k: int32 [segments + 1], where the keys of each segment begin in ``index``.
        longest: Number of queries of the longest segment, and number of keys of the segment with most of them.
    """

    queries: slice
    index: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    longest: tuple[int, int]


@dataclass(frozen=True, eq=False)
class PrefixLayout:
    """The segments and rounds of a pack on the host, and the index tensors of its attention kernels on the device.

    Attributes:
        segments: Number of queries of each segment.
        rounds: The spans. There are none if no tokens share a prefix.
        trees: Number of tokens of each tree.
        stops: int64 [T] on the host, the end of the tokens that may see each token.
        query_places: int64 [Q] on the host, the places of the queries among the keys.
        cu_seqlens: int32 [segments + 1], the first query of each segment, then the number of queries.
        query_index: int64, the places of the queries among the keys. None = every key is also a query.
        split: How the ranks of a sequence-parallel group share the tokens. None = this rank computes all of them.
        branches: int64 on the host, the tokens after which following packs go on, so that layers with a state must keep it.
    """

    segments: tuple[int, ...]
    rounds: tuple[Round, ...]
    trees: tuple[int, ...]
    stops: np.ndarray
    query_places: np.ndarray
    cu_seqlens: Tensor
    query_index: Tensor | None
    split: TokenSplit | None = None
    branches: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @classmethod
    def of(cls, groups: Sequence[PrefixGroup], skipped: Sequence[int] | None = None) -> PrefixLayout:
        """Build the layout of groups of suffixes that share a prefix, on the CPU.

        Args:
            groups: Number of queries in the prefix and in each suffix of each group. A prefix has 0 queries if all its tokens are
                skipped.
            skipped: For each group, the number of prefix tokens before its first query. They are only keys. None = no token is
                skipped.
        """
        first = query = 0
        segments, spans, trees, ends, runs = list[int](), list[PrefixSpan](), [], list[tuple[int, int]](), []
        for before, (prefix, suffixes) in zip((0,) * len(groups) if skipped is None else skipped, groups, strict=True):
            behind, whole = sum(suffixes), before + prefix
            if prefix:
                segments.append(prefix)
                spans += span_of(query, query + prefix, first, first + before)
            segments += suffixes
            spans += span_of(query + prefix, query + prefix + behind, first, first + whole)
            trees.append(whole + behind)
            ends.append((first + trees[-1], whole))
            ends += zip(accumulate(suffixes, initial=first + whole), (0, *suffixes), strict=True)
            runs.append(SegmentRun(first + before, 1, prefix + behind))
            first, query = first + trees[-1], query + prefix + behind
        stops = np.repeat(*np.array(ends, dtype=np.int64).reshape(-1, 2).T)
        return cls.with_spans(segments, spans, trees, stops, _places(runs))

    @classmethod
    def with_spans(
        cls, segments: Sequence[int], spans: Sequence[PrefixSpan], trees: Sequence[int], stops: np.ndarray, queries: np.ndarray
    ) -> PrefixLayout:
        """Build a layout on the CPU. Arguments are as in the class. ``spans`` may have queries in common, and any order."""
        # Build all tensors on the host, so that the whole pack is sent to the device at once.
        rounds = tuple(Round.of(some) for some in _rounds(spans, len(stops)))
        index = None if len(queries) == len(stops) else on_host(queries)
        return cls(tuple(segments), rounds, tuple(trees), stops, queries, _cumulative(segments), index)

    def map(self, change: Callable[[Tensor], Tensor]) -> PrefixLayout:
        return replace(self, rounds=tuple(_mapped(some, change) for some in self.rounds), **changed(self, change))

    def at_queries(self, *tensors: Any) -> tuple[Any, ...]:
        if self.query_index is None:
            return tensors
        return tuple(None if tensor is None else tensor[self.query_index] for tensor in tensors)

    def at_keys(self, tensor: Tensor, like: Tensor) -> Tensor:
        """Scatter a tensor of the queries [Q, ...] to the places of all keys, with zeros for tokens that are no queries.

        The result has the shape of ``like``, [T, ...], and the dtype of ``tensor``.
        """
        if self.query_index is None:
            return tensor
        return torch.zeros_like(like, dtype=tensor.dtype).index_copy_(0, self.query_index, tensor)

    @cached_property
    def runs(self) -> tuple[SegmentRun, ...]:
        # Neighbouring segments of equal length form one run, for kernels that need equal lengths.
        runs: list[SegmentRun] = []
        start = 0
        for length, same in groupby(self.segments):
            runs.append(SegmentRun(start, sum(1 for _ in same), length))
            start += runs[-1].count * length
        return tuple(runs)

    @property
    def spans(self) -> tuple[PrefixSpan, ...]:
        return tuple(span for some in self.rounds for span in some.spans)

    @cached_property
    def sums_many(self) -> bool:
        """Whether a query is in more than one round or a key in more than one span, so that sums need a longer dtype."""
        keys = np.zeros(len(self.stops) + 1, dtype=np.int64)
        for span in self.spans:
            keys[[span.keys.places.start, span.keys.places.stop]] += 1, -1
        # In a group of answers a skipped token is in the span of the prompt's queries and in that of the answers.
        seen = keys.cumsum()[:-1]
        seen[self.query_places] += 1
        return len(self.rounds) > 1 or bool((seen > 2).any())

    @cached_property
    def longest_path(self) -> int:
        # The number of tokens that a token sees, itself included, is the number of runs from a token to its stop around it.
        changes = np.ones(len(self.stops) + 1, dtype=np.int64)
        np.subtract.at(changes, self.stops, 1)
        return int(changes.cumsum()[:-1].max(initial=0))

    @cached_property
    def plans(self) -> dict[Any, Any]:
        return {}

    def above(self, window: int) -> list[np.ndarray]:
        """Return for each segment the keys before it that its first query sees in a sliding window, int64."""
        found, ends = [], np.cumsum(self.segments)
        for first in self.query_places[ends - self.segments]:
            # A window of 1 has only the query's own key.
            seen = np.flatnonzero(self.stops[:first] > first)
            found.append(seen[max(len(seen) - window + 1, 0) :])
        return found

    def behind(self, window: int) -> tuple[WindowCall, ...]:
        """Return the attention calls of all segments in a sliding window, cached in the layout.

        A call copies the keys of its segments, so a call has at most twice as many keys as the pack.
        """
        if ("window", window) not in self.plans:
            own = np.split(self.query_places, np.cumsum(self.segments)[:-1])
            keys = [np.concatenate(pair) for pair in zip(self.above(window), own, strict=True)]
            part = np.maximum(np.cumsum([len(some) for some in keys]) - 1, 0) // max(len(self.stops), 1)
            cuts = [list(same) for _, same in groupby(range(len(keys)), key=part.__getitem__)]
            tensors, queries, longest = list[Tensor](), [0], []
            for some in cuts:
                sizes = [self.segments[place] for place in some], [len(keys[place]) for place in some]
                tensors += on_host(np.concatenate([keys[place] for place in some])), *map(_cumulative, sizes)
                queries.append(queries[-1] + sum(sizes[0]))
                longest.append((max(sizes[0]), max(sizes[1])))
            sent = iter(sent_together(tensors, self.cu_seqlens.device))
            triples = zip(sent, sent, sent, strict=True)
            self.plans["window", window] = tuple(
                WindowCall(slice(first, end), *triple, most)
                for (first, end), triple, most in zip(pairwise(queries), triples, longest, strict=True)
            )
        return self.plans["window", window]

    @property
    def own_queries(self) -> Rows | None:
        if self.split is not None:
            return self.split.rows
        return None if self.query_index is None else Rows(self.query_index, self.query_places)


def _rounds(spans: Sequence[PrefixSpan], tokens: int) -> Iterator[list[PrefixSpan]]:
    # The queries of two spans are apart, or those of one contain those of the other. So the number of spans around a span says
    # in which round it can be.
    rounds: list[list[PrefixSpan]] = []
    around: list[int] = []
    for span in sorted(spans, key=lambda span: (span.queries.start, -span.queries.length)):
        while around and around[-1] <= span.queries.start:
            around.pop()
        if len(around) == len(rounds):
            rounds.append([])
        rounds[len(around)].append(span)
        around.append(span.queries.places.stop)
    # A call copies the keys of a round, so cut rounds that have more than twice the keys of the pack.
    for some in rounds:
        ends = np.cumsum([span.keys.length for span in some])
        part = np.maximum(ends - 1, 0) // max(2 * tokens, 1)
        yield from ([some[place] for place in places] for _, places in groupby(range(len(some)), key=part.__getitem__))


def span_of(query: int, last_query: int, key: int, last_key: int) -> list[PrefixSpan]:
    # Returns no span if it has no queries or no keys.
    if query == last_query or key == last_key:
        return []
    return [PrefixSpan(keys=SegmentRun(key, 1, last_key - key), queries=SegmentRun(query, 1, last_query - query))]


def changed(record: Any, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    return {name: change(value) for name, value in vars(record).items() if isinstance(value, Tensor)}


def _mapped(some: Round, change: Callable[[Tensor], Tensor]) -> Round:
    return replace(some, **changed(some, change))


def _cumulative(lengths: Iterable[int]) -> Tensor:
    return torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)


def _places(runs: Iterable[SegmentRun]) -> np.ndarray:
    places = [np.arange(run.start, run.start + run.length) for run in runs]
    return np.concatenate([np.zeros(0, dtype=np.int64), *places])


def on_host(values: np.ndarray) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Concatenate the ranges from ``start`` to ``start + size - 1``, int64 [sum of sizes]."""
    before = np.cumsum(sizes) - sizes
    return np.repeat(starts - before, sizes) + np.arange(sizes.sum())
