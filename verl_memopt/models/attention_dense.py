"""Attention over trees by torch's fused kernels for rectangular batches: flash on a CPU, memory-efficient on a GPU.

A token of a branch attends in two parts: over its own segment, causally, and over its trunk, whole. Each part gives an output and
the log-sum-exp of its scores, and from these the two are merged exactly; the same two kernels, given the merged output and
log-sum-exp, give in backward the exact gradient of each part, and the gradients of parts add up (arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl_memopt.distributed.device import is_gpu
from verl_memopt.models.trees import Trees
from verl_memopt.ops.rotation import Rotary, turned, turned_back, turning, weight_sums

_Views: TypeAlias = tuple[Tensor, ...]


@dataclass(frozen=True)
class Kernel:
    """A fused kernel over [batch, heads, length, D] of any strides but for the last; key and value may repeat heads by stride 0.

    forward: (q, k, v, causal, scale) -> output, log-sum-exp fp32 [batch, heads, length].
    backward: (gradient, q, k, v, output, log-sum-exp, causal, scale) -> gradients of q, k, v.
    float_parts: what is merged from parts is computed in fp32 and rounded once, which costs no time where half precision is no
    faster.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    float_parts: bool

    def working(self, trees: Trees, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Gives the tensors in the dtype that attention over these trees is computed in."""
        return tuple(tensor.float() for tensor in tensors) if self.float_parts and trees.forks else tensors


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, causal, scale=scale)


LSE_ALIGNMENT = 32
"""The memory-efficient kernel pads the lengths of its log-sum-exps to a multiple of this, with infinity."""


def _gpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return out, lse[..., : q.shape[2]]


def _gpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    padded = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % LSE_ALIGNMENT), value=float("inf")).contiguous()
    out = out.transpose(1, 2).contiguous().transpose(1, 2)  # its tokens' stride is not read but taken to be heads x D
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # state of a generator, for dropout
    mask, needed = None, [True, True, True, False]
    dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, mask, out, padded, unused, unused, 0.0, needed, causal, scale=scale
    )
    return dq, dk, dv


CPU_FLASH = Kernel(_cpu_forward, _cpu_backward, float_parts=True)
EFFICIENT = Kernel(_gpu_forward, _gpu_backward, float_parts=False)


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, trees: Trees, scale: float, rotary: Rotary | None = None
) -> Tensor:
    """Gives attention [T, heads, D]; saves its arguments, its output and one log-sum-exp for each token and head.

    query: [T, heads, D], or of the tokens that are read alone; key, value: [T, kv heads, D]. The last stride must be 1. With
    ``rotary`` queries and keys are turned here, and again in backward, whose gradients take the place of the arguments. Key heads
    come one after another, each with the query heads that share it, so that what a call makes beside is of one key head.
    """
    kernel = EFFICIENT if is_gpu(query.device) else CPU_FLASH
    return _DenseAttention.apply(query, key, value, *turning(rotary), trees, scale, kernel)


class _DenseAttention(torch.autograd.Function):
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
        kernel: Kernel,
    ) -> Tensor:
        tables, (query_cos, query_sin) = (eps, cos, sin), trees.at_queries(cos, sin)
        query_tables = eps, query_cos, query_sin
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        for queries, keys in _heads(query, key):
            made = turned(query[:, queries], query_norm, *query_tables), turned(key[:, keys], key_norm, *tables)
            q, k, v = kernel.working(trees, *made, value[:, keys])
            # The kernel's own outputs stay as they are: selective checkpointing keeps them, and refuses what was written to.
            whole = out[:, queries] if q.dtype == out.dtype else torch.empty_like(q)
            by_query, by_key = _views(q, whole, lse[:, queries]), _shared(_views(k, v), q)
            for q_, out_, lse_, k_, v_ in _own_calls(trees, by_query + _shared(_views(*trees.at_queries(k, v)), q)):
                part, part_lse = kernel.forward(q_, k_, v_, True, scale)
                out_.copy_(part)
                lse_.copy_(part_lse)
            for q_, out_, lse_, k_, v_ in _trunk_calls(trees, by_query, by_key):
                part, part_lse = kernel.forward(q_, k_, v_, False, scale)
                merged, merged_lse = merge(out_, lse_, part, part_lse)
                out_.copy_(merged)
                lse_.copy_(merged_lse)
            if whole.dtype != out.dtype:
                out[:, queries].copy_(whole)
        ctx.save_for_backward(query, key, value, cos, sin, query_norm, key_norm, out, lse)
        ctx.eps, ctx.trees, ctx.scale, ctx.kernel = eps, trees, scale, kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        trees, kernel, scale = ctx.trees, ctx.kernel, ctx.scale
        query, key, value, cos, sin, query_norm, key_norm, out, lse = ctx.saved_tensors
        grad, tables, norms = grad.contiguous(), (ctx.eps, cos, sin), (query_norm, key_norm)
        query_cos, query_sin = trees.at_queries(cos, sin)
        query_tables = ctx.eps, query_cos, query_sin
        sums = weight_sums(norms, ctx.needs_input_grad[5:7])
        into = (query, key, value) if cos is not None else tuple(torch.empty_like(x) for x in (query, key, value))
        for queries, keys in _heads(query, key):
            x, y = query[:, queries], key[:, keys]
            made = turned(x, query_norm, *query_tables), turned(y, key_norm, *tables)
            given = kernel.working(trees, *made, value[:, keys], grad[:, queries], out[:, queries])
            dq, dk, dv = _backward_of_heads(kernel, trees, scale, (*given, lse[:, queries]))
            turned_back(dq.to(x.dtype), x, query_norm, *query_tables, into[0][:, queries], sums[0])
            turned_back(dk.to(y.dtype), y, key_norm, *tables, into[1][:, keys], sums[1])
            into[2][:, keys].copy_(dv)
            del made, given, dq, dk, dv  # the next head's are not to lie beside them
        of_norms = (None if total is None else total.to(norm.dtype) for total, norm in zip(sums, norms, strict=True))
        return *into, None, None, *of_norms, None, None, None, None


def _backward_of_heads(kernel: Kernel, trees: Trees, scale: float, given: _Views) -> tuple[Tensor, Tensor, Tensor]:
    """Gives the gradients of queries [T, heads, D], and of the key and value [T, 1, D] that these heads share.

    given: queries, key, value, the output's gradient, the output, and its log-sum-exps.
    """
    q, k, v, grad, out, lse = given
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, *trees.at_queries(k, v)))
    by_query = _views(dq, grad, q, out, lse)
    own = _views(dk, dv) + _shared(_views(*trees.at_queries(k, v)), q)
    for dq_, grad_, q_, out_, lse_, dk_, dv_, k_, v_ in _own_calls(trees, by_query + own):
        parts = kernel.backward(grad_, q_, k_, v_, out_, lse_, True, scale)
        _collect(Tensor.copy_, (dq_, dk_, dv_), parts)
        del parts
    del own
    dk, dv = trees.at_keys(dk, k), trees.at_keys(dv, v)
    by_key = _views(dk, dv) + _shared(_views(k, v), q)
    for dq_, grad_, q_, out_, lse_, dk_, dv_, k_, v_ in _trunk_calls(trees, by_query, by_key):
        parts = kernel.backward(grad_, q_, k_, v_, out_, lse_, False, scale)
        _collect(Tensor.add_, (dq_, dk_, dv_), parts)
        del parts
    return dq, dk, dv


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Gives attention over two sets of keys together, from that over each: output fp32 [..., D] and log-sum-exp fp32 [...]."""
    share = torch.sigmoid(other_lse - lse)
    return out.float().lerp(other.float(), share[..., None]), torch.logaddexp(lse, other_lse)


def _heads(query: Tensor, key: Tensor) -> Iterator[tuple[slice, slice]]:
    """Gives, for each key head, the query heads that share it, and itself."""
    each = query.shape[1] // key.shape[1]
    return ((slice(head * each, (head + 1) * each), slice(head, head + 1)) for head in range(key.shape[1]))


def _views(*tensors: Tensor) -> _Views:
    """Gives views [1, heads, T, ...] of tensors of tokens [T, heads, ...]."""
    return tuple(tensor.transpose(0, 1)[None] for tensor in tensors)


def _shared(tensors: _Views, query: Tensor) -> _Views:
    return tuple(tensor.expand(-1, query.shape[1], -1, -1) for tensor in tensors)


def _collect(collect: Callable[[Tensor, Tensor], Tensor], targets: _Views, parts: _Views) -> None:
    """Copies or adds the gradients of queries, and those of the key and value that their heads share, summed over the heads."""
    for target, part in zip(targets, parts, strict=True):
        collect(target, part if part.shape[1] == target.shape[1] else part.sum(1, keepdim=True))


def _own_calls(trees: Trees, tensors: _Views) -> Iterator[_Views]:
    """Gives, for each call over segments by themselves, the views [segments, heads, length, ...] of tensors of tokens."""
    tokens = [run.count * run.length for run in trees.runs]
    for run, *parts in zip(trees.runs, *(tensor.split(tokens, 2) for tensor in tensors), strict=True):
        if run.count == 1:
            yield tuple(parts)
        else:
            yield tuple(part[0].unflatten(1, (run.count, run.length)).transpose(0, 1) for part in parts)


def _trunk_calls(trees: Trees, by_query: _Views, by_key: _Views) -> Iterator[_Views]:
    """Gives, for each call over all branches of a tree and its trunk, their views."""
    for fork in trees.forks:
        queries = (tensor.narrow(2, fork.branches.start, fork.branches.length) for tensor in by_query)
        keys = (tensor.narrow(2, fork.trunk.start, fork.trunk.length) for tensor in by_key)
        yield *queries, *keys
