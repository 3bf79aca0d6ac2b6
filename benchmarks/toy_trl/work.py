"""The work that every contestant does, and the plan and record of one run. Nothing here imports a trainer or torch."""

from __future__ import annotations

import hashlib
import json
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WARM_UP = 2
"""First steps of a timed run that are left out of its figures."""
TRACKED_STEP = 2
"""The step whose bytes are read: the first with optimizer state."""
PHASES = ("rollout", "reward", "log_prob", "update", "sync")
"""Phases of a step. ``rest`` is what a step takes beyond them: data, advantages, metrics, logging."""


@dataclass(frozen=True)
class Work:
    """One step of RLOO, without a KL and with one optimizer step per rollout batch, in fp32."""

    prompts: int = 32
    """Prompts per step, taken in file order."""
    samples: int = 8
    """Answers per prompt."""
    max_prompt_tokens: int = 16
    max_response_tokens: int = 4
    temperature: float = 1.0
    learning_rate: float = 2e-4
    """AdamW, fused, constant."""
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    clip_ratio: float = 0.2

    @property
    def rows(self) -> int:
        return self.prompts * self.samples


WORK = Work()


@dataclass(frozen=True)
class Contestant:
    """A trainer, its rollout engine, and the micro-batches it cuts a step's rows into.

    trimmed: TRL without two costs of its head that are only the toy's and the CPU's. It allocates a tile of up to 4,096 tokens
    x 32,768 words in full, however small the vocabulary: here the tile is as wide as the vocabulary. And where there is no
    Triton it sends every position of a row through the head: here only those of the answer, as on a GPU.
    """

    trainer: str
    rollout: str
    micro_batches: int
    trimmed: bool = False

    @property
    def rows_per_micro_batch(self) -> int:
        return WORK.rows // self.micro_batches

    @property
    def name(self) -> str:
        return f"{self.trainer}, trimmed" if self.trimmed else self.trainer

    @property
    def slug(self) -> str:
        return f"{self.trainer}-{self.rollout}-{self.micro_batches}{'-trimmed' if self.trimmed else ''}"


TRL, OURS = "TRL", "verl_memopt"
CONTESTANTS = tuple(
    contestant
    for micro_batches in (1, 8)
    for contestant in (
        Contestant(TRL, "hf", micro_batches),
        Contestant(TRL, "hf", micro_batches, trimmed=True),
        Contestant(OURS, "hf", micro_batches),
        Contestant(OURS, "vllm", micro_batches),
    )
)


@dataclass(frozen=True)
class Plan:
    """One run in a process of its own. Folders are absolute. track: count bytes, in which case times mean nothing."""

    contestant: Contestant
    task: str
    folder: str
    steps: int
    seed: int
    track: bool


@dataclass(frozen=True)
class Peak:
    """Most bytes live at once in a phase, and how much of that is the rollout engine's own (weights and KV cache)."""

    bytes: int
    engine_bytes: int


@dataclass(frozen=True)
class Record:
    """What a run leaves. Lists have one entry per step. Times are of the processor, which other work does not lengthen."""

    starts: list[float]
    """When each step began."""
    phases: list[dict[str, float]]
    """How long each phase of ``PHASES`` took that there is."""
    response_tokens: list[int]
    accuracy: float
    """Share of held-out prompts answered right, greedily, after the last step."""
    peaks: dict[str, Peak] = field(default_factory=dict)
    """By phase, in step ``TRACKED_STEP``; empty when nothing was counted."""
    prompt_ids: str = ""
    """Hash of the prompt ids of all steps, where the run was tracked."""


def store(value: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(value))


def stored(path: Path) -> Any:
    return pickle.loads(path.read_bytes())


ENGINE_KINDS = ("rollout weights", "kv")


def peak_of(size: int, kinds: dict[str, int]) -> Peak:
    return Peak(size, sum(kinds.get(kind, 0) for kind in ENGINE_KINDS))


def hash_of(ids: list[list[list[int]]]) -> str:
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()
