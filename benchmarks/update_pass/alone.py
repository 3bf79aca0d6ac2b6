"""The contest of a GPU: one contestant at a time on an empty device, each row given as soon as it is measured.

What befalls one contestant is a row of its own: a package that is not installed, memory that runs out, a wrong gradient, an error
in a peer's code. The next begins on a device from which everything of the last is gone.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from benchmarks.update_pass.contest import (
    CONTESTANTS,
    FAILED,
    NOT_RUN,
    OURS,
    OUT_OF_MEMORY,
    WRONG_GRADIENT,
    Row,
    WrongGradientError,
    checked,
    missing,
    not_installed,
    param_grad_bytes,
    peak,
    shared_fields,
    timed,
    too_large,
    unmeasured,
)
from benchmarks.update_pass.naive import Reference
from benchmarks.update_pass.sides import Job, Side
from verl_memopt.distributed import device as device_room
from verl_memopt.distributed.device import leave_process_group
from verl_memopt.observe.phase import MIB

logger = logging.getLogger(__name__)

LEFT_OVER = 64 * MIB
"""More than libraries keep for themselves; what is left beyond it is a former contestant's."""

ALLOCATION_FAILURES = ("out of memory", "ALLOC_FAILED")
"""In the message of a RuntimeError: memory that ran out where the allocator was not the one to ask for it."""


@dataclass
class TimeBudget:
    """Wall time for the contestants that are still to run, shared evenly among them. seconds: None = no limit."""

    seconds: float | None
    entries: int
    started: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        """Gives the seconds that are left; infinite without a limit."""
        return float("inf") if self.seconds is None else self.started + self.seconds - time.monotonic()

    def take(self) -> float:
        """Gives until when, by ``time.monotonic``, the next contestant may begin another repeat."""
        until = time.monotonic() + self.left() / max(self.entries, 1)
        self.entries -= 1
        return until


def run_alone(
    names: Sequence[str], job: Job, expected: Reference, repeats: int, most_bytes: float, budget: TimeBudget
) -> Iterator[Row]:
    """Yields a row per contestant, this project's first, so that they are there whatever a peer does to the device."""
    empty = _held(job.device)
    for name in sorted(names, key=lambda name: name not in OURS):
        start, until = _held(job.device), budget.take()
        row = _row(name, job, expected, repeats, most_bytes, until, budget)
        yield row if start is None or empty is None else _with_start(row, start, start - empty)


def _with_start(row: Row, start: int, left_over: int) -> Row:
    """Gives a row with what was on the device before its contestant, and a note where that is more than there should be."""
    note = f"{left_over / MIB:.0f} MiB of former contestants were on the device" if left_over > LEFT_OVER else ""
    return dataclasses.replace(row, start_bytes=start, note="; ".join(words for words in (row.note, note) if words))


def _row(name: str, job: Job, expected: Reference, repeats: int, most_bytes: float, until: float, budget: TimeBudget) -> Row:
    reason = missing(name)
    if reason is not None:
        return not_installed(name, job, expected, reason)
    if budget.left() <= 0:
        return unmeasured(name, job, expected, NOT_RUN, f"not run: the time budget of {budget.seconds:.0f} s was spent")
    if CONTESTANTS[name].least_bytes(job) > most_bytes:
        return too_large(name, job, expected, most_bytes)
    stage = ["building"]
    failure = None
    try:
        return _measured(name, job, expected, repeats, until, stage.append)
    except WrongGradientError as error:
        failure = WRONG_GRADIENT, str(error)
    except torch.OutOfMemoryError as error:
        failure = OUT_OF_MEMORY, _line(error)
    except Exception as error:
        failure = (OUT_OF_MEMORY if _is_out_of_memory(error) else FAILED), _line(error)
        logger.exception("%s failed while %s", name, stage[-1])
    finally:
        leave_process_group()  # libraries behave otherwise where there is one, and it holds buffers of its own
        _emptied(job.device)
    # Outside the handler: until it ends the error holds the frames of the update, and with them all its tensors.
    _emptied(job.device)
    status, words = failure
    note = f"{status} while {stage[-1]}: {words}"
    return unmeasured(name, job, expected, status, note, lacks_memory=status == OUT_OF_MEMORY)


def _measured(name: str, job: Job, expected: Reference, repeats: int, until: float, stage: Callable[[str], None]) -> Row:
    side = CONTESTANTS[name].build(job)
    stage("computing the gradient")
    made, error = checked(name, job, side, expected)
    stage("counting bytes")
    most = peak(side, job.device)
    stage("being timed")
    seconds = _repeated(side, job.device, repeats, until)
    return Row(
        name,
        **shared_fields(job),
        seconds=statistics.median(seconds),
        peak_bytes=most,
        param_grad_bytes=param_grad_bytes(side),
        flops=made,
        grad_rel_err=error,
        runs=tuple(seconds),
    )


def _repeated(side: Side, device: torch.device, repeats: int, until: float) -> list[float]:
    """Gives the seconds of each repeat after one that is not kept. At least one is kept, whatever the time."""
    timed(side, device)
    seconds = [timed(side, device)]
    while len(seconds) < repeats and time.monotonic() < until:
        seconds.append(timed(side, device))
    return seconds


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and any(words in str(error) for words in ALLOCATION_FAILURES)


def _line(error: Exception) -> str:
    """Gives the first sentences of an error's message: what was asked for, and how much there was."""
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= 240 else f"{words[:240]}…"


def _emptied(device: torch.device) -> None:
    """Drops what nobody holds any more, and gives it back to the device."""
    gc.collect()
    device_room.empty_cache(device)


def _held(device: torch.device) -> int | None:
    """Gives what the GPU's allocator holds for tensors; None on a CPU."""
    _emptied(device)
    return device_room.memory_allocated(device) if device_room.is_gpu(device) else None
