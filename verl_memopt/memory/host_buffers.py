"""Reusable host memory: slots of any size within chunks that are kept.

A slot may cross from one chunk to the next, so no gap is left at the end of a chunk. The memory held is the most that was in use
at once, rounded up to whole chunks.
"""

from __future__ import annotations

import logging
import mmap
import weakref
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from verl_memopt.distributed.device import is_gpu, lock_pages, unlock_pages
from verl_memopt.errors import HostMemoryError
from verl_memopt.observe.byte_tracker import HOST, declare_host, scope

CHUNK_BYTES = 2**26
"""Bytes per chunk: a multiple of the page size, and large enough that a new chunk is rarely allocated and locked."""

ALIGNMENT = 512
"""Each slot starts at a multiple of this many bytes, so that it can be viewed as any dtype."""


@dataclass(order=True)
class Slot:
    start: int
    stop: int
    parts: list[Tensor] = field(compare=False)  # uint8 views of the chunks that it lies in, in order


class HostArena:
    """Hands out slots and takes them back. Its chunks come from the host allocator, and are kept until :meth:`shrink`."""

    def __init__(self, device: torch.device, kind: str, chunk_bytes: int = CHUNK_BYTES) -> None:
        assert chunk_bytes % ALIGNMENT == 0, chunk_bytes
        self._device, self._kind, self._chunk_bytes = device, kind, chunk_bytes
        self._chunks: list[Tensor] = []
        self._live: list[Slot] = []

    @property
    def held_bytes(self) -> int:
        return len(self._chunks) * self._chunk_bytes

    @property
    def used_bytes(self) -> int:
        return sum(slot.stop - slot.start for slot in self._live)

    def take(self, num_bytes: int) -> Slot:
        """Take the first free range of ``num_bytes``. Add chunks if there is none.

        Raises:
            HostMemoryError: The host limit allows no further chunk.
        """
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        start = self._first_fit(size)
        while self.held_bytes < start + size:
            self._chunks.append(host_buffer(self._chunk_bytes, self._device, self._kind))
        slot = Slot(start, start + size, self._parts(start, start + num_bytes))
        insort(self._live, slot)
        return slot

    def give_back(self, slot: Slot) -> None:
        self._live.remove(slot)

    def shrink(self) -> None:
        end = self._live[-1].stop if self._live else 0
        del self._chunks[-(-end // self._chunk_bytes) :]

    def _first_fit(self, size: int) -> int:
        start = 0
        for slot in self._live:
            if slot.start - start >= size:
                break
            start = slot.stop
        return start

    def _parts(self, start: int, stop: int) -> list[Tensor]:
        parts = []
        while start < stop:
            chunk, offset = divmod(start, self._chunk_bytes)
            size = min(stop - start, self._chunk_bytes - offset)
            parts.append(self._chunks[chunk][offset : offset + size])
            start += size
        return parts


# The only place that allocates host memory for data that is moved off the device.
#
# All offloaded data rests in these buffers, so its bytes are counted as host bytes on any machine. In a run on a CPU, "device"
# and "host" are the same memory, and only this allocator tells them apart. Code that offloads a tensor takes a buffer, copies
# into it and drops the device tensor. ``.to("cpu")`` would return the same storage on a CPU and move nothing.
#
# Page-locked buffers are mappings of whole pages, locked in place. torch's own page-locked memory (``pin_memory``) is rounded up
# to a power of two and never returned to the system; see ``docs/decisions/host_memory.md``.

logger = logging.getLogger(__name__)

LIMIT_KEY = "memory.host_limit_gb"
GIB = 2**30
PAGE = mmap.PAGESIZE
"""Bytes per page. Only whole pages can be locked."""
NO_COPY_IN_CHILDREN = getattr(mmap, "MADV_DONTFORK", None)
"""madvise flag: a forked child does not get these pages. Otherwise a write could move the parent's pages to another physical
address, where they are not locked for the device."""
HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)
"""madvise flag: use pages of 2 MiB, so that the driver has 512 times fewer pages to lock. A kernel without such pages refuses;
then nothing changes."""


class HostAllocator:
    """Allocates host buffers and counts their bytes. Each process has one: :func:`host_allocator`."""

    def __init__(self, limit_bytes: int | None = None, pinned_limit_bytes: int | None = None) -> None:
        """Set the limits of all bytes and of page-locked bytes that are held at once. None = no limit.

        A buffer beyond ``pinned_limit_bytes`` is ordinary memory. Copies from and to it block.
        """
        self.limit_bytes, self.pinned_limit_bytes = limit_bytes, pinned_limit_bytes
        self.pinned_bytes = self.peak_bytes = 0
        self.kinds: Counter[str] = Counter()
        """Kind -> bytes held."""

    @property
    def held_bytes(self) -> int:
        return self.kinds.total()

    def empty(self, num_bytes: int, device: torch.device, kind: str) -> Tensor:
        """Return an uninitialised uint8 [num_bytes] on the host, page-locked if ``device`` is a GPU and the limit allows it.

        Its bytes (whole pages if locked) count until the last tensor that views them is freed; then the system gets the memory
        back. ``kind`` is the name of these bytes in the byte tracker.

        Raises:
            HostMemoryError: The limit is too small. The message names the limit and what is already held.
        """
        pages = -(-num_bytes // PAGE) * PAGE
        pinned = is_gpu(device) and num_bytes > 0 and self.may_pin(pages)
        counted_bytes = pages if pinned else num_bytes
        self.check_room(counted_bytes, kind)
        # Fake tensors have no memory to lock, but their bytes are counted as locked.
        locks = pinned and not isinstance(torch.empty(0), FakeTensor)
        locked = _lock(pages, device) if locks else None
        if locks and locked is None:
            counted_bytes, pinned = num_bytes, False
        with scope(kind=kind, tier=HOST):
            if locked is None:
                buffer = torch.empty(num_bytes, dtype=torch.uint8)
            else:
                # The view is needed, because a dispatch mode (such as the byte tracker) does not see ``frombuffer``.
                buffer = torch.frombuffer(locked.pages, dtype=torch.uint8, count=num_bytes).view(-1)
        storage = buffer.untyped_storage()
        declare_host(storage)
        self._count(counted_bytes, pinned, kind)
        # Not at exit: the system then frees all memory, and the driver may be gone already.
        weakref.finalize(storage, self._give_back, counted_bytes, pinned, kind, device, locked).atexit = False
        return buffer

    def may_pin(self, num_bytes: int) -> bool:
        return self.pinned_limit_bytes is None or self.pinned_bytes + num_bytes <= self.pinned_limit_bytes

    def check_room(self, num_bytes: int, kind: str) -> None:
        """Raise a HostMemoryError if ``num_bytes`` more would exceed the limit."""
        if self.limit_bytes is not None and self.held_bytes + num_bytes > self.limit_bytes:
            parts = ", ".join(f"{part} {size / GIB:.4g}" for part, size in self.kinds.most_common() if size)
            raise HostMemoryError(
                f"{LIMIT_KEY}={self.limit_bytes / GIB:.4g}: {kind} needs {num_bytes / GIB:.4g} GiB on the host, where "
                f"{self.held_bytes / GIB:.4g} GiB are in use{f' ({parts})' if parts else ''}. Raise it to at least "
                f"{(self.held_bytes + num_bytes) / GIB:.4g}, or turn an offload off.",
                kind,
            )

    def count_elsewhere(self, num_bytes: int, pinned: bool, kind: str) -> Callable[[], None]:
        """Count host memory that other code allocates, until the returned function is called.

        Raises:
            HostMemoryError: See :meth:`check_room`.
        """
        self.check_room(num_bytes, kind)
        self._count(num_bytes, pinned, kind)
        return partial(self._count, -num_bytes, pinned, kind)

    def reset_peak(self) -> None:
        self.peak_bytes = self.held_bytes

    def _give_back(self, num_bytes: int, pinned: bool, kind: str, device: torch.device, locked: _Locked | None) -> None:
        self._count(-num_bytes, pinned, kind)
        if locked is not None:
            unlock_pages(device, locked.address)

    def _count(self, num_bytes: int, pinned: bool, kind: str) -> None:
        self.kinds[kind] += num_bytes
        self.pinned_bytes += num_bytes if pinned else 0
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)


class _Locked(NamedTuple):
    pages: mmap.mmap
    address: int


def _lock(num_bytes: int, device: torch.device) -> _Locked | None:
    # Map and lock whole pages. If the driver refuses, warn once per process and return None.
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if NO_COPY_IN_CHILDREN is not None:
        pages.madvise(NO_COPY_IN_CHILDREN)
    if HUGE_PAGES is not None:
        with suppress(OSError):
            pages.madvise(HUGE_PAGES)
    # A mapping has no attribute for its address, but a tensor on it does.
    address = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
    refusal = lock_pages(device, address, num_bytes)
    if refusal is None:
        return _Locked(pages, address)
    _warn_once(refusal)
    return None


@cache
def _warn_once(refusal: str) -> None:
    logger.warning(
        "host memory cannot be page-locked (%s): offloads use ordinary memory, and their copies block. In a container, allow it "
        "to lock memory, or set memory.pinned_limit_gb to what the machine allows.", refusal
    )  # fmt: skip


_allocator = HostAllocator()


def host_allocator() -> HostAllocator:
    return _allocator


@contextmanager
def host_limits(limit_bytes: int | None, pinned_limit_bytes: int | None) -> Iterator[HostAllocator]:
    before = (_allocator.limit_bytes, _allocator.pinned_limit_bytes)
    _allocator.limit_bytes, _allocator.pinned_limit_bytes = limit_bytes, pinned_limit_bytes
    try:
        yield _allocator
    finally:
        _allocator.limit_bytes, _allocator.pinned_limit_bytes = before


def whole_storage(tensor: Tensor) -> Tensor:
    count = tensor.untyped_storage().nbytes() // tensor.itemsize
    return tensor.detach().as_strided((count,), (1,), 0).view(torch.uint8)


def host_buffer(num_bytes: int, device: torch.device, kind: str) -> Tensor:
    return _allocator.empty(num_bytes, device, kind)
