"""The ladder: one real update of a model from every knob off to every knob on, a knob a rung, with what each rung holds."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from verl_memopt.algorithms.reductions import GlobalCounts
from verl_memopt.config.loader import settings_from_mapping
from verl_memopt.config.schema import Settings
from verl_memopt.data.batch import RolloutBatch
from verl_memopt.data.ragged import Ragged
from verl_memopt.distributed.device import resolve_device
from verl_memopt.memory.knobs import Entry, index
from verl_memopt.models.folder import resolve_folder
from verl_memopt.observe.phase import PhaseMemory
from verl_memopt.trainer.passes import cut_ranks
from verl_memopt.trainer.step import budgets
from verl_memopt.workers.local_group import start_local_group
from verl_memopt.workers.policy import MiniBatch
from verl_memopt.workers.worker import Worker, WorkerPlan

logger = logging.getLogger(__name__)

MEASURED_ROUND = 2
"""The first round has no optimizer state yet, so the second is read."""


@dataclass(frozen=True)
class Work:
    """What every rung computes: ``rows`` rollouts of ``prompt`` + ``response`` tokens, in groups of ``group``."""

    rows: int = 8
    prompt: int = 1024
    response: int = 256
    group: int = 8
    seed: int = 0


@dataclass(frozen=True)
class Rung:
    """One measured rung. Bytes are peaks of live tensors on the device, and what lies in host buffers at most."""

    knob: str
    overrides: tuple[str, ...]
    phases: dict[str, int]
    kinds: dict[str, int]
    peak_device_bytes: int
    host_bytes: int
    seconds: float
    loss: float
    grad_norm: float
    phase_kinds: dict[str, dict[str, int]] = field(default_factory=dict)


def ladder_settings(folder: str, work: Work, overrides: Sequence[str]) -> Settings:
    """Gives the settings of a rung: one micro-batch a row budget, no engine but transformers', ``overrides`` on top."""
    tokens = work.prompt + work.response
    base = {
        "data.train_files": "none", "data.val_files": None, "data.seed": work.seed,
        "data.train_batch_size": work.rows // work.group,
        "data.max_prompt_length": work.prompt, "data.max_response_length": work.response,
        "actor_rollout_ref.model.path": folder, "actor_rollout_ref.actor.ppo_mini_batch_size": work.rows // work.group,
        "actor_rollout_ref.actor.use_dynamic_bsz": True, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": tokens * work.rows,
        "actor_rollout_ref.rollout.name": "hf", "actor_rollout_ref.rollout.n": work.group,
        "actor_rollout_ref.rollout.dtype": "fp32", "actor_rollout_ref.actor.fsdp_config.dtype": "fp32",
        "trainer.worker_group": "local",
    }  # fmt: skip
    given = dict(override.lstrip("+").split("=", 1) for override in overrides)
    return settings_from_mapping({**base, **{key: yaml.safe_load(text) for key, text in given.items()}})


def rungs(entries: Sequence[Entry] | None = None) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Gives (knob, overrides) of each rung: first every knob off, then one more on at each, last all on."""
    climbed = [entry for entry in (index() if entries is None else entries) if entry.on]
    off = [override for entry in climbed for override in entry.off]
    yield "all off", tuple(off)
    on: list[str] = []
    for entry in climbed:
        on += entry.on
        replaced = {override.split("=")[0] for override in on}
        yield entry.name, (*(override for override in off if override.split("=")[0] not in replaced), *on)


def measure(folder: Path, work: Work, knob: str, overrides: tuple[str, ...], extra: Sequence[str] = ()) -> Rung:
    """Runs log-probs and update twice with the given knobs and gives what the second round held."""
    settings = ladder_settings(str(folder), work, [*overrides, *extra])
    device = resolve_device(settings.trainer.device)
    group = start_local_group(functools.partial(Worker, _plan(settings, folder)), device)
    try:
        for _ in range(MEASURED_ROUND):
            started = time.perf_counter()
            memories, metrics = _round(group, settings, make_batch(work))
            seconds = time.perf_counter() - started
    finally:
        group.shutdown()
    highest = max(memories, key=lambda memory: memory.peak_allocated_bytes or 0)
    return Rung(
        knob=knob,
        overrides=overrides,
        phases={memory.name: memory.peak_allocated_bytes or 0 for memory in memories},
        kinds=dict(highest.kinds),
        peak_device_bytes=highest.peak_allocated_bytes or 0,
        host_bytes=max(memory.host_buffer_bytes for memory in memories),
        seconds=seconds,
        loss=metrics["actor/loss"],
        grad_norm=metrics["actor/grad_norm"],
        phase_kinds={memory.name: dict(memory.kinds) for memory in memories},
    )


def make_batch(work: Work) -> RolloutBatch:
    """Gives rollouts of random tokens with random advantages, the same for the same work."""
    generator = torch.Generator().manual_seed(work.seed)

    def ids(length: int) -> Ragged:
        flat = torch.randint(0, 256, (work.rows * length,), generator=generator)
        return Ragged(flat=flat, lengths=torch.full((work.rows,), length), batch_size=[])

    advantages = torch.randn(work.rows, generator=generator).repeat_interleave(work.response)
    return RolloutBatch(
        prompts=ids(work.prompt),
        responses=ids(work.response),
        group=torch.arange(work.rows) // work.group,
        advantages=advantages,
        batch_size=[],
    )


def _plan(settings: Settings, folder: Path) -> WorkerPlan:
    text = str(folder)
    return WorkerPlan(
        settings=settings.actor_rollout_ref,
        folder=text,
        engine_folder=text,
        reference_folder=None,
        tokenizer_folder=text,
        eos_token_ids=(0,),
        optimizer_steps=MEASURED_ROUND,
        free_engine=False,
        track_init=False,
        memory=settings.memory,
    )


def _round(group: Any, settings: Settings, batch: RolloutBatch) -> tuple[list[PhaseMemory], dict[str, float]]:
    update, old, _ = budgets(settings)
    tokens = [batch.computed_tokens()]
    names = [[f"row {row}" for row in range(batch.num_rows)]]
    scoring, training = cut_ranks(tokens, names, old)[0], cut_ranks(tokens, names, update)[0]
    memories = []

    def call(phase: str, method: str, *args: Any) -> Any:
        (reply,) = group.all("call", phase, True, method, *args)
        memories.append(reply.memory)
        return reply.value

    batch.old_log_probs = call("old_log_prob", "old_log_probs", batch, scoring, False).log_probs
    counts = GlobalCounts(float(batch.responses.lengths.sum()), float(batch.num_rows))
    metrics = call("update_actor", "update_actor", [MiniBatch(batch, training, counts)])
    call("update_weights", "update_weights")
    return memories, metrics


def climb(model: str, work: Work, extra: Sequence[str] = (), only: Sequence[str] = ()) -> Iterator[Rung]:
    """Measures every rung in order, or those whose knob is in ``only``. Errors: ConfigError for a model that is not there."""
    folder = resolve_folder(model, "--model")
    for knob, overrides in rungs():
        if not only or knob in only:
            logger.info("ladder: %s", knob)
            yield measure(folder, work, knob, overrides, extra)


def as_json(rungs: Sequence[Rung], work: Work, model: str) -> dict[str, Any]:
    """Gives a ladder as plain values: ``rungs`` first all off, last all on."""
    return {"schema": 1, "model": model, "work": asdict(work), "rungs": [asdict(rung) for rung in rungs]}
