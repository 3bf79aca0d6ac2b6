"""Which tokens of packed sequences share a prefix, and the index tensors that attention over them needs.

A pack is one row of tokens. It holds groups, one after another; a group is a prefix followed by its suffixes. The prefix and each
suffix are a segment. A token sees the tokens before it in its own segment; a token of a suffix also sees the whole prefix of its
group. A group may skip queries: the outputs of the first tokens of its prefix are not computed, and these tokens are keys only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

PrefixGroup: TypeAlias = tuple[int, tuple[int, ...]]
"""Number of tokens of the prefix, and of each suffix. The tokens lie in this order."""


@dataclass(frozen=True)
class Run:
    """Neighbouring segments of one length: where the first begins, how many there are, and the tokens of each."""

    start: int
    count: int
    length: int


@dataclass(frozen=True)
class PrefixSpan:
    """One call of the prefix pass: contiguous queries that each see contiguous keys whole.

    Attributes:
        keys: Places among the keys.
        queries: Places among the queries. They differ from places among the keys where tokens are skipped.
    """

    keys: Run
    queries: Run


@dataclass(frozen=True, eq=False)
class PrefixLayout:
    """The groups of a pack on the host, and the index tensors of its attention kernels on the device.

    Attributes:
        groups: Lengths of the queries of each group. The prefix may have length 0 where tokens of it are skipped.
        skipped: For each group, the number of prefix tokens before its queries. They are keys only.
        cu_seqlens: int32 [segments + 1], the first query of each segment, then the number of queries.
        prefix_index_q: int64, the queries of all prefix spans, in order.
        prefix_index_k: int64, the keys of all prefix spans, in order.
        prefix_cu_seqlens_q: int32 [spans + 1], where the queries of each span begin in ``prefix_index_q``.
        prefix_cu_seqlens_k: int32 [spans + 1], where the keys of each span begin in ``prefix_index_k``.
        query_index: int64, the places of the queries among the keys; None where every key is also a query.
    """

    groups: tuple[PrefixGroup, ...]
    skipped: tuple[int, ...]
    cu_seqlens: Tensor
    prefix_index_q: Tensor
    prefix_index_k: Tensor
    prefix_cu_seqlens_q: Tensor
    prefix_cu_seqlens_k: Tensor
    query_index: Tensor | None

    @classmethod
    def of(cls, groups: tuple[PrefixGroup, ...], skipped: tuple[int, ...] | None = None) -> PrefixLayout:
        """Build the layout of some groups on the CPU.

        Args:
            groups: Lengths of the queries of each group.
            skipped: For each group, the number of tokens before these that are keys only; None for none.
        """
        num_skipped = (0,) * len(groups) if skipped is None else skipped
        spans = tuple(prefix_spans(groups, num_skipped))
        keys = [span.keys for span in spans]
        queries = [span.queries for span in spans]
        return cls(
            groups,
            num_skipped,
            cu_seqlens=_cumulative(segments(groups)),
            prefix_index_q=_places(queries),
            prefix_index_k=_places(keys),
            prefix_cu_seqlens_q=_cumulative(run.length for run in queries),
            prefix_cu_seqlens_k=_cumulative(run.length for run in keys),
            query_index=_places(_query_runs(groups, num_skipped)) if any(num_skipped) else None,
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> PrefixLayout:
        """Return the same layout with ``change`` applied to each tensor."""
        changed: dict[str, Any] = {name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **changed)

    def at_queries(self, *tensors: Any) -> tuple[Any, ...]:
        """Return the rows of the queries from tensors of all keys, or the tensors themselves where every key is a query.

        Args:
            tensors: [T, ...] each, or None, which stays None.
        """
        if self.query_index is None:
            return tensors
        return tuple(None if one is None else one[self.query_index] for one in tensors)

    def at_keys(self, tensor: Tensor, like: Tensor) -> Tensor:
        """Return a tensor of the queries as one of all keys, with zeros for the skipped tokens.

        Args:
            tensor: [Q, ...].
            like: [T, ...], whose shape and dtype the result has.
        """
        if self.query_index is None:
            return tensor
        return torch.zeros_like(like).index_copy_(0, self.query_index, tensor)

    @cached_property
    def segments(self) -> tuple[int, ...]:
        """Number of queries of every prefix and suffix, in order."""
        return tuple(segments(self.groups))

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The segments, with neighbours of equal length together."""
        runs: list[Run] = []
        start = 0
        for length, same in groupby(self.segments):
            runs.append(Run(start, sum(1 for _ in same), length))
            start += runs[-1].count * length
        return tuple(runs)

    @cached_property
    def prefix_spans(self) -> tuple[PrefixSpan, ...]:
        """The calls of the prefix pass: queries that see more than their own segment, and what they see."""
        return tuple(prefix_spans(self.groups, self.skipped))

    @cached_property
    def query_places(self) -> np.ndarray:
        """The places of the queries among the keys, int64 [Q] on the host."""
        return _host_places(_query_runs(self.groups, self.skipped))

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """Number of tokens of each group, skipped ones included."""
        pairs = zip(self.skipped, self.groups, strict=True)
        return tuple(skipped + prefix + sum(suffixes) for skipped, (prefix, suffixes) in pairs)


def segments(groups: tuple[PrefixGroup, ...]) -> Iterator[int]:
    """Yield the number of tokens of every prefix and suffix, in order."""
    for prefix, suffixes in groups:
        if prefix:
            yield prefix
        yield from suffixes


def prefix_spans(groups: tuple[PrefixGroup, ...], skipped: tuple[int, ...]) -> Iterator[PrefixSpan]:
    """Yield what the prefix pass computes, in order.

    For each group these are the queries of its prefix over its skipped tokens, if it has both, and the queries of all its
    suffixes over its whole prefix.
    """
    query = key = 0
    for before, (prefix, suffixes) in zip(skipped, groups, strict=True):
        if before and prefix:
            yield PrefixSpan(keys=Run(key, 1, before), queries=Run(query, 1, prefix))
        if suffixes:
            yield PrefixSpan(keys=Run(key, 1, before + prefix), queries=Run(query + prefix, 1, sum(suffixes)))
        query += prefix + sum(suffixes)
        key += before + prefix + sum(suffixes)


def _query_runs(groups: tuple[PrefixGroup, ...], skipped: tuple[int, ...]) -> Iterator[Run]:
    """Yield, for each group, the places of its queries among the keys."""
    key = 0
    for before, (prefix, suffixes) in zip(skipped, groups, strict=True):
        yield Run(key + before, 1, prefix + sum(suffixes))
        key += before + prefix + sum(suffixes)


def _cumulative(lengths: Iterable[int]) -> Tensor:
    return torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)


def _places(runs: Iterable[Run]) -> Tensor:
    return torch.tensor(_host_places(runs))


def _host_places(runs: Iterable[Run]) -> np.ndarray:
    places = [np.arange(run.start, run.start + run.length) for run in runs]
    return np.concatenate([np.zeros(0, dtype=np.int64), *places])
