"""Attention written out with explicit masks, in plain autograd: the reference of every kernel; and sliding windows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from verl_memopt.models.trees import Tree, Trees


def eager_attention(query: Tensor, key: Tensor, value: Tensor, trees: Trees, scale: float, window: int | None) -> Tensor:
    """Gives attention [1, heads, T, D]; holds a score of each pair of tokens of one tree at a time.

    query: [1, heads, T, D], or of the tokens that are read alone; key, value: [1, kv heads, T, D]. window: how many positions
    back a token sees, itself included.
    """
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    queries = [trunk + sum(branches) for trunk, branches in trees.sizes]
    outputs, tensors = [], (query.split(queries, 2), *(x.split(trees.tokens, 2) for x in (key, value)))
    for (trunk, branches), unread, q, k, v in zip(trees.sizes, trees.unread, *tensors, strict=True):
        hidden = ~tree_mask((unread + trunk, branches), window, query.device)[unread:]
        scores = (q @ k.transpose(2, 3) * scale).masked_fill(hidden, float("-inf"))
        outputs.append(scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ v)
    return torch.cat(outputs, dim=2)


def windowed_attention(query: Tensor, key: Tensor, value: Tensor, trees: Trees, scale: float, window: int) -> Tensor:
    """Gives attention [1, heads, T, D] over trees without branches, by torch's SDPA, one after another."""
    assert not trees.forks, trees.sizes
    grouped, outputs = query.shape[1] != key.shape[1], []
    for q, k, v in zip(*(x.split(trees.segments, 2) for x in (query, key, value)), strict=True):
        whole = q.shape[2] <= window
        mask = None if whole else tree_mask((q.shape[2], ()), window, query.device)
        outputs.append(scaled_dot_product_attention(q, k, v, mask, is_causal=whole, scale=scale, enable_gqa=grouped))
    return torch.cat(outputs, dim=2)


def tree_mask(tree: Tree, window: int | None, device: torch.device) -> Tensor:
    """Gives bool [tokens, tokens] of one tree: which token (row) sees which (column).

    With a window a token at position p sees positions p - window + 1 to p.
    """
    trunk, branches = tree
    sizes, starts = [trunk, *branches], [0] + [trunk] * len(branches)
    # Made on the host by numpy and sent without waiting: this runs between the micro-batches of a step.
    segment, place = (
        torch.from_numpy(values).to(device, non_blocking=True)
        for values in (
            np.repeat(np.arange(len(sizes)), sizes),
            np.concatenate([start + np.arange(size) for start, size in zip(starts, sizes, strict=True)]),
        )
    )
    distance = place[:, None] - place
    seen = ((segment[:, None] == segment) | (segment == 0)) & (distance >= 0)
    return seen if window is None else seen & (distance < window)
