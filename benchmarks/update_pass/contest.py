"""The contest: every side's gradient checked, its FLOPs and bytes counted, then all of them timed in turns."""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.update_pass import flops
from benchmarks.update_pass.naive import Reference, reference
from benchmarks.update_pass.sides import Job, Side
from benchmarks.update_pass.work import Workload, make_batch
from verl_memopt.distributed import device as device_room
from verl_memopt.models.tiny import make_tiny_model
from verl_memopt.observe.phase import GIB, MemoryProbe

BOUND = 1e-4
"""Largest relative difference of the gradient in fp32. In half precision it is reported and not judged."""
OURS = ("ours_no_sharing", "ours")


class WrongGradientError(Exception):
    """A contestant computed another gradient than the reference; there is no row for it."""


@dataclass(frozen=True)
class Contestant:
    """module, function: what builds the side; imported when asked for, as not every environment has every peer.

    logit_bytes: most bytes of logits and of what is made of them, per position that has any and word of the vocabulary.
    prompts: how often a prompt has logits as well: not at all, once per group (shared), or once per answer (repeated).
    """

    module: str
    function: str
    logit_bytes: int = 0
    prompts: str = "none"
    simulates: bool = False
    """Whether its update runs on tensors without values, which gives the peak of what does not fit."""

    def build(self, job: Job) -> Side:
        """Gives the side, ready to run."""
        return getattr(importlib.import_module(f"benchmarks.update_pass.{self.module}"), self.function)(job)

    def least_bytes(self, job: Job) -> int:
        """Gives the bytes its logits alone will take at the peak, for the largest micro-batch."""
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
    "trl_rloo_trimmed": Contestant("trl_side", "build_rloo_trimmed"),
    "trl_grpo_trimmed": Contestant("trl_side", "build_grpo_trimmed"),
    "liger": Contestant("liger_side", "build_liger"),
    "verl": Contestant("verl_side", "build_verl", logit_bytes=12, prompts="repeated"),
    "verl_fused": Contestant("verl_side", "build_verl_fused"),
    "verl_prefix_grouper": Contestant("verl_side", "build_verl_prefix_grouper", logit_bytes=12, prompts="shared"),
    "ours_no_sharing": Contestant("ours", "build_ours_no_sharing"),
    "ours": Contestant("ours", "build_ours"),
}


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

    @property
    def beyond_bytes(self) -> int | None:
        """The peak without parameters and gradients."""
        return None if self.peak_bytes is None else self.peak_bytes - self.param_grad_bytes


def available(name: str) -> bool:
    """Says whether this environment has what a contestant needs."""
    with suppress(ImportError):
        importlib.import_module(f"benchmarks.update_pass.{CONTESTANTS[name].module}")
        return True
    return False


def make_job(work: Workload, folder: Path, checkpointing: bool, device: torch.device, seed: int = 0) -> tuple[Job, Reference]:
    """Gives the job, its model's folder made, and the reference; what the peers are given of it is in the job."""
    if not (folder / "config.json").exists():
        make_tiny_model(folder, work.shape, seed=seed)
    job = Job(work, make_batch(work, seed), folder, checkpointing, device, ())
    expected = reference(job)
    return dataclasses.replace(job, old_log_probs=expected.log_probs), expected


def run(names: Sequence[str], job: Job, expected: Reference, repeats: int, most_bytes: float = 10 * GIB) -> list[Row]:
    """Gives a row per contestant. Errors: WrongGradientError naming the contestant."""
    fits = [name for name in names if CONTESTANTS[name].least_bytes(job) <= most_bytes]
    sides = {name: CONTESTANTS[name].build(job) for name in fits}
    made, errors = {}, {}
    for name, side in sides.items():
        made[name] = flops.count(side.update)
        errors[name] = _checked(name, job, side, expected)
    peaks = {name: peak(side, job.device) for name, side in sides.items()}
    times = in_turns({name: functools.partial(_timed, side, job.device) for name, side in sides.items()}, repeats)
    floor = flops.floor(job.work.shape, job.batch, job.checkpointing)
    row = functools.partial(Row, checkpointing=job.checkpointing, k=job.batch.k, floor_flops=floor)
    rows = {
        name: row(
            name,
            seconds=statistics.median(times[name]),
            peak_bytes=peaks[name],
            param_grad_bytes=param_grad_bytes(side),
            flops=made[name],
            grad_rel_err=errors[name],
            runs=tuple(times[name]),
        )
        for name, side in sides.items()
    }
    size = 2 * sum(gradient.numel() for gradient in expected.gradients.values()) * job.dtype.itemsize
    absent = functools.partial(row, seconds=None, param_grad_bytes=size, flops=None, grad_rel_err=None)
    for name in names:
        if name not in rows:
            need = CONTESTANTS[name].least_bytes(job) / GIB
            note = f"not run: its logits alone take {need:.1f} GiB, the limit is {most_bytes / GIB:.0f} GiB"
            found = simulated_peak(name, job) if CONTESTANTS[name].simulates else None
            rows[name] = absent(name, peak_bytes=found, note=note + ("" if found is None else "; the peak is simulated"))
    return [rows[name] for name in names]


def _checked(name: str, job: Job, side: Side, expected: Reference) -> float:
    error = difference(side.gradients(), expected.gradients)
    side.clear()
    if job.dtype is torch.float32 and not error <= BOUND:
        raise WrongGradientError(f"{name}: its gradient differs by {error:.2g} of the reference's norm, the bound is {BOUND:g}")
    return error


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Gives the norm of the difference of two gradients over the norm of the second, all tensors as one vector."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    squared = sum(float((found[name].double() - expected[name].double()).square().sum()) for name in expected)
    return (squared / sum(float(tensor.double().square().sum()) for tensor in expected.values())) ** 0.5


def peak(side: Side, device: torch.device) -> int:
    """Gives the most bytes live at once in an update, those of other sides left out."""
    side.clear()
    gc.collect()
    before = device_room.memory_allocated(device) if device_room.is_gpu(device) else 0
    probe = MemoryProbe(device, lambda: (("params", parameter) for parameter in side.model.parameters()))
    with probe.phase("update", track=True) as report:
        side.update()
    side.clear()
    found = report().peak_allocated_bytes
    assert found is not None
    return found - before + (parameter_bytes(side) if before else 0)


def simulated_peak(name: str, job: Job) -> int:
    """Gives the peak of an update on tensors that have shapes and no values, counted by the same tracker."""
    with FakeTensorMode():
        return peak(CONTESTANTS[name].build(job), job.device)


def parameter_bytes(side: Side) -> int:
    """Gives the bytes of the parameters."""
    return sum(parameter.numel() * parameter.element_size() for parameter in side.model.parameters())


def param_grad_bytes(side: Side) -> int:
    """Gives the bytes of parameters and gradients, which every update needs."""
    return 2 * parameter_bytes(side)


def _timed(side: Side, device: torch.device) -> float:
    gc.collect()
    device_room.synchronize(device)
    start = time.perf_counter()
    side.update()
    device_room.synchronize(device)
    seconds = time.perf_counter() - start
    side.clear()
    return seconds


def in_turns(timed: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Gives the seconds of each call, called in turns, another first in each round; a round before all is not kept."""
    times: dict[str, list[float]] = {name: [] for name in timed}
    for order in _orders(list(timed), repeats + 1):
        for name in order:
            times[name].append(timed[name]())
    return {name: seconds[1:] for name, seconds in times.items()}


def _orders(names: list[str], rounds: int) -> Iterator[list[str]]:
    for turn in range(rounds):
        start = turn % max(len(names), 1)
        yield names[start:] + names[:start]
