"""Send weights from a sharded policy to the engine in buckets: cast each shard, gather, and write rows in place.

Weights are sent as a stream of whole tensors, or of ranges of their rows.

Bytes saved: without buckets a sync holds the largest gathered tensor in the dtype of the trainer's weights. That is b_w x V x h
bytes for an embedding (bytes per weight x vocabulary x hidden size), 3.48 GiB in fp32 for an 8B model. With buckets it holds
megabytes x 2^20 bytes, or the whole model in the engine's dtype if that is smaller. All buckets use one buffer. On W ranks it has
W + 1 equal parts: one for the data of each rank, and one for the data that this rank sends. A tensor larger than the bucket is
sent in ranges of rows. A single rank needs no buffer, because the engine copies and casts straight from the shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from verl_memopt.distributed.sharded_state import detached
from verl_memopt.model.families import CORRECTION
from verl_memopt.observe.byte_tracker import scope
from verl_memopt.observe.phase import MIB


@dataclass(frozen=True)
class WeightSlice:
    """Rows of the tensor ``name``, starting at row ``start``. ``shape`` is the shape of the whole tensor."""

    name: str
    shape: torch.Size
    start: int
    tensor: Tensor

    @property
    def stop(self) -> int:
        return self.start + num_rows(self.tensor.shape)

    @property
    def whole(self) -> bool:
        return self.tensor.shape == self.shape


Weights = Iterable[tuple[str, Tensor] | WeightSlice]
"""A stream of whole tensors, or of slices that together contain all rows of each tensor, in any order."""


def num_rows(shape: torch.Size) -> int:
    return shape[0] if len(shape) else 1


def as_slice(item: tuple[str, Tensor] | WeightSlice) -> WeightSlice:
    return item if isinstance(item, WeightSlice) else WeightSlice(item[0], item[1].shape, 0, item[1])


def dtype_of_weight(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a weight is sent and saved: fp32 for the correction of a router, else ``dtype``."""
    return torch.float32 if name.endswith(f".{CORRECTION}") else dtype


