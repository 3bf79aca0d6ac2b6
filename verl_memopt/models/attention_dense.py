"""Attention over trees by torch's fused kernels for rectangular batches: flash on a CPU, memory-efficient on a GPU.

A token of a branch attends in two parts: over its own segment, causally, and over its trunk, whole. Each part gives an output and
the log-sum-exp of its scores, and from these the two are merged exactly; the same two kernels, given the merged output and
log-sum-exp, give in backward the exact gradient of each part, and the gradients of parts add up (arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl_memopt.distributed.device import is_gpu
from verl_memopt.models.trees import Run, Trees


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
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # state of a generator, for dropout
    mask, needed = None, [True, True, True, False]
    dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, mask, out, padded, unused, unused, 0.0, needed, causal, scale=scale
    )
    return dq, dk, dv


CPU_FLASH = Kernel(_cpu_forward, _cpu_backward, float_parts=True)
EFFICIENT = Kernel(_gpu_forward, _gpu_backward, float_parts=False)


def dense_attention(query: Tensor, key: Tensor, value: Tensor, trees: Trees, scale: float) -> Tensor:
    """Gives attention [T, heads, D]; saves its arguments, its output and one log-sum-exp for each token and head.

    query: [T, heads, D]; key, value: [T, kv heads, D]; heads that share a key head are never expanded in memory, but for the
    gradients of keys and values of one call. The last stride must be 1.
    """
    kernel = EFFICIENT if is_gpu(query.device) else CPU_FLASH
    return _DenseAttention.apply(query, key, value, trees, scale, kernel)


class _DenseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, trees: Trees, scale: float, kernel: Kernel) -> Tensor:
        q, k, v = kernel.working(trees, query, key, value)
        # The kernel's own outputs stay as they are: selective checkpointing keeps them, and refuses what was written to.
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        for run in trees.runs:
            for q_, out_, lse_, k_, v_ in _calls(run, run, (q, out, lse), (k, v)):
                part, part_lse = kernel.forward(q_, _like(k_, q_), _like(v_, q_), True, scale)
                out_.copy_(part)
                lse_.copy_(part_lse)
        for fork in trees.forks:
            for q_, out_, lse_, k_, v_ in _calls(fork.branches, fork.trunk, (q, out, lse), (k, v)):
                part, part_lse = kernel.forward(q_, _like(k_, q_), _like(v_, q_), False, scale)
                merged, merged_lse = merge(out_, lse_, part, part_lse)
                out_.copy_(merged)
                lse_.copy_(merged_lse)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.trees, ctx.scale, ctx.kernel = trees, scale, kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        trees, kernel, dtype = ctx.trees, ctx.kernel, grad.dtype
        *given, lse = ctx.saved_tensors
        grad, q, k, v, out = kernel.working(trees, grad.contiguous(), *given)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        parts = [(run, run, True) for run in trees.runs] + [(fork.branches, fork.trunk, False) for fork in trees.forks]
        for queries, keys, own in parts:
            for dq_, grad_, q_, out_, lse_, dk_, dv_, k_, v_ in _calls(queries, keys, (dq, grad, q, out, lse), (dk, dv, k, v)):
                found = kernel.backward(grad_, q_, _like(k_, q_), _like(v_, q_), out_, lse_, own, ctx.scale)
                for target, part in zip((dq_, dk_, dv_), found, strict=True):
                    summed = part if part.shape == target.shape else part.sum(1, keepdim=True)
                    # Every token is in one segment of its own, and that comes first.
                    target.copy_(summed) if own else target.add_(summed)
        return dq.to(dtype), dk.to(dtype), dv.to(dtype), None, None, None


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Gives attention over two sets of keys together, from that over each: output fp32 [..., D] and log-sum-exp fp32 [...]."""
    share = torch.sigmoid(other_lse - lse)
    return out.float().lerp(other.float(), share[..., None]), torch.logaddexp(lse, other_lse)


def _calls(queries: Run, keys: Run, by_query: tuple[Tensor, ...], by_key: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
    """Gives, for each call of a kernel, the views [batch, heads, length, ...] of tensors of tokens [T, heads, ...]."""
    kv_heads = by_key[-1].shape[1]
    groups = by_query[0].shape[1] // kv_heads
    views = [_views(tensor, queries, kv_heads, groups) for tensor in by_query]
    views += [_views(tensor, keys, kv_heads, groups) for tensor in by_key]
    return zip(*views, strict=True)


def _views(tensor: Tensor, run: Run, kv_heads: int, groups: int) -> Sequence[Tensor]:
    part = tensor.narrow(0, run.start, run.count * run.length).unflatten(0, (run.count, run.length))
    part = part.unflatten(2, (kv_heads, -1)).movedim(1, 3)  # [count, kv heads, heads of each, length, ...]
    if groups == 1:
        return (part.squeeze(2),)
    # Heads that share a key head are the heads of a call; segments or key heads are its batch, and the other is a loop.
    return part.unbind(0) if run.count <= kv_heads else part.unbind(1)


def _like(key: Tensor, query: Tensor) -> Tensor:
    return key.expand(-1, query.shape[1], -1, -1)
