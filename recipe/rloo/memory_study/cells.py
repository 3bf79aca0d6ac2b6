"""The arms of the study and their devices, the result of a cell (one measurement), and the published values."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_memopt.observe.files import write_whole

MIB, GIB = 2**20, 2**30

LABELS = {"token": "Basic", "lazy": "Lazy generation", "repeat_sampler": "RepeatSampler", "string": "String-level"}
"""Ways to expand a prompt to k rows, as in ``algorithm.expansion`` -> their published names."""
EXPANSIONS = tuple(LABELS)
FULL, TRUNCATED = "full", "truncated"
PROMPT, RESPONSE, VOCAB = 3015, 100, 151_669
TRUNCATED_TOKENS = 1024
"""Number of tokens that a truncated prompt keeps: its first tokens, as in the published tokenizer call."""

LEGACY, WHOLE_RUN = "legacy", "whole_run"
"""The update of the published trainer, and a whole step of this project, which samples its own answers."""
NO_RETENTION, RESPONSE_ONLY, CHUNKED = "no_retention", "response_only", "chunked"
SHARED, SHARED_CHECKPOINTING = "shared_prompt", "shared_prompt_checkpointing"
OWN_UPDATES = (CHUNKED, SHARED, SHARED_CHECKPOINTING)
"""Updates by this project's own pass. NO_RETENTION and RESPONSE_ONLY are repaired forms of the published trainer."""
SAVINGS = (NO_RETENTION, RESPONSE_ONLY, *OWN_UPDATES)
"""Updates that save memory with the whole prompt and the same loss. Each includes the savings of the one before."""

KS, MORE_KS = (2, 4, 8), (16, 32, 64)
"""The published group sizes, and larger ones. A larger size runs only if half of it completed; 64 also needs a shared prompt."""
FIXED_ROWS = 2
"""Rows per forward in the main table, for every group size."""
COUPLED = "_coupled"
"""Suffix of the names of arms whose micro-batch is k, as in the published runs."""


@dataclass(frozen=True)
class Arm:
    """One program to measure, at one group size. Name and ``k`` together are unique."""

    name: str
    expansion: str
    prompt: str
    update: str
    k: int
    micro_batch: int
    """Rows per forward; a divisor of ``k``. Arms with a shared prompt use the project's default token budget instead."""

    @property
    def cell(self) -> str:
        return f"{self.name}_k{self.k}"

    @property
    def coupled(self) -> bool:
        return self.name.endswith(COUPLED)


def main_arms(ks: Iterable[int] = KS) -> list[Arm]:
    """Return the main table: the published update with FIXED_ROWS rows per forward, for each expansion and prompt length."""
    return [
        Arm(f"{expansion}_{prompt}_{LEGACY}", expansion, prompt, LEGACY, k, FIXED_ROWS)
        for k in ks
        for prompt in (FULL, TRUNCATED)
        for expansion in EXPANSIONS
    ]


def coupled_arms() -> list[Arm]:
    """Return the arms of the main table with the published micro-batch: all k rows in one forward."""
    return [dataclasses.replace(arm, name=arm.name + COUPLED, micro_batch=arm.k) for arm in main_arms()]


def saving_arms(ks: Iterable[int] = KS) -> list[Arm]:
    """Return the arms that save memory with the whole prompt, from the smallest to the largest saving."""
    arms = []
    for k in ks:
        for update in SAVINGS:
            arms.append(Arm(f"token_{FULL}_{update}", "token", FULL, update, k, k))
            if update == CHUNKED:
                arms.append(Arm(f"token_{FULL}_{update}_one_row", "token", FULL, update, k, 1))
    return arms


WHOLE_RUN_ARM = Arm(f"token_{FULL}_{WHOLE_RUN}", "token", FULL, WHOLE_RUN, KS[-1], KS[-1])
ARMS = (*main_arms(), *coupled_arms(), *saving_arms(), WHOLE_RUN_ARM)
LARGER = [
    arm
    for arm in (*main_arms(MORE_KS), *saving_arms(MORE_KS))
    if arm.prompt == FULL and (arm.k < MORE_KS[-1] or arm.update in (SHARED, SHARED_CHECKPOINTING))
]


