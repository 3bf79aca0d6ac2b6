"""Attention written out with explicit masks, in plain autograd: the reference for every kernel; and sliding windows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from verl_memopt.models.prefix_layout import PrefixGroup, PrefixLayout


def eager_attention(query: Tensor, key: Tensor, value: Tensor, layout: PrefixLayout, scale: float, window: int | None) -> Tensor:
    """Return attention [1, heads, Q, D]. It holds the scores of all pairs of tokens of one group at a time.

    Args:
        query: [1, heads, Q, D], of the queries of the layout.
        key: [1, kv heads, T, D], of all tokens.
        value: As ``key``.
        layout: Which tokens share a prefix.
        scale: Factor of the products of queries and keys.
        window: How many positions back a token sees, itself included; None for all.
    """
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    queries = [prefix + sum(suffixes) for prefix, suffixes in layout.groups]
    outputs, tensors = [], (query.split(queries, 2), *(x.split(layout.tokens, 2) for x in (key, value)))
    for (prefix, suffixes), skipped, q, k, v in zip(layout.groups, layout.skipped, *tensors, strict=True):
        hidden = ~group_mask((skipped + prefix, suffixes), window, query.device)[skipped:]
        scores = (q @ k.transpose(2, 3) * scale).masked_fill(hidden, float("-inf"))
        # The softmax is in fp32 as in transformers' own eager attention, which this is the reference for.
        outputs.append(scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ v)
    return torch.cat(outputs, dim=2)


def windowed_attention(query: Tensor, key: Tensor, value: Tensor, layout: PrefixLayout, scale: float, window: int) -> Tensor:
    """Return sliding-window attention [1, heads, T, D] by torch's SDPA, one sequence after another.

    Args:
        query: [1, heads, T, D].
        key: [1, kv heads, T, D].
        value: As ``key``.
        layout: Sequences that share no prefix.
        scale: Factor of the products of queries and keys.
        window: How many positions back a token sees, itself included.
    """
    assert not layout.prefix_spans, layout.groups
    grouped, outputs = query.shape[1] != key.shape[1], []
    for q, k, v in zip(*(x.split(layout.segments, 2) for x in (query, key, value)), strict=True):
        whole = q.shape[2] <= window
        mask = None if whole else group_mask((q.shape[2], ()), window, query.device)
        outputs.append(scaled_dot_product_attention(q, k, v, mask, is_causal=whole, scale=scale, enable_gqa=grouped))
    return torch.cat(outputs, dim=2)


def group_mask(group: PrefixGroup, window: int | None, device: torch.device) -> Tensor:
    """Return bool [tokens, tokens] of one group: which token (row) sees which (column).

    Args:
        group: Lengths of the prefix and of each suffix.
        window: A token at position p sees positions p - window + 1 to p; None for all positions up to p.
        device: Where the mask is needed.
    """
    prefix, suffixes = group
    sizes, first_places = [prefix, *suffixes], [0] + [prefix] * len(suffixes)
    # Built on the host by numpy and sent without waiting: this runs between the micro-batches of a step.
    segment, place = (
        torch.from_numpy(values).to(device, non_blocking=True)
        for values in (
            np.repeat(np.arange(len(sizes)), sizes),
            np.concatenate([start + np.arange(size) for start, size in zip(first_places, sizes, strict=True)]),
        )
    )
    distance = place[:, None] - place
    visible = ((segment[:, None] == segment) | (segment == 0)) & (distance >= 0)
    return visible if window is None else visible & (distance < window)
