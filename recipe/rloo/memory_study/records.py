"""What a cell of the study leaves behind: its outcome, and a record of each phase of each update."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipe.rloo.memory_study.arms import Arm

COMPLETED, OOM, DIVERGED, FAILED, REFUSED, TIMEOUT = "completed", "oom", "diverged", "failed", "refused", "timeout"

EXIT_CODES = {COMPLETED: 0, FAILED: 1, REFUSED: 2, OOM: 3, DIVERGED: 4, TIMEOUT: 5}
"""Exit code of each outcome."""
WORST_FIRST = (FAILED, DIVERGED, TIMEOUT, REFUSED, OOM, COMPLETED)
"""A study ends with the exit code of the first of these that one of its cells has."""

BYTE_TRACKER, SIMULATED_ALLOCATOR, DEVICE_ALLOCATOR = "byte tracker", "simulated allocator", "device allocator"
"""Values of ``measured_by``: real tensors on a CPU, fake tensors on a fake GPU, a real GPU."""

THIS_RUN = "this run"
"""Value of ``values_from`` where the measured run itself had values."""


class OutOfMemory(RuntimeError):  # noqa: N818 - the name of the event, as in torch
    """A device, or the limit set for it, had no room for a tensor.

    Args:
        phase: Phase of the update, for example ``backward``.
        requested_bytes: Size of the block that was refused.
        held_bytes: Bytes that the process held at that moment.
        shape: Shape and dtype of the tensor at fault, for example ``[8, 3115, 151669] float32``. Empty = unknown.
        peak_bytes: Highest number of bytes held before. None = ``held_bytes``.
    """

    def __init__(self, phase: str, requested_bytes: int, held_bytes: int, shape: str = "", peak_bytes: int | None = None) -> None:
        """Keep the figures beside the message."""
        super().__init__(f"{phase}: no room for {requested_bytes:,} bytes {shape} beside the {held_bytes:,} that are held")
        self.phase, self.requested_bytes, self.held_bytes, self.shape = phase, requested_bytes, held_bytes, shape
        self.peak_bytes = held_bytes if peak_bytes is None else peak_bytes


@dataclass(frozen=True)
class UpdateRecord:
    """One phase of one update, as the measuring process saw it. None = not measured."""

    update: int
    """Number of the update, from 0. A warm-up update has number -1, and enters no figure."""
    phase: str
    """rollout, old_log_prob, reference, reward, forward, backward, optimizer or weight_sync."""
    rows: int
    """Rows of the update, over all its micro-batches."""
    prompt_len: int
    """Tokens of a prompt as the model gets it."""
    response_len: int
    """Tokens of a response."""
    total_tokens: int
    """Tokens of all rows: ``rows * (prompt_len + response_len)`` where nothing is padded or shared."""
    dropped_tokens: int
    """Prompt tokens that truncation removed, over all rows."""
    vocab: int
    """Size of the vocabulary."""
    dtype: str
    """Of the weights, and of autocast where there is one, for example ``float32, autocast bfloat16``."""
    ids_sha256: str
    """Hash of the ids and the mask of all rows in prompt-major order, as the model gets them."""
    allocated_enter: int
    """Live bytes when the phase begins."""
    allocated_peak: int
    """Highest live bytes of the phase."""
    allocated_exit: int
    """Live bytes when the phase ends."""
    reserved_peak: int | None
    """Highest bytes that the caching allocator held, live or cached."""
    loss: float | None
    """Loss of the whole update, the same in each of its phases."""
    grad_norm: float | None
    """Norm of the gradient of the whole update, before it is clipped."""
    seconds: float
    """Duration of the phase. On fake tensors this is the time of the simulation."""
    measured_by: str
    """Source of the bytes: BYTE_TRACKER, SIMULATED_ALLOCATOR or DEVICE_ALLOCATOR."""
    values_from: str = THIS_RUN
    """Source of loss and gradient norm. Fake tensors have no values: then it says at which shape the same program ran."""
    timeline: tuple[tuple[float, int, int | None], ...] = ()
    """(seconds since the phase began, live bytes, reserved bytes) at each turning point. Empty = only enter, peak and exit."""


@dataclass(frozen=True)
class Cell:
    """One measurement: an arm, once, in a process of its own."""

    arm: Arm
    repeat: int
    seed: int
    device: str
    """``cpu``, ``fake`` or ``cuda``."""
    limit_bytes: int | None
    """Largest number of bytes on the device. None = no limit."""
    shapes: str = "published"
    """Name of the shapes: ``published`` or ``small``."""
    documents: str | None = None
    """A file or folder with documents for the prompt. None = a document that is made locally."""

    @property
    def name(self) -> str:
        """A name for files, unique in the study."""
        return f"{self.arm.cell}_r{self.repeat}" + ("" if self.limit_bytes is None else "_limited")


@dataclass(frozen=True)
class Failure:
    """Why a cell did not complete. None = does not apply or unknown."""

    error: str
    """Type of the exception, or what ended the process."""
    message: str
    phase: str = ""
    requested_bytes: int | None = None
    held_bytes: int | None = None
    shape: str = ""
    peak_before_failure: int | None = None
    """Highest bytes before the failure. It never enters a mean, a saving or a bar."""


@dataclass(frozen=True)
class CellResult:
    """What became of a cell."""

    cell: Cell
    outcome: str
    """One of the keys of EXIT_CODES."""
    records: tuple[UpdateRecord, ...] = ()
    failure: Failure | None = None
    started: float = 0.0
    """Seconds since 1970."""
    seconds: float = 0.0
    """Duration of the process."""
    host_rss: int | None = None
    """Largest resident memory of the process, bytes."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of the packages, and the device."""

    @property
    def exit_code(self) -> int:
        """Exit code of the outcome."""
        return EXIT_CODES[self.outcome]


def worst(outcomes: set[str]) -> str:
    """Return the outcome that a study with these outcomes has."""
    return next((outcome for outcome in WORST_FIRST if outcome in outcomes), COMPLETED)


def write_result(path: Path, result: CellResult) -> None:
    """Write a result as JSON, completely or not at all."""
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(json.dumps(dataclasses.asdict(result), indent=1) + "\n", encoding="utf-8")
    aside.replace(path)


def read_result(path: Path) -> CellResult:
    """Return the result that a file holds."""
    entries: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    cell = entries["cell"]
    failure = entries["failure"]
    return CellResult(
        **{
            **entries,
            "cell": Cell(**{**cell, "arm": Arm(**cell["arm"])}),
            "records": tuple(_record(record) for record in entries["records"]),
            "failure": None if failure is None else Failure(**failure),
        }
    )


def _record(entries: dict[str, Any]) -> UpdateRecord:
    return UpdateRecord(**{**entries, "timeline": tuple(tuple(point) for point in entries["timeline"])})
