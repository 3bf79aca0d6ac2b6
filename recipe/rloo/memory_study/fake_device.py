"""A GPU without memory: ``cuda`` tensors have shapes and dtypes but no values, and a simulated allocator counts their bytes.

The count is exact for all tensors that the program creates and drops. Memory inside a kernel, such as the workspace of a matrix
product, is not counted.
"""

from __future__ import annotations

import bisect
import time
import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from recipe.rloo.memory_study.cells import MIB

DEVICE = torch.device("cuda", 0)
ROUND_BYTES = 512
"""Every size is rounded up to a multiple of this."""
SMALL_BYTES, SMALL_SEGMENT_BYTES = MIB, 2 * MIB
"""Largest block in the small pool, and the size of that pool's segments. In the large pool, the rest of a block is split off if
it is larger than SMALL_BYTES."""
MEDIUM_BYTES, MEDIUM_SEGMENT_BYTES = 10 * MIB, 20 * MIB
"""Blocks below the first size share segments of the second size. Larger blocks have their own segments, in multiples of 2 MiB."""
Block = tuple[int, int, int]
"""Size, number of the segment, and first byte in the segment."""


class NoRoom(Exception):  # noqa: N818 - an event, which the meter turns into an error with its phase
    """A request does not fit under the limit. It has the requested bytes, the held bytes, and the shape of the tensor."""

    def __init__(self, requested_bytes: int, held_bytes: int) -> None:
        super().__init__(f"{requested_bytes} bytes beside {held_bytes}")
        self.requested_bytes, self.held_bytes, self.shape = requested_bytes, held_bytes, ""


