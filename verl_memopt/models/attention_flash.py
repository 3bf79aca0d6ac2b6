"""Attention over trees by flash kernels over segments of any lengths, on a GPU in half precision.

Two calls at most: one over all segments, each over itself, and one over all branches, each tree's over its trunk. They are merged
and differentiated as in :mod:`verl_memopt.models.attention_dense`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl_memopt.models.attention_dense import merge
from verl_memopt.models.trees import Trees
from verl_memopt.ops.rotation import Rotary, turned, turned_back, turning, weight_sums


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, trees: Trees, scale: float, window: int | None, rotary: Rotary | None = None
) -> Tensor:
    """Gives attention [T, heads, D] by torch's own flash kernels; saves its arguments, its output and one log-sum-exp for each
    token and head.

    query: [T, heads, D], or of the tokens that are read alone; key, value: [T, kv heads, D], the last stride 1. window: how
    many positions back a token sees, itself included; only over trees without branches. With ``rotary`` queries and keys are
    turned here, and again in backward, whose gradients of them take their place.
    """
    assert window is None or not trees.forks, (window, trees.sizes)
    return _FlashAttention.apply(query, key, value, *turning(rotary), trees, scale, window)


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        query_norm: Tensor | None,
        key_norm: Tensor | None,
        eps: float,
        trees: Trees,
        scale: float,
        window: int | None,
    ) -> Tensor:
        query_cos, query_sin = trees.at_queries(cos, sin)
        q = turned(query, query_norm, eps, query_cos, query_sin)
        k, v = turned(key, key_norm, eps, cos, sin), value
        own_k, own_v = trees.at_queries(k, v)
        out, lse = _forward(q, own_k, own_v, _own(trees, window), scale)  # lse: fp32 [heads, T]
        if trees.forks:
            at, trunk = trees.branch_index, trees.trunk_index
            other, other_lse = _forward(q[at], k[trunk], v[trunk], _trunks(trees), scale)
            merged, merged_lse = merge(out[at], lse[:, at].t(), other, other_lse.t())
            # Not in place: selective checkpointing keeps the kernel's outputs, and refuses what was written to.
            out, lse = out.index_copy(0, at, merged.to(out.dtype)), lse.index_copy(1, at, merged_lse.t())
        ctx.save_for_backward(query, key, value, cos, sin, query_norm, key_norm, out, lse)
        ctx.eps, ctx.trees, ctx.scale, ctx.window = eps, trees, scale, window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, v, cos, sin, query_norm, key_norm, out, lse = ctx.saved_tensors
        trees, scale, grad, tables, norms = ctx.trees, ctx.scale, grad.contiguous(), (ctx.eps, cos, sin), (query_norm, key_norm)
        query_cos, query_sin = trees.at_queries(cos, sin)
        query_tables = ctx.eps, query_cos, query_sin
        q, k = turned(query, query_norm, *query_tables), turned(key, key_norm, *tables)
        own_k, own_v = trees.at_queries(k, v)
        dq, own_dk, own_dv = _backward(grad, q, own_k, own_v, out, lse, _own(trees, ctx.window), scale)
        dk, dv = trees.at_keys(own_dk, k), trees.at_keys(own_dv, v)
        if trees.forks:
            at, trunk = trees.branch_index, trees.trunk_index
            given = (grad[at], q[at], k[trunk], v[trunk], out[at], lse[:, at].contiguous())
            parts = _backward(*given, _trunks(trees), scale)
            for target, place, part in zip((dq, dk, dv), (at, trunk, trunk), parts, strict=True):
                target.index_add_(0, place, part)
        if cos is None:
            return dq, dk, dv, *(None,) * 8
        sums = weight_sums(norms, ctx.needs_input_grad[5:7])
        turned_back(dq, query, query_norm, *query_tables, query, sums[0])
        turned_back(dk, key, key_norm, *tables, key, sums[1])
        of_norms = (None if total is None else total.to(norm.dtype) for total, norm in zip(sums, norms, strict=True))
        return query, key, dv, None, None, *of_norms, None, None, None, None


@dataclass(frozen=True)
class _Segments:
    """Which queries meet which keys: segments of both, one by one.

    q_starts, k_starts: int32 [segments + 1]. max_q, max_k: tokens of the longest. left, right: positions seen, -1 for all.
    """

    q_starts: Tensor
    k_starts: Tensor
    max_q: int
    max_k: int
    causal: bool
    left: int = -1
    right: int = -1


def _own(trees: Trees, window: int | None) -> _Segments:
    longest = max(trees.segments)
    return _Segments(trees.starts, trees.starts, longest, longest, True, -1 if window is None else window - 1, 0)


def _trunks(trees: Trees) -> _Segments:
    branches, trunks = (fork.branches.length for fork in trees.forks), (fork.trunk.length for fork in trees.forks)
    return _Segments(trees.branch_starts, trees.trunk_starts, max(branches), max(trunks), False)


def _forward(q: Tensor, k: Tensor, v: Tensor, which: _Segments, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, which.q_starts, which.k_starts, which.max_q, which.max_k, 0.0, which.causal, False,
        scale=scale, window_size_left=which.left, window_size_right=which.right,
    )  # fmt: skip
    return out, lse


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, which: _Segments, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    # What dropout would need.
    state, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    return torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, which.q_starts, which.k_starts, which.max_q, which.max_k, 0.0, which.causal, state, unused,
        scale=scale, window_size_left=which.left, window_size_right=which.right,
    )  # fmt: skip
