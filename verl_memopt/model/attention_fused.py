"""Attention over packed sequences by torch's fused kernels: kernels for sequences of equal length, and flash kernels of a GPU.

A token of a suffix attends in two passes: causally over its own segment, and over the whole prefix. In a tree with more levels
there is a pass for each round of the layout. Each pass returns an output and the log-sum-exp of its scores, and with these the
outputs are merged exactly. In backward the same kernels get the merged output and log-sum-exp, and so return the exact gradient
of each pass. The gradients of the passes are summed (arXiv 2310.01889).

A sink is a learned number for each head that counts as the score of one more key, whose value is zero (gpt-oss). So it is one
more pass: its output is zero, and its log-sum-exp is the sink. It is merged last, once for each query.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl_memopt.memory import kernels
from verl_memopt.memory.fused import over_rows, runs_compiled
from verl_memopt.memory.kernels import has_kernel
from verl_memopt.model.prefix_layout import PrefixLayout, Round, WindowCall
from verl_memopt.model.rotary import (
    Rotary,
    apply_rotary_to_both,
    rotary_arguments,
    rotary_backward_to_all,
    weight_sums,
)

Parts: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Gradients of queries, keys and values."""


@dataclass(frozen=True)
class Kernel:
    """A fused kernel over [batch, heads, length, D].

    The last stride must be 1. Other strides are free, so key and value may repeat heads by a stride of 0.

    Attributes:
        forward: (q, k, v, causal, scale) -> output, log-sum-exp fp32 [batch, heads, length].
        backward: (gradient, q, k, v, output, log-sum-exp, causal, scale) -> gradients of q, k, v.
        float_parts: Compute passes that are merged in fp32, and round once. Used if half precision is not faster.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    float_parts: bool


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, causal, scale=scale)


LSE_ALIGNMENT = 32
"""The memory-efficient kernel pads its log-sum-exps with infinity to a multiple of this length."""


def _gpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    # Cut off the padding of the log-sum-exps.
    return out, lse[..., : q.shape[2]]


def _gpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    # The kernel turns a padding of infinity into attention weights of 0. Without padding it would read past the end.
    padded = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % LSE_ALIGNMENT), value=float("inf")).contiguous()
    out = out.transpose(1, 2).contiguous().transpose(1, 2)  # the kernel assumes a stride of heads x D between tokens
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # random state for dropout, which is off
    mask, needed = None, [True, True, True, False]
    dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, mask, out, padded, unused, unused, 0.0, needed, causal, scale=scale
    )
    return dq, dk, dv


CPU_FLASH = Kernel(_cpu_forward, _cpu_backward, float_parts=True)
EFFICIENT = Kernel(_gpu_forward, _gpu_backward, float_parts=False)


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over two sets of keys into attention over both.

    ``out`` and ``other`` are [..., D]. ``lse`` and ``other_lse`` are the log-sum-exps of their scores, fp32 [...]. Returns the
    merged output, fp32 [..., D], and its log-sum-exp, fp32 [...].
    """
    # A sigmoid of the difference cannot overflow. Exponentials of the log-sum-exps could.
    share = torch.sigmoid(other_lse - lse)
    return out.float().lerp(other.float(), share[..., None]), torch.logaddexp(lse, other_lse)


