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
    out = out.transpose(1, 2).contiguous().transpose(1, 2)  # its tokens' stride is not read but taken to be heads x D
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

    query: [T, heads, D]; key, value: [T, kv heads, D]. Keys and values are never repeated for the heads that share them; their
    gradients are, until they are summed. The last stride must be 1.
    """
    kernel = EFFICIENT if is_gpu(query.device) else CPU_FLASH
    return _DenseAttention.apply(query, key, value, trees, scale, kernel)


class _DenseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, trees: Trees, scale: float, kernel: Kernel) -> Tensor:
        q, k, v = kernel.working(trees, query, key, value)
        # The kernel's own outputs stay as they are: selective checkpointing keeps them, and refuses what was written to.
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        batch = _key_batch(q, k)
        by_query, by_key = _grouped((q, out, lse), batch), _expanded(_grouped((k, v), batch), q)
        for q_, out_, lse_, k_, v_ in _own_calls(trees, by_query + by_key):
            part, part_lse = kernel.forward(q_, k_, v_, True, scale)
            out_.copy_(part)
            lse_.copy_(part_lse)
        for q_, out_, lse_, k_, v_ in _trunk_calls(trees, by_query, by_key):
            part, part_lse = kernel.forward(q_, k_, v_, False, scale)
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
        # One for each query head, also of keys and values: to sum these call by call would be many small sums.
        dq, dk, dv = (torch.empty_like(q) for _ in range(3))
        batch = _key_batch(q, k)
        by_query = _grouped((dq, grad, q, out, lse), batch)
        by_key = _grouped((dk, dv), batch) + _expanded(_grouped((k, v), batch), q)
        for dq_, grad_, q_, out_, lse_, dk_, dv_, k_, v_ in _own_calls(trees, by_query + by_key):
            parts = kernel.backward(grad_, q_, k_, v_, out_, lse_, True, ctx.scale)
            for target, part in zip((dq_, dk_, dv_), parts, strict=True):
                target.copy_(part)
        for dq_, grad_, q_, out_, lse_, dk_, dv_, k_, v_ in _trunk_calls(trees, by_query, by_key):
            parts = kernel.backward(grad_, q_, k_, v_, out_, lse_, False, ctx.scale)
            for target, part in zip((dq_, dk_, dv_), parts, strict=True):
                target.add_(part)
        if q.shape[1] != k.shape[1]:
            dk, dv = (gradient.unflatten(1, (k.shape[1], -1)).sum(2) for gradient in (dk, dv))
        return dq.to(dtype), dk.to(dtype), dv.to(dtype), None, None, None


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Gives attention over two sets of keys together, from that over each: output fp32 [..., D] and log-sum-exp fp32 [...]."""
    share = torch.sigmoid(other_lse - lse)
    return out.float().lerp(other.float(), share[..., None]), torch.logaddexp(lse, other_lse)


_Views: TypeAlias = tuple[Tensor, ...]


def _key_batch(query: Tensor, key: Tensor) -> int:
    """Gives the batch of a call over one segment: key heads that several query heads share, else one, as tokens lie."""
    return 1 if query.shape[1] == key.shape[1] else key.shape[1]


def _grouped(tensors: _Views, batch: int) -> _Views:
    """Gives views [batch, heads, T, ...] of tensors of tokens [T, batch x heads, ...]."""
    return tuple(tensor.unflatten(1, (batch, -1)).movedim(0, 2) for tensor in tensors)


def _expanded(tensors: _Views, query: Tensor) -> _Views:
    return tuple(tensor.expand(-1, query.shape[1] // tensor.shape[0], -1, -1) for tensor in tensors)


def _own_calls(trees: Trees, tensors: _Views) -> Iterator[_Views]:
    """Gives, for each call over segments by themselves, the views [batch, heads, length, ...] of grouped tensors."""
    tokens = [run.count * run.length for run in trees.runs]
    for run, *parts in zip(trees.runs, *(tensor.split(tokens, 2) for tensor in tensors), strict=True):
        if run.count == 1:
            yield tuple(parts)
        else:
            yield from zip(*(_batched(part, run) for part in parts), strict=True)


def _batched(part: Tensor, run: Run) -> _Views:
    """Gives the views of as few calls as strides can say: a call's batch is of segments or of key heads, the other is a loop."""
    split = part.unflatten(2, (run.count, run.length))  # [key heads, heads, segments, length, ...]
    return split.unbind(2) if run.count < split.shape[0] else split.movedim(2, 1).unbind(0)


def _trunk_calls(trees: Trees, by_query: _Views, by_key: _Views) -> Iterator[_Views]:
    """Gives, for each call over all branches of a tree and its trunk, the views of grouped tensors."""
    for fork in trees.forks:
        queries = (tensor.narrow(2, fork.branches.start, fork.branches.length) for tensor in by_query)
        keys = (tensor.narrow(2, fork.trunk.start, fork.trunk.length) for tensor in by_key)
        yield *queries, *keys
