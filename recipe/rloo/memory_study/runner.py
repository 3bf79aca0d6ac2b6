"""Runs cells: each in a process of its own, with a time limit, a result file, and on a GPU a sampler of the used memory."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import importlib
import multiprocessing
import os
import pkgutil
import platform
import random
import resource
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil

from recipe.rloo.memory_study.cells import (
    COMPLETED,
    CUDA,
    EXIT_CODES,
    FAILED,
    FAKE,
    MIB,
    OOM,
    REFUSED,
    TIMEOUT,
    Arm,
    Cell,
    CellResult,
    Failure,
    OutOfMemory,
    UpdateRecord,
    larger,
    read_result,
    write_result,
)
from verl_memopt.errors import ConfigError

MEASURE = "recipe.rloo.memory_study.measure:measure_cell"
PRELOAD = "recipe.rloo.memory_study.preload"
CELLS, SAMPLES = "cells", "samples"
"""Folders of the results: the first has one JSON file and one log per cell, and the second the samples of the device."""
Measure = Callable[[Cell], Sequence[UpdateRecord]]


@dataclass(frozen=True)
class How:
    out: Path
    measure: str = MEASURE
    """Module and name of the function that measures a cell."""
    time_limit: float = 600.0
    jobs: int = 1
    """Number of cells that run at the same time. On a GPU only one, because cells would share its memory."""
    preload: str = ""
    """Module that the fork server imports before it forks the processes of cells. Empty = the module of ``measure``."""

    def path(self, cell: Cell) -> Path:
        return self.out / CELLS / f"{cell.name}.json"


def run_study(
    arms: Sequence[Arm], cells_of: Callable[[Arm], list[Cell]], seed: int, how: How, more_ks: bool, planned: list[Cell]
) -> Iterator[CellResult]:
    """Run the arms, then the larger group sizes of those that completed, and yield each result as it comes.

    A simulated cell that does not fit below its limit runs once more without one. That shows what it would have needed. It has a
    file of its own, and enters no bar. ``planned`` gets the cells as they are decided on.
    """
    wave, ran, completed = list(arms), set[Arm](), set[Arm]()
    while wave:
        cells = [cell for arm in wave for cell in cells_of(arm)]
        # A table of runs with and without a limit would compare different runs.
        for cell in cells:
            for limit_bytes in (None, 1):
                how.path(dataclasses.replace(cell, limit_bytes=limit_bytes)).unlink(missing_ok=True)
        planned += cells
        results = list[CellResult]()
        for result in run_cells(shuffled(cells, seed), how):
            results.append(result)
            yield result
        too_large = [result.cell for result in results if result.outcome == OOM and result.cell.device == FAKE]
        without_limit = [dataclasses.replace(cell, limit_bytes=None) for cell in too_large if cell.repeat == 0]
        planned += without_limit
        yield from run_cells(without_limit, how)
        completed |= set(wave) - {result.cell.arm for result in results if result.outcome != COMPLETED}
        ran |= set(wave)
        wave = [arm for arm in larger(completed) if arm not in ran] if more_ks else []


def shuffled(cells: Sequence[Cell], seed: int) -> list[Cell]:
    """Return the cells in a random order that depends only on the seed, so that no arm always runs first."""
    return random.Random(seed).sample(cells, len(cells))


def run_cells(cells: Sequence[Cell], how: How) -> Iterator[CellResult]:
    """Run cells, each in a fresh process, and yield their results as they end.

    Only one thread starts processes and waits for them, because each ``Process.start`` polls every child.
    """
    (how.out / CELLS).mkdir(parents=True, exist_ok=True)
    waiting, running = list(cells), list[_Running]()
    try:
        while waiting or running:
            while waiting and len(running) < how.jobs:
                running.append(_Running(waiting.pop(0), how))
            nearest = min(each.deadline for each in running)
            wait([each.process.sentinel for each in running], max(0.0, nearest - time.monotonic()))
            for each in [each for each in running if not each.process.is_alive() or time.monotonic() >= each.deadline]:
                running.remove(each)
                yield each.result()
    finally:
        for each in running:
            each.end()


class _Running:
    """A cell in a process of its own, forked from a server that has only imported modules. On a GPU it has a sampler too."""

    def __init__(self, cell: Cell, how: How) -> None:
        self.cell, self.how, self.path = cell, how, how.path(cell)
        self.path.unlink(missing_ok=True)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([how.preload or how.measure.partition(":")[0]])
        self.process = context.Process(target=_cell_main, args=(cell, how), name=cell.name)
        self.started, self.deadline = time.time(), time.monotonic() + how.time_limit
        self.sampler = Sampler(how.out / SAMPLES / f"{cell.name}.csv") if cell.device == CUDA else None
        self.process.start()
        if self.sampler is not None:
            self.sampler.pid = self.process.pid

    def end(self) -> None:
        """End the process and its sampler. A process that does not terminate is killed."""
        for signal in (self.process.terminate, self.process.kill):
            if self.process.is_alive():
                signal()
                self.process.join(5)
        if self.sampler is not None:
            self.sampler.close()

    def result(self) -> CellResult:
        """Return the result of the cell. If the process could not write it, write it here."""
        late = self.process.is_alive()
        self.end()
        if self.path.exists() and not late:
            return read_result(self.path)
        code = self.process.exitcode or 0
        died = f"killed by signal {-code}" if code < 0 else f"ended with code {code} and left no result"
        failure = Failure("ProcessDied", died + (", as a host does that has no memory left" if code == -9 else ""))
        if late:
            failure = Failure("Timeout", f"ended after {self.how.time_limit:g} seconds")
        seconds = time.time() - self.started
        result = CellResult(self.cell, TIMEOUT if late else FAILED, (), failure, self.started, seconds, None, _versions())
        write_result(self.path, result)
        return result


def _cell_main(cell: Cell, how: How) -> None:
    """Run a cell in this process, write its output to a log, and exit with the code of its outcome."""
    log = os.open(how.path(cell).with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    result = measured(cell, lambda cell: pkgutil.resolve_name(how.measure)(cell))
    write_result(how.path(cell), result)
    raise SystemExit(EXIT_CODES[result.outcome])


def measured(cell: Cell, measure: Measure) -> CellResult:
    """Measure a cell, and return its records or its failure. The traceback of an error is printed."""
    started, records, failure, outcome = time.time(), tuple[UpdateRecord, ...](), None, COMPLETED
    try:
        records = tuple(measure(cell))
    except Exception as error:  # noqa: BLE001 - the record keeps what became of the cell
        traceback.print_exc()
        outcome, failure = outcome_of(error), failure_of(error)
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return CellResult(cell, outcome, records, failure, started, time.time() - started, largest, _versions())


def outcome_of(error: Exception) -> str:
    """Return the outcome of a cell that raised an error.

    The outcome is ``oom`` if memory ran out, by an error of this study, of torch or of the host. It is ``refused`` if a setting
    cannot work.
    """
    names = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, (OutOfMemory, MemoryError)) or names & {"OutOfMemoryError", "DeviceMemoryError"}:
        return OOM
    return REFUSED if isinstance(error, ConfigError) else FAILED


def failure_of(error: Exception) -> Failure:
    """Return the record of an error: its phase, the requested and the held bytes, and the tensor, if the error has them."""
    known = getattr(error, "figures", error)
    requested = getattr(known, "requested_bytes", getattr(known, "asked_bytes", None))
    held = getattr(known, "held_bytes", getattr(known, "num_bytes", None))
    return Failure(
        error=type(error).__name__,
        message=" ".join(str(error).split())[:500],
        phase=getattr(known, "phase", ""),
        requested_bytes=requested,
        held_bytes=held,
        shape=getattr(error, "shape", ""),
        peak_before_failure=getattr(error, "peak_bytes", held),
    )


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("torch", "transformers", "verl-memopt"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions


# The sampler of a GPU. It runs in a thread of this process, which only waits. The measured process is another one.

PUBLISHED_COLUMNS = (
    "timestamp", "datetime", "gpu_memory_allocated_mb", "gpu_memory_reserved_mb", "gpu_memory_free_mb", "gpu_memory_total_mb",
    "gpu_utilization_percent", "cpu_memory_used_mb", "cpu_memory_percent", "cpu_usage_percent",
)  # fmt: skip
"""Columns of the published CSV. ``gpu_memory_allocated_mb`` is the memory of the whole device in use, as it was there.
``gpu_memory_reserved_mb`` stays empty: NVML cannot tell live tensors from cached blocks. The published files have 0."""
SAMPLE_COLUMNS = (*PUBLISHED_COLUMNS, "device_used", "process_used", "idle_used")
"""The published columns, and used bytes: of the device, of the measured process, and of the device before the cell began."""
PERIOD_SECONDS = 0.02


class NoNvmlError(Exception):
    """NVML is not available on this machine. The message says why."""


def open_device(index: int = 0) -> tuple[Any, Any]:
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError as error:
        raise NoNvmlError("nvidia-ml-py is not installed (pip install nvidia-ml-py)") from error
    try:
        nvml.nvmlInit()
        return nvml, nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        raise NoNvmlError(f"NVML: {error}") from error


class Sampler:
    """Writes a reading of the device into a CSV file every 20 ms until it is closed. Without NVML it writes nothing."""

    def __init__(self, path: Path, period: float = PERIOD_SECONDS) -> None:
        self.path, self.period, self.ended = path, period, threading.Event()
        self.pid: int | None = None
        """Id of the measured process, whose memory is read too."""
        self.thread = threading.Thread(target=self._run, daemon=True)
        with suppress(NoNvmlError):
            self.nvml, self.handle = open_device()
            self.idle_used = self.nvml.nvmlDeviceGetMemoryInfo(self.handle).used
            path.parent.mkdir(exist_ok=True)
            self.thread.start()

    def close(self) -> None:
        self.ended.set()
        if self.thread.ident is not None:
            self.thread.join()

    def _run(self) -> None:
        with self.path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, SAMPLE_COLUMNS, lineterminator="\n")
            writer.writeheader()
            due = time.monotonic()
            # A reading that takes longer than a period delays the next one. Its true time is in the row.
            while not self.ended.wait(max(0.0, due - time.monotonic())):
                writer.writerow(self._row(time.time()))
                due = max(due + self.period, time.monotonic())

    def _row(self, now: float) -> dict[str, Any]:
        nvml, handle, host = self.nvml, self.handle, psutil.virtual_memory()
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle) if self.pid is not None else ()
        return {
            "timestamp": round(now, 6),
            "datetime": datetime.datetime.fromtimestamp(now, tz=datetime.UTC).isoformat(),
            "gpu_memory_allocated_mb": round(memory.used / MIB, 3),
            "gpu_memory_reserved_mb": "",
            "gpu_memory_free_mb": round(memory.free / MIB, 3),
            "gpu_memory_total_mb": round(memory.total / MIB, 3),
            "gpu_utilization_percent": nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "cpu_memory_used_mb": round(host.used / MIB, 3),
            "cpu_memory_percent": host.percent,
            # interval=None: the mean since the last call, so that this call does not wait.
            "cpu_usage_percent": psutil.cpu_percent(interval=None),
            "device_used": memory.used,
            "process_used": next((each.usedGpuMemory for each in processes if each.pid == self.pid), ""),
            "idle_used": self.idle_used,
        }