def merge_sinks(out: Tensor, lse: Tensor, sinks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return attention with sinks, in ``dtype`` [Q, heads, D], and its log-sum-exps [Q, heads], in new tensors.

    ``out`` [Q, heads, D] and ``lse`` [Q, heads] are without them. ``sinks`` [heads] may have any float dtype.
    """
    whole, whole_lse = torch.empty_like(out, dtype=dtype), torch.empty_like(lse)
    over_rows(_merge_sinks, (out, lse, whole, whole_lse), sinks)
    return whole, whole_lse


def _merge_sinks(out: Tensor, lse: Tensor, into: Tensor, into_lse: Tensor, sinks: Tensor) -> None:
    sinks = sinks.to(lse.dtype)
    into.copy_(out.to(lse.dtype) * torch.sigmoid(lse - sinks)[..., None])
    into_lse.copy_(torch.logaddexp(lse, sinks.expand_as(lse)))


def sink_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of the sinks, fp32 [heads], from that of the output [Q, heads, D], the output and its log-sum-exps."""
    total = torch.zeros_like(sinks, dtype=lse.dtype)
    over_rows(_add_sink_gradient, (grad, out, lse), sinks, total)
    return total


def _add_sink_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor, total: Tensor) -> None:
    # The value of a sink is zero, so the gradient of its weight is too. Its weight only takes from those of the keys.
    above = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    total.sub_((above * torch.exp(sinks.to(lse.dtype) - lse)).sum(0))


def key_heads(query: Tensor, key: Tensor, at_once: int = 1) -> Iterator[tuple[slice, slice]]:
    """Yield pairs of slices: ``at_once`` key heads, after the query heads that share them."""
    repeats = query.shape[1] // key.shape[1]
    firsts = range(0, key.shape[1], at_once)
    return ((slice(first * repeats, (first + at_once) * repeats), slice(first, first + at_once)) for first in firsts)


