"""Reusable host memory: slots of any size in chunks that are kept.

Slots lie one after another over the chunks and may cross from one chunk to the next, so no size leaves a gap at a chunk's end.
The bytes held are those in use at the busiest moment, rounded up to a chunk.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

import torch
from torch import Tensor

from verl_memopt.memory.host.host_buffers import host_buffer

CHUNK_BYTES = 2**26
"""A multiple of the page size, large enough that locking a chunk is rare."""

ALIGNMENT = 512
"""Every slot starts at a multiple of this many bytes, so that any dtype can view it."""


@dataclass(order=True)
class Slot:
    """A stretch of the arena, with uint8 views (``parts``) of the chunks it lies in, in order."""

    start: int
    stop: int
    parts: list[Tensor] = field(compare=False)


class HostArena:
    """Hands out slots and takes them back. Chunks come from the process's host allocator and stay until :meth:`shrink`."""

    def __init__(self, device: torch.device, kind: str, chunk_bytes: int = CHUNK_BYTES) -> None:
        """Start without chunks.

        Args:
            device: Whose bytes rest here.
            kind: Kind of these bytes, for the byte tracker.
            chunk_bytes: A multiple of 512.
        """
        assert chunk_bytes % ALIGNMENT == 0, chunk_bytes
        self._device, self._kind, self._chunk_bytes = device, kind, chunk_bytes
        self._chunks: list[Tensor] = []
        self._live: list[Slot] = []

    @property
    def held_bytes(self) -> int:
        """Bytes of all chunks."""
        return len(self._chunks) * self._chunk_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots that are taken, alignment included."""
        return sum(slot.stop - slot.start for slot in self._live)

    def take(self, num_bytes: int) -> Slot:
        """Return the first free stretch of ``num_bytes``.

        Raises:
            ConfigError: The host limit allows no further chunk.
        """
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        start = self._first_fit(size)
        while self.held_bytes < start + size:
            self._chunks.append(host_buffer(self._chunk_bytes, self._device, self._kind))
        slot = Slot(start, start + size, self._parts(start, start + num_bytes))
        insort(self._live, slot)
        return slot

    def give_back(self, slot: Slot) -> None:
        """Free the bytes of a slot for others."""
        self._live.remove(slot)

    def shrink(self) -> None:
        """Free the chunks behind the last slot in use."""
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
