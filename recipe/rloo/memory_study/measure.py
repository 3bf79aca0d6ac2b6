"""Measures a cell: the bytes of each phase at the study's shapes, and loss and gradient norm of the same program.

A fake GPU has no values, and the baseline does not fit on a CPU. So every arm runs a second time, with real tensors, the same
vocabulary, the same number of rows, and a short prompt. Loss and gradient norm of every record come from that run. In it all
programs sum over the whole vocabulary at once, so that they round alike.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from recipe.rloo.memory_study.cells import (
    BYTE_TRACKER,
    CPU,
    CUDA,
    DEVICE_ALLOCATOR,
    FAKE,
    LEGACY,
    OWN_UPDATES,
    SIMULATED_ALLOCATOR,
    WHOLE_RUN,
    Arm,
    Cell,
    OutOfMemory,
    Phase,
    Point,
    UpdateRecord,
)
from recipe.rloo.memory_study.fake_device import DEVICE as FAKE_GPU
from recipe.rloo.memory_study.fake_device import CachingAllocator, NoRoom, fake_device
from recipe.rloo.memory_study.fake_guard import call_in_fake_process
from recipe.rloo.memory_study.shapes import SHAPES, Shapes, StudyBatch, make_batch, make_model, shortened
from recipe.rloo.memory_study.updates import (
    Options,
    PublishedTrainer,
    Values,
    build_model,
    own_policy,
    own_settings,
    train_own,
    whole_step,
)
from verl_memopt.distributed import device as device_room
from verl_memopt.errors import ConfigError
from verl_memopt.observe.byte_tracker import DEVICE, ByteTracker, DeviceLimitError

STEADY_EPOCHS = 2
"""Epochs of the updates in ``SAVINGS``. The first one creates the optimizer state. All later ones hold the same bytes."""
LEAST_SHARE = 0.005
"""A timeline omits changes of memory that are smaller than this fraction of the highest level."""


# Three counters of bytes. Each has a device, a source of figures, its changes as (``time.perf_counter()``, live, reserved), and
# - begin: start the peaks at the present level, and return the live bytes;
# - end: return the peak of the live bytes, the live bytes, and the peak of what an allocator held;
# - refusal: for an out-of-memory error, return requested bytes, held bytes, tensor, and peak.


class TrackerCounter(ByteTracker):
    """Counts real tensors on a CPU. There is no caching allocator, so nothing is reserved."""

    device = torch.device("cpu")
    source = BYTE_TRACKER

    def __init__(self, limit_bytes: int | None = None) -> None:
        super().__init__(limit_bytes=limit_bytes, default_kind="params")
        self.changes: list[Point] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        live = self.total()
        if not self.changes or self.changes[-1][1] != live:
            self.changes.append((time.perf_counter(), live, None))
        return result

    def begin(self, phase: str) -> int:
        self.enter(phase)
        return self.total()

    def end(self) -> tuple[int, int, None]:
        return self.peaks[DEVICE].bytes, self.total(), None

    def refusal(self, error: Exception) -> tuple[int, int, str, None] | None:
        if not isinstance(error, DeviceLimitError):
            return None
        return error.asked_bytes, error.num_bytes - error.asked_bytes, error.op, None

    def empty_cache(self) -> None:
        """Do nothing: there is no cache, only live tensors."""


class FakeCounter:
    """Reads the allocator of the fake GPU in whose context it runs."""

    device, source = FAKE_GPU, SIMULATED_ALLOCATOR

    def __init__(self, allocator: CachingAllocator) -> None:
        self.allocator, self.changes, self.empty_cache = allocator, allocator.changes, allocator.empty_cache

    def begin(self, phase: str) -> int:
        self.allocator.reset_peaks()
        return self.allocator.live

    def end(self) -> tuple[int, int, int]:
        return self.allocator.live_peak, self.allocator.live, self.allocator.reserved_peak

    def refusal(self, error: Exception) -> tuple[int, int, str, int] | None:
        if not isinstance(error, NoRoom):
            return None
        return error.requested_bytes, error.held_bytes, error.shape, self.allocator.reserved_peak


class DeviceCounter:
    """Reads the counters of torch's allocator on a GPU. The host waits for the device at both ends of a phase."""

    source = DEVICE_ALLOCATOR

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.changes: list[Point] = []

    def begin(self, phase: str) -> int:
        device_room.synchronize(self.device)
        device_room.reset_peak_memory(self.device)
        return device_room.memory_allocated(self.device)

    def end(self) -> tuple[int, int, int]:
        device_room.synchronize(self.device)
        peaks = device_room.max_memory_allocated(self.device), device_room.max_memory_reserved(self.device)
        return peaks[0], device_room.memory_allocated(self.device), peaks[1]

    def refusal(self, error: Exception) -> tuple[int, int, str, int] | None:
        if not isinstance(error, torch.OutOfMemoryError):
            return None
        held, peak = device_room.memory_reserved(self.device), device_room.max_memory_reserved(self.device)
        return requested_bytes(str(error)), held, "", peak

    def empty_cache(self) -> None:
        gc.collect()
        device_room.empty_cache(self.device)


Counter = TrackerCounter | FakeCounter | DeviceCounter


def requested_bytes(message: str) -> int:
    """Return the size that the message of a CUDA out-of-memory error names, in bytes; 0 = it names none."""
    size = re.search(r"Tried to allocate ([0-9.]+) ([KMG]?i?B|bytes)", message)
    if size is None:
        return 0
    unit = {"K": 2**10, "M": 2**20, "G": 2**30}.get(size.group(2)[0], 1)
    return int(float(size.group(1)) * unit)


class Meter:
    """Measures phases with a counter. If a phase is entered again in an update, both parts count as one phase."""

    def __init__(self, counter: Counter) -> None:
        self.counter, self.device, self.empty_cache = counter, counter.device, counter.empty_cache
        self._phases: dict[tuple[int, str], Phase] = {}

    @property
    def phases(self) -> list[Phase]:
        return list(self._phases.values())

    @contextmanager
    def phase(self, name: str, update: int = 0) -> Iterator[None]:
        """Measure the body."""
        counter = self.counter
        enter, first, started = counter.begin(name), len(counter.changes), time.perf_counter()
        try:
            yield
            figures = counter.end()
        except Exception as error:
            refusal = counter.refusal(error)
            if refusal is None:
                raise
            raise OutOfMemory(name, *refusal) from error
        points = thinned([(moment - started, live, held) for moment, live, held in counter.changes[first:]])
        peak, live, reserved = figures
        phase = Phase(update, name, enter, peak, live, reserved, time.perf_counter() - started, points)
        before = self._phases.get((update, name))
        self._phases[update, name] = phase if before is None else merged(before, phase)


def merged(first: Phase, second: Phase) -> Phase:
    """Return two entries of a phase as one: the first enter, the highest peaks, the last exit, the sum of the seconds."""
    reserved = [peak for peak in (first.reserved_peak, second.reserved_peak) if peak is not None]
    later = tuple((first.seconds + moment, live, held) for moment, live, held in second.timeline)
    return dataclasses.replace(
        first,
        allocated_peak=max(first.allocated_peak, second.allocated_peak),
        allocated_exit=second.allocated_exit,
        reserved_peak=max(reserved, default=None),
        seconds=first.seconds + second.seconds,
        timeline=first.timeline + later,
    )


def thinned(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return the points that a chart needs: the first, the last, and each point that differs from the last kept one.

    Differences below LEAST_SHARE of the highest level do not count. The highest live and the highest reserved level always stay.
    """
    if not points:
        return ()
    live, reserved = [point[1] for point in points], [point[2] or 0 for point in points]
    least = LEAST_SHARE * max(*live, *reserved)
    keep = {0, len(points) - 1, live.index(max(live)), reserved.index(max(reserved))}
    last = 0
    for place in range(1, len(points)):
        if max(abs(live[place] - live[last]), abs(reserved[place] - reserved[last])) > least:
            keep.add(place)
            last = place
    return tuple(points[place] for place in sorted(keep))


def measure_cell(cell: Cell) -> list[UpdateRecord]:
    return measure(cell, dataclasses.replace(SHAPES[cell.shapes], documents=cell.documents))


def measure(cell: Cell, shapes: Shapes) -> list[UpdateRecord]:
    """Return a record for each phase of each update of a cell. An update is one optimizer step; an arm takes ``epochs`` of them.

    Device ``fake`` measures this project's own updates on the CPU, and their records say so.
    """
    arm = cell.arm
    if cell.device not in (CPU, FAKE, CUDA):
        raise ConfigError(f"device={cell.device}: unknown. Use {CPU}, {FAKE} or {CUDA}.")
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_model(Path(scratch), shapes, cell.seed)
        batch = batch_of(arm, shapes, folder, cell.seed)
        if arm.update == WHOLE_RUN:
            return _whole_run(cell, shapes, folder, batch)
        epochs = shapes.epochs if arm.update == LEGACY else min(shapes.epochs, STEADY_EPOCHS)
        steps = dataclasses.replace(shapes, epochs=epochs)
        phases, source, _ = run_arm(arm, steps, cell.device, cell.limit_bytes, cell.seed, folder, Options(arm.micro_batch))
        short = dataclasses.replace(shortened(shapes), epochs=1)
        # What sums as the published program does is up to 5e-6 from its own gradient in float64, so it has its values from there.
        dtype = torch.float32 if arm.update in OWN_UPDATES else torch.float64
        options = Options(arm.micro_batch, autocast=False, for_values=True, dtype=dtype)
        _, _, values = run_arm(arm, short, CUDA if cell.device == CUDA else CPU, None, cell.seed, folder, options)
        prompt, name = short.truncated if batch.dropped else short.prompt, str(dtype).removeprefix("torch.")
        where = f"{name}, real tensors, prompt of {prompt}, answers of {short.response}"
        return [_record(cell, shapes, batch, source, phase, values, where) for phase in phases]


def batch_of(arm: Arm, shapes: Shapes, folder: Path, seed: int) -> StudyBatch:
    from transformers import AutoTokenizer

    return make_batch(arm, shapes, AutoTokenizer.from_pretrained(folder), seed)


def _record(
    cell: Cell, shapes: Shapes, batch: StudyBatch, source: str, phase: Phase, values: Values, values_from: str
) -> UpdateRecord:
    own, first = cell.arm.update in (*OWN_UPDATES, WHOLE_RUN), phase.update == 0
    return UpdateRecord(
        **vars(phase),
        rows=batch.rows,
        prompt_len=batch.prompt_len,
        response_len=batch.response_len,
        total_tokens=batch.rows * (batch.prompt_len + batch.response_len),
        dropped_tokens=batch.dropped,
        vocab=shapes.model.vocab_size,
        dtype="float32" if own else "float32, autocast bfloat16",
        # A whole step samples its own answers, so its ids cannot be compared with those of other arms.
        ids_sha256="" if cell.arm.update == WHOLE_RUN else batch.ids_sha256(),
        loss=values.loss if first else None,
        grad_norm=values.grad_norm if first else None,
        measured_by=source,
        values_from=values_from,
    )


def _whole_run(cell: Cell, shapes: Shapes, folder: Path, batch: StudyBatch) -> list[UpdateRecord]:
    source = BYTE_TRACKER if cell.device == CPU else DEVICE_ALLOCATOR
    records = []
    for memory in whole_step(cell.arm, shapes, folder, batch, cell.device):
        live, peak = memory.allocated_bytes or 0, memory.peak_allocated_bytes or 0
        phase = Phase(0, memory.name, live, peak, live, memory.peak_reserved_bytes, memory.seconds)
        records.append(_record(cell, shapes, batch, source, phase, Values(), "this run"))
    return records


Ran = tuple[list[Phase], str, Values]
"""Phases of one run of a program, what counted them, and the values of its first epoch."""


def run_arm(arm: Arm, shapes: Shapes, device: str, limit_bytes: int | None, seed: int, folder: Path, options: Options) -> Ran:
    """Run an arm once, with the model in ``folder``."""
    run = functools.partial(_run, arm, batch_of(arm, shapes, folder, seed), shapes, folder, options)
    if device == FAKE and arm.update not in OWN_UPDATES:
        ran = call_in_fake_process(f"{__name__}:run_on_fake_gpu", run, limit_bytes)
        if isinstance(ran, OutOfMemory):
            raise ran
        return ran
    if device == CUDA:
        gpu = device_room.local_device("cuda", 0)
        device_room.cap_device_memory(gpu, limit_bytes)
        return run(DeviceCounter(gpu))
    tracker = TrackerCounter(limit_bytes)
    with tracker:
        return run(tracker)


def run_on_fake_gpu(run: Callable[[Counter], Ran], limit_bytes: int | None) -> Ran | OutOfMemory:
    """Run an arm in a process that has the guard. Running out of memory is returned, because errors come back as text."""
    try:
        with fake_device(limit_bytes) as allocator:
            return run(FakeCounter(allocator))
    except OutOfMemory as error:
        return error


def _run(arm: Arm, batch: StudyBatch, shapes: Shapes, folder: Path, options: Options, counter: Counter) -> Ran:
    meter = Meter(counter)
    with ExitStack() as stack:
        with meter.phase("init"):
            train = _program(arm, shapes, folder, options, meter, stack)
        gc.collect()
        values = train(batch)
        phases = [phase for phase in meter.phases if phase.phase != "init"]
    return phases, counter.source, values


def _program(
    arm: Arm, shapes: Shapes, folder: Path, options: Options, meter: Meter, stack: ExitStack
) -> Callable[[StudyBatch], Values]:
    """Build the models of an arm on the meter's device and return its training step."""
    if arm.update in OWN_UPDATES:
        settings = own_settings(arm, shapes, folder)
        policy = stack.enter_context(own_policy(settings, shapes.epochs, meter.device))
        return lambda batch: train_own(policy, settings, shapes, options.for_values, meter, batch)
    fake = isinstance(meter.counter, FakeCounter)
    models = [build_model(folder, meter.device, fake, options.dtype) for _ in range(2)]
    if isinstance(meter.counter, ByteTracker):
        # The weights are read from a mapped file, without an operation that the tracker sees.
        for model in models:
            meter.counter.mark("params", model.parameters())
    trainer = PublishedTrainer(models[0], models[1], shapes, options, meter)
    return trainer.train if arm.update == LEGACY else lambda batch: trainer.train_mended(batch, arm.update)
