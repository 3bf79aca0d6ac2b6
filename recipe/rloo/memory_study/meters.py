"""Measures the phases of an update: on a CPU by the byte tracker, on a fake GPU by a simulated allocator, on a GPU by torch's."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from recipe.rloo.memory_study.allocator import CachingAllocator
from recipe.rloo.memory_study.fake_device import DEVICE as FAKE_GPU
from recipe.rloo.memory_study.fake_device import NoRoomForTensor
from recipe.rloo.memory_study.records import BYTE_TRACKER, DEVICE_ALLOCATOR, SIMULATED_ALLOCATOR, OutOfMemory
from recipe.rloo.memory_study.timeline import Point, TimelineTracker, thinned
from verl_memopt.distributed import device as device_room
from verl_memopt.observe.byte_tracker import DEVICE, ByteTracker, DeviceLimitError


@dataclass(frozen=True)
class Phase:
    """What a phase held, in bytes. ``reserved_peak`` is None where there is no allocator."""

    update: int
    name: str
    enter: int
    peak: int
    exit: int
    reserved_peak: int | None
    seconds: float
    timeline: tuple[Point, ...] = ()


class Meter(Protocol):
    """Measures phases on one device.

    Attributes:
        device: Where the tensors are.
        source: One of the values of ``UpdateRecord.measured_by``.
        phases: The phases that ended, in order.
    """

    device: torch.device
    source: str
    phases: list[Phase]

    def phase(self, name: str, update: int = 0) -> AbstractContextManager[None]:
        """Measure the body of a ``with`` statement. Raises OutOfMemory where the body runs out of memory."""

    def count_model(self, model: nn.Module) -> None:
        """Count the weights of a model from here on, where they were made without an op that the meter sees."""

    def empty_cache(self) -> None:
        """Return the allocator's cached blocks to the device."""


class FakeMeter:
    """Measures a fake GPU (:class:`Meter`).

    Args:
        allocator: Of the fake device that is entered.
    """

    device = FAKE_GPU
    source = SIMULATED_ALLOCATOR

    def __init__(self, allocator: CachingAllocator) -> None:
        """Measure nothing yet."""
        self.allocator = allocator
        self.phases: list[Phase] = []

    @contextmanager
    def phase(self, name: str, update: int = 0) -> Iterator[None]:
        """Measure the body. The timeline has each change by a large block, evenly spaced over the duration."""
        allocator = self.allocator
        allocator.reset_peaks()
        enter, first, started = allocator.live, len(allocator.history), time.perf_counter()
        try:
            yield
        except NoRoomForTensor as refusal:
            peak = allocator.reserved_peak
            raise OutOfMemory(name, refusal.requested_bytes, refusal.held_bytes, refusal.shape, peak) from refusal
        seconds, changes = time.perf_counter() - started, allocator.history[first:]
        points = [(seconds * (place + 1) / (len(changes) + 1), live, held) for place, (live, held) in enumerate(changes)]
        figures = enter, allocator.live_peak, allocator.live, allocator.reserved_peak
        self.phases.append(Phase(update, name, *figures, seconds, thinned(points)))

    def count_model(self, model: nn.Module) -> None:
        """Do nothing: every tensor of the device was made by an op."""

    def empty_cache(self) -> None:
        """Return the cached blocks."""
        self.allocator.empty_cache()


class TrackerMeter:
    """Measures real tensors on a CPU (:class:`Meter`). There is no caching allocator, so nothing is reserved.

    Args:
        tracker: A byte tracker that is entered. A :class:`TimelineTracker` gives the phases their timelines.
    """

    device = torch.device("cpu")
    source = BYTE_TRACKER

    def __init__(self, tracker: ByteTracker) -> None:
        """Measure nothing yet."""
        self._tracker = tracker
        self._changes = tracker.changes if isinstance(tracker, TimelineTracker) else []
        self.phases: list[Phase] = []

    @contextmanager
    def phase(self, name: str, update: int = 0) -> Iterator[None]:
        """Measure the body."""
        tracker = self._tracker
        tracker.enter(name)
        enter, first, started = tracker.total(), len(self._changes), time.perf_counter()
        try:
            yield
        except DeviceLimitError as error:
            held = error.num_bytes - error.asked_bytes
            raise OutOfMemory(name, error.asked_bytes, held, error.op) from error
        figures = enter, tracker.peaks[DEVICE].bytes, tracker.total(), None
        points = [(moment - started, live, None) for moment, live in self._changes[first:]]
        self.phases.append(Phase(update, name, *figures, time.perf_counter() - started, thinned(points)))

    def count_model(self, model: nn.Module) -> None:
        """Count the weights, which are read from a mapped file."""
        self._tracker.mark("params", model.parameters())

    def empty_cache(self) -> None:
        """Do nothing: live tensors are all that there is."""


class DeviceMeter:
    """Measures a GPU by the counters of torch's allocator (:class:`Meter`).

    Args:
        device: The GPU.
    """

    source = DEVICE_ALLOCATOR

    def __init__(self, device: torch.device) -> None:
        """Measure nothing yet."""
        self.device = device
        self.phases: list[Phase] = []

    @contextmanager
    def phase(self, name: str, update: int = 0) -> Iterator[None]:
        """Measure the body. The host waits for the device at both ends."""
        device = self.device
        device_room.synchronize(device)
        device_room.reset_peak_memory(device)
        enter, started = device_room.memory_allocated(device), time.perf_counter()
        try:
            yield
            device_room.synchronize(device)
        except torch.OutOfMemoryError as error:
            held = device_room.memory_reserved(device)
            peak = device_room.max_memory_reserved(device)
            raise OutOfMemory(name, requested_bytes(str(error)), held, "", peak) from error
        peaks = device_room.max_memory_allocated(device), device_room.max_memory_reserved(device)
        seconds = time.perf_counter() - started
        figures = enter, peaks[0], device_room.memory_allocated(device), peaks[1]
        self.phases.append(Phase(update, name, *figures, seconds))

    def count_model(self, model: nn.Module) -> None:
        """Do nothing: the allocator counts all."""

    def empty_cache(self) -> None:
        """Return the cached blocks."""
        gc.collect()
        device_room.empty_cache(self.device)


def requested_bytes(message: str) -> int:
    """Return the size that the message of a CUDA out-of-memory error names, in bytes; 0 = it names none."""
    size = re.search(r"Tried to allocate ([0-9.]+) ([KMG]?i?B|bytes)", message)
    if size is None:
        return 0
    unit = {"K": 2**10, "M": 2**20, "G": 2**30}.get(size.group(2)[0], 1)
    return int(float(size.group(1)) * unit)


def merged(phases: list[Phase]) -> list[Phase]:
    """Return one phase for each update and name: the first entry, the highest peak, the last exit, the sum of the seconds."""
    together: dict[tuple[int, str], Phase] = {}
    for phase in phases:
        key = phase.update, phase.name
        if key not in together:
            together[key] = phase
            continue
        first = together[key]
        later = tuple((first.seconds + seconds, live, held) for seconds, live, held in phase.timeline)
        reserved = [peak for peak in (first.reserved_peak, phase.reserved_peak) if peak is not None]
        together[key] = Phase(
            *key,
            enter=first.enter,
            peak=max(first.peak, phase.peak),
            exit=phase.exit,
            reserved_peak=max(reserved, default=None),
            seconds=first.seconds + phase.seconds,
            timeline=first.timeline + later,
        )
    return list(together.values())
