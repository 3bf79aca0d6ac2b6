"""The contestants, and the contest: every gradient checked, FLOPs and bytes counted, then all timed.

In turns, whatever else happens on the machine falls on all alike. On a GPU one contestant runs after another, each on an empty
device. What befalls one there is a row of its own: a package that is not installed, memory that runs out, a wrong gradient, an
error in a peer's code.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.common import seconds_of
from benchmarks.update_pass import flops
from benchmarks.update_pass.naive import Reference, reference
from benchmarks.update_pass.sides import Job, Side
from benchmarks.update_pass.work import Workload, make_batch
from verl_memopt.distributed import device as device_room
from verl_memopt.model.tiny import make_tiny_model
from verl_memopt.observe.byte_tracker import DEVICE, ByteTracker
from verl_memopt.observe.phase import GIB, MIB, MemoryProbe

logger = logging.getLogger(__name__)

BOUND = 1e-4
"""Largest relative difference of the gradient in fp32."""
HALF_BOUND = 0.5
"""The same in half precision, where rounding alone makes some hundredths: a factor left out is beyond it, rounding is not."""
ALLOCATOR_BLOCK = 512
"""A GPU's allocator rounds every tensor up to a multiple of this."""
LEFT_OVER = 64 * MIB
"""More than libraries keep for themselves; what is left on a device beyond it is a former contestant's."""
ALLOCATION_FAILURES = ("out of memory", "ALLOC_FAILED")
"""In the message of a RuntimeError: memory that ran out where the allocator was not the one to ask for it."""

MEASURED, NOT_RUN = "measured", "not run"
OUT_OF_MEMORY, WRONG_GRADIENT, NOT_INSTALLED, FAILED = "out of memory", "wrong gradient", "not installed", "failed"
"""What became of a contestant."""


class WrongGradientError(Exception):
    """A contestant computed another gradient than the reference; there is no row for it."""


@dataclass(frozen=True)
class Contestant:
    """Who takes part.

    The module is imported when it is asked for, as not every environment has every peer. Its function builds the side from the
    job and the options.
    """

    module: str
    function: str
    options: Mapping[str, bool] = field(default_factory=dict)
    logit_bytes: int = 0
    """Most bytes of logits and of what is made of them, per position that has any and word of the vocabulary."""
    prompts: str = "none"
    """How often a prompt has logits as well: not at all, once per group (shared), or once per answer (repeated)."""
    simulates: bool = False
    """Whether its update runs on tensors without values, which gives the peak of what does not fit."""
    cpu_only: bool = False
    """Whether it does on a CPU what another contestant does on a GPU anyway."""

    def build(self, job: Job) -> Side:
        room = importlib.import_module(f"benchmarks.update_pass.{self.module}")
        return getattr(room, self.function)(job, **self.options)

    def least_bytes(self, job: Job) -> int:
        most = 0
        for rows in job.cuts():
            times = {"none": 0, "shared": 1, "repeated": len(rows)}[self.prompts]
            longest = max(len(job.batch.answers[row]) for row in rows)
            most = max(most, times * len(job.batch.prompt_of(rows[0])) + len(rows) * longest)
        return self.logit_bytes * most * job.work.shape.vocab_size


CONTESTANTS = {
    "naive": Contestant("naive", "build_naive", logit_bytes=16, prompts="repeated", simulates=True),
    "response_logits": Contestant("naive", "build_response_logits", logit_bytes=28, simulates=True),
    "trl_rloo": Contestant("trl_side", "build_rloo"),
    "trl_grpo": Contestant("trl_side", "build_grpo"),
    "trl_rloo_trimmed": Contestant("trl_side", "build_rloo", {"trimmed": True}, cpu_only=True),
    "trl_grpo_trimmed": Contestant("trl_side", "build_grpo", {"trimmed": True}, cpu_only=True),
    "liger": Contestant("liger_side", "build_liger"),
    "verl": Contestant("verl_side", "build_verl", logit_bytes=12, prompts="repeated"),
    "verl_fused": Contestant("verl_side", "build_verl", {"fused": True}),
    "verl_prefix_grouper": Contestant("verl_side", "build_verl_prefix_grouper", logit_bytes=12, prompts="shared"),
    "ours_no_sharing": Contestant("ours", "build_ours", {"shared": False}),
    "ours": Contestant("ours", "build_ours", {"shared": True}),
}
OURS = tuple(name for name, found in CONTESTANTS.items() if found.module == "ours")


