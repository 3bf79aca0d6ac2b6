"""The gradient of a token embedding, added where the gradient already is: a tied head and embedding share one matrix of it.

Autograd would fill a [vocabulary, hidden] matrix with zeros for every backward, put the rows of a few tokens in it, and add it to
the one that is there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from verl_memopt.memory.parameters.resharding import gathered_for_forward
from verl_memopt.ops.in_place_gradient import room_for

COLUMNS = 256
"""Columns whose repeated tokens are summed in fp32 at once, where the gradient is kept in less."""


class TrainedEmbedding(nn.Embedding):
    """An embedding that adds to its weight's gradient in place. Made from a plain one in place of it, under the same name."""

    def __init__(self, base: nn.Embedding) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim, self.padding_idx = base.num_embeddings, base.embedding_dim, base.padding_idx
        self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse = None, 2.0, False, False
        self.weight = base.weight

    def forward(self, input: Tensor) -> Tensor:
        gathered_for_forward(self, again_in_backward=False)
        return _LookUp.apply(input, self.weight, self.padding_idx)


def is_plain(embedding: nn.Module) -> bool:
    """Whether :class:`TrainedEmbedding` can stand in for a module."""
    plain = type(embedding) is nn.Embedding
    return plain and embedding.max_norm is None and not embedding.scale_grad_by_freq and not embedding.sparse


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding_idx = weight, padding_idx
        return torch.nn.functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        rows = grads[0].reshape(-1, grads[0].shape[-1])
        if ctx.padding_idx is not None:
            rows = rows.masked_fill((ids == ctx.padding_idx).reshape(-1, 1), 0)
        into, handed = room_for(ctx.weight, ctx.needs_input_grad[1], True)
        if into is not None:
            add_rows_(into, ids.reshape(-1), rows)
        return None, handed, None


def add_rows_(into: Tensor, ids: Tensor, rows: Tensor) -> None:
    """Adds ``rows [T, h]`` to the rows ``ids [T]`` (int64) of ``into [V, h]``; what a repeated id gets is summed in fp32.

    The order of the sums does not vary from run to run.
    """
    if into.dtype == torch.float32:
        _add(into, ids, rows)
        return
    ids, order = ids.sort(stable=True)
    run = torch.cat([ids.new_zeros(1), (ids[1:] != ids[:-1]).cumsum(0)])[: ids.shape[0]]
    # Where runs are fewer than tokens the rest adds zeros to row 0.
    first = torch.zeros_like(ids).scatter_(0, run, ids)
    for start in range(0, rows.shape[1], COLUMNS):
        part = rows[:, start : start + COLUMNS].index_select(0, order).float()
        sums = torch.zeros_like(part)
        _add(sums, run, part)
        # Each row once, or zeros: no order of sums can show. index_put_ would copy all rows of these columns, both ways.
        into[:, start : start + COLUMNS].index_add_(0, first, sums.to(into.dtype))


def _add(into: Tensor, ids: Tensor, rows: Tensor) -> None:
    if into.device.type == "cpu":
        into.index_add_(0, ids, rows)
    else:
        # Sorts the indices first; index_add_ would add in whatever order threads come by.
        into.index_put_((ids,), rows, accumulate=True)
