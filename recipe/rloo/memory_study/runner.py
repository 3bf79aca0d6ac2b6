"""Run cells: each in a process of its own, with a time limit, its outcome on file, and in shuffled order."""

from __future__ import annotations

import dataclasses
import importlib
import multiprocessing
import os
import platform
import random
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import wait
from pathlib import Path

from recipe.rloo.memory_study.arms import Arm, larger
from recipe.rloo.memory_study.monitor import PERIOD_SECONDS, sampling
from recipe.rloo.memory_study.records import (
    COMPLETED,
    EXIT_CODES,
    FAILED,
    OOM,
    REFUSED,
    TIMEOUT,
    Cell,
    CellResult,
    Failure,
    OutOfMemory,
    UpdateRecord,
    read_result,
    write_result,
)
from verl_memopt.errors import ConfigError

MEASURE = "recipe.rloo.memory_study.measure_cell:measure_cell"
"""Module and name of the function that measures a cell."""
PACKAGES = ("torch", "transformers", "verl-memopt")
CELLS, SAMPLES = "cells", "samples"
"""Folders of the results: one JSON and one log for each cell, and the device's samples."""

Measure = Callable[[Cell], Sequence[UpdateRecord]]


@dataclass(frozen=True)
class How:
    """How the cells are run."""

    out: Path
    """Folder of the results."""
    measure: str = MEASURE
    """Module and name of the function that measures a cell."""
    time_limit: float = 600.0
    """Seconds after which a cell is ended."""
    jobs: int = 1
    """Cells that run at the same time. One on a GPU, whose memory they would share."""
    period: float = PERIOD_SECONDS
    """Seconds between two readings of the device."""
    documents: str | None = None
    """A file or folder with documents for the prompts. None = a document that is made locally."""
    preload: tuple[str, ...] = ()
    """Modules that the server imports from which the processes are forked. Empty = that of ``measure``."""


def shuffled(cells: Sequence[Cell], seed: int) -> list[Cell]:
    """Return the cells in an order that only the seed decides, so that no arm always runs first."""
    order = list(cells)
    random.Random(seed).shuffle(order)
    return order


def run_study(
    arms: Sequence[Arm], repeats: int, seed: int, device_of: Callable[[Arm], str], limit_bytes: int | None, how: How,
    more_ks: bool = True, planned: list[Cell] | None = None,
) -> Iterator[CellResult]:  # fmt: skip
    """Run the arms, then the larger group sizes of those that completed, and yield each result as it comes.

    A simulated cell that does not fit below the limit runs once more without one. That shows what it would have needed. It has a
    file of its own, and enters no bar.

    Args:
        arms: The arms at the published group sizes.
        repeats: Processes for each arm.
        seed: Seed of ids and weights, and of the order.
        device_of: Returns the device of an arm: ``cpu``, ``fake`` or ``cuda``.
        limit_bytes: Largest number of bytes on the device. None = no limit.
        how: How the cells are run.
        more_ks: Whether the larger group sizes run too.
        planned: Gets the cells as they are decided on: the larger ones only when the smaller ones have ended.
    """
    wave, ran, completed = list(arms), set[Arm](), set[Arm]()
    while wave:
        cells = [
            Cell(arm, repeat, seed, device_of(arm), limit_bytes, documents=how.documents)
            for arm in wave
            for repeat in range(repeats)
        ]
        _forget(cells, how.out)
        planned = [] if planned is None else planned
        planned += cells
        results = list[CellResult]()
        for result in run_cells(shuffled(cells, seed), how):
            results.append(result)
            yield result
        too_large = [result.cell for result in results if result.outcome == OOM and result.cell.device == "fake"]
        without_limit = [dataclasses.replace(cell, limit_bytes=None) for cell in too_large if cell.repeat == 0]
        planned += without_limit
        yield from run_cells(without_limit, how)
        bad = {result.cell.arm for result in results if result.outcome != COMPLETED}
        completed |= {arm for arm in wave if arm not in bad}
        ran |= set(wave)
        wave = [arm for arm in larger(completed) if arm not in ran] if more_ks else []


def run_cells(cells: Sequence[Cell], how: How) -> Iterator[CellResult]:
    """Run cells, each in a fresh process, and yield their results as they end."""
    (how.out / CELLS).mkdir(parents=True, exist_ok=True)
    waiting, running = list(cells), list[_Running]()
    try:
        while waiting or running:
            while waiting and len(running) < how.jobs:
                running.append(_Running(waiting.pop(0), how))
            nearest = min(each.deadline for each in running)
            wait([each.process.sentinel for each in running], max(0.0, nearest - time.monotonic()))
            for each in [each for each in running if each.has_ended() or each.is_late()]:
                running.remove(each)
                yield each.result()
    finally:
        for each in running:
            each.end()


