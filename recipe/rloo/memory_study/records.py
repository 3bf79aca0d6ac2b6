"""What a cell of the study leaves behind: its outcome, and a record of each phase of each update. None = not measured."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipe.rloo.memory_study.arms import Arm

COMPLETED, OOM, DIVERGED, FAILED, REFUSED, TIMEOUT = "completed", "oom", "diverged", "failed", "refused", "timeout"
EXIT_CODES = {COMPLETED: 0, FAILED: 1, REFUSED: 2, OOM: 3, DIVERGED: 4, TIMEOUT: 5}
WORST_FIRST = (FAILED, DIVERGED, TIMEOUT, REFUSED, OOM, COMPLETED)
"""A study ends with the exit code of the first of these that one of its cells has."""
BYTE_TRACKER, SIMULATED_ALLOCATOR, DEVICE_ALLOCATOR = "byte tracker", "simulated allocator", "device allocator"
"""Values of ``measured_by``: real tensors on a CPU, fake tensors on a fake GPU, a real GPU."""

Point = tuple[float, int, int | None]
"""Seconds since the phase began, live bytes, reserved bytes."""


class OutOfMemory(RuntimeError):  # noqa: N818 - the name of the event, as in torch
    """A device, or the limit set for it, had no room for a tensor, ``shape``. ``peak_bytes``: held before, at most."""

    def __init__(self, phase: str, requested_bytes: int, held_bytes: int, shape: str = "", peak_bytes: int | None = None) -> None:
        super().__init__(phase, requested_bytes, held_bytes, shape, peak_bytes)
        self.phase, self.requested_bytes, self.held_bytes, self.shape = phase, requested_bytes, held_bytes, shape
        self.peak_bytes = held_bytes if peak_bytes is None else peak_bytes

    def __str__(self) -> str:
        asked, held = f"{self.requested_bytes:,}", f"{self.held_bytes:,}"
        return f"{self.phase}: no room for {asked} bytes {self.shape} beside the {held} that are held"


@dataclass(frozen=True)
class Phase:
    """What a phase of an update held, in bytes."""

    update: int
    phase: str
    allocated_enter: int
    allocated_peak: int
    allocated_exit: int
    reserved_peak: int | None
    """Of what the caching allocator held, live or cached."""
    seconds: float
    """On fake tensors the time of the simulation."""
    timeline: tuple[Point, ...] = ()


@dataclass(frozen=True, kw_only=True)
class UpdateRecord(Phase):
    """A phase, and what ran in it."""

    rows: int
    prompt_len: int
    response_len: int
    total_tokens: int
    dropped_tokens: int
    """Prompt tokens that truncation removed, over all rows."""
    vocab: int
    dtype: str
    """Of the weights, and of autocast where there is one."""
    ids_sha256: str
    """Of ids and mask of all rows, as the model gets them. Empty = the arm samples its own answers."""
    loss: float | None
    grad_norm: float | None
    """Of the whole update, before it is clipped."""
    measured_by: str
    values_from: str = "this run"
    """Source of loss and gradient norm. Fake tensors have no values: then it says at which shape the same program ran."""


@dataclass(frozen=True)
class Cell:
    """One measurement: an arm, once, in a process of its own."""

    arm: Arm
    repeat: int
    seed: int
    device: str
    limit_bytes: int | None
    shapes: str = "published"
    documents: str | None = None

    @property
    def name(self) -> str:
        """A name for files, unique in the study."""
        return f"{self.arm.cell}_r{self.repeat}" + ("" if self.limit_bytes is None else "_limited")


@dataclass(frozen=True)
class Failure:
    """Why a cell did not complete. Its highest bytes before that never enter a mean, a saving or a bar."""

    error: str
    message: str
    phase: str = ""
    requested_bytes: int | None = None
    held_bytes: int | None = None
    shape: str = ""
    peak_before_failure: int | None = None


@dataclass(frozen=True)
class CellResult:
    """What became of a cell."""

    cell: Cell
    outcome: str
    records: tuple[UpdateRecord, ...] = ()
    failure: Failure | None = None
    started: float = 0.0
    seconds: float = 0.0
    host_rss: int | None = None
    """Largest resident memory of the process, bytes."""
    versions: dict[str, str] = field(default_factory=dict)


def worst(outcomes: set[str]) -> str:
    return next((outcome for outcome in WORST_FIRST if outcome in outcomes), COMPLETED)


def write_result(path: Path, result: CellResult) -> None:
    """Write a result as JSON, completely or not at all."""
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(json.dumps(dataclasses.asdict(result), indent=1) + "\n", encoding="utf-8")
    aside.replace(path)


def read_result(path: Path) -> CellResult:
    entries: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    cell, failure, records = entries["cell"], entries["failure"], entries["records"]
    for record in records:
        record["timeline"] = tuple(map(tuple, record["timeline"]))
    entries["cell"] = Cell(**{**cell, "arm": Arm(**cell["arm"])})
    entries["records"] = tuple(UpdateRecord(**record) for record in records)
    entries["failure"] = failure and Failure(**failure)
    return CellResult(**entries)
