"""One micro-batch as the model sees it: sequences one after another in one row, and what is asked of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from verl_memopt.memory.batching.shared_prompt import unread_if_many
from verl_memopt.models.trees import Tree, Trees


@dataclass(frozen=True)
class Read:
    """What is read of the last block's output: the T' tokens from the last one of each prompt on.

    trees: of these tokens, which see all. predicts: int64 [R], the places among them of the pack's ``predicts``.
    """

    trees: Trees
    predicts: Tensor


@dataclass(frozen=True)
class Pack:
    """The packed tokens of some rows.

    input_ids, position_ids: int64 [1, T]. trees: which of the T tokens see which.
    predicts: int64 [R], where in T the hidden state lies that predicts each response token. targets: int64 [R].
    row: int64 [R], the row of each response token; row_lengths: int64 [rows], response tokens of each row.
    read: the tokens whose last hidden state predicts something, where they are few enough for it to matter.
    """

    input_ids: Tensor
    position_ids: Tensor
    trees: Trees
    predicts: Tensor
    targets: Tensor
    row: Tensor
    row_lengths: Tensor
    read: Read | None = None

    @property
    def num_rows(self) -> int:
        return int(self.row_lengths.shape[0])

    def to(self, device: torch.device) -> Pack:
        """Gives the pack on a device; the copies do not wait."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def map(self, change: Callable[[Tensor], Tensor]) -> Pack:
        """Gives the same pack with each tensor changed."""
        changed = {name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        read = None if self.read is None else Read(self.read.trees.map(change), change(self.read.predicts))
        return replace(self, trees=self.trees.map(change), read=read, **changed)


def pack_rows(prompts: Tensor, prompt_sizes: Sequence[int], responses: Tensor, response_sizes: Sequence[int]) -> Pack:
    """Gives the pack of rows whose tokens lie one row after another in ``prompts`` and ``responses``, each with its own prompt.

    Otherwise as :func:`pack_groups`.
    """
    return pack_groups(prompts, prompt_sizes, responses, response_sizes, range(len(response_sizes)))


def pack_groups(
    prompts: Tensor,
    prompt_sizes: Sequence[int],
    responses: Tensor,
    response_sizes: Sequence[int],
    groups: Sequence[int],
) -> Pack:
    """Gives the pack of rows in which the rows of one group share their prompt.

    prompts, responses: int64, flat, one row after another; every row brings its prompt, and the first of a group lends its
    own. groups: a number for each row; rows with the same number need not be neighbours. What is asked of the model keeps the
    order of rows. A response's last token predicts nothing and is left out; so is a row with an empty response, and the prompt
    of a group without any other. With nothing to compute, one token stands in, so that ranks in step run the same collectives.
    No shape depends on the tokens' values, so fake tensors pass through.
    """
    p, r = np.asarray(prompt_sizes, dtype=np.int64), np.asarray(response_sizes, dtype=np.int64)
    assert len(p) == len(r) == len(groups), (len(p), len(r), len(groups))
    members = _members(groups, r)
    if not members:
        return _nothing(responses, len(r))
    # A tree's pieces: one prompt from the one tensor, then from the other, which lies behind it, each response but for its last.
    prompt_start, response_start = np.cumsum(p) - p, len(prompts) + np.cumsum(r) - r
    pieces: list[tuple[int, int, int]] = []  # (first place in both tensors, tokens, position of the first)
    trees: list[Tree] = []
    read_trees: list[Tree] = []
    unread: list[int] = []
    prompt_end, branch_start = np.zeros_like(p), np.zeros_like(p)
    token = 0
    for rows in members:
        trunk = int(p[rows[0]])
        assert all(p[row] == trunk for row in rows), f"rows {rows} share a prompt, and their prompts have {p[rows]} tokens"
        answers = [int(r[row]) - 1 for row in rows]
        trees.append(_tree(trunk, answers))
        read_trees.append(_tree(1, answers))
        unread.append(trunk - 1)
        pieces.append((prompt_start[rows[0]], trunk, 0))
        token += trunk
        prompt_end[rows] = token
        for row in rows:
            pieces.append((response_start[row], r[row] - 1, trunk))
            branch_start[row] = token
            token += int(r[row]) - 1
    first, sizes, positions = np.array(pieces, dtype=np.int64).T
    present = r > 0
    predictors = np.stack([prompt_end[present] - 1, branch_start[present]], axis=1).reshape(-1)
    predicted = np.stack([np.ones_like(r[present]), r[present] - 1], axis=1).reshape(-1)
    predicts = ranges(predictors, predicted)
    return Pack(
        input_ids=torch.cat([prompts, responses])[_host(ranges(first, sizes))][None],
        position_ids=_host(ranges(positions, sizes))[None],
        trees=Trees.of(tuple(trees)),
        predicts=_host(predicts),
        targets=responses,
        row=_host(np.repeat(np.arange(len(r)), r)),
        row_lengths=_host(r),
        read=_read(read_trees, unread, predicts) if unread_if_many(sum(unread), token) else None,
    )


def pack_prompt(prompt: Tensor) -> Pack:
    """Gives the pack of a prompt alone, int64 [P], of which the last token's state is read and nothing is asked."""
    none = prompt.new_zeros(0)
    pack = pack_rows(prompt, [len(prompt)], prompt[:1], [1])
    return replace(pack, targets=none, row=none, row_lengths=none)


def pack_branches(prompt_size: int, responses: Tensor, response_sizes: Sequence[int]) -> Pack:
    """Gives the pack of answers to a prompt that is computed elsewhere.

    Otherwise as :func:`pack_groups`, but that ``predicts`` counts the state of the prompt's last token as the first.
    """
    r = np.asarray(response_sizes, dtype=np.int64)
    own = np.maximum(r - 1, 0)
    start = np.cumsum(own) - own
    present = r > 0
    predictors = np.stack([np.zeros_like(r[present]), 1 + start[present]], axis=1).reshape(-1)
    predicted = np.stack([np.ones_like(r[present]), own[present]], axis=1).reshape(-1)
    return Pack(
        input_ids=responses[_host(ranges(np.cumsum(r) - r, own))][None],
        position_ids=_host(ranges(np.full_like(own, prompt_size), own))[None],
        trees=Trees.of(((0, tuple(own[own > 0].tolist())),), (prompt_size,)),
        predicts=_host(ranges(predictors, predicted)),
        targets=responses,
        row=_host(np.repeat(np.arange(len(r)), r)),
        row_lengths=_host(r),
    )


def _read(sizes: Sequence[Tree], unread: Sequence[int], predicts: np.ndarray) -> Read:
    before, read = np.asarray(unread), np.array([trunk + sum(branches) for trunk, branches in sizes])
    places = ranges(np.cumsum(before + read) - read, read)
    return Read(Trees.of(tuple(sizes), tuple(unread)), _host(np.searchsorted(places, predicts)))


def _members(groups: Sequence[int], response_sizes: np.ndarray) -> list[list[int]]:
    """Gives the rows of each group that have a response, groups in the order of their first such row."""
    found: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        if response_sizes[row] > 0:
            found.setdefault(int(group), []).append(row)
    return list(found.values())


def _tree(trunk: int, branches: list[int]) -> Tree:
    if len(branches) == 1:  # nobody to share with: one segment costs one call of a kernel, not three
        return trunk + branches[0], ()
    return trunk, tuple(length for length in branches if length > 0)


def _nothing(responses: Tensor, num_rows: int) -> Pack:
    none = _host(np.zeros(0, dtype=np.int64))
    token = _host(np.zeros((1, 1), dtype=np.int64))
    row_lengths = _host(np.zeros(num_rows, dtype=np.int64))
    return Pack(token, token, Trees.of(((1, ()),)), none, responses, none, row_lengths)


def _host(values: np.ndarray) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Gives int64 [sum of sizes]: for each pair the integers from its start on, as many as its size, one pair after another."""
    before = np.cumsum(sizes) - sizes
    return np.repeat(starts - before, sizes) + np.arange(sizes.sum())
