"""The order of passes: those of several ranks, and those of rows that are longer than their token budget.

The tokens of the rows are a forest, whose nodes are runs of tokens. A node whose subtree exceeds the budget is opened: its keys
and values are kept while the nodes below it are computed, a part in each pass. Then it is closed, which is its backward.

Passes of sharded weights have collectives, so all ranks must open, run and close in the same order. This order is a word of
``(``, ``m`` and ``)``. It depends only on numbers of tokens, which the driver knows of all ranks. A rank that has nothing to do
for a letter computes a placeholder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

Nodes: TypeAlias = tuple[Sequence[int], Sequence[int]]
"""Number of computed tokens of each node, and number of each node's parent, which is below its own. -1 = a root."""

OPEN, RUN, CLOSE = "(", "m", ")"


class InParts(list[int]):
    """The rows of a micro-batch that has more tokens than its budget. A worker computes it in several passes.

    ``budget`` is the most tokens of a pass. ``problem`` is the error of a worker whose model cannot do so. ``word`` is the order
    of the passes on all ranks. None = there is one rank.
    """

    def __init__(self, rows: Iterable[int], budget: int, problem: str, word: str | None = None) -> None:
        super().__init__(rows)
        self.budget, self.problem, self.word = budget, problem, word

    def of(self, rows: Sequence[int]) -> InParts:
        # The same micro-batch, whose numbers were places in ``rows``.
        return InParts([rows[place] for place in self], self.budget, self.problem, self.word)

    def placeholder(self) -> InParts:
        return InParts((), self.budget, self.problem, self.word)


class Cut(list[list[int]]):
    """The rows of each micro-batch of one rank out of several, and the micro-batches in which the ranks carry a prompt.

    A span is some neighbouring micro-batches over which a prompt's keys and values are carried, and ``spans`` are their lengths.
    Spans come first, and are the same on all ranks, because forward and backward of a prompt have collectives of their own.
    """

    def __init__(self, micro_batches: Iterable[list[int]] = (), spans: Sequence[int] = ()) -> None:
        super().__init__(micro_batches)
        self.spans = tuple(spans)

    def placeholders(self) -> Cut:
        # Micro-batches without rows, with the same collectives.
        return Cut((rows.placeholder() if isinstance(rows, InParts) else [] for rows in self), self.spans)


@dataclass(frozen=True)
class Open:
    """Compute nodes that follow each other on a path, and keep their keys and values. Without nodes it is a placeholder."""

    nodes: tuple[int, ...]


@dataclass(frozen=True)
class Run:
    """Compute whole subtrees, whose parents are open or none. Without roots it is a placeholder."""

    roots: tuple[int, ...]


@dataclass(frozen=True)
class Close:
    """Run the backward of the nodes that were opened last."""

    def map(self, change: Callable[[Any], Any]) -> Close:
        return self


Step: TypeAlias = Open | Run | Close


def schedule(nodes: Nodes, budget: int, word: str | None = None) -> list[Step]:
    """Return the steps in which a forest is computed, each with at most ``budget`` tokens.

    A node whose subtree has more tokens than the budget must be opened. So the number of open tokens is at most that of the
    longest path to the end of such a node, whatever the order. The roots of all other subtrees can wait for a pass with room as
    long as their parent is open.

    Args:
        nodes: The forest. No node has more than ``budget`` tokens, see :func:`pieces`.
        budget: Most tokens of a step.
        word: The result of :func:`common_word` for this forest and those of other ranks. None = there are no others.
    """
    own = _Schedule(nodes, budget)
    for letter in common_word([nodes], budget) if word is None else word:
        own.take(letter)
    (last,) = own.levels
    assert last.is_done, f"the word {word} leaves out some nodes of this rank"
    return own.steps


def common_word(forests: Sequence[Nodes], budget: int) -> str:
    """Return the order of the steps of some ranks, each of which has a forest.

    The largest open subtrees of all ranks are computed at the same time, then the second largest. A rank that has fewer passes
    below its open nodes than others uses them for subtrees that wait.
    """
    ranks, word, depth = [_Schedule(nodes, budget) for nodes in forests], list[str](), 0
    while True:
        if any(rank.levels[-1].large for rank in ranks):
            letter, depth = OPEN, depth + 1
        elif any(rank.levels[-1].units for rank in ranks):
            letter = RUN
        elif depth:
            letter, depth = CLOSE, depth - 1
        else:
            return "".join(word)
        word.append(letter)
        for rank in ranks:
            rank.take(letter)


@dataclass
class _Level:
    """The children of open nodes that are left: those with larger subtrees than the budget, and the others. Largest first."""

    large: list[int]
    units: list[int]

    @property
    def is_done(self) -> bool:
        return not self.large and not self.units


class _Schedule:
    """The steps of one rank, letter by letter."""

    def __init__(self, nodes: Nodes, budget: int) -> None:
        self.need, parent = nodes
        assert max(self.need, default=0) <= budget, (max(self.need), budget)
        self.budget, self.total, self.steps = budget, list(self.need), list[Step]()
        self.children: list[list[int]] = [[] for _ in range(len(parent) + 1)]  # the last list has the roots
        for node in range(len(parent) - 1, -1, -1):
            self.children[parent[node]].append(node)
            if parent[node] >= 0:
                self.total[parent[node]] += self.total[node]
        for children in self.children:
            children.sort(key=lambda child: (-self.total[child], child))
        self.levels = [_Level(self._large(-1), self._units(-1))]

    def take(self, letter: str) -> None:
        if letter == OPEN:
            self.steps.append(Open(self._open(self.levels[-1].large)))
        elif letter == RUN:
            self.steps.append(Run(self._fill()))
        else:
            assert self.levels.pop().is_done, "closed before everything below was computed"
            self.steps.append(Close())

    def _open(self, large: list[int]) -> tuple[int, ...]:
        if not large:
            self.levels.append(_Level([], []))
            return ()
        trunk = [large.pop(0)]
        following, tokens = self._large(trunk[-1]), self.need[trunk[-1]]
        while len(following) == 1 and tokens + self.need[following[0]] <= self.budget:
            tokens += self.need[following[0]]
            trunk.append(following[0])
            following = self._large(trunk[-1])
        self.levels.append(_Level(following, [unit for node in trunk for unit in self._units(node)]))
        return tuple(trunk)

    def _fill(self) -> tuple[int, ...]:
        # From the units of the last open nodes, then from those of the nodes above.
        roots, room = list[int](), self.budget
        for level in reversed(self.levels):
            for unit in list(level.units):
                if self.total[unit] <= room:
                    roots.append(unit)
                    level.units.remove(unit)
                    room -= self.total[unit]
        return tuple(roots)

    def _large(self, node: int) -> list[int]:
        return [child for child in self.children[node] if self.total[child] > self.budget]

    def _units(self, node: int) -> list[int]:
        return [child for child in self.children[node] if self.total[child] <= self.budget]


def pieces(sizes: np.ndarray, parents: np.ndarray, budget: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut nodes into chains of nodes with at most ``budget`` tokens. Return the sizes and parents of all pieces, int64 each.

    ``sizes`` and ``parents``, int64, are those of the nodes.
    """
    count = -(-sizes // budget)
    last = np.cumsum(count) - 1
    cut = np.full(count.sum(), budget)
    cut[last] = sizes - (count - 1) * budget
    above = np.arange(len(cut)) - 1
    # The first piece hangs on the last one of the parent.
    above[last - count + 1] = np.where(parents >= 0, last[parents], -1)
    return cut, above
