"""What the study runs and where, what was published, and the formula that predicts it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

MIB, GIB = 2**20, 2**30

LABELS = {"token": "Basic", "lazy": "Lazy generation", "repeat_sampler": "RepeatSampler", "string": "String-level"}
"""Ways to give a prompt k rows, as in ``algorithm.expansion``, with their published names."""
EXPANSIONS = tuple(LABELS)
FULL, TRUNCATED = "full", "truncated"
PROMPT, RESPONSE, VOCAB = 3015, 100, 151_669
TRUNCATED_TOKENS = 1024
"""Tokens that a truncated prompt keeps: the first ones, as the published tokenizer call did."""

LEGACY, WHOLE_RUN = "legacy", "whole_run"
"""The published trainer, and a whole step of this project, which samples its own answers."""
NO_RETENTION, RESPONSE_ONLY, CHUNKED = "no_retention", "response_only", "chunked"
SHARED, SHARED_CHECKPOINTING = "shared_prompt", "shared_prompt_checkpointing"
OWN_UPDATES = (CHUNKED, SHARED, SHARED_CHECKPOINTING)
"""This project's own pass. The two before it mend the published trainer."""
SAVINGS = (NO_RETENTION, RESPONSE_ONLY, *OWN_UPDATES)
"""Updates that save memory with the whole prompt and the same loss, each on top of the one before."""

KS, MORE_KS = (2, 4, 8), (16, 32, 64)
"""The published group sizes, and further ones. One of those is run where half of it completed; 64 only with a shared prompt."""
FIXED_ROWS = 2
"""Rows of one forward in the main table, whatever the group size."""
COUPLED = "_coupled"
"""Ending of the names of the published runs: micro-batch = k."""


@dataclass(frozen=True)
class Arm:
    """One program to measure, at one group size. Name and ``k`` together are unique."""

    name: str
    expansion: str
    prompt: str
    update: str
    k: int
    """Answers to a prompt."""
    micro_batch: int
    """Rows of one forward; it divides ``k``. A shared prompt takes the token budget of the project's defaults instead."""

    @property
    def cell(self) -> str:
        return f"{self.name}_k{self.k}"

    @property
    def coupled(self) -> bool:
        return self.name.endswith(COUPLED)


def main_arms(ks: Iterable[int] = KS) -> list[Arm]:
    """Return the main table: each expansion, whole and truncated prompt, the published update, FIXED_ROWS rows in a forward."""
    return [
        Arm(f"{expansion}_{prompt}_{LEGACY}", expansion, prompt, LEGACY, k, FIXED_ROWS)
        for k in ks
        for prompt in (FULL, TRUNCATED)
        for expansion in EXPANSIONS
    ]


def coupled_arms() -> list[Arm]:
    """Return the same with the published coupling: all k rows in one forward."""
    return [dataclasses.replace(arm, name=arm.name + COUPLED, micro_batch=arm.k) for arm in main_arms()]


def saving_arms(ks: Iterable[int] = KS) -> list[Arm]:
    """Return what saves memory with the whole prompt, from the least to the most."""
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
    """Return the arms to try next: those that completed at half the group size."""
    done = {(arm.name, arm.k) for arm in completed}
    return [arm for arm in LARGER if (arm.name, arm.k // 2) in done and (arm.name, arm.k) not in done]


AUTO, CPU, FAKE, CUDA = "auto", "cpu", "fake", "cuda"
ROW_BYTES = {NO_RETENTION: 2_800 * MIB, RESPONSE_ONLY: 320 * MIB, CHUNKED: 90 * MIB} | dict.fromkeys(
    (SHARED, SHARED_CHECKPOINTING, WHOLE_RUN), 20 * MIB
)
"""About what a row of one forward takes. It only decides where an arm runs."""


def needed_bytes(arm: Arm) -> int:
    if arm.update in ROW_BYTES:
        return arm.micro_batch * ROW_BYTES[arm.update]
    return predicted_bytes(arm.micro_batch, PROMPT, RESPONSE, VOCAB)


def choose_device(arm: Arm, asked: str, has_gpu: bool, cpu_bytes: int) -> str:
    """Return the device of an arm.

    Without a GPU, ``auto`` simulates the published update, so that all prompts are measured in the same way, and takes real
    tensors for the others where they need at most ``cpu_bytes``.
    """
    if asked == FAKE and arm.update == WHOLE_RUN:
        return CPU  # a worker samples and reads values
    if asked != AUTO:
        return asked
    if has_gpu:
        return CUDA
    return CPU if arm.update in ROW_BYTES and needed_bytes(arm) <= cpu_bytes else FAKE


# What the published experiment reports. Nothing from here on was measured by this study.

PEAKS_GIB: dict[tuple[str, int], float | None] = {
    ("token", 2): 14.38, ("token", 4): 26.99, ("token", 8): None,
    ("lazy", 2): 14.49, ("lazy", 4): 27.22, ("lazy", 8): None,
    ("repeat_sampler", 2): 14.48, ("repeat_sampler", 4): 27.22, ("repeat_sampler", 8): None,
    ("string", 2): 6.40, ("string", 4): 11.01, ("string", 8): 20.25,
}  # fmt: skip
"""Peak use of the whole device by (expansion, k). None = out of memory. One run a cell on one RTX 5090, desktop included. The
string-level runs had prompts of 1,024 tokens, the others of about 3,015."""
LAST_GIB = {("token", 8): 23.87}
"""What the publication gives for a run that ran out of memory: the highest reading before the error, as "Completed"."""
CARD_GIB = 32_607 / 1024
IDLE_BYTES = 641 * MIB
"""Level of the process before its first update: the CUDA context, the libraries and the models. A given constant."""
DESKTOP_BYTES = int(1109.9 * MIB)
"""What the desktop of the machine held. The published peaks contain it."""
PLATEAUS = (4.0, 6.2, 8.0, 12.0, 14.2)
"""Plateaus of the samples in bytes per logit: above the level between updates, divided by B T V."""


def predicted_bytes(rows: int, prompt: int, response: int, vocab: int) -> int:
    """Return the peak above the desktop, ``641 MiB + B V (14 T + 8 R)``.

    14 bytes for every position, T = P + R: three fp32 tensors and the cached bf16 block of the head's output. 8 for those of the
    response: the fp32 scores of the generation, which are kept, and a gradient of the same size.
    """
    return IDLE_BYTES + rows * vocab * (14 * (prompt + response) + 8 * response)


def card_bytes(held: float) -> float:
    """Return the used memory of the whole published card while a process's allocator holds some bytes."""
    return IDLE_BYTES + DESKTOP_BYTES + held