def joined(slices: Weights, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Assemble slices into (name, whole tensor of ``dtype``), except for a weight that is fp32 in any model.

    This holds one tensor at a time, beside what the stream holds.
    """
    pending: dict[str, tuple[Tensor, int]] = {}
    for item in slices:
        part = as_slice(item)
        if part.whole:
            yield part.name, part.tensor.to(dtype_of_weight(part.name, dtype))
            continue
        if part.name not in pending:
            # The whole tensor, and the number of rows that are still missing.
            pending[part.name] = torch.empty(part.shape, dtype=dtype, device=part.tensor.device), part.shape[0]
        whole, missing = pending.pop(part.name)
        whole[part.start : part.stop].copy_(part.tensor)
        if part.stop - part.start < missing:
            pending[part.name] = whole, missing - (part.stop - part.start)
        else:
            yield part.name, whole
        # Otherwise this variable would keep the tensor alive while the next one is allocated.
        del whole
    assert not pending, f"rows are missing of {', '.join(pending)}"


KIND = "sync bucket"


@dataclass(frozen=True)
class _Part:
    name: str
    weight: DTensor
    shard_rows: int  # of the largest shard
    first: int  # of every rank's shard, as `rows`
    rows: int

    @property
    def row_elements(self) -> int:
        return prod(self.weight.shape[1:])

    @property
    def elements(self) -> int:
        return self.rows * self.row_elements


def weight_slices(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, bucket_megabytes: int) -> Iterator[WeightSlice]:
    """Yield every row of every tensor once on every rank, in the order of ``weights``.

    A slice may share memory with the parameter or with the bucket, so use each slice before you take the next. Parameters are
    plain, or sharded on their first dimension (DTensor). All ranks must iterate in step. Gathered slices are cast to ``dtype``
    before they are sent. The receiver casts the others.
    """
    bucket: _Bucket | None = None
    for name, weight in weights:
        held = detached(weight)
        if not isinstance(held, DTensor) or shard_group(held)[1] == 1:
            if bucket is not None:
                yield from bucket.flush()
            plain = held.to_local() if isinstance(held, DTensor) else held
            # Nothing is gathered or cast: the receiver copies from the parameter itself.
            yield WeightSlice(name, plain.shape, 0, plain)
            continue
        if bucket is None:
            bucket = _Bucket(*shard_group(held), dtype, bucket_megabytes * MIB // dtype.itemsize)
        yield from bucket.add(name, held)
    if bucket is not None:
        yield from bucket.flush()


class _Bucket:
    def __init__(self, group: dist.ProcessGroup | None, ranks: int, dtype: torch.dtype, limit: int) -> None:
        self._group, self._ranks, self._dtype = group, ranks, dtype
        # One part for the rows of each rank, and one for the rows that this rank sends.
        self._limit = limit // (ranks + 1)
        self._parts: list[_Part] = []
        self._held = 0
        self._buffer: Tensor | None = None

    def add(self, name: str, weight: DTensor) -> Iterator[WeightSlice]:
        # FSDP cuts the first dimension into shards of ceil(rows / ranks) rows. Only the last shards may have fewer.
        shard_rows = -(-weight.shape[0] // self._ranks)
        row, first = prod(weight.shape[1:]), 0
        while first < shard_rows:
            if self._parts and self._held + row > self._limit:
                yield from self.flush(self._limit)
            # At least one row, so that a row larger than the bucket is still sent.
            rows = min(shard_rows - first, max((self._limit - self._held) // max(row, 1), 1))
            self._parts.append(_Part(name, weight, shard_rows, first, rows))
            self._held += rows * row
            first += rows

    def flush(self, expected: int = 0) -> Iterator[WeightSlice]:
        if not self._parts:
            return
        parts, length = self._parts, self._held
        self._parts, self._held = [], 0
        # The buffer also has room for `expected` elements, which later flushes need.
        received, sent = self._room(parts[0].weight.device, length, expected)
        start = 0
        for part in parts:
            own = part.weight.to_local()[part.first : part.first + part.rows]
            # If this rank's shard has fewer rows, the rest keeps old values, which are never read.
            sent[start : start + own.numel()].view(own.shape).copy_(own)
            start += part.elements
        # One collective for all parts. Each rank sends equally many elements, padding included.
        dist.all_gather_into_tensor(received, sent, group=self._group)
        start = 0
        for part in parts:
            yield from _slices(part, received.view(self._ranks, length)[:, start : start + part.elements])
            start += part.elements

    def _room(self, device: torch.device, length: int, expected: int) -> tuple[Tensor, Tensor]:
        # One buffer for all buckets. With a new buffer each time, a receiver that still holds the last slice would keep a second
        # one alive.
        if self._buffer is None or self._buffer.numel() < (self._ranks + 1) * length:
            self._buffer = None
            with scope(kind=KIND):
                elements = (self._ranks + 1) * max(length, expected)
                self._buffer = torch.empty(elements, dtype=self._dtype, device=device)
        return self._buffer[: self._ranks * length], self._buffer[self._ranks * length : (self._ranks + 1) * length]


def _slices(part: _Part, gathered: Tensor) -> Iterator[WeightSlice]:
    shape = part.weight.shape
    for rank, own in enumerate(gathered):
        # The last shards may have fewer rows, so rows past the end of the tensor are padding.
        start = rank * part.shard_rows + part.first
        stop = min(start + part.rows, (rank + 1) * part.shard_rows, shape[0])
        if stop > start:
            rows = own[: (stop - start) * part.row_elements]
            yield WeightSlice(part.name, shape, start, rows.view(stop - start, *shape[1:]))


def shard_group(weight: DTensor) -> tuple[dist.ProcessGroup | None, int]:
    for dim, placement in enumerate(weight.placements):
        if isinstance(placement, Shard):
            return weight.device_mesh.get_group(dim), weight.device_mesh.size(dim)
    return None, 1


def full_weights(
    weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, bucket_megabytes: int
) -> Iterator[tuple[str, Tensor]]:
    return joined(weight_slices(weights, dtype, bucket_megabytes), dtype)