def larger(completed: Iterable[Arm]) -> list[Arm]:
    """Return the arms to try next: the arms that completed at half the group size."""
    done = {(arm.name, arm.k) for arm in completed}
    return [arm for arm in LARGER if (arm.name, arm.k // 2) in done and (arm.name, arm.k) not in done]


AUTO, CPU, FAKE, CUDA = "auto", "cpu", "fake", "cuda"
ROW_BYTES = {NO_RETENTION: 2_800 * MIB, RESPONSE_ONLY: 320 * MIB, CHUNKED: 90 * MIB} | dict.fromkeys(
    (SHARED, SHARED_CHECKPOINTING, WHOLE_RUN), 20 * MIB
)
"""Approximate bytes per row of a forward. They only decide on which device an arm runs."""


def needed_bytes(arm: Arm) -> int:
    if arm.update in ROW_BYTES:
        return arm.micro_batch * ROW_BYTES[arm.update]
    return predicted_bytes(arm.micro_batch, PROMPT, RESPONSE, VOCAB)


def choose_device(arm: Arm, asked: str, has_gpu: bool, cpu_bytes: int) -> str:
    """Return the device of an arm.

    Without a GPU, ``auto`` simulates the published update, so that all prompts are measured in the same way. Other updates use
    real tensors if they need at most ``cpu_bytes``.
    """
    if asked == FAKE and arm.update == WHOLE_RUN:
        return CPU  # a whole step samples tokens, so it needs tensors with values
    if asked != AUTO:
        return asked
    if has_gpu:
        return CUDA
    return CPU if arm.update in ROW_BYTES and needed_bytes(arm) <= cpu_bytes else FAKE


# The result of a cell: its outcome, and a record of each phase of each update. None = not measured.

COMPLETED, OOM, DIVERGED, FAILED, REFUSED, TIMEOUT = "completed", "oom", "diverged", "failed", "refused", "timeout"
EXIT_CODES = {COMPLETED: 0, FAILED: 1, REFUSED: 2, OOM: 3, DIVERGED: 4, TIMEOUT: 5}
WORST_FIRST = (FAILED, DIVERGED, TIMEOUT, REFUSED, OOM, COMPLETED)
"""Outcomes, the worst first. A study ends with the exit code of its worst cell."""
BYTE_TRACKER, SIMULATED_ALLOCATOR, DEVICE_ALLOCATOR = "byte tracker", "simulated allocator", "device allocator"
"""Values of ``measured_by``, for real tensors on a CPU, fake tensors on a fake GPU, and a real GPU."""

Point = tuple[float, int, int | None]
"""Seconds since the phase began, live bytes, reserved bytes."""


class OutOfMemory(RuntimeError):  # noqa: N818 - the name of the event, as in torch
    """A device, or the limit set for it, had no room for a tensor, ``shape``. ``peak_bytes``: the peak before this request."""

    def __init__(self, phase: str, requested_bytes: int, held_bytes: int, shape: str = "", peak_bytes: int | None = None) -> None:
        super().__init__(phase, requested_bytes, held_bytes, shape, peak_bytes)
        self.phase, self.requested_bytes, self.held_bytes, self.shape = phase, requested_bytes, held_bytes, shape
        self.peak_bytes = held_bytes if peak_bytes is None else peak_bytes

    def __str__(self) -> str:
        asked, held = f"{self.requested_bytes:,}", f"{self.held_bytes:,}"
        return f"{self.phase}: no room for {asked} bytes {self.shape} beside the {held} that are held"


@dataclass(frozen=True)
class Phase:
    """Bytes that were held in a phase of an update."""

    update: int
    phase: str
    allocated_enter: int
    allocated_peak: int
    allocated_exit: int
    reserved_peak: int | None
    """Peak of the bytes that the caching allocator held, live or cached."""
    seconds: float
    """Duration of the phase. With fake tensors, this is the duration of the simulation."""
    timeline: tuple[Point, ...] = ()


@dataclass(frozen=True, kw_only=True)
class UpdateRecord(Phase):
    rows: int
    prompt_len: int
    response_len: int
    total_tokens: int
    dropped_tokens: int
    """Prompt tokens that truncation removed, over all rows."""
    vocab: int
    dtype: str
    """Dtype of the weights, and of autocast if it is used."""
    ids_sha256: str
    """Hash of ids and mask of all rows, as the model gets them. Empty = the arm samples its own answers."""
    loss: float | None
    grad_norm: float | None
    """Gradient norm of the whole update, before clipping."""
    measured_by: str
    values_from: str = "this run"
    """Source of loss and gradient norm. Fake tensors have no values; this then names the shape at which the program got them."""


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
        return f"{self.arm.cell}_r{self.repeat}" + ("" if self.limit_bytes is None else "_limited")


@dataclass(frozen=True)
class Failure:
    """Why a cell did not complete. Its peak before the failure is used in no mean, no saving and no bar."""

    error: str
    message: str
    phase: str = ""
    requested_bytes: int | None = None
    held_bytes: int | None = None
    shape: str = ""
    peak_before_failure: int | None = None


@dataclass(frozen=True)
class CellResult:
    cell: Cell
    outcome: str
    records: tuple[UpdateRecord, ...] = ()
    failure: Failure | None = None
    started: float = 0.0
    seconds: float = 0.0
    host_rss: int | None = None
    """Largest resident memory of the process, in bytes."""
    versions: dict[str, str] = field(default_factory=dict)


def worst(outcomes: set[str]) -> str:
    return next((outcome for outcome in WORST_FIRST if outcome in outcomes), COMPLETED)


def write_result(path: Path, result: CellResult) -> None:
    write_whole(path, json.dumps(dataclasses.asdict(result), indent=1) + "\n")


def read_result(path: Path) -> CellResult:
    entries: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    cell, failure, records = entries["cell"], entries["failure"], entries["records"]
    for record in records:
        record["timeline"] = tuple(map(tuple, record["timeline"]))
    entries["cell"] = Cell(**{**cell, "arm": Arm(**cell["arm"])})
    entries["records"] = tuple(UpdateRecord(**record) for record in records)
    entries["failure"] = failure and Failure(**failure)
    return CellResult(**entries)


# The values of the published experiment. This study measured none of the values below.

PEAKS_GIB: dict[tuple[str, int], float | None] = {
    ("token", 2): 14.38, ("token", 4): 26.99, ("token", 8): None,
    ("lazy", 2): 14.49, ("lazy", 4): 27.22, ("lazy", 8): None,
    ("repeat_sampler", 2): 14.48, ("repeat_sampler", 4): 27.22, ("repeat_sampler", 8): None,
    ("string", 2): 6.40, ("string", 4): 11.01, ("string", 8): 20.25,
}  # fmt: skip
"""(expansion, k) -> peak use of the whole device, with the desktop. None = out of memory. Each is one run on an RTX 5090. The
string-level runs had prompts of 1,024 tokens, and the other runs of about 3,015 tokens."""
LAST_GIB = {("token", 8): 23.87}
"""The published value of a run that ran out of memory: the highest reading before the error, published as "Completed"."""
CARD_GIB = 32_607 / 1024
IDLE_BYTES = 641 * MIB
"""Memory of the process before its first update: the CUDA context, the libraries and the models. A given constant."""
DESKTOP_BYTES = int(1109.9 * MIB)
"""Memory of the machine's desktop. The published peaks include it."""
PLATEAUS = (4.0, 6.2, 8.0, 12.0, 14.2)
"""Plateaus in the published samples, in bytes per logit: the memory above the level between updates, divided by B T V."""


def predicted_bytes(rows: int, prompt: int, response: int, vocab: int) -> int:
    """Return the predicted peak without the desktop, for B rows of T = P + R tokens and a vocabulary of V::

        641 MiB + B V (14 T + 8 R)

    Each position needs 14 bytes per logit: three fp32 tensors and the cached bf16 block of the head's output. Each position of
    the response needs 8 more: the fp32 scores of the generation, which are kept, and a gradient of the same size.
    """
    return IDLE_BYTES + rows * vocab * (14 * (prompt + response) + 8 * response)


def card_bytes(held: float) -> float:
    """Return the used memory of the whole published card while the allocator of the process holds ``held`` bytes."""
    return IDLE_BYTES + DESKTOP_BYTES + held
