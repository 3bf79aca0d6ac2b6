"""The conversations of a step as a forest of token runs, so that tokens that several turns or rows share are computed once.

Only ids count. A turn whose prompt begins with all that came before extends that branch. Otherwise it forks where its ids first
differ. The rest of an output that a later prompt leaves out stays on its own branch and is learned there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from tensordict import TensorClass
from torch import Tensor

from verl_memopt.model.prefix_layout import ranges


class Turn(NamedTuple):
    prompt_ids: Sequence[int] | np.ndarray
    """All tokens that the model saw before it sampled: earlier turns too."""
    output_ids: Sequence[int] | np.ndarray
    """The sampled tokens."""


class Forest(TensorClass):
    """Runs of tokens without a fork inside (nodes), with the places of the sampled tokens. All tensors stay on the host.

    Attributes:
        tokens: int64 [T], the tokens of all nodes, node after node.
        sizes: int64 [N], at least 1 token per node.
        parent: int64 [N], the number of the parent, which is below the node's own number. -1 = a root.
        place: int64 [R], for each sampled token its place in ``tokens``, in the order of the batch's rows. Rows that sampled the
            same tokens after the same tokens have the same places.
        routes: Experts to replay [T, L, k], or places of a record [T], as in :class:`~verl_memopt.data.batch.RolloutBatch`.
    """

    tokens: Tensor
    sizes: Tensor
    parent: Tensor
    place: Tensor
    routes: Tensor | None = None

    def path(self, place: int) -> np.ndarray:
        """Return the places of all tokens before a token on its path, int64, from the root on."""
        sizes, pieces = self.sizes.numpy(), []
        start = np.cumsum(sizes) - sizes
        node = int(np.searchsorted(start, place, "right")) - 1
        while node >= 0:
            pieces.append(np.arange(start[node], place))
            node = int(self.parent[node])
            place = int(start[node] + sizes[node])
        return np.concatenate(pieces[::-1])

    def select(self, entries: Tensor) -> Forest:  # type: ignore[override]
        """Return the nodes that some sampled tokens need. A node without children ends at the last of them.

        ``entries``, int64, are numbers in ``place``. They become the places of the result, in this order.
        """
        sizes, parent, place = self.sizes.numpy(), self.parent.numpy(), self.place.numpy()[entries.numpy()]
        start = np.cumsum(sizes) - sizes
        node = np.searchsorted(start, place, "right") - 1
        kept = np.zeros(len(sizes), dtype=np.int64)
        np.maximum.at(kept, node, place - start[node] + 1)
        above = np.unique(parent[node])
        while len(above := above[above >= 0]):
            kept[above] = sizes[above]
            above = np.unique(parent[above])
        chosen = np.flatnonzero(kept)
        # One place more, so that the parent of a root stays -1.
        number = np.full(len(sizes) + 1, -1)
        number[chosen] = np.arange(len(chosen))
        begin = np.cumsum(kept) - kept
        tokens = torch.from_numpy(ranges(start[chosen], kept[chosen]))
        return Forest(
            tokens=self.tokens[tokens],
            sizes=torch.from_numpy(kept[chosen]),
            parent=torch.from_numpy(number[parent[chosen]]),
            place=torch.from_numpy(place - start[node] + begin[node]),
            routes=None if self.routes is None else self.routes[tokens],
            batch_size=[],
        )

    def paths(self, lengths: Sequence[int]) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return for each row of the batch its nodes, ascending, each with the number of its tokens that the row computes.

        A row computes all tokens before a sampled token. The sampled token itself counts only if something after it is computed.
        ``lengths`` are the numbers of sampled tokens of the rows.
        """
        sizes, parent, place = self.sizes.numpy(), self.parent.tolist(), self.place.numpy()
        start = np.cumsum(sizes) - sizes
        node = np.searchsorted(start, place, "right") - 1
        # The last sampled token of each row in each node.
        row = np.repeat(np.arange(len(lengths)), lengths)
        pairs, inverse = np.unique(row * len(sizes) + node, return_inverse=True)
        last = np.zeros(len(pairs), dtype=np.int64)
        np.maximum.at(last, inverse, place - start[node])
        computed: list[dict[int, int]] = [{} for _ in lengths]
        for pair, tokens in zip(pairs.tolist(), last.tolist(), strict=True):
            own, number = computed[pair // len(sizes)], pair % len(sizes)
            own[number] = max(own.get(number, 0), tokens)
            while (number := parent[number]) >= 0 and own.get(number) != sizes[number]:
                own[number] = int(sizes[number])
        return tuple(tuple((number, own[number]) for number in sorted(own) if own[number]) for own in computed)


MERGE_COST = 1 / 30
"""Cost of merging one more attention output into that of a query, in computed tokens. An estimate by bytes for 8B models."""


def build_forest(rows: Sequence[Sequence[Turn]], groups: Sequence[int] | None = None, merge_cost: float = MERGE_COST) -> Forest:
    """Build the forest of some conversations. Its places are those of the outputs of all turns of all rows, one after another.

    Args:
        rows: The turns of each row. A turn without output is left out, and one with output needs a prompt.
        groups: The group of each row. Rows of different groups share no node. None = all rows are one group.
        merge_cost: Where branches agree in so few tokens that merging costs more, each branch has its own copy of them. 0 = share
            all tokens.
    """
    trees: dict[int, _Node] = {}
    ends: list[tuple[_Node, int, int]] = []
    for group, turns in zip([0] * len(rows) if groups is None else groups, rows, strict=True):
        above = trees.setdefault(group, _Node(_NOTHING, 0))
        for turn in (turn for turn in turns if len(turn.output_ids)):
            assert len(turn.prompt_ids), "a turn has an output and no prompt, so no token predicts its first token"
            ids = np.concatenate([np.asarray(turn.prompt_ids, dtype=np.int64), np.asarray(turn.output_ids, dtype=np.int64)])
            ends.append((_insert(above, ids), len(turn.prompt_ids), len(ids)))
    if merge_cost:
        for node in reversed(_depth_first(trees.values())):
            _copy_if_short(node, merge_cost)
    nodes = _depth_first(trees.values())
    sizes = np.array([len(node.ids) for node in nodes], dtype=np.int64)
    for number, begin in enumerate(np.cumsum(sizes) - sizes):
        nodes[number].number, nodes[number].begin = number, int(begin)
    return Forest(
        tokens=torch.from_numpy(np.concatenate([_NOTHING, *(node.ids for node in nodes)])),
        sizes=torch.from_numpy(sizes),
        parent=torch.tensor([-1 if node.above is None else node.above.number for node in nodes], dtype=torch.int64),
        place=torch.from_numpy(np.concatenate([_NOTHING, *(_places(*end) for end in ends)])),
        batch_size=[],
    )


_NOTHING = np.zeros(0, dtype=np.int64)


@dataclass(eq=False)
class _Node:
    ids: np.ndarray
    depth: int  # number of tokens above it
    above: _Node | None = None
    below: dict[int, _Node] = field(default_factory=dict)  # by first token
    copies: list[_Node] = field(default_factory=list)  # nodes that hold its tokens in its place, largest first
    total: int = 0  # tokens of its subtree
    number: int = -1
    begin: int = 0  # place of its first token in the forest

    def children(self) -> list[_Node]:
        return [node for child in self.below.values() for node in (child.copies or [child])]


def _insert(root: _Node, ids: np.ndarray) -> _Node:
    # Return the node that has the last token. Later calls may split it, then its lower part keeps the object.
    node = root
    while True:
        agreed = common_length(node.ids, ids[node.depth :])
        end = node.depth + agreed
        if agreed < len(node.ids) and end < len(ids):
            node = _split(node, agreed)
        elif end == len(ids):
            return node
        elif node is not root and not node.below:
            # Nothing forks here, so the node becomes longer.
            node.ids = ids[node.depth :]
            return node
        following = node.below.get(int(ids[end]))
        if following is None:
            node.below[int(ids[end])] = following = _Node(ids[end:], end, node)
            return following
        node = following


def common_length(one: np.ndarray, other: np.ndarray) -> int:
    # The number of first tokens in which both agree.
    length = min(len(one), len(other))
    different = one[:length] != other[:length]
    return int(different.argmax()) if different.any() else length


def _split(node: _Node, size: int) -> _Node:
    # Return a new node with the first tokens, above the given node.
    above = node.above
    assert above is not None
    upper = _Node(node.ids[:size], node.depth, above, {int(node.ids[size]): node})
    above.below[int(node.ids[0])] = upper
    node.ids, node.depth, node.above = node.ids[size:], node.depth + size, upper
    return upper


def _depth_first(trees: Iterable[_Node]) -> list[_Node]:
    # The nodes below the empty nodes that hold the roots.
    found: list[_Node] = []
    left = [root for tree in trees for root in tree.children()][::-1]
    for root in left:
        root.above = None
    while left:
        found.append(node := left.pop())
        left.extend(reversed(node.children()))
    return found


def _copy_if_short(node: _Node, merge_cost: float) -> None:
    # Sharing spares all copies but one. But then the queries of all branches but the largest are merged once more.
    branches = sorted(node.children(), key=lambda branch: -branch.total)
    merged = sum(branch.total for branch in branches[1:])
    if not branches or (len(branches) - 1) * len(node.ids) >= merge_cost * merged:
        node.total = len(node.ids) + sum(branch.total for branch in branches)
        return
    for branch in branches:
        branch.ids, branch.depth, branch.above = np.concatenate([node.ids, branch.ids]), node.depth, node.above
        branch.total += len(node.ids)
    node.copies = branches


def _places(node: _Node, first: int, end: int) -> np.ndarray:
    # The places of tokens first to end - 1 of a sequence that ends in this node, or above it if it was split.
    pieces: list[np.ndarray] = []
    above: _Node | None = node
    while above is not None and above.copies:
        above = above.copies[0]
    while above is not None and end > first:
        begin = max(above.depth, first)
        if end > begin:
            pieces.append(np.arange(begin, end) - above.depth + above.begin)
            end = begin
        above = above.above
    return np.concatenate(pieces[::-1])
