"""Attention over packed sequences by flash kernels over segments of any length, on a GPU in half precision.

There are at most two kernel calls. The segment pass computes each segment over itself. The prefix pass computes all suffixes over
the prefix of their group. The two are merged and differentiated as in :mod:`verl_memopt.model.attention_dense`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl_memopt.memory.fused import over_rows
from verl_memopt.model.attention_dense import Kernel, merge
from verl_memopt.model.packing import PrefixLayout
from verl_memopt.model.rotary import Rotary, apply_rotary, rotary_arguments, rotary_backward, weight_sums


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PrefixLayout,
    scale: float,
    window: int | None,
    rotary: Rotary | None = None,
) -> Tensor:
    """Return attention [Q, heads, D], computed by torch's own flash kernels.

    Saves its arguments, its output and one log-sum-exp for each token and head. Arguments are as in
    :func:`verl_memopt.model.attention_dense.dense_attention`. ``window`` counts how many positions back a token sees, itself
    included; None for all. A window is for sequences that share no prefix.
    """
    assert window is None or not layout.prefix_spans, (window, layout.groups)
    return _FlashAttention.apply(query, key, value, *rotary_arguments(rotary), layout, scale, window)


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
        layout: PrefixLayout,
        scale: float,
        window: int | None,
    ) -> Tensor:
        query_cos, query_sin = layout.at_queries(cos, sin)
        q = apply_rotary(query, query_norm, eps, query_cos, query_sin)
        k, v = apply_rotary(key, key_norm, eps, cos, sin), value
        segment_k, segment_v = layout.at_queries(k, v)
        out, lse = _forward(q, segment_k, segment_v, _segment_pass(layout, window), scale)  # lse: fp32 [heads, Q]
        if layout.prefix_spans:
            at_q, at_k = _prefix_places(layout)
            other, other_lse = _forward(q[at_q], k[at_k], v[at_k], _prefix_pass(layout), scale)
            out, lse = _with_merged(out, lse, at_q, other, other_lse)
        ctx.save_for_backward(query, key, value, cos, sin, query_norm, key_norm, out, lse)
        ctx.eps, ctx.layout, ctx.scale, ctx.window = eps, layout, scale, window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, v, cos, sin, query_norm, key_norm, out, lse = ctx.saved_tensors
        layout, scale, grad = ctx.layout, ctx.scale, grad.contiguous()
        tables, norms = (ctx.eps, cos, sin), (query_norm, key_norm)
        query_cos, query_sin = layout.at_queries(cos, sin)
        query_tables = ctx.eps, query_cos, query_sin
        q, k = apply_rotary(query, query_norm, *query_tables), apply_rotary(key, key_norm, *tables)
        segment_k, segment_v = layout.at_queries(k, v)
        dq, segment_dk, segment_dv = _backward(grad, q, segment_k, segment_v, out, lse, _segment_pass(layout, ctx.window), scale)
        dk, dv = layout.at_keys(segment_dk, k), layout.at_keys(segment_dv, v)
        if layout.prefix_spans:
            at_q, at_k = _prefix_places(layout)
            # Contiguous, because the selection of columns may leave other strides than the kernel takes.
            inputs = (grad[at_q], q[at_q], k[at_k], v[at_k], out[at_q], lse[:, at_q].contiguous())
            parts = _backward(*inputs, _prefix_pass(layout), scale)
            for target, place, part in zip((dq, dk, dv), (at_q, at_k, at_k), parts, strict=True):
                if isinstance(place, slice):
                    target[place].add_(part)
                else:
                    target.index_add_(0, place, part)
        if cos is None:
            return dq, dk, dv, *(None,) * 8
        sums = weight_sums(norms, ctx.needs_input_grad[5:7])
        rotary_backward(dq, query, query_norm, *query_tables, query, sums[0])
        rotary_backward(dk, key, key_norm, *tables, key, sums[1])
        norm_grads = (None if total is None else total.to(norm.dtype) for total, norm in zip(sums, norms, strict=True))
        return query, key, dv, None, None, *norm_grads, None, None, None, None


def _prefix_places(layout: PrefixLayout) -> tuple[slice, slice] | tuple[Tensor, Tensor]:
    """Return where the queries and keys of the prefix pass lie: slices for one group, whose rows need no copy, else indices."""
    slices = layout.prefix_slices
    return (layout.prefix_index_q, layout.prefix_index_k) if slices is None else slices


def _with_merged(out: Tensor, lse: Tensor, places: Any, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention [Q, heads, D] and log-sum-exps [heads, Q], merged at some places with those over other keys.

    In new tensors: selective checkpointing keeps the kernel's outputs, and refuses outputs that were written to.
    """
    if not isinstance(places, slice):
        merged, merged_lse = merge(out[places], lse[:, places].t(), other, other_lse.t())
        return out.index_copy(0, places, merged.to(out.dtype)), lse.index_copy(1, places, merged_lse.t())
    whole, whole_lse = torch.empty_like(out), torch.empty_like(lse)
    into, into_lse = whole[places], whole_lse[:, places].t()
    over_rows(_merge_statement, (out[places], lse[:, places].t(), other, other_lse.t(), into, into_lse))
    for rest in (slice(0, places.start), slice(places.stop, out.shape[0])):
        if rest.start < rest.stop:
            whole[rest], whole_lse[:, rest] = out[rest], lse[:, rest]
    return whole, whole_lse