def result_path(out: Path, cell: Cell) -> Path:
    """Return the file of a cell's result."""
    return out / CELLS / f"{cell.name}.json"


def _forget(cells: Sequence[Cell], out: Path) -> None:
    """Remove earlier results of cells, with and without a limit: a table of both would compare different runs."""
    for cell in cells:
        for limit_bytes in (None, 1):
            result_path(out, dataclasses.replace(cell, limit_bytes=limit_bytes)).unlink(missing_ok=True)


class _Running:
    """A cell in a process of its own, forked from a server which has only imported modules; on a GPU with its sampler."""

    def __init__(self, cell: Cell, how: How) -> None:
        self.cell, self.how, self.path = cell, how, result_path(how.out, cell)
        self.path.unlink(missing_ok=True)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(how.preload) or [how.measure.partition(":")[0]])
        self.process = context.Process(target=_cell_main, args=(cell, how), name=cell.name)
        self.started, self.deadline = time.time(), time.monotonic() + how.time_limit
        self.sampling = ExitStack()
        sampler = None
        if cell.device == "cuda":
            (how.out / SAMPLES).mkdir(exist_ok=True)
            sampler = self.sampling.enter_context(sampling(how.out / SAMPLES / f"{cell.name}.csv", how.period))
        self.process.start()
        if sampler is not None and self.process.pid is not None:
            sampler.watch(self.process.pid)

    def has_ended(self) -> bool:
        return not self.process.is_alive()

    def is_late(self) -> bool:
        return time.monotonic() >= self.deadline

    def end(self) -> None:
        """End the process and its sampler, by force where it must be."""
        for signal in (self.process.terminate, self.process.kill):
            if self.process.is_alive():
                signal()
                self.process.join(5)
        self.sampling.close()

    def result(self) -> CellResult:
        """Return what became of the cell, and write it where the process could not."""
        late = not self.has_ended()
        self.end()
        if self.path.exists() and not late:
            result = read_result(self.path)
            assert self.process.exitcode == result.exit_code, (self.cell.name, self.process.exitcode, result.outcome)
            return result
        if late:
            failure = Failure("Timeout", f"ended after {self.how.time_limit:g} seconds")
        else:
            failure = Failure("ProcessDied", _death(self.process.exitcode))
        seconds = time.time() - self.started
        result = CellResult(self.cell, TIMEOUT if late else FAILED, (), failure, self.started, seconds, None, _versions())
        write_result(self.path, result)
        return result


def _death(code: int | None) -> str:
    if code == -9:
        return "killed by signal 9, as a host does that has no memory left"
    return f"killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code} and left no result"


def _cell_main(cell: Cell, how: How) -> None:
    """Run a cell in this process, its output in a log, and end with the exit code of its outcome."""
    log = os.open(result_path(how.out, cell).with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    module, _, name = how.measure.partition(":")
    try:
        measure_and_record(cell, getattr(importlib.import_module(module), name), result_path(how.out, cell))
    except Exception as error:
        traceback.print_exc()
        sys.stderr.flush()
        raise SystemExit(EXIT_CODES[outcome_of(error)]) from error


def measure_and_record(cell: Cell, measure: Measure, path: Path) -> CellResult:
    """Measure a cell and write its result.

    Raises:
        Exception: Whatever ``measure`` raised, once its outcome is on file.
    """
    started = time.time()
    try:
        records = tuple(measure(cell))
    except Exception as error:
        write_result(path, _result(cell, outcome_of(error), (), failure_of(error), started))
        raise
    result = _result(cell, COMPLETED, records, None, started)
    write_result(path, result)
    return result


def _result(cell: Cell, outcome: str, records: tuple[UpdateRecord, ...], failure: Failure | None, started: float) -> CellResult:
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return CellResult(cell, outcome, records, failure, started, time.time() - started, largest, _versions())


def outcome_of(error: Exception) -> str:
    """Return the outcome of a cell that raised an error.

    Memory that ran out is ``oom``, whether this study, torch or the host said so. A setting that cannot work is ``refused``.
    """
    names = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, (OutOfMemory, MemoryError)) or names & {"OutOfMemoryError", "DeviceMemoryError"}:
        return OOM
    return REFUSED if isinstance(error, ConfigError) else FAILED


def failure_of(error: Exception) -> Failure:
    """Return what is kept of an error: its phase, the bytes asked for and held, and the tensor, where it knows them."""
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
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions
