"""Peak memory of one phase in one process: the allocator's counters on a GPU, the byte tracker on a CPU."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from codetiming import Timer

from verl_memopt.distributed import device as device_room
from verl_memopt.observe.byte_tracker import DEVICE, ByteTracker
from verl_memopt.observe.device_ledger import fsdp_kinds, ledger_of

logger = logging.getLogger(__name__)

MIB = 2**20
GIB = 2**30


@dataclass(frozen=True)
class PhaseMemory:
    """Memory and time of one phase. A figure that the device or the run does not have is None, never 0."""

    name: str
    seconds: float
    """Wall time of the phase in this process."""
    peak_allocated_bytes: int | None
    """Peak of live tensors, without those of a sleeping engine. The allocator counts on a GPU, and the byte tracker on a CPU."""
    allocated_bytes: int | None
    """Live tensors at the end of the phase, without those of a sleeping engine."""
    peak_reserved_bytes: int | None
    """Peak of the caching allocator's device memory, without memory that slept at that moment. GPU only."""
    device_used_bytes: int | None
    """Total minus free memory of the device at the end of the phase, including other processes and the engine. GPU only."""
    host_rss_bytes: int
    """Resident memory of the process at the end of the phase. A rough host figure, not for ratios or tests."""
    kinds: dict[str, int] = field(default_factory=dict)
    """Bytes by kind at the peak, if the tracker ran."""
    kind_peaks: dict[str, int] = field(default_factory=dict)
    """Peak bytes of each kind in the phase, if the tracker ran. Kinds peak at different moments."""
    host_buffer_bytes: int = 0
    """Peak bytes in host buffers, which hold data moved off the device."""
    entered_bytes: int | None = None
    """Live tensors at the start of the phase, without those of a sleeping engine."""
    compiles: int | None = None
    """Number of graphs that were compiled for the trainer's functions. None if the process compiles none."""
    compile_fallbacks: int | None = None
    """Number of calls of these functions that ran uncompiled."""
    mean_peak_bytes: int | None = None
    """Mean of the processes' peaks of live tensors. None for a single process, or if none is measured."""
    worst_rank: int | None = None
    """Rank of the process with the highest peak. None if ``mean_peak_bytes`` is None."""


DEVICE_FIGURES = ("peak_allocated_bytes", "allocated_bytes", "peak_reserved_bytes", "device_used_bytes")
"""Fields of ``PhaseMemory`` with bytes of a device. A field that is not measured is None."""
COMPILE_FIGURES = ("compiles", "compile_fallbacks")


@dataclass(frozen=True)
class MemoryProbe:
    """Measures the phases of one process on one device.

    Attributes:
        device: The device.
        resident: Yields (kind, tensor) for all tensors that exist before a phase. Called only if the tracker runs.
        limit_bytes: On a CPU, the limit of the live bytes in a tracked phase. On a GPU, the limit of the reserved bytes in any
            phase. A GPU's allocator refuses more, if its cap can express the limit; otherwise the probe raises an error at the
            end of the phase.
        kinds_on_gpu: Also run the tracker in tracked phases on a GPU, to get the bytes by kind. torch.compile must be off.
    """

    device: torch.device
    resident: Callable[[], Iterable[tuple[str, torch.Tensor]]]
    limit_bytes: int | None = None
    kinds_on_gpu: bool = False

    @contextmanager
    def phase(self, name: str, track: bool, kind: str = "activations") -> Iterator[Callable[[], PhaseMemory]]:
        """Measure the body. The yielded function returns the figures once the body has ended.

        Args:
            name: Name of the phase.
            track: Count live tensor bytes on a CPU, which slows the phase. On a GPU the allocator always counts them.
            kind: Kind of tensors without a label.
        """
        measured: list[PhaseMemory] = []
        started = time.perf_counter()
        on_gpu = device_room.is_gpu(self.device)
        tracked = track and (self.kinds_on_gpu or not on_gpu)
        tracker: AbstractContextManager[dict] = self._tracker(name, kind) if tracked else nullcontext({})
        allocator: AbstractContextManager[dict] = self._allocator(name) if on_gpu else nullcontext({})
        with tracker as counted, allocator as read:
            yield lambda: measured[0]
            # Wait for the work that is queued on the GPU. It belongs to this phase, and would else be counted in the next one.
            device_room.synchronize(self.device)
        figures: dict[str, Any] = {**dict.fromkeys(DEVICE_FIGURES), **counted, **read}
        memory = PhaseMemory(name, time.perf_counter() - started, **figures, host_rss_bytes=host_rss_bytes())
        measured.append(memory)
        logger.debug("%s: %.3f s %s", name, memory.seconds, memory_words(memory))

    @contextmanager
    def _allocator(self, name: str) -> Iterator[dict]:
        ledger = ledger_of(self.device)
        # No wait here: the phase before has waited for its work. Only copies of parameters can be queued now, and they may run
        # during this phase.
        ledger.reset_peaks()
        figures: dict = {"entered_bytes": ledger.allocated()}
        yield figures
        figures.update(
            peak_allocated_bytes=ledger.peak_allocated(),
            allocated_bytes=ledger.allocated(),
            peak_reserved_bytes=ledger.peak_reserved(),
            device_used_bytes=ledger.used(),
        )
        ledger.check(name)
        # Torch's cap is at most the device's size and counts sleeping memory, so it cannot express every limit near that size.
        if self.limit_bytes is not None and ledger.peak_reserved() > self.limit_bytes:
            raise torch.OutOfMemoryError(
                f"the allocator held {ledger.peak_reserved()} bytes, and the limit is {self.limit_bytes}"
            )

    @contextmanager
    def _tracker(self, name: str, kind: str) -> Iterator[dict]:
        figures: dict = {}
        with ByteTracker(self.device, default_kind=kind, limit_bytes=self.limit_bytes) as tracker, fsdp_kinds():
            self._mark_resident(tracker)
            entered = tracker.total()
            tracker.enter(name)
            yield figures
        peak = tracker.peaks[DEVICE]
        figures.update(peak_allocated_bytes=peak.bytes, allocated_bytes=tracker.total(), kinds=peak.kinds)
        figures.update(kind_peaks=tracker.most(), entered_bytes=entered)

    def _mark_resident(self, tracker: ByteTracker) -> None:
        # This is a function of its own, so that no local variable keeps a tensor alive that the phase frees.
        for kind, tensor in self.resident():
            tracker.mark(kind, [tensor])


def combine(memories: Sequence[PhaseMemory], driver_rss_bytes: int = 0) -> PhaseMemory:
    """Combine the figures of one phase over all processes: the largest of each device figure, and the sum of host memory.

    ``memories``: one entry per rank, in order of rank. The bytes by kind are those of the process with the highest peak.
    """
    assert len({memory.name for memory in memories}) == 1, [memory.name for memory in memories]

    def largest(name: str) -> int | None:
        return max((value for memory in memories if (value := getattr(memory, name)) is not None), default=None)

    peaks = {rank: peak for rank, memory in enumerate(memories) if (peak := memory.peak_allocated_bytes) is not None}
    several = len(memories) > 1 and bool(peaks)
    device: dict[str, Any] = {name: largest(name) for name in (*DEVICE_FIGURES, "entered_bytes", *COMPILE_FIGURES)}
    return PhaseMemory(
        name=memories[0].name,
        seconds=max(memory.seconds for memory in memories),
        host_rss_bytes=sum(memory.host_rss_bytes for memory in memories) + driver_rss_bytes,
        kinds=max(memories, key=lambda memory: memory.peak_allocated_bytes or 0).kinds,
        host_buffer_bytes=sum(memory.host_buffer_bytes for memory in memories),
        mean_peak_bytes=sum(peaks.values()) // len(peaks) if several else None,
        worst_rank=max(peaks, key=peaks.__getitem__) if several else None,
        **device,
    )


def sum_of_counted(memories: Sequence[PhaseMemory], name: str) -> int | None:
    """Return the sum of a field over all calls or phases that have it; None if none has it."""
    values = [value for memory in memories if (value := getattr(memory, name)) is not None]
    return sum(values) if values else None


def host_rss_bytes() -> int:
    """Return the resident memory of this process in bytes.

    It includes shared pages, and freed blocks that the allocator keeps. It shows roughly how much memory the host needs, but do
    not use it for a ratio.
    """
    return psutil.Process().memory_info().rss


def memory_words(memory: PhaseMemory) -> str:
    sizes = {
        "live_mib": memory.allocated_bytes,
        "reserved_mib": memory.peak_reserved_bytes,
        "peak_mib": memory.peak_allocated_bytes,
        "host_rss_mib": memory.host_rss_bytes,
    }
    return " ".join(f"{name}={size / MIB:.1f}" for name, size in sizes.items() if size is not None)


# When each phase of a step began, and its seconds, as the driver measures them.


@dataclass(frozen=True)
class Span:
    """One stretch of a phase: its name, when it began (seconds since 1970) and how long it took."""

    name: str
    started: float
    seconds: float


REWARD_IN_ROLLOUT = "reward_in_rollout"
"""Name of the time in which reward functions score answers while other answers are generated. It is a part of ``gen``, and not a
phase of its own."""


_EPOCH = time.time() - time.monotonic()


def wall_time() -> float:
    # Seconds since 1970. Setting the system's clock while the process runs does not change this one.
    return _EPOCH + time.monotonic()


class PhaseClock:
    """Times phases by name. A phase that runs twice in a step is summed. Phases may be nested."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.within: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        # A body that raises is not recorded.
        started = wall_time()
        with Timer(logger=None) as timer:
            yield
        self.spans.append(Span(name, started, timer.last))

    def add_span(self, name: str, started: float, seconds: float) -> None:
        # Add a phase that was measured elsewhere and may overlap with others. `started` is in seconds since 1970.
        self.spans.append(Span(name, started, seconds))

    def add(self, name: str, seconds: float) -> None:
        """Add time that was spent inside a phase and measured elsewhere. It is not a span, because the phase is one already."""
        self.within[name] = self.within.get(name, 0.0) + seconds

    def timings(self) -> dict[str, float]:
        # Return ``timing_s/<phase>`` of the spans since the last :meth:`take`, and of the times inside them.
        seconds = {f"timing_s/{name}": value for name, value in self.within.items()}
        for span in self.spans:
            seconds[f"timing_s/{span.name}"] = seconds.get(f"timing_s/{span.name}", 0.0) + span.seconds
        return seconds

    def take(self) -> list[Span]:
        spans, self.spans, self.within = self.spans, [], {}
        return spans
