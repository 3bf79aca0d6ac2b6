"""The GPU memory that a process really holds: the caching allocator's counters minus the sleeping memory.

A sleeping vLLM engine keeps its tensors and their addresses, but returns the memory behind them to the driver. Torch does not
know this: ``memory_allocated``, ``memory_reserved`` and their peaks still count it. The ledger knows how much that is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch

from verl_memopt.distributed import device as device_room

logger = logging.getLogger(__name__)

GIB = 2**30
TOLERANCE_BYTES = GIB
"""Difference between driver and ledger that is tolerated: libraries load their own kernels and buffers over time."""


@dataclass(frozen=True)
class Asleep:
    """Bytes that the allocator counts but the device does not hold."""

    reserved_bytes: int = 0
    """Bytes of whole segments."""
    allocated_bytes: int = 0
    """Bytes of the live tensors in them."""


AsleepReader: TypeAlias = Callable[[], Asleep | None]
"""Returns what sleeps now, from the records of the engine that put it to sleep. None if they cannot be read."""


class DeviceLedger:
    """The memory figures of one process on one GPU. There is one per device: :func:`ledger_of`.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        """Start with nothing asleep."""
        self.asleep = Asleep()
        self._device = device
        self._peak_allocated = 0
        self._peak_reserved = 0
        self._outside: int | None = None
        self._warned: set[str] = set()

    def allocated(self) -> int:
        """Return the bytes of live tensors that are on the device now."""
        return max(device_room.memory_allocated(self._device) - self.asleep.allocated_bytes, 0)

    def reserved(self) -> int:
        """Return the bytes of the device that the caching allocator holds now."""
        return max(device_room.memory_reserved(self._device) - self.asleep.reserved_bytes, 0)

    def used(self) -> int:
        """Return the used bytes of the device by the driver's count, including all processes and contexts."""
        free, total = device_room.memory_info(self._device)
        return total - free

    def peak_allocated(self) -> int:
        """Return the peak of :meth:`allocated` since :meth:`reset_peaks`."""
        return max(self._peak_allocated, device_room.max_memory_allocated(self._device) - self.asleep.allocated_bytes)

    def peak_reserved(self) -> int:
        """Return the peak of :meth:`reserved` since :meth:`reset_peaks`."""
        return max(self._peak_reserved, device_room.max_memory_reserved(self._device) - self.asleep.reserved_bytes)

    def reset_peaks(self) -> None:
        """Start new peaks at the present values."""
        device_room.reset_peak_memory(self._device)
        self._peak_allocated = self._peak_reserved = 0

    @contextmanager
    def changing(self, read: AsleepReader) -> Iterator[None]:
        """Wrap anything that puts memory to sleep or wakes it, even if it fails half-way.

        Peaks are kept for each stretch between two changes, because the same counter means other bytes before and after. Inside
        the body the smaller of the two sleeps is subtracted. Empty the cache before a wake-up, or the blocks that it frees are
        counted beside the part that wakes.

        Args:
            read: Returns what sleeps at the end of the body.
        """
        # The driver's figures are true only once the queued work is done.
        device_room.synchronize(self._device)
        before = self.asleep
        self._end_stretch(before)
        free, reserved = device_room.memory_info(self._device)[0], device_room.memory_reserved(self._device)
        try:
            yield
        finally:
            device_room.synchronize(self._device)
            freed = device_room.memory_info(self._device)[0] - free
            # A cached block that returns to the driver frees memory too, and the allocator stops counting it.
            unmapped = freed + device_room.memory_reserved(self._device) - reserved
            self.asleep = self._agreed(read(), before.reserved_bytes + unmapped)
            self._end_stretch(_less(before, self.asleep))

    def check(self, phase: str) -> None:
        """Compare the ledger with the driver, and warn once if their difference has grown since the first call."""
        outside = self.used() - self.reserved()
        if self._outside is None:
            self._outside = outside
        elif abs(outside - self._outside) > TOLERANCE_BYTES:
            self._warn_once(
                "outside",
                f"{phase}: {outside / GIB:.2f} GiB of the device are in use outside this process's allocator. At the start "
                f"it was {self._outside / GIB:.2f} GiB. Another process took or freed memory, or the memory figures are wrong by "
                "the difference.",
            )

    def _agreed(self, reported: Asleep | None, measured: int) -> Asleep:
        if reported is None:
            words = "The engine's records of its sleeping memory cannot be read. The driver's free memory is used instead."
            self._warn_once("unread", words)
            within = min(max(measured, 0), device_room.memory_reserved(self._device))
            return Asleep(within, min(within, device_room.memory_allocated(self._device)))
        if abs(reported.reserved_bytes - measured) > TOLERANCE_BYTES:
            self._warn_once(
                "disagreed",
                f"The engine says that {reported.reserved_bytes / GIB:.2f} GiB of its memory are asleep; the driver's "
                f"free memory says {measured / GIB:.2f} GiB. The engine's figure is used: another process "
                "may have changed the driver's.",
            )
        return reported

    def _end_stretch(self, asleep: Asleep) -> None:
        allocated = device_room.max_memory_allocated(self._device) - asleep.allocated_bytes
        reserved = device_room.max_memory_reserved(self._device) - asleep.reserved_bytes
        self._peak_allocated = max(self._peak_allocated, allocated)
        self._peak_reserved = max(self._peak_reserved, reserved)
        device_room.reset_peak_memory(self._device)

    def _warn_once(self, kind: str, words: str) -> None:
        """Warn once per kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning(words)


def _less(one: Asleep, other: Asleep) -> Asleep:
    reserved = min(one.reserved_bytes, other.reserved_bytes)
    return Asleep(reserved, min(one.allocated_bytes, other.allocated_bytes))


_ledgers: dict[torch.device, DeviceLedger] = {}


def ledger_of(device: torch.device) -> DeviceLedger:
    """Return this process's ledger of a GPU."""
    assert device_room.is_gpu(device), device
    return _ledgers.setdefault(device, DeviceLedger(device))