@dataclass(frozen=True)
class Row:
    """One contestant's result. seconds: the median; those of all repeats are in ``runs``. None = not run, see ``note``."""

    contestant: str
    checkpointing: bool
    k: int
    seconds: float | None
    peak_bytes: int | None
    """Most live tensor bytes at once, parameters and gradients among them. Without ``seconds``: simulated."""
    param_grad_bytes: int
    flops: int | None
    grad_rel_err: float | None
    floor_flops: int
    runs: tuple[float, ...] = ()
    note: str = ""
    status: str = MEASURED
    start_bytes: int | None = None
    """What the GPU's allocator held before the contestant was built: nothing of another's is left where this stays the same."""

    @property
    def beyond_bytes(self) -> int | None:
        return None if self.peak_bytes is None else self.peak_bytes - self.param_grad_bytes


def missing(name: str) -> str | None:
    """Gives why a contestant cannot be imported here, in a line; None where it can."""
    try:
        importlib.import_module(f"benchmarks.update_pass.{CONTESTANTS[name].module}")
    except (ImportError, RuntimeError) as error:  # a package that imports lazily tells of a missing one as a RuntimeError
        return " ".join(str(error).split())
    return None


def make_job(work: Workload, folder: Path, checkpointing: bool, device: torch.device, seed: int = 0) -> tuple[Job, Reference]:
    """Gives the job, its model's folder made, and the reference; what the peers are given of it is in the job."""
    if not (folder / "config.json").exists():
        make_tiny_model(folder, work.shape, seed=seed)
    job = Job(work, make_batch(work, seed), folder, checkpointing, device, ())
    expected = reference(job)
    return dataclasses.replace(job, old_log_probs=expected.log_probs), expected


def run(
    names: Sequence[str],
    job: Job,
    expected: Reference,
    repeats: int,
    most_bytes: float = 10 * GIB,
    until: float = math.inf,
    stage: Callable[[str], None] = lambda words: None,
) -> list[Row]:
    """Gives a row per contestant, timed in turns.

    until: when no further round begins, by ``time.monotonic``; one is always kept. stage: told what is done next.
    Errors: WrongGradientError naming the contestant.
    """
    absent = {name: reason for name in names if (reason := missing(name)) is not None}
    fits = [name for name in names if name not in absent and CONTESTANTS[name].least_bytes(job) <= most_bytes]
    sides = {name: CONTESTANTS[name].build(job) for name in fits}
    stage("computing the gradient")
    found = {name: checked(name, job, side, expected) for name, side in sides.items()}
    stage("counting bytes")
    peaks = {name: peak(side, job.device) for name, side in sides.items()}
    stage("being timed")
    times = in_turns({name: functools.partial(timed, side, job.device) for name, side in sides.items()}, repeats, until)
    rows = {
        name: Row(
            name,
            **shared_fields(job),
            seconds=statistics.median(times[name]),
            peak_bytes=peaks[name],
            # Every update needs both.
            param_grad_bytes=2 * parameter_bytes(side),
            flops=found[name][0],
            grad_rel_err=found[name][1],
            runs=tuple(times[name]),
        )
        for name, side in sides.items()
    }
    rows |= {name: unmeasured(name, job, expected, NOT_INSTALLED, f"not installed: {words}") for name, words in absent.items()}
    return [rows[name] if name in rows else too_large(name, job, expected, most_bytes) for name in names]


def shared_fields(job: Job) -> dict[str, Any]:
    floor = flops.floor(job.work.shape, job.batch, job.checkpointing)
    return {"checkpointing": job.checkpointing, "k": job.batch.k, "floor_flops": floor}


def too_large(name: str, job: Job, expected: Reference, most_bytes: float) -> Row:
    need = CONTESTANTS[name].least_bytes(job) / GIB
    note = f"not run: its logits alone take {need:.1f} GiB, the limit is {most_bytes / GIB:.0f} GiB"
    return unmeasured(name, job, expected, NOT_RUN, note, lacks_memory=True)


def unmeasured(name: str, job: Job, expected: Reference, status: str, note: str, lacks_memory: bool = False) -> Row:
    size = 2 * sum(gradient.numel() for gradient in expected.gradients.values()) * job.dtype.itemsize
    found = simulated_peak(name, job) if lacks_memory and CONTESTANTS[name].simulates else None
    return Row(
        name, **shared_fields(job), seconds=None, peak_bytes=found, param_grad_bytes=size, flops=None, grad_rel_err=None,
        note=note + ("" if found is None else "; the peak is simulated"), status=status,
    )  # fmt: skip


