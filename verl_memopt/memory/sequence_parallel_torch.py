"""Sequence parallelism: the ranks of a group share the tokens of each micro-batch, and exchange heads around attention.

Each rank computes embedding, norms, projections, MLPs and head for its own tokens. Before attention the ranks exchange data, and
each gets all tokens for a part of the heads. So attention sees whole sequences, and its kernels do not change. After attention
the ranks exchange back (DeepSpeed-Ulysses, arXiv 2309.14509). The gradient of each exchange is the other exchange.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import init_device_mesh

from verl_memopt.memory.recompute_elementwise_torch import Rows
from verl_memopt.memory.sequence_parallel import key_copies


class SequenceGroup:
    """Neighbouring ranks that share the tokens of their micro-batches. Not a dataclass, because FSDP2 copies dataclasses."""

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup) -> None:
        self.rank, self.size, self.group = rank, size, group

    def shares(self, tokens: int) -> tuple[int, ...]:
        return tuple(tokens // self.size + (rank < tokens % self.size) for rank in range(self.size))


_GROUPS: weakref.WeakKeyDictionary[Any, dict[int, SequenceGroup]] = weakref.WeakKeyDictionary()
"""Default process group -> size -> sequence group. Models with the same size share a group and its connections."""


def sequence_group(device_type: str, world_size: int, size: int) -> SequenceGroup | None:
    """Return this rank's group of ``size`` neighbours; None for a size of 1. All ranks must call this in step."""
    if size == 1:
        return None
    groups = _GROUPS.setdefault(dist.group.WORLD, {})
    if size not in groups:
        # Neighbouring ranks, which usually have the fastest links.
        mesh = init_device_mesh(device_type, (world_size // size, size), mesh_dim_names=("data", "sequence"))["sequence"]
        groups[size] = SequenceGroup(mesh.get_local_rank(), size, mesh.get_group())
    return groups[size]


@dataclass(frozen=True, eq=False)
class TokenSplit:
    """How the ranks of a group share the tokens and queries of a micro-batch. Each rank has one consecutive part.

    ``rows``: which of this rank's tokens are queries; None = all of them.
    """

    group: SequenceGroup
    tokens: tuple[int, ...]
    queries: tuple[int, ...]
    rows: Rows | None = None

    @property
    def own(self) -> slice:
        first = sum(self.tokens[: self.group.rank])
        return slice(first, first + self.tokens[self.group.rank])

    def over_heads(self, attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, args: Any) -> Tensor:
        """Compute attention [q, heads, D] for this rank's q queries, with a kernel that gets all queries for some heads.

        Key heads are repeated if they do not divide over the ranks.

        Args:
            attend: The kernel, a :data:`verl_memopt.model.attention.Attend`; it gets all Q queries and T tokens, and ``args``.
            query: Queries of this rank, [q, heads, D].
            key: Keys of this rank, [t, kv heads, D].
            value: Values of this rank, shaped like ``key``.
            args: Passed to ``attend``.
        """
        # Key heads that do not divide over the ranks are repeated, so that several ranks get them.
        copies = key_copies(query.shape[1], key.shape[1], self.group.size)
        q = _over_heads(query, self, self.queries)
        k, v = (_over_heads(x if copies == 1 else x.repeat_interleave(copies, 1), self, self.tokens) for x in (key, value))
        out = attend(q, k, v, args)
        back = _Exchange.apply(out.flatten(1), self.group, self.queries, False)
        return back.view(back.shape[0], query.shape[1], out.shape[-1])


def _over_heads(x: Tensor, split: TokenSplit, sizes: tuple[int, ...]) -> Tensor:
    # Exchange this rank's tokens with all heads, [t, heads, D], for all tokens with a part of the heads, [T, heads / S, D].
    whole = _Exchange.apply(x.flatten(1), split.group, sizes, True)
    return whole.view(whole.shape[0], -1, x.shape[-1])


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SequenceGroup, sizes: tuple[int, ...], to_heads: bool) -> Tensor:
        ctx.group, ctx.sizes, ctx.to_heads = group, sizes, to_heads
        return (_to_heads if to_heads else _to_tokens)(x, group, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (_to_tokens if ctx.to_heads else _to_heads)(grad, ctx.group, ctx.sizes), None, None, None


def _to_heads(x: Tensor, group: SequenceGroup, sizes: tuple[int, ...]) -> Tensor:
    # From [own tokens, S x n] with all heads to [all tokens, n] with this rank's heads. S is the size of the group.
    own, width = x.shape[0], x.shape[1] // group.size
    # Sorted by receiver, because all_to_all sends consecutive pieces.
    sent = x.reshape(own, group.size, width).transpose(0, 1).reshape(-1, width)
    received = x.new_empty(sum(sizes), width)
    dist.all_to_all_single(received, sent, list(sizes), [own] * group.size, group=group.group)
    return received


def _to_tokens(x: Tensor, group: SequenceGroup, sizes: tuple[int, ...]) -> Tensor:
    # From [all tokens, n] with this rank's heads to [own tokens, S x n] with all heads.
    own, width = sizes[group.rank], x.shape[1]
    received = x.new_empty(own * group.size, width)
    dist.all_to_all_single(received, x.contiguous(), [own] * group.size, list(sizes), group=group.group)
    return received.view(group.size, own, width).transpose(0, 1).reshape(own, group.size * width)


def combine_ranks(values: Tensor, places: Tensor, count: int, group: SequenceGroup) -> Tensor:
    """Combine the ``values`` of all ranks, [r, ...], at their ``places``, int64 [r], into the same [count, ...] on each rank.

    Each place belongs to one rank of the group. All ranks compute the same loss from the result, so backward needs no reduction:
    each rank takes the gradient at its own places.
    """
    return _CombineRanks.apply(values, places, count, group)


class _CombineRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Tensor, count: int, group: SequenceGroup) -> Tensor:
        ctx.save_for_backward(places)
        # Places of other ranks are zero, so a sum over ranks combines all values.
        whole = values.new_zeros(count, *values.shape[1:]).index_copy_(0, places, values)
        if count:
            dist.all_reduce(whole, group=group.group)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        # No reduction, because each rank computes the loss of all places.
        return grad.index_select(0, places), None, None, None


def largest_of_ranks(value: Tensor, group: SequenceGroup) -> Tensor:
    dist.all_reduce(value, dist.ReduceOp.MAX, group=group.group)
    return value
