"""Whole weights from a sharded policy, a bucket at a time: cast on the shard, gathered once a bucket, handed on by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

MIB = 2**20


@dataclass(frozen=True)
class _Piece:
    """One sharded tensor inside a bucket: its name, whole shape, and elements of the largest shard."""

    name: str
    shape: torch.Size
    local: Tensor
    padded: int


def full_weights(
    weights: Iterator[tuple[str, Tensor]], dtype: torch.dtype, bucket_megabytes: int
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, whole tensor in ``dtype``) in the order of ``weights``; every rank gets every tensor.

    weights: named parameters, sharded on their first dimension (DTensor) or plain. All ranks must consume in step. A yielded
    tensor may share memory with the parameter or with the bucket: use it before asking for the next.
    """
    limit, bucket, size = bucket_megabytes * MIB, [], 0
    for name, weight in weights:
        num_bytes = weight.numel() * dtype.itemsize
        if bucket and size + num_bytes > limit:
            yield from _gather(bucket, dtype)
            bucket, size = [], 0
        bucket.append((name, weight.detach()))
        size += num_bytes
    if bucket:
        yield from _gather(bucket, dtype)


def _gather(bucket: Sequence[tuple[str, Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    sharded = [weight for _, weight in bucket if isinstance(weight, DTensor)]
    if not sharded or _shard_group(sharded[0])[1] == 1:
        for name, weight in bucket:
            yield name, (weight.to_local() if isinstance(weight, DTensor) else weight).to(dtype)
        return
    group, ranks = _shard_group(sharded[0])
    pieces = [_piece(name, weight, ranks) for name, weight in bucket]
    flat = torch.zeros(sum(piece.padded for piece in pieces), dtype=dtype, device=sharded[0].device)
    start = 0
    for piece in pieces:
        flat[start : start + piece.local.numel()].copy_(piece.local.reshape(-1))
        start += piece.padded
    output = flat.new_empty(ranks * flat.numel())
    dist.all_gather_into_tensor(output, flat, group=group)
    gathered = output.view(ranks, -1)
    del flat
    start = 0
    for piece in pieces:
        whole = gathered[:, start : start + piece.padded].reshape(-1)[: prod(piece.shape)]
        yield piece.name, whole.view(piece.shape)
        start += piece.padded


def _shard_group(weight: DTensor) -> tuple[dist.ProcessGroup | None, int]:
    """Gives the process group over which a tensor is sharded, and its size."""
    for dim, placement in enumerate(weight.placements):
        if isinstance(placement, Shard):
            return weight.device_mesh.get_group(dim), weight.device_mesh.size(dim)
    return None, 1


def _piece(name: str, weight: Tensor, ranks: int) -> _Piece:
    # FSDP cuts the first dimension into ceil(rows / ranks): every shard but the last ones is full, so the gathered
    # shards, cut to the whole size, are the tensor.
    rows = -(-weight.shape[0] // ranks)
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    return _Piece(name, weight.shape, local, rows * prod(weight.shape[1:]))