def _merge_statement(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, into: Tensor, into_lse: Tensor) -> None:
    merged, merged_lse = merge(out, lse, other, other_lse)
    into.copy_(merged)
    into_lse.copy_(merged_lse)


@dataclass(frozen=True)
class _Varlen:
    """Which queries see which keys. ``cu_seqlens`` are int32 [sequences + 1], ``left`` and ``right`` of -1 see all."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool
    left: int = -1
    right: int = -1


def _segment_pass(layout: PrefixLayout, window: int | None) -> _Varlen:
    longest = max(layout.segments)
    return _Varlen(layout.cu_seqlens, layout.cu_seqlens, longest, longest, True, -1 if window is None else window - 1, 0)


def _prefix_pass(layout: PrefixLayout) -> _Varlen:
    longest_q = max(span.queries.length for span in layout.prefix_spans)
    longest_k = max(span.keys.length for span in layout.prefix_spans)
    return _Varlen(layout.prefix_cu_seqlens_q, layout.prefix_cu_seqlens_k, longest_q, longest_k, False)


def _forward(q: Tensor, k: Tensor, v: Tensor, which: _Varlen, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, which.cu_seqlens_q, which.cu_seqlens_k, which.max_seqlen_q, which.max_seqlen_k, 0.0, which.causal, False,
        scale=scale, window_size_left=which.left, window_size_right=which.right,
    )  # fmt: skip
    return out, lse


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, which: _Varlen, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    # Arguments for dropout, which is off.
    state, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    return torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, which.cu_seqlens_q, which.cu_seqlens_k, which.max_seqlen_q, which.max_seqlen_k, 0.0,
        which.causal, state, unused, scale=scale, window_size_left=which.left, window_size_right=which.right,
    )  # fmt: skip


# The same kernels for one rectangle of queries and keys.


def _rectangle_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scale
    )
    return out.transpose(1, 2), lse


def _rectangle_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    grad, q, k, v, out = (x.transpose(1, 2) for x in (grad, q, k, v, out))
    # Arguments for dropout, which is off.
    state, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    gradients = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, None, None, q.shape[1], k.shape[1], 0.0, causal, state, unused, scale=scale
    )
    of_q, of_k, of_v = (x.transpose(1, 2) for x in gradients)
    return of_q, of_k, of_v


FLASH = Kernel(_rectangle_forward, _rectangle_backward, float_parts=False)
"""Flash kernels of a GPU in half precision. The last two strides of all tensors must be those of one head after another."""
