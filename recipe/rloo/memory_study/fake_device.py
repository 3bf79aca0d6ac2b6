"""A GPU without memory: ``cuda`` tensors have shapes and dtypes but no values, and a simulated allocator counts their bytes.

What it counts is exact where the program decides it: the order in which tensors are made and dropped. Memory inside a kernel,
such as the workspace of a matrix product, is not seen.
"""

from __future__ import annotations

import bisect
import time
import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from recipe.rloo.memory_study.arms import MIB

DEVICE = torch.device("cuda", 0)
ROUND_BYTES = 512
"""Every size is rounded up to a multiple of this."""
SMALL_BYTES, SMALL_SEGMENT_BYTES = MIB, 2 * MIB
"""Largest size of the small pool, and its segments. A larger remainder of a large block is split off."""
MEDIUM_BYTES, MEDIUM_SEGMENT_BYTES = 10 * MIB, 20 * MIB
"""Sizes below the first share a segment of the second. Larger ones have their own, rounded up to 2 MiB."""


class NoRoom(Exception):  # noqa: N818 - an event, which the meter turns into an error with its phase
    """A request does not fit under the limit: the bytes asked for and held, and the tensor they are for."""

    def __init__(self, requested_bytes: int, held_bytes: int) -> None:
        super().__init__(f"{requested_bytes} bytes beside {held_bytes}")
        self.requested_bytes, self.held_bytes, self.shape = requested_bytes, held_bytes, ""


@dataclass(eq=False)
class _Block:
    """A stretch of a segment, between its neighbours there."""

    size: int
    segment: int
    pool: list[tuple[int, int, int, _Block]] = field(repr=False)
    """Free blocks of the same kind of segment: size, segment, offset, block, in this order."""
    offset: int = 0
    free: bool = False
    before: _Block | None = field(default=None, repr=False)
    after: _Block | None = field(default=None, repr=False)

    def into_pool(self) -> None:
        bisect.insort(self.pool, (self.size, self.segment, self.offset, self))

    def out_of_pool(self) -> None:
        del self.pool[bisect.bisect_left(self.pool, (self.size, self.segment, self.offset))]

    def split(self, size: int) -> None:
        """Cut the block to a size if the remainder is large enough for its pool to keep."""
        remainder = self.size - size
        if remainder < ROUND_BYTES if size <= SMALL_BYTES else remainder <= SMALL_BYTES:
            return
        rest = _Block(remainder, self.segment, self.pool, self.offset + size, free=True, before=self, after=self.after)
        if self.after is not None:
            self.after.before = rest
        self.after, self.size = rest, size
        rest.into_pool()

    def merge(self) -> None:
        """Take over the neighbours that are free."""
        if self.before is not None and self.before.free:
            self.before.out_of_pool()
            self.size, self.offset, self.before = self.size + self.before.size, self.before.offset, self.before.before
            if self.before is not None:
                self.before.after = self
        if self.after is not None and self.after.free:
            self.after.out_of_pool()
            self.size, self.after = self.size + self.after.size, self.after.after
            if self.after is not None:
                self.after.before = self


class CachingAllocator:
    """Simulates torch's caching allocator, ``c10/cuda/CUDACachingAllocator.cpp`` with its defaults and one stream.

    Small and large sizes have pools of their own. A freed block stays in its pool and merges with its free neighbours. A request
    takes the smallest free block that fits, and what is left of it stays free.

    Attributes:
        live: Bytes of the blocks in use, rounded. ``live_peak``: the highest since ``reset_peaks``.
        reserved: Bytes of all segments, in use or cached. ``reserved_peak``: the highest since ``reset_peaks``.
        changes: (``time.perf_counter()``, live, reserved) after each allocation of a large block and each segment returned.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.live = self.reserved = self.live_peak = self.reserved_peak = 0
        self.changes: list[tuple[float, int, int | None]] = []
        self._limit_bytes = limit_bytes
        self._small: list[tuple[int, int, int, _Block]] = []
        self._large: list[tuple[int, int, int, _Block]] = []
        self._used: dict[Hashable, _Block] = {}
        self._segments = 0

    def allocate(self, key: Hashable, num_bytes: int) -> None:
        """Take a block, which ``key`` names until it is freed.

        Raises:
            NoRoom: The limit would be passed even after the cached segments are returned.
        """
        assert key not in self._used, key
        size = max(ROUND_BYTES, _rounded(num_bytes, ROUND_BYTES))
        pool = self._small if size <= SMALL_BYTES else self._large
        place = bisect.bisect_left(pool, (size,))
        block = pool.pop(place)[3] if place < len(pool) else self._new_segment(pool, size)
        block.split(size)
        block.free = False
        self._used[key] = block
        self.live += block.size
        self.live_peak = max(self.live_peak, self.live)
        self._note(block.size)

    def free(self, key: Hashable) -> None:
        """Give a block back to its pool, where it stays cached."""
        block = self._used.pop(key)
        self.live -= block.size
        block.free = True
        block.merge()
        block.into_pool()

    def empty_cache(self) -> None:
        """Return every segment that is wholly free, large ones before small ones, in each pool the smallest first."""
        for pool in (self._large, self._small):
            for block in [block for *_, block in pool if block.before is None and block.after is None]:
                block.out_of_pool()
                self.reserved -= block.size
                self._note(block.size)

    def reset_peaks(self) -> None:
        """Start both peaks at the present level."""
        self.live_peak, self.reserved_peak = self.live, self.reserved

    def _new_segment(self, pool: list[tuple[int, int, int, _Block]], size: int) -> _Block:
        segment_bytes = SMALL_SEGMENT_BYTES
        if size > SMALL_BYTES:
            segment_bytes = MEDIUM_SEGMENT_BYTES if size < MEDIUM_BYTES else _rounded(size, 2 * MIB)
        if self._limit_bytes is not None and self.reserved + segment_bytes > self._limit_bytes:
            self.empty_cache()
            if self.reserved + segment_bytes > self._limit_bytes:
                raise NoRoom(size, self.reserved)
        self._segments += 1
        self.reserved += segment_bytes
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        return _Block(segment_bytes, self._segments, pool)

    def _note(self, num_bytes: int) -> None:
        """Note the present levels, unless the block that changed them is small."""
        if num_bytes > SMALL_BYTES:
            self.changes.append((time.perf_counter(), self.live, self.reserved))


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


class FakeDevice(TorchDispatchMode):
    """Sends each storage that is made on the fake device through the allocator, until it dies. Enter :func:`fake_device`."""

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
    """Tell torch inside the body what the backward of memory-efficient attention over several sequences returns.

    Torch's own description of it (2.11 and 2.13) leaves out the argument ``out``, and fails where a scale is given.
    """
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_efficient_attention_backward", _efficient_backward, "Meta", allow_override=True)
        yield


def _efficient_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    gradients = (torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in (q, k, v))
    return *gradients, torch.empty((), device=q.device)


@contextmanager
def fake_device(limit_bytes: int | None = None) -> Iterator[CachingAllocator]:
    """Run the body with a fake GPU, and yield its allocator. Tensors must be made on ``cuda`` and must not be read.

    ``limit_bytes``: largest number of reserved bytes. None = no limit.
    """
    allocator = CachingAllocator(limit_bytes)
    # Without this, autograd would run the backward in a thread of the device, which knows no dispatch mode.
    with (
        torch.autograd.set_multithreading_enabled(False),
        described_efficient_backward(),
        FakeTensorMode(allow_non_fake_inputs=True),
        FakeDevice(allocator),
    ):
        yield allocator