def checked(name: str, job: Job, side: Side, expected: Reference) -> tuple[int, float]:
    made = flops.count(side.update)
    error = difference(side.gradients(), expected.gradients)
    side.clear()
    bound = BOUND if job.dtype is torch.float32 else HALF_BOUND
    if not error <= bound:
        raise WrongGradientError(f"{name}: its gradient differs by {error:.2g} of the reference's norm, the bound is {bound:g}")
    return made, error


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Gives the norm of the difference of two gradients over the norm of the second, all tensors as one vector.

    Compared where the first lie, a tensor at a time, in fp32 or what is wider, and summed in float64.
    """
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    apart = whole = 0.0
    for name, tensor in found.items():
        should = expected[name].to(tensor.device)
        apart += _squared(tensor.float() - should if tensor.dtype is not torch.float64 else tensor - should)
        whole += _squared(should)
    return (apart / whole) ** 0.5


def _squared(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2


def peak(side: Side, device: torch.device) -> int:
    """Gives the most bytes live at once in an update: the tracker's on a CPU, the allocator's on a GPU.

    On a GPU what other things hold is left out: the parameters, and the most that the update adds to what was there before.
    """
    side.clear()
    gc.collect()
    before = device_room.memory_allocated(device) if device_room.is_gpu(device) else None
    probe = MemoryProbe(device, lambda: (("params", parameter) for parameter in side.model.parameters()))
    with probe.phase("update", track=True) as report:
        side.update()
    side.clear()
    found = report().peak_allocated_bytes
    assert found is not None
    return found if before is None else found - before + parameter_bytes(side)


def simulated_peak(name: str, job: Job) -> int:
    """Gives the peak of an update on tensors that have shapes and no values, counted by the project's tracker on any device.

    The tensors stand on a CPU whatever the job's device: no allocator sees them, so none can be asked. For a GPU each counts
    as the blocks that its allocator would give.
    """
    block = ALLOCATOR_BLOCK if device_room.is_gpu(job.device) else 1
    cpu = torch.device("cpu")
    with FakeTensorMode():
        side = CONTESTANTS[name].build(dataclasses.replace(job, device=cpu))
        with ByteTracker(cpu, block) as tracker:
            tracker.mark("params", side.model.parameters())
            tracker.enter("update")
            side.update()
            side.clear()
        return tracker.peaks[DEVICE].bytes


def parameter_bytes(side: Side) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in side.model.parameters())


def timed(side: Side, device: torch.device) -> float:
    gc.collect()
    seconds = seconds_of(side.update, device)
    side.clear()
    return seconds


def in_turns(calls: dict[str, Callable[[], float]], repeats: int, until: float = math.inf) -> dict[str, list[float]]:
    """Gives the seconds of each call, called in turns, another first in each round; a round before all is not kept.

    No round begins after ``until``, by ``time.monotonic``, but for the first that is kept.
    """
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repeats + 1):
        if turn > 1 and time.monotonic() > until:
            break
        start = turn % max(len(names), 1)
        for name in names[start:] + names[:start]:
            times[name].append(calls[name]())
    return {name: seconds[1:] for name, seconds in times.items()}


@dataclass
class TimeBudget:
    """Wall time for the contestants that are still to run, shared evenly among them. seconds: None = no limit."""

    seconds: float | None
    entries: int
    started: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        return math.inf if self.seconds is None else self.started + self.seconds - time.monotonic()

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
        row = _alone(name, job, expected, repeats, most_bytes, until, budget)
        yield row if start is None or empty is None else with_start(row, start, start - empty)


def with_start(row: Row, start: int, left_over: int) -> Row:
    """Gives a row with what was on the device before its contestant, and a note where that is more than there should be."""
    note = f"{left_over / MIB:.0f} MiB of former contestants were on the device" if left_over > LEFT_OVER else ""
    return dataclasses.replace(row, start_bytes=start, note="; ".join(words for words in (row.note, note) if words))


def _alone(name: str, job: Job, expected: Reference, repeats: int, most_bytes: float, until: float, budget: TimeBudget) -> Row:
    if budget.left() <= 0 and missing(name) is None:
        return unmeasured(name, job, expected, NOT_RUN, f"not run: the time budget of {budget.seconds:.0f} s was spent")
    stage = ["building"]
    try:
        return run([name], job, expected, repeats, most_bytes, until, stage.append)[0]
    except WrongGradientError as error:
        status, words = WRONG_GRADIENT, str(error)
    except Exception as error:  # a side that fails is a row of the result
        status, words = (OUT_OF_MEMORY if _is_out_of_memory(error) else FAILED), _line(error)
        if not isinstance(error, torch.OutOfMemoryError):
            logger.exception("%s failed while %s", name, stage[-1])
    finally:
        device_room.leave_process_group()  # libraries behave otherwise where there is one, and it holds buffers of its own
        _emptied(job.device)
    # Outside the handler: until it ends the error holds the frames of the update, and with them all its tensors.
    _emptied(job.device)
    note = f"{status} while {stage[-1]}: {words}"
    return unmeasured(name, job, expected, status, note, lacks_memory=status == OUT_OF_MEMORY)


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in ALLOCATION_FAILURES)


def _line(error: Exception) -> str:
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= 240 else f"{words[:240]}…"


def _emptied(device: torch.device) -> None:
    gc.collect()
    device_room.empty_cache(device)


def _held(device: torch.device) -> int | None:
    _emptied(device)
    return device_room.memory_allocated(device) if device_room.is_gpu(device) else None
