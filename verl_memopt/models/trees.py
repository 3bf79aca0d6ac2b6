"""How the sequences of a pack share their beginnings: trees of one trunk and its branches, one after another in a row of tokens.

A token sees the tokens before it in its own segment (a trunk or a branch), and one of a branch also the whole trunk of its tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import groupby
from typing import TypeAlias

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
    """The tokens of a trunk, and those of all its branches together, as one segment each."""

    trunk: Run
    branches: Run


@dataclass(frozen=True, eq=False)
class Trees:
    """The trees of a pack on the host, and what a kernel over all of them needs on its device.

    starts: int32 [segments + 1], the first token of each segment, and the number of tokens. Of the trees with branches, in
    order: branch_index, trunk_index: int64, the places of all tokens of branches, and of trunks; branch_starts, trunk_starts:
    int32 [such trees + 1], where each tree's part of these begins.
    """

    sizes: tuple[Tree, ...]
    starts: Tensor
    branch_index: Tensor
    trunk_index: Tensor
    branch_starts: Tensor
    trunk_starts: Tensor

    @classmethod
    def of(cls, sizes: tuple[Tree, ...]) -> Trees:
        """Gives the trees of these sizes, on the CPU."""
        trunks, branches = [fork.trunk for fork in forks(sizes)], [fork.branches for fork in forks(sizes)]
        return cls(
            sizes,
            starts=_cumulative(segments(sizes)),
            branch_index=_places(branches),
            trunk_index=_places(trunks),
            branch_starts=_cumulative(run.length for run in branches),
            trunk_starts=_cumulative(run.length for run in trunks),
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> Trees:
        """Gives the same trees with each tensor changed."""
        tensors = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "sizes"}
        return replace(self, **{name: change(tensor) for name, tensor in tensors.items()})

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
        """Gives the trees that have branches."""
        return tuple(forks(self.sizes))


def segments(sizes: tuple[Tree, ...]) -> Iterator[int]:
    """Gives the tokens of every trunk and branch in order."""
    for trunk, branches in sizes:
        yield trunk
        yield from branches


def forks(sizes: tuple[Tree, ...]) -> Iterator[Fork]:
    """Gives the trees that have branches, with the place of each."""
    start = 0
    for trunk, branches in sizes:
        if branches:
            yield Fork(Run(start, 1, trunk), Run(start + trunk, 1, sum(branches)))
        start += trunk + sum(branches)


def _cumulative(lengths: Iterable[int]) -> Tensor:
    return torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)


def _places(runs: Iterable[Run]) -> Tensor:
    places = [np.arange(run.start, run.start + run.length) for run in runs]
    return torch.tensor(np.concatenate([np.zeros(0, dtype=np.int64), *places]))
