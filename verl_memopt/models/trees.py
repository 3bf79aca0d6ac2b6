"""How the sequences of a pack share their beginnings: trees of one trunk and its branches, one after another in a row of tokens.

A token sees the tokens before it in its own segment (a trunk or a branch), and one of a branch also the whole trunk of its tree.
Where the outputs of a trunk's first tokens are read by nobody, its tree can be one whose queries begin behind them.
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

Tree: TypeAlias = tuple[int, tuple[int, ...]]
"""Tokens of the trunk, and of each branch; the order of tokens is trunk, first branch, second branch and so on."""


@dataclass(frozen=True)
class Run:
    """Neighbouring segments of one length: where the first begins, how many there are, and their tokens each."""

    start: int
    count: int
    length: int


@dataclass(frozen=True)
class Fork:
    """The tokens of a trunk, and those of all its branches together, as one segment each.

    trunk: among the tokens that are seen. branches: among those that see, which are the same but for unread ones.
    """

    trunk: Run
    branches: Run


@dataclass(frozen=True, eq=False)
class Trees:
    """The trees of a pack on the host, and what a kernel over all of them needs on its device.

    sizes: of what is read, that is of the queries. unread: how many tokens of each tree lie before them, keys and values only;
    where there are some, the read part of the trunk may be empty.
    starts: int32 [segments + 1], the first query of each segment, and the number of queries. Of the forks, in order:
    branch_index, trunk_index: int64, the places of all tokens of branches among queries, and of trunks among keys;
    branch_starts, trunk_starts: int32 [forks + 1], where each fork's part of these begins. read: int64, the places of queries
    among keys; None where nothing is unread.
    """

    sizes: tuple[Tree, ...]
    unread: tuple[int, ...]
    starts: Tensor
    branch_index: Tensor
    trunk_index: Tensor
    branch_starts: Tensor
    trunk_starts: Tensor
    read: Tensor | None

    @classmethod
    def of(cls, sizes: tuple[Tree, ...], unread: tuple[int, ...] | None = None) -> Trees:
        """Gives the trees of these sizes, on the CPU. unread: of each tree, tokens before these that are keys only."""
        before = (0,) * len(sizes) if unread is None else unread
        found = tuple(forks(sizes, before))
        trunks, branches = [fork.trunk for fork in found], [fork.branches for fork in found]
        return cls(
            sizes,
            before,
            starts=_cumulative(segments(sizes)),
            branch_index=_places(branches),
            trunk_index=_places(trunks),
            branch_starts=_cumulative(run.length for run in branches),
            trunk_starts=_cumulative(run.length for run in trunks),
            read=_places(_read(sizes, before)) if any(before) else None,
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> Trees:
        """Gives the same trees with each tensor changed."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **{name: change(tensor) for name, tensor in tensors.items()})

    def at_queries(self, *tensors: Any) -> tuple[Any, ...]:
        """Gives tensors [T, ...] of all tokens (or None) at those that are read; themselves where all are."""
        return tensors if self.read is None else tuple(None if one is None else one[self.read] for one in tensors)

    def at_keys(self, tensor: Tensor, like: Tensor) -> Tensor:
        """Gives a tensor of the tokens that are read at all tokens, as ``like`` has them, with zeros at the others."""
        return tensor if self.read is None else torch.zeros_like(like).index_copy_(0, self.read, tensor)

    @cached_property
    def segments(self) -> tuple[int, ...]:
        """Gives the tokens of every trunk and branch in order."""
        return tuple(segments(self.sizes))

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """Gives the segments, neighbours of equal length together."""
        found, start = [], 0
        for length, same in groupby(self.segments):
            found.append(Run(start, sum(1 for _ in same), length))
            start += found[-1].count * length
        return tuple(found)

    @cached_property
    def forks(self) -> tuple[Fork, ...]:
        """Gives what sees more than its own segment, and what of a trunk it sees."""
        return tuple(forks(self.sizes, self.unread))

    @cached_property
    def read_places(self) -> np.ndarray:
        """Gives int64 [queries] on the host: the places of queries among keys."""
        return _host_places(_read(self.sizes, self.unread))

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """Gives the tokens of each tree, read or not."""
        trees = zip(self.unread, self.sizes, strict=True)
        return tuple(before + trunk + sum(branches) for before, (trunk, branches) in trees)


def segments(sizes: tuple[Tree, ...]) -> Iterator[int]:
    """Gives the tokens of every trunk and branch in order."""
    for trunk, branches in sizes:
        if trunk:
            yield trunk
        yield from branches


def forks(sizes: tuple[Tree, ...], unread: tuple[int, ...]) -> Iterator[Fork]:
    """Gives, in order, what is read of each trunk with what is not, if anything, and all branches with the whole trunk."""
    query = key = 0
    for before, (trunk, branches) in zip(unread, sizes, strict=True):
        if before and trunk:
            yield Fork(Run(key, 1, before), Run(query, 1, trunk))
        if branches:
            yield Fork(Run(key, 1, before + trunk), Run(query + trunk, 1, sum(branches)))
        query += trunk + sum(branches)
        key += before + trunk + sum(branches)


def _read(sizes: tuple[Tree, ...], unread: tuple[int, ...]) -> Iterator[Run]:
    key = 0
    for before, (trunk, branches) in zip(unread, sizes, strict=True):
        yield Run(key + before, 1, trunk + sum(branches))
        key += before + trunk + sum(branches)


def _cumulative(lengths: Iterable[int]) -> Tensor:
    return torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)


def _places(runs: Iterable[Run]) -> Tensor:
    return torch.tensor(_host_places(runs))


def _host_places(runs: Iterable[Run]) -> np.ndarray:
    places = [np.arange(run.start, run.start + run.length) for run in runs]
    return np.concatenate([np.zeros(0, dtype=np.int64), *places])