# Flash kernels over segments of any length, on a GPU in half precision.
#
# There is one kernel call for all segments, and one for each round. Rows that share only a prompt have one round.


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PrefixLayout,
    scale: float,
    window: int | None,
    rotary: Rotary | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention [Q, heads, D] by torch's own flash kernels.

    It saves the arguments, the output and one log-sum-exp per token and head for backward. Arguments are as in
    :func:`dense_attention`. ``window`` is the number of positions that a token sees, with its own position. None = all positions
    before it. With a window each segment sees the last keys of its path before it, which are gathered, and nothing is merged.
    """
    return _FlashAttention.apply(query, key, value, *rotary_arguments(rotary), layout, scale, window, sinks)


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
        sinks: Tensor | None,
    ) -> Tensor:
        q, k = apply_rotary_to_both(query, key, (query_norm, key_norm), eps, layout.at_queries(cos, sin), (cos, sin))
        v, cut = value, window if layout.rounds else None
        if cut is not None:
            out, lse = _window_forward(q, k, v, layout, cut, scale)
        else:
            segment_k, segment_v = layout.at_queries(k, v)
            out, lse = _forward(q, segment_k, segment_v, _segment_pass(layout, window), scale)  # lse: fp32 [heads, Q]
            del segment_k, segment_v  # freed before the next pass
        if layout.sums_many and cut is None:
            out = out.float()
        for spans in layout.rounds if cut is None else ():
            at_q, at_k = spans.places
            other, other_lse = _forward(q[at_q], k[at_k], v[at_k], _round_pass(spans), scale)
            # Each visible key was in exactly one of the passes, so the merge is exact.
            out, lse = _with_merged(out, lse, at_q, other, other_lse)
            del other, other_lse  # freed before the next pass
        if sinks is not None:
            out, with_sinks = merge_sinks(out, lse.t(), sinks, query.dtype)
            lse = with_sinks.t().contiguous()
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, cos, sin, query_norm, key_norm, sinks, out, lse)
        ctx.eps, ctx.layout, ctx.scale, ctx.window = eps, layout, scale, window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, v, cos, sin, query_norm, key_norm, sinks, out, lse = ctx.saved_tensors
        layout, scale, grad = ctx.layout, ctx.scale, grad.contiguous()
        norms, tables = (query_norm, key_norm), (layout.at_queries(cos, sin), (cos, sin))
        sink_grad = None if sinks is None else sink_gradient(grad, out, lse.t(), sinks).to(sinks.dtype)
        q, k = apply_rotary_to_both(query, key, norms, ctx.eps, *tables)
        cut = ctx.window if layout.rounds else None
        if cut is not None:
            dq, dk, dv = _window_backward(grad, q, k, v, out, lse, layout, cut, scale)
        else:
            segment_k, segment_v = layout.at_queries(k, v)
            dq, dk, dv = _backward(grad, q, segment_k, segment_v, out, lse, _segment_pass(layout, ctx.window), scale)
            del segment_k, segment_v  # freed before the next pass, like the gradients of selected keys and values
            if layout.sums_many:
                dq, dk, dv = dq.float(), dk.float(), dv.float()
            dk, dv = layout.at_keys(dk, k), layout.at_keys(dv, v)
        for spans in layout.rounds if cut is None else ():
            at_q, at_k = spans.places
            # Contiguous, because selected columns may have strides that the kernel does not accept.
            inputs = (grad[at_q], q[at_q], k[at_k], v[at_k], out[at_q], lse[:, at_q].contiguous())
            # With the merged output and log-sum-exp the kernel returns the exact gradient of this pass.
            parts = _backward(*inputs, _round_pass(spans), scale)
            del inputs
            if isinstance(at_q, slice):
                torch._foreach_add_([dq[at_q], dk[at_k], dv[at_k]], parts)
            else:
                for target, place, part in zip((dq, dk, dv), (at_q, at_k, at_k), parts, strict=True):
                    target.index_add_(0, place, part.to(target.dtype))
            del parts
        dq, dk, dv = dq.to(query.dtype), dk.to(key.dtype), dv.to(v.dtype)
        # Without a rotation these are the gradients of the arguments.
        if cos is None:
            return dq, dk, dv, *(None,) * 8, sink_grad
        sums = weight_sums(norms, ctx.needs_input_grad[5:7])
        into = rotary_backward_to_all((dq, dk, dv), (query, key, v), norms, ctx.eps, *tables, sums)
        norm_grads = (None if total is None else total.to(norm.dtype) for total, norm in zip(sums, norms, strict=True))
        return *into, None, None, *norm_grads, None, None, None, None, sink_grad


def _with_merged(out: Tensor, lse: Tensor, places: Any, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention [Q, heads, D] and log-sum-exps [heads, Q] with attention over other keys, for the queries at ``places``.

    Without compilation the result is in new tensors. Selective checkpointing, which disables compilation, keeps the outputs of
    the kernel, and rejects changed outputs.
    """
    parts = out[places], lse[:, places].t()
    if not isinstance(places, slice):
        # Indexing has made copies. The result overwrites them, so that no fp32 tensor of their size is needed.
        merge_into(*parts, other, other_lse.t())
        copied = Tensor.index_copy_ if runs_compiled(other) else Tensor.index_copy
        return copied(out, 0, places, parts[0]), copied(lse, 1, places, parts[1].t())
    if runs_compiled(other):
        merge_into(*parts, other, other_lse.t())
        return out, lse
    whole, whole_lse = torch.empty_like(out), torch.empty_like(lse)
    over_rows(_merge_statement, (*parts, other, other_lse.t(), whole[places], whole_lse[:, places].t()))
    for rest in (slice(0, places.start), slice(places.stop, out.shape[0])):
        if rest.start < rest.stop:
            whole[rest], whole_lse[:, rest] = out[rest], lse[:, rest]
    return whole, whole_lse


