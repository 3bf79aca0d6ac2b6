"""The memory of one GPU on a machine without one: what its driver holds, and torch's caching allocator above it.

The rules are those of c10/cuda/CUDACachingAllocator.cpp of torch 2.11 to 2.13: sizes are rounded to 512 bytes; blocks of up to
1 MiB share segments of 2 MiB, others lie in segments of 20 MiB or of whole 2 MiB; the smallest free block that fits is taken
and split; neighbours merge again; a request that does not fit frees the cache and is tried once more. Every segment counts
towards the cap, a private pool's too, whether the memory behind it is mapped or not. ``installed`` puts the device in the place
of ``torch.cuda``'s functions.

    device = SimulatedDevice(total=32 * GIB)
    device.installed(monkeypatch)
    tensor = device.empty(4 * GIB)
    torch.cuda.memory_allocated()    # 4 GiB
    del tensor                       # the block is free, the segment stays reserved
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

KIB, MIB, GIB = 2**10, 2**20, 2**30
GRANULARITY = 2 * MIB
"""What the driver maps at least."""
SMALL, MIDDLE = MIB, 10 * MIB


class Driver:
    """The memory of the device: contexts, other processes, and what this process has mapped."""

    def __init__(self, total, context):
        self.total = total
        self.outside = context
        self.changed: Callable[[int, bool], None] = lambda address, mapped: None
        """Told of each address that is mapped or unmapped."""
        self.mapped = 0
        self._mapped: dict[int, int] = {}
        self._reserved: dict[int, int] = {}
        self._addresses = itertools.count(GRANULARITY)

    @property
    def free(self):
        return self.total - self.outside - self.mapped

    def reserve(self, size):
        """Return an address without memory behind it."""
        address = next(self._addresses) * GIB
        self._reserved[address] = size
        return address

    def map(self, address):
        """Map memory behind an address. False = the device is full."""
        assert address not in self._mapped, "mapped twice"
        size = self._reserved[address]
        if size > self.free:
            return False
        self._mapped[address] = size
        self.mapped += size
        self.changed(address, True)
        return True

    def is_mapped(self, address):
        return address in self._mapped

    def unmap(self, address):
        """Unmap the memory of an address. False = there is none."""
        if address not in self._mapped:
            return False
        self.mapped -= self._mapped.pop(address)
        self.changed(address, False)
        return True

    def release(self, address):
        del self._reserved[address]


@dataclass(eq=False)
class Block:
    segment: Segment
    size: int
    taken: bool = False


@dataclass(eq=False)
class Segment:
    address: int
    size: int
    small: bool
    pool: Pool
    blocks: list[Block] = field(default_factory=list)

    @property
    def allocated(self):
        return sum(block.size for block in self.blocks if block.taken)


@dataclass(eq=False)
class Pool:
    """The default pool, or a private one whose segments come from an allocator of its own."""

    take: Callable[[int], int | None]
    give: Callable[[int], None]
    segments: list[Segment] = field(default_factory=list)
    in_use: bool = True
    """Whether somebody holds the pool: its free segments stay until nobody does."""


@dataclass
class Counter:
    current: int = 0
    peak: int = 0

    def add(self, size):
        self.current += size
        self.peak = max(self.peak, self.current)


class Allocation:
    """Stands for a tensor's storage: its block is free when the last reference is gone."""

    def __init__(self, device, block):
        self._device, self._block = device, block

    def __del__(self):
        self._device.free(self._block)


