"""The work that every contestant does, the stopwatch, and the plan and record of one run. Nothing here imports torch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

PHASES = ("rollout", "reward", "reference", "update", "sync")
"""Phases of a step. ``rest`` is what a step takes beyond them: data, advantages, metrics, logging."""
WHOLE = "whole step"
WARM_UP = 1
"""First steps of a run that are left out of its figures."""


@dataclass(frozen=True)
class Work:
    """One step of GRPO with a KL to a reference, one optimizer step per rollout, no gradient checkpointing."""

    prompts: int = 8
    """Prompts per step, taken in file order."""
    samples: int = 8
    """Answers per prompt."""
    max_prompt_tokens: int = 64
    response_tokens: int = 24
    """Every answer has as many: an end of the sequence ends none."""
    dtype: str = "fp32"
    """fp32, or bf16: fp32 master weights, and passes and engine in bfloat16."""
    learning_rate: float = 1e-6
    """AdamW, fused, constant."""
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    clip_ratio: float = 0.2
    kl: float = 1e-3

    @property
    def rows(self) -> int:
        return self.prompts * self.samples


TRL, OURS = "TRL", "verl_memopt"


@dataclass(frozen=True)
class Contestant:
    """A trainer and its rollout engine.

    trimmed: TRL with two costs of a CPU taken away: where there is no Triton it sends every position of a row through the head,
    and in tiles of up to 32,768 words. Here only the answer's positions go through it, as on a GPU.
    """

    trainer: str
    engine: str
    trimmed: bool = False

    @property
    def slug(self) -> str:
        return f"{self.trainer.lower()}-{self.engine}{'-trimmed' if self.trimmed else ''}"


CONTESTANTS = {
    contestant.slug: contestant
    for contestant in (
        Contestant(TRL, "hf"),
        Contestant(TRL, "hf", trimmed=True),
        Contestant(TRL, "vllm", trimmed=True),
        Contestant(OURS, "hf"),
        Contestant(OURS, "vllm"),
    )
}


@dataclass(frozen=True)
class Plan:
    """One run in a process of its own. Folders are absolute. micro_batch_rows: of TRL, which cuts by rows."""

    contestant: Contestant
    work: Work
    model: str
    task: str
    folder: str
    steps: int
    seed: int
    micro_batch_rows: int


@dataclass(frozen=True)
class Seconds:
    processor: float
    """Of all threads of the process."""
    wall: float

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.processor + other.processor, self.wall + other.wall)

    def __sub__(self, other: Seconds) -> Seconds:
        return Seconds(self.processor - other.processor, self.wall - other.wall)


NOTHING = Seconds(0.0, 0.0)


def now() -> Seconds:
    return Seconds(time.process_time(), time.perf_counter())


@dataclass
class Stopwatch:
    """Seconds of each phase of each step, and of ``WHOLE``."""

    steps: list[dict[str, Seconds]] = field(default_factory=list)

    @contextmanager
    def step(self) -> Iterator[None]:
        self.steps.append({})
        with self.phase(WHOLE):
            yield

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = now()
        yield
        if self.steps:
            self.steps[-1][name] = self.steps[-1].get(name, NOTHING) + (now() - began)


@dataclass(frozen=True)
class Record:
    """What a run leaves, one entry per step in each list."""

    steps: list[dict[str, Seconds]]
    prompt_ids: list[str]
    """Hash of the prompts' ids, one for each answer."""
    prompt_tokens: list[int]
    """Of the different prompts."""
    response_tokens: list[int]
    rewards: list[float]
    """Means."""
