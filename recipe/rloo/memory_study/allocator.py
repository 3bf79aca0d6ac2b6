"""A simulation of torch's caching allocator on a GPU: live and reserved bytes of a sequence of allocations and frees.

It follows the rules of ``c10/cuda/CUDACachingAllocator.cpp`` with its default settings and one stream. Sizes are rounded to 512
bytes. Small and large sizes have pools of their own. A freed block stays in its pool and merges with its free neighbours. A
request takes the smallest free block that fits, and what is left of it stays free. ``empty_cache`` returns the segments that are
wholly free, the smallest first. A request that does not fit under the limit returns all free segments before it fails.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable
from dataclasses import dataclass, field

MIB = 2**20
ROUND_BYTES = 512
"""Every size is rounded up to a multiple of this."""
SMALL_BYTES = MIB
"""Largest size of the small pool. A larger remainder of a large block is split off."""
SMALL_SEGMENT_BYTES = 2 * MIB
"""Segment of the small pool."""
MEDIUM_BYTES = 10 * MIB
"""Sizes below this share a segment."""
MEDIUM_SEGMENT_BYTES = 20 * MIB
"""Segment that such sizes share."""
SEGMENT_ROUND_BYTES = 2 * MIB
"""Larger sizes have a segment of their own, rounded up to a multiple of this."""


class NoRoom(Exception):  # noqa: N818 - an event, which the caller turns into an error with the phase and the tensor
    """A request does not fit under the limit.

    Args:
        requested_bytes: Size of the segment that was refused.
        held_bytes: Bytes that the allocator holds.
    """

    def __init__(self, requested_bytes: int, held_bytes: int) -> None:
        """Keep the figures."""
        super().__init__(f"{requested_bytes} bytes beside {held_bytes}")
        self.requested_bytes, self.held_bytes = requested_bytes, held_bytes


@dataclass
class _Block:
    """A stretch of a segment. ``before`` and ``after`` are its neighbours in the segment."""

    size: int
    segment: int
    pool: _Pool = field(repr=False)
    offset: int = 0
    """First byte in the segment."""
    free: bool = False
    before: _Block | None = field(default=None, repr=False)
    after: _Block | None = field(default=None, repr=False)


class _Pool:
    """The free blocks of one kind of segment, ordered by size and then by age of their segment."""

    def __init__(self) -> None:
        """Start empty."""
        self.blocks: list[tuple[int, int, int, _Block]] = []

    def add(self, block: _Block) -> None:
        """Take in a free block."""
        bisect.insort(self.blocks, (block.size, block.segment, block.offset, block))

    def remove(self, block: _Block) -> None:
        """Take a block out."""
        del self.blocks[bisect.bisect_left(self.blocks, (block.size, block.segment, block.offset))]

    def fitting(self, size: int) -> _Block | None:
        """Return the smallest block of at least ``size`` bytes, or None."""
        place = bisect.bisect_left(self.blocks, (size,))
        return self.blocks[place][3] if place < len(self.blocks) else None

    def whole_segments(self) -> list[_Block]:
        """Return the free blocks that are a whole segment, the smallest first."""
        return [block for *_, block in self.blocks if block.before is None and block.after is None]


class CachingAllocator:
    """Simulated device memory.

    Args:
        limit_bytes: Largest number of reserved bytes. None = no limit.

    Attributes:
        live: Bytes of the blocks in use, rounded.
        reserved: Bytes of all segments, in use or cached.
        live_peak: Highest ``live`` since ``reset_peaks``.
        reserved_peak: Highest ``reserved`` since ``reset_peaks``.
        history: (live, reserved) after each allocation and free of a large block, and each segment that was returned.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        """Start with an empty device."""
        self.live = self.reserved = self.live_peak = self.reserved_peak = 0
        self.history: list[tuple[int, int]] = []
        self._limit_bytes = limit_bytes
        self._small, self._large = _Pool(), _Pool()
        self._used: dict[Hashable, _Block] = {}
        self._segments = 0

    def allocate(self, key: Hashable, num_bytes: int) -> None:
        """Take a block.

        Args:
            key: Names the block until it is freed.
            num_bytes: Size, before rounding.

        Raises:
            NoRoom: The limit would be passed even after the cached segments are returned.
        """
        assert key not in self._used, key
        size = max(ROUND_BYTES, _rounded(num_bytes, ROUND_BYTES))
        pool = self._pool(size)
        block = pool.fitting(size)
        if block is None:
            block = self._new_segment(pool, size)
        else:
            pool.remove(block)
        _split(block, size)
        block.free = False
        self._used[key] = block
        self.live += block.size
        self.live_peak = max(self.live_peak, self.live)
        self._note(block.size)

    def free(self, key: Hashable) -> None:
        """Give a block back to its pool, where it stays cached."""
        block = self._used.pop(key)
        size = block.size
        self.live -= size
        block.free = True
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                block.pool.remove(neighbour)
                _merge(block, neighbour)
        block.pool.add(block)

    def empty_cache(self) -> None:
        """Return every segment that is wholly free, large ones before small ones, in each pool the smallest first."""
        for pool in (self._large, self._small):
            for block in pool.whole_segments():
                pool.remove(block)
                self._reserve(-block.size)
                self._note(block.size)

    def reset_peaks(self) -> None:
        """Start both peaks at the present level."""
        self.live_peak, self.reserved_peak = self.live, self.reserved

    def _pool(self, size: int) -> _Pool:
        return self._small if size <= SMALL_BYTES else self._large

    def _new_segment(self, pool: _Pool, size: int) -> _Block:
        segment_bytes = _segment_bytes(size)
        if self._limit_bytes is not None and self.reserved + segment_bytes > self._limit_bytes:
            self.empty_cache()
            if self.reserved + segment_bytes > self._limit_bytes:
                raise NoRoom(size, self.reserved)
        self._segments += 1
        self._reserve(segment_bytes)
        return _Block(segment_bytes, self._segments, pool)

    def _reserve(self, num_bytes: int) -> None:
        self.reserved += num_bytes
        self.reserved_peak = max(self.reserved_peak, self.reserved)

    def _note(self, num_bytes: int) -> None:
        """Add the present levels to the history, unless the block that changed them is small."""
        if num_bytes > SMALL_BYTES:
            self.history.append((self.live, self.reserved))


def _split(block: _Block, size: int) -> None:
    """Cut a block to ``size`` if the remainder is large enough for its pool to keep."""
    remainder = block.size - size
    if remainder < ROUND_BYTES if size <= SMALL_BYTES else remainder <= SMALL_BYTES:
        return
    rest = _Block(remainder, block.segment, block.pool, block.offset + size, free=True, before=block, after=block.after)
    if block.after is not None:
        block.after.before = rest
    block.after, block.size = rest, size
    block.pool.add(rest)


def _merge(block: _Block, neighbour: _Block) -> None:
    """Let a block take over a free neighbour."""
    if neighbour is block.before:
        block.before, block.offset = neighbour.before, neighbour.offset
        if block.before is not None:
            block.before.after = block
    else:
        block.after = neighbour.after
        if block.after is not None:
            block.after.before = block
    block.size += neighbour.size


def _segment_bytes(size: int) -> int:
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    return MEDIUM_SEGMENT_BYTES if size < MEDIUM_BYTES else _rounded(size, SEGMENT_ROUND_BYTES)


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