class CachingAllocator:
    """Simulates torch's caching allocator, ``c10/cuda/CUDACachingAllocator.cpp`` with its defaults and one stream.

    Small and large sizes have pools of their own. A freed block stays in its pool and merges with its free neighbours. A request
    takes the smallest free block that fits, and the rest of that block stays free.

    Attributes:
        live: Bytes of the blocks in use, rounded. ``live_peak``: the highest since ``reset_peaks``.
        reserved: Bytes of all segments, in use or cached. ``reserved_peak``: the highest since ``reset_peaks``.
        changes: (``time.perf_counter()``, live, reserved) after each allocation of a large block and each segment returned.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.live = self.reserved = self.live_peak = self.reserved_peak = 0
        self.changes: list[tuple[float, int, int | None]] = []
        self._limit_bytes = limit_bytes
        self._segments: list[int] = []
        """Size of each segment, including returned ones."""
        self._pools: dict[bool, list[Block]] = {False: [], True: []}
        """Free blocks, large and small, in order."""
        self._starts: dict[tuple[int, int], int] = {}
        """Size of the free block that begins at (segment, byte)."""
        self._ends: dict[tuple[int, int], int] = {}
        """First byte of the free block that ends at (segment, byte)."""
        self._used: dict[Hashable, Block] = {}

    def allocate(self, key: Hashable, num_bytes: int) -> None:
        """Take a block. ``key`` names it until it is freed."""
        assert key not in self._used, key
        size = max(ROUND_BYTES, _rounded(num_bytes, ROUND_BYTES))
        small = size <= SMALL_BYTES
        pool = self._pools[small]
        place = bisect.bisect_left(pool, (size,))
        found, segment, start = self._take(pool[place]) if place < len(pool) else self._new_segment(size)
        remainder = found - size
        if remainder >= ROUND_BYTES if small else remainder > SMALL_BYTES:
            self._cache((remainder, segment, start + size))
            found = size
        self._used[key] = found, segment, start
        self.live += found
        self.live_peak = max(self.live_peak, self.live)
        self._note(found)

    def free(self, key: Hashable) -> None:
        """Give a block back to its pool, where it stays cached."""
        size, segment, start = self._used.pop(key)
        self.live -= size
        before, after = self._ends.get((segment, start)), self._starts.get((segment, start + size))
        if after is not None:
            self._take((after, segment, start + size))
            size += after
        if before is not None:
            self._take((start - before, segment, before))
            size, start = size + start - before, before
        self._cache((size, segment, start))

    def empty_cache(self) -> None:
        """Return all free segments to the device: first the large pool and then the small pool, the smallest segments first."""
        for pool in self._pools.values():
            for block in [block for block in pool if block[0] == self._segments[block[1]]]:
                self._take(block)
                self.reserved -= block[0]
                self._note(block[0])

    def reset_peaks(self) -> None:
        """Start both peaks at the present level."""
        self.live_peak, self.reserved_peak = self.live, self.reserved

    def _new_segment(self, size: int) -> Block:
        segment_bytes = SMALL_SEGMENT_BYTES
        if size > SMALL_BYTES:
            segment_bytes = MEDIUM_SEGMENT_BYTES if size < MEDIUM_BYTES else _rounded(size, 2 * MIB)
        if self._limit_bytes is not None and self.reserved + segment_bytes > self._limit_bytes:
            self.empty_cache()
            if self.reserved + segment_bytes > self._limit_bytes:
                raise NoRoom(size, self.reserved)
        self._segments.append(segment_bytes)
        self.reserved += segment_bytes
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        return segment_bytes, len(self._segments) - 1, 0

    def _cache(self, block: Block) -> None:
        size, segment, start = block
        bisect.insort(self._pool_of(segment), block)
        self._starts[segment, start], self._ends[segment, start + size] = size, start

    def _take(self, block: Block) -> Block:
        size, segment, start = block
        pool = self._pool_of(segment)
        del pool[bisect.bisect_left(pool, block)]
        del self._starts[segment, start], self._ends[segment, start + size]
        return block

    def _pool_of(self, segment: int) -> list[Block]:
        return self._pools[self._segments[segment] == SMALL_SEGMENT_BYTES]

    def _note(self, num_bytes: int) -> None:
        """Note the present levels, unless the block that changed them is small."""
        if num_bytes > SMALL_BYTES:
            self.changes.append((time.perf_counter(), self.live, self.reserved))


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


class FakeDevice(TorchDispatchMode):
    """Allocates each new storage of the fake device, and frees it when it dies. Use it by :func:`fake_device`."""

    def __init__(self, allocator: CachingAllocator) -> None:
        super().__init__()
        self.allocator = allocator
        self._deaths: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, FakeTensor) and tensor.fake_device.type == DEVICE.type:
                self._count(tensor)
        return result

    def _count(self, tensor: FakeTensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._deaths or not size:
            return
        try:
            self.allocator.allocate(key, size)
        except NoRoom as refusal:
            refusal.shape = f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
            raise
        self._deaths[key] = weakref.ref(storage, lambda _: self._forget(key))

    def _forget(self, key: int) -> None:
        if self._deaths.pop(key, None) is not None:
            self.allocator.free(key)


@contextmanager
def described_efficient_backward() -> Iterator[None]:
    """In the body, give torch a correct meta kernel for the backward of memory-efficient attention over several sequences.

    Torch's own meta kernel (2.11 and 2.13) lacks the argument ``out``, and fails if a scale is given.
    """
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_efficient_attention_backward", _efficient_backward, "Meta", allow_override=True)
        yield


def _efficient_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    gradients = (torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in (q, k, v))
    return *gradients, torch.empty((), device=q.device)


@contextmanager
def fake_device(limit_bytes: int | None = None) -> Iterator[CachingAllocator]:
    """Run the body with a fake GPU, and yield its allocator. Create tensors on ``cuda``, and do not read their values.

    ``limit_bytes``: largest number of reserved bytes. None = no limit.
    """
    allocator = CachingAllocator(limit_bytes)
    # With multithreading, autograd would run the backward in another thread, where these dispatch modes are not active.
    with (
        torch.autograd.set_multithreading_enabled(False),
        described_efficient_backward(),
        FakeTensorMode(allow_non_fake_inputs=True),
        FakeDevice(allocator),
    ):
        yield allocator
