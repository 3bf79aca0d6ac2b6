"""Compute rows that are longer than a token budget.

Some nodes of their forest stay open: their keys and values are kept while everything below them is computed, a part in each pass.
Then their own forward runs again and its backward, from the gradients that all passes gave to these keys and values. So the
budget bounds the tokens of a pass, whatever the length of a row. The open nodes are always one path from a root.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from verl_memopt.memory.pass_order import Close, Open, Run, pieces, schedule
from verl_memopt.model.forest import Forest
from verl_memopt.model.packing import Pack, pack_forest, pack_path
from verl_memopt.model.prefix_layout import on_host, ranges


def in_pieces(forest: Forest, budget: int) -> Forest:
    """Return the same forest, in which longer nodes are chains of nodes with at most ``budget`` tokens."""
    sizes, parent = map(on_host, pieces(forest.sizes.numpy(), forest.parent.numpy(), budget))
    return Forest(tokens=forest.tokens, sizes=sizes, parent=parent, place=forest.place, routes=forest.routes, batch_size=[])


def computed_tokens(forest: Forest) -> list[int]:
    """Return the number of computed tokens of each node of a selected forest. The last sampled token predicts nothing."""
    is_leaf = np.ones(len(forest.sizes), dtype=bool)
    is_leaf[forest.parent[forest.parent >= 0].numpy()] = False
    return (forest.sizes.numpy() - is_leaf).tolist()


# The packs of the steps.


@dataclass(frozen=True)
class OpenPack:
    """A pack of ``pack_path``, whose prefix KV is kept for the following packs. They do not read that of a placeholder."""

    pack: Pack
    is_read: bool = True

    def map(self, change: Callable[[Tensor], Tensor]) -> OpenPack:
        return replace(self, pack=self.pack.map(change))


@dataclass(frozen=True)
class RunPack:
    """A pack behind the open nodes. ``entries``, int64, are the sampled tokens that it learns, in the order of its targets."""

    pack: Pack
    entries: Tensor
    entries_on_host: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> RunPack:
        return replace(self, pack=self.pack.map(change), entries=change(self.entries))


PackStep: TypeAlias = OpenPack | RunPack | Close


def path_packs(forest: Forest, budget: int, word: str | None = None) -> list[PackStep]:
    """Return the packs of the steps of :func:`schedule`. Each sampled token of a selected forest is learned in one of them.

    Steps without nodes have a pack of one token, so that this rank still runs the same collectives as other ranks.
    """
    forest = in_pieces(forest, budget)
    steps, packs = schedule((computed_tokens(forest), forest.parent.tolist()), budget, word), _Packs(forest)
    return [
        packs.opened(step) if isinstance(step, Open) else packs.run(step) if isinstance(step, Run) else packs.close(step)
        for step in steps
    ]


class _Packs:
    """Makes the packs of one step after the other, and knows which nodes are open."""

    def __init__(self, forest: Forest) -> None:
        self.tokens, self.place, self.routes = forest.tokens, forest.place.numpy(), forest.routes
        self.sizes, self.parent = forest.sizes.numpy(), forest.parent.numpy()
        self.start = np.cumsum(self.sizes) - self.sizes
        self.before = np.zeros_like(self.sizes)  # number of tokens on the path above each node
        self.children: list[list[int]] = [[] for _ in self.sizes]
        for node, above in enumerate(self.parent.tolist()):
            if above >= 0:
                self.before[node] = self.before[above] + self.sizes[above]
                self.children[above].append(node)
        self.node = np.searchsorted(self.start, self.place, "right") - 1
        self.order = np.argsort(self.node, kind="stable")
        self.borders = np.searchsorted(self.node[self.order], np.arange(len(self.sizes) + 1))
        self.trunks: list[tuple[int, ...]] = []
        self.states: list[np.ndarray] = []  # for each trunk the tokens of the path whose states are kept
        # Tokens that were sampled in open nodes. The next pass learns them, because it gets the states that predict them.
        self.waiting = np.zeros(0, dtype=np.int64)

    def opened(self, step: Open) -> OpenPack:
        if not step.nodes:
            self.trunks.append(())
            self.states.append(np.zeros(0, dtype=np.int64))
            first = np.zeros(1, dtype=np.int64)
            return OpenPack(pack_path(torch.zeros(1, dtype=torch.int64), 0, first, first), is_read=False)
        nodes, entries = list(step.nodes), self._entries(step.nodes)
        node = self.node[entries]
        offset = self.place[entries] - self.start[node]
        # The last token of a node predicts the first tokens of its children.
        predicting = self.before[nodes] + self.sizes[nodes] - 1, (self.before[node] + offset - 1)[offset > 0]
        states, before = np.unique(np.concatenate(predicting)), int(self.before[nodes[0]])
        self.trunks.append(step.nodes)
        self.states.append(states)
        self.waiting = np.concatenate([self.waiting, entries])
        ends = self.before[nodes] + self.sizes[nodes] - 1 - before
        tokens = self._places(np.array(nodes))
        return OpenPack(self._routed(pack_path(self.tokens[tokens], before, states - before, ends), tokens))

    def run(self, step: Run) -> RunPack:
        opened = [node for trunk in self.trunks for node in trunk]
        own = sorted(node for root in step.roots for node in self._subtree(root))
        entries = np.concatenate([self.waiting, self._entries(own)])
        self.waiting = self.waiting[:0]
        chosen, number, begin = (
            np.array([*opened, *own], dtype=np.int64),
            np.full(len(self.sizes) + 1, -1),
            np.zeros_like(self.sizes),
        )
        number[chosen] = np.arange(len(chosen))
        begin[chosen] = np.cumsum(self.sizes[chosen]) - self.sizes[chosen]
        place = begin[self.node[entries]] + self.place[entries] - self.start[self.node[entries]]
        sizes, parent, at = map(on_host, (self.sizes[chosen], number[self.parent[chosen]], place))
        states = np.concatenate(self.states) if opened else None
        tokens = self._places(chosen)
        pack = pack_forest(self.tokens[tokens], sizes, parent, at, [len(entries)], len(opened), states)
        return RunPack(self._routed(pack, tokens), on_host(entries), on_host(entries))

    def close(self, step: Close) -> Close:
        self.trunks.pop()
        self.states.pop()
        return step

    def _places(self, nodes: np.ndarray) -> Tensor:
        return on_host(ranges(self.start[nodes], self.sizes[nodes]))

    def _routed(self, pack: Pack, tokens: Tensor) -> Pack:
        return pack if self.routes is None else pack.routed(self.routes[tokens])

    def _entries(self, nodes: Sequence[int]) -> np.ndarray:
        return np.concatenate([self.order[:0], *(self.order[self.borders[node] : self.borders[node + 1]] for node in nodes)])

    def _subtree(self, node: int) -> Iterator[int]:
        left = [node]
        while left:
            yield (node := left.pop())
            left += self.children[node]