def merge_into(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Merge as :func:`merge` does, in place into ``out`` and ``lse``. The first dimension of all tensors is rows."""
    over_rows(_merge_statement, (out, lse, other, other_lse, out, lse))


@has_kernel(kernels.merge, "rrrrww", dims=3, strided=(1, 3, 5), takes=kernels.has_narrow_heads)
def _merge_statement(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, into: Tensor, into_lse: Tensor) -> None:
    merged, merged_lse = merge(out, lse, other, other_lse)
    into.copy_(merged)
    into_lse.copy_(merged_lse)


@dataclass(frozen=True)
class _Varlen:
    """Which queries see which keys.

    ``cu_seqlens_q`` and ``cu_seqlens_k`` are int32 [sequences + 1]. None = sequences of equal length. ``left`` and ``right`` are
    how many keys a query sees before and after its own position. -1 = all.
    """

    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool
    left: int = -1
    right: int = -1


def _segment_pass(layout: PrefixLayout, window: int | None) -> _Varlen:
    longest = max(layout.segments)
    # The kernel does not count the token's own position.
    return _Varlen(layout.cu_seqlens, layout.cu_seqlens, longest, longest, True, -1 if window is None else window - 1, 0)


def _window_pass(call: WindowCall, window: int) -> _Varlen:
    # If there are more keys than queries, the last query of the kernel has the position of the last key.
    return _Varlen(call.cu_seqlens_q, call.cu_seqlens_k, *call.longest, True, window - 1, 0)


def _window_forward(q: Tensor, k: Tensor, v: Tensor, layout: PrefixLayout, window: int, scale: float) -> tuple[Tensor, Tensor]:
    parts = [
        _forward(q[call.queries], k[call.index], v[call.index], _window_pass(call, window), scale)
        for call in layout.behind(window)
    ]
    outs, lses = zip(*parts, strict=True)
    return parts[0] if len(parts) == 1 else (torch.cat(outs), torch.cat(lses, 1))


def _window_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, layout: PrefixLayout, window: int, scale: float
) -> Parts:
    # Several segments see the keys at the end of a prefix, so the gradients of keys and values are sums, in fp32.
    dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
    query_grads = []
    for call in layout.behind(window):
        at, index = call.queries, call.index
        inputs = grad[at], q[at], k[index], v[index], out[at], lse[:, at].contiguous()
        query_grad, key_grad, value_grad = _backward(*inputs, _window_pass(call, window), scale)
        del inputs
        query_grads.append(query_grad)
        dk.index_add_(0, index, key_grad.float())
        del key_grad
        dv.index_add_(0, index, value_grad.float())
        del value_grad
    return query_grads[0] if len(query_grads) == 1 else torch.cat(query_grads), dk, dv


def _round_pass(some: Round) -> _Varlen:
    longest_q = max(span.queries.length for span in some.spans)
    longest_k = max(span.keys.length for span in some.spans)
    return _Varlen(some.cu_seqlens_q, some.cu_seqlens_k, longest_q, longest_k, False)


def _forward(q: Tensor, k: Tensor, v: Tensor, which: _Varlen, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, which.cu_seqlens_q, which.cu_seqlens_k, which.max_seqlen_q, which.max_seqlen_k, 0.0, which.causal, False,
        scale=scale, window_size_left=which.left, window_size_right=which.right,
    )  # fmt: skip
    return out, lse


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, which: _Varlen, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    # Arguments for dropout, which is off. The kernel loads the random state but does not use it.
    state, unused = torch.empty(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    return torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, which.cu_seqlens_q, which.cu_seqlens_k, which.max_seqlen_q, which.max_seqlen_k, 0.0,
        which.causal, state, unused, scale=scale, window_size_left=which.left, window_size_right=which.right,
    )  # fmt: skip


# The same flash kernels for sequences of equal length, [batch, heads, length, D].


def _rectangle_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = _forward(q, k, v, _Varlen(None, None, q.shape[1], k.shape[1], causal), scale)
    return out.transpose(1, 2), lse


def _rectangle_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    grad, q, k, v, out = (x.transpose(1, 2) for x in (grad, q, k, v, out))
    lse = lse.contiguous()  # the kernel ignores its strides
    dq, dk, dv = _backward(grad, q, k, v, out, lse, _Varlen(None, None, q.shape[1], k.shape[1], causal), scale)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


FLASH = Kernel(_rectangle_forward, _rectangle_backward, float_parts=False)
"""Flash kernels of a GPU in half precision. In all tensors the heads of a token must be next to each other."""