class SimulatedDevice:
    def __init__(self, total, context=512 * MIB):
        """context: bytes that this process's context and libraries take beside the allocator."""
        self.driver = Driver(total, context)
        self.default = Pool(self._cuda_malloc, self._cuda_free)
        self._pools: list[Pool] = [self.default]
        self._active = self.default
        self._allocated, self._reserved = Counter(), Counter()
        self._cap: int | None = None
        self._segments: dict[int, Segment] = {}
        self.live = 0
        """The truth about what is allocated: bytes of tensors with memory behind them."""
        self.peak_held = self.peak_live = 0
        self.driver.changed = self._remapped

    @property
    def held(self):
        """The true number of reserved bytes: device memory behind this process's segments."""
        return self.driver.mapped

    def forget_peaks(self):
        """Reset ``peak_held`` and ``peak_live``. The allocator's own peaks stay."""
        self.peak_held, self.peak_live = self.held, self.live

    def empty(self, size):
        """Allocate from the pool in use. Raises torch.OutOfMemoryError as torch does."""
        size = max(-(-size // 512) * 512, 512)
        block = self._free_block(size) or self._new_block(size)
        if block is None:
            self.empty_cache()
            block = self._new_block(size)
        if block is None:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size / GIB:.2f} GiB. GPU 0 is simulated.")
        self._split(block, size)
        block.taken = True
        self._allocated.add(block.size)
        self._count(block.size if self.driver.is_mapped(block.segment.address) else 0)
        return Allocation(self, block)

    def free(self, block):
        block.taken = False
        self._allocated.add(-block.size)
        self._count(-block.size if self.driver.is_mapped(block.segment.address) else 0)
        merged: list[Block] = []
        for part in block.segment.blocks:
            if merged and not part.taken and not merged[-1].taken:
                merged[-1].size += part.size
            else:
                merged.append(part)
        block.segment.blocks = merged

    def empty_cache(self):
        for pool in list(self._pools):
            if pool is self.default or not pool.in_use:
                for segment in [segment for segment in pool.segments if not segment.allocated]:
                    pool.segments.remove(segment)
                    del self._segments[segment.address]
                    pool.give(segment.address)
                    self._reserved.add(-segment.size)

    def private_pool(self, take, give):
        self._pools.append(Pool(take, give))
        return self._pools[-1]

    @contextmanager
    def using(self, pool):
        before, self._active = self._active, pool
        try:
            yield
        finally:
            self._active = before

    def snapshot(self, pool):
        return [{"address": s.address, "total_size": s.size, "allocated_size": s.allocated} for s in pool.segments]

    def set_fraction(self, fraction):
        if not 0 <= fraction <= 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        self._cap = None if fraction == 1.0 else int(fraction * self.driver.total)

    def fraction(self):
        return 1.0 if self._cap is None else self._cap / self.driver.total

    def reset_peaks(self):
        for counter in (self._allocated, self._reserved):
            counter.peak = counter.current

    def installed(self, monkeypatch):
        """Replace GPU 0 by this device."""
        values: dict[str, Callable[..., Any]] = {
            "memory_allocated": lambda device=None: self._allocated.current,
            "max_memory_allocated": lambda device=None: self._allocated.peak,
            "memory_reserved": lambda device=None: self._reserved.current,
            "max_memory_reserved": lambda device=None: self._reserved.peak,
            "reset_peak_memory_stats": lambda device=None: self.reset_peaks(),
            "mem_get_info": lambda device=None: (self.driver.free, self.driver.total),
            "set_per_process_memory_fraction": lambda fraction, device=None: self.set_fraction(fraction),
            "get_per_process_memory_fraction": lambda device=None: self.fraction(),
            "get_device_properties": lambda device=None: SimpleNamespace(total_memory=self.driver.total),
            "empty_cache": self.empty_cache,
            "synchronize": lambda device=None: None,
            "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
            "set_rng_state": lambda state, device=None: None,
        }
        for name, value in values.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.accelerator, "empty_cache", self.empty_cache)
        monkeypatch.setattr(torch.accelerator, "synchronize", lambda device=None: None)
        monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device=None: (self.driver.free, self.driver.total))
        # Figures of a device that another test simulated are not this one's.
        monkeypatch.setattr("verl_memopt.observe.device_ledger._ledgers", {})

    def _remapped(self, address, mapped):
        allocated = self._segments[address].allocated if address in self._segments else 0
        self._count(allocated if mapped else -allocated)

    def _count(self, live):
        self.live += live
        self.peak_held, self.peak_live = max(self.peak_held, self.held), max(self.peak_live, self.live)

    def _cuda_malloc(self, size):
        address = self.driver.reserve(size)
        if self.driver.map(address):
            return address
        self.driver.release(address)
        return None

    def _cuda_free(self, address):
        self.driver.unmap(address)
        self.driver.release(address)

    def _free_block(self, size):
        fitting = [
            block
            for segment in self._active.segments
            if segment.small == (size <= SMALL)
            for block in segment.blocks
            if not block.taken and block.size >= size
        ]
        return min(fitting, key=lambda block: block.size, default=None)

    def _new_block(self, size):
        small = size <= SMALL
        whole = GRANULARITY if small else 20 * MIB if size < MIDDLE else -(-size // GRANULARITY) * GRANULARITY
        if self._cap is not None and self._reserved.current + whole > self._cap:
            return None
        address = self._active.take(whole)
        if address is None:
            return None
        segment = Segment(address, whole, small, self._active)
        segment.blocks = [Block(segment, whole)]
        self._active.segments.append(segment)
        self._segments[address] = segment
        self._reserved.add(whole)
        return segment.blocks[0]

    def _split(self, block, size):
        rest = block.size - size
        if rest >= 512 if block.segment.small else rest > SMALL:
            block.size = size
            blocks = block.segment.blocks
            blocks.insert(blocks.index(block) + 1, Block(block.segment, rest))
