"""Token embeddings whose gradient is added, row by row, to the one that is there: no second [vocabulary, hidden] matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from verl_memopt.memory.chunked_logprob import adds_in_place
from verl_memopt.observe.byte_tracker import mark


class TokenEmbedding(nn.Module):
    """A plain embedding's weight, looked up with a gradient that stays where it is.

    Torch makes a zero matrix of the weight's size for the gradient of each lookup and adds it to ``.grad``. Here the rows of
    the tokens are added to ``.grad``, where nothing watches the parameter (:func:`adds_in_place`); elsewhere autograd gets
    the matrix as from torch.
    """

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight
        self.padding_idx = embedding.padding_idx

    def forward(self, input_ids: Tensor) -> Tensor:
        """Gives [..., hidden] for int64 [...]."""
        return _Lookup.apply(input_ids, self.weight, self.padding_idx)


def embedding_in_place(embedding: nn.Module) -> nn.Module:
    """Gives the module that takes an embedding's place: itself where it does more than look up rows."""
    if type(embedding) is not nn.Embedding or embedding.max_norm is not None or embedding.sparse or embedding.scale_grad_by_freq:
        return embedding
    return TokenEmbedding(embedding)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        # Not saved as a tensor: what moves saved tensors would hand back another one, whose .grad is not the parameter's.
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding = weight, padding
        return nn.functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (ids,), weight = ctx.saved_tensors, ctx.weight
        rows, values = ids.reshape(-1), grads[0].reshape(-1, weight.shape[1])
        if ctx.padding is not None:
            values = values.masked_fill((rows == ctx.padding)[:, None], 0)
        handed = None
        if adds_in_place(weight):
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
                mark("grads", [weight.grad])
            into = weight.grad
        else:
            into = handed = torch.zeros_like(weight)
        add_rows(into, rows, values)
        return None, handed, None


def add_rows(into: Tensor, rows: Tensor, values: Tensor) -> None:
    """Adds ``values`` [T, h] to the rows int64 [T] of ``into`` [V, h], each row's values summed in fp32 first.

    In half precision a token that occurs a thousand times would stop growing; so its values are summed apart, in T rows at
    most. No shape depends on the tokens.
    """
    if into.dtype == torch.float32:
        into.index_add_(0, rows, values)
        return
    ordered, order = rows.sort()
    number = torch.cat([ordered.new_zeros(1), (ordered[1:] != ordered[:-1]).cumsum(0)])
    sums = torch.zeros(values.shape, dtype=torch.float32, device=values.device)
    sums.index_add_(0, number, values[order].float())
    # Numbers beyond the last distinct row stand for row 0, to which they add nothing.
    distinct = torch.zeros_like(rows).scatter_(0, number, ordered)
    into.index_add_(0, distinct, sums.to(into.dtype))
