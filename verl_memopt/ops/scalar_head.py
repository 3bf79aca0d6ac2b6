"""One number per token: the product of states with one vector, computed in fp32 whatever dtype the states have.

Plain autograd would keep an fp32 copy of all states for backward. Here backward reads the states themselves, and only a tile of
them is widened at a time.

Bytes saved: 4 x R x h, for R tokens and a hidden size of h, where the states are not fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE_TOKENS = 2048
"""Tokens that are widened to fp32 at a time."""


def scalar_head(states: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return ``states @ weight + bias`` in fp32, [R].

    Gradients flow to all three, each in its own dtype. The weight's gradient is summed in fp32.

    Args:
        states: [R, h].
        weight: [1, h].
        bias: [1].
    """
    return _ScalarHead.apply(states, weight, bias)


class _ScalarHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(states)
        # The weight is a parameter, which FSDP2 frees and gathers again under the same tensor.
        ctx.weight, ctx.bias_dtype = weight, bias.dtype
        vector, out = weight[0].float(), states.new_empty(states.shape[0], dtype=torch.float32)
        for rows in _tiles(states):
            torch.mv(states[rows].float(), vector, out=out[rows])
        return out.add_(bias.float())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (states,), weight = ctx.saved_tensors, ctx.weight
        needs_states, needs_weight, needs_bias = ctx.needs_input_grad
        vector = weight[0].float()
        grad_states = torch.empty_like(states) if needs_states else None
        grad_vector = torch.zeros_like(vector) if needs_weight else None
        for rows in _tiles(states):
            if grad_states is not None:
                grad_states[rows] = grad[rows, None] * vector
            if grad_vector is not None:
                grad_vector += grad[rows] @ states[rows].float()
        of_weight = None if grad_vector is None else grad_vector[None].to(weight.dtype)
        return grad_states, of_weight, grad.sum()[None].to(ctx.bias_dtype) if needs_bias else None


def _tiles(states: Tensor) -> Iterator[slice]:
    for start in range(0, states.shape[0], TILE_TOKENS):
        yield slice(start, start + TILE_TOKENS)
