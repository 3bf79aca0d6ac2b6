"""What a process really holds of a GPU: the caching allocator's counters less what is asleep.

A sleeping vLLM engine keeps its tensors and their addresses, and gives the memory behind them back to the driver. Torch is not
told: ``memory_allocated``, ``memory_reserved`` and their peaks go on counting it. The ledger holds how much that is.
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
"""How far the driver and the ledger may part before it is said: libraries load kernels and buffers of their own as they go."""


@dataclass(frozen=True)
class Asleep:
    """Bytes that the allocator counts and the device does not hold."""

    reserved_bytes: int = 0
    """Whole segments."""
    allocated_bytes: int = 0
    """The live tensors on them."""


AsleepReader: TypeAlias = Callable[[], Asleep | None]
"""Gives what sleeps now, from the books of whoever put it to sleep; None where these cannot be read."""


class DeviceLedger:
    """The figures of one process on one GPU. One a device: :func:`ledger_of`."""

    def __init__(self, device: torch.device) -> None:
        self.asleep = Asleep()
        self._device = device
        self._peak_allocated = 0
        self._peak_reserved = 0
        self._outside: int | None = None
        self._told: set[str] = set()

    def allocated(self) -> int:
        """Gives the bytes of live tensors that are on the device now."""
        return max(device_room.memory_allocated(self._device) - self.asleep.allocated_bytes, 0)

    def reserved(self) -> int:
        """Gives the bytes of the device that the caching allocator holds now."""
        return max(device_room.memory_reserved(self._device) - self.asleep.reserved_bytes, 0)

    def used(self) -> int:
        """Gives the bytes that are taken on the device, by the driver's own count: all processes and contexts included."""
        free, total = device_room.memory_info(self._device)
        return total - free

    def peak_allocated(self) -> int:
        """Gives the most that :meth:`allocated` was since :meth:`reset_peaks`."""
        return max(self._peak_allocated, device_room.max_memory_allocated(self._device) - self.asleep.allocated_bytes)

    def peak_reserved(self) -> int:
        """Gives the most that :meth:`reserved` was since :meth:`reset_peaks`."""
        return max(self._peak_reserved, device_room.max_memory_reserved(self._device) - self.asleep.reserved_bytes)

    def reset_peaks(self) -> None:
        """Makes the present the new peak."""
        device_room.reset_peak_memory(self._device)
        self._peak_allocated = self._peak_reserved = 0

    @contextmanager
    def changing(self, read: AsleepReader) -> Iterator[None]:
        """Around anything that goes to sleep or wakes, also when it fails half-way.

        Peaks are kept stretch by stretch, because the same counter means other bytes before and after. Inside the body the
        smaller of the two sleeps is taken off: empty the cache before a wake-up, or what it frees counts beside what wakes.
        """
        device_room.synchronize(self._device)
        before = self.asleep
        self._end_stretch(before)
        free, reserved = device_room.memory_info(self._device)[0], device_room.memory_reserved(self._device)
        try:
            yield
        finally:
            device_room.synchronize(self._device)
            freed = device_room.memory_info(self._device)[0] - free
            # A cached block that goes back to the driver frees memory too, and the allocator stops counting it.
            unmapped = freed + device_room.memory_reserved(self._device) - reserved
            self.asleep = self._agreed(read(), before.reserved_bytes + unmapped)
            self._end_stretch(_less(before, self.asleep))

    def check(self, phase: str) -> None:
        """Compares the ledger with the driver, and warns once where they part by more than they did the first time."""
        outside = self.used() - self.reserved()
        if self._outside is None:
            self._outside = outside
        elif abs(outside - self._outside) > TOLERANCE_BYTES:
            self._tell(
                "outside",
                f"{phase}: {outside / GIB:.2f} GiB of the device are in use outside this process's allocator; at the start it "
                f"was {self._outside / GIB:.2f} GiB. Another process took or freed memory, or the memory figures are wrong by "
                "the difference.",
            )

    def _agreed(self, told: Asleep | None, measured: int) -> Asleep:
        if told is None:
            words = "The engine's books of its sleeping memory cannot be read. The driver's free memory is used instead."
            self._tell("unread", words)
            within = min(max(measured, 0), device_room.memory_reserved(self._device))
            return Asleep(within, min(within, device_room.memory_allocated(self._device)))
        if abs(told.reserved_bytes - measured) > TOLERANCE_BYTES:
            self._tell(
                "disagreed",
                f"The engine says that {told.reserved_bytes / GIB:.2f} GiB of its memory are asleep; the driver's free memory "
                f"says {measured / GIB:.2f} GiB. The engine's figure is used: another process may have moved the driver's.",
            )
        return told

    def _end_stretch(self, asleep: Asleep) -> None:
        allocated = device_room.max_memory_allocated(self._device) - asleep.allocated_bytes
        reserved = device_room.max_memory_reserved(self._device) - asleep.reserved_bytes
        self._peak_allocated = max(self._peak_allocated, allocated)
        self._peak_reserved = max(self._peak_reserved, reserved)
        device_room.reset_peak_memory(self._device)

    def _tell(self, kind: str, words: str) -> None:
        """Warns once of each kind."""
        if kind not in self._told:
            self._told.add(kind)
            logger.warning(words)


def _less(one: Asleep, other: Asleep) -> Asleep:
    reserved = min(one.reserved_bytes, other.reserved_bytes)
    return Asleep(reserved, min(one.allocated_bytes, other.allocated_bytes))


_ledgers: dict[torch.device, DeviceLedger] = {}


def ledger_of(device: torch.device) -> DeviceLedger:
    """Gives this process's ledger of a GPU."""
    assert device_room.is_gpu(device), device
    return _ledgers.setdefault(device, DeviceLedger(device))
