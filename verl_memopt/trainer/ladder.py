"""The ladder: one real update of a model from every knob off to every knob on, a knob a rung, with what each rung holds."""

from __future__ import annotations

import functools
import gc
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from verl_memopt.algorithms.reductions import GlobalCounts
from verl_memopt.config.schema import Settings
from verl_memopt.data.batch import RolloutBatch
from verl_memopt.data.ragged import Ragged
from verl_memopt.distributed.device import resolve_device
from verl_memopt.errors import ConfigError
from verl_memopt.memory.host_buffers import host_allocator
from verl_memopt.memory.knob import Claim
from verl_memopt.memory.knobs import knob_named
from verl_memopt.memory.shapes import Shapes
from verl_memopt.models.attention import choose_attention
from verl_memopt.models.build import empty_model, load_model_config
from verl_memopt.models.folder import resolve_folder
from verl_memopt.models.policy_model import PolicyModel
from verl_memopt.observe.phase import PhaseMemory
from verl_memopt.trainer.ladder_plan import BRANCHES, Work, ladder_settings, steps
from verl_memopt.trainer.passes import cut_ranks
from verl_memopt.trainer.step import budgets
from verl_memopt.workers.local_group import start_local_group
from verl_memopt.workers.policy import MiniBatch
from verl_memopt.workers.worker import Worker, WorkerPlan

logger = logging.getLogger(__name__)

ROUNDS = 2
"""The first has no optimizer state yet, so it is short and the second is read."""

SHORT = 8
"""Tokens of a prompt and of a response in the first round, at most."""

HOST = "host buffers"
"""Stands for the bytes in host buffers where a claim names a kind."""


@dataclass(frozen=True)
class Saving:
    """One claim of a rung's knob beside what was measured, in bytes."""

    phase: str
    kind: str
    formula_bytes: int
    measured_bytes: int


@dataclass(frozen=True)
class Rung:
    """One measured rung. Bytes are peaks of live tensors on the device, and what lies in host buffers at most.

    kinds: at the moment of the peak. phase_kinds: the most each kind held in each phase; the moments differ.
    """

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
    savings: tuple[Saving, ...] = ()
    base: str = ""
    """The rung below."""


def measure(folder: Path, work: Work, knob: str, overrides: tuple[str, ...], extra: Sequence[str] = ()) -> Rung:
    """Runs log-probs, update and weight sync with the given knobs, a short round first, and gives what they held."""
    settings = ladder_settings(str(folder), work, [*overrides, *extra])
    device = resolve_device(settings.trainer.device)
    # A worker's parts point at each other; what an earlier one left, and what is not the ladder's, is not this rung's.
    gc.collect()
    held_before = host_allocator().held_bytes
    group = start_local_group(functools.partial(Worker, _plan(settings, folder)), device)
    try:
        _round(group, settings, make_batch(replace(work, prompt=min(SHORT, work.prompt), response=min(SHORT, work.response))))
        started = time.perf_counter()
        memories, metrics = _round(group, settings, make_batch(work))
        seconds = time.perf_counter() - started
        group.all("close")
    finally:
        group.shutdown()
    highest = max(memories, key=lambda memory: memory.peak_allocated_bytes or 0)
    return Rung(
        knob=knob,
        overrides=overrides,
        phases={memory.name: memory.peak_allocated_bytes or 0 for memory in memories},
        kinds=dict(highest.kinds),
        peak_device_bytes=highest.peak_allocated_bytes or 0,
        host_bytes=max(memory.host_buffer_bytes for memory in memories) - held_before,
        seconds=seconds,
        loss=metrics["actor/loss"],
        grad_norm=metrics["actor/grad_norm"],
        phase_kinds={memory.name: {**memory.kind_peaks, HOST: memory.host_buffer_bytes - held_before} for memory in memories},
    )


def make_batch(work: Work) -> RolloutBatch:
    """Gives rollouts of random tokens with random advantages, one prompt to a group, the same for the same work."""
    generator = torch.Generator().manual_seed(work.seed)

    def ids(rows: int, length: int) -> torch.Tensor:
        return torch.randint(0, 256, (rows, length), generator=generator)

    def ragged(tokens: torch.Tensor) -> Ragged:
        return Ragged(flat=tokens.reshape(-1), lengths=torch.full((tokens.shape[0],), tokens.shape[1]), batch_size=[])

    advantages = torch.randn(work.rows, generator=generator).repeat_interleave(work.response)
    return RolloutBatch(
        prompts=ragged(ids(work.rows // work.group, work.prompt).repeat_interleave(work.group, 0)),
        responses=ragged(ids(work.rows, work.response)),
        group=torch.arange(work.rows) // work.group,
        advantages=advantages,
        batch_size=[],
    )


def _plan(settings: Settings, folder: Path) -> WorkerPlan:
    text = str(folder)
    with_reference = settings.actor_rollout_ref.model.lora_rank == 0
    return WorkerPlan(
        settings=settings.actor_rollout_ref,
        folder=text,
        engine_folder=text,
        reference_folder=text if with_reference else None,
        tokenizer_folder=text,
        eos_token_ids=(0,),
        optimizer_steps=ROUNDS,
        free_engine=bool(settings.actor_rollout_ref.rollout.free_cache_engine),
        track_init=False,
        memory=settings.memory,
        kinds_on_gpu=True,
    )


def _round(group: Any, settings: Settings, batch: RolloutBatch) -> tuple[list[PhaseMemory], dict[str, float]]:
    names = [f"row {row}" for row in range(batch.num_rows)]
    cuts = (cut_ranks([batch.row_tokens(budget.shared)], [names], budget)[0] for budget in budgets(settings))
    training, scoring, reference = cuts
    memories = []

    def call(phase: str, method: str, *args: Any) -> Any:
        (reply,) = group.all("call", phase, True, method, *args)
        memories.append(reply.memory)
        return reply.value

    group.all("call", "gen", False, "release_engine")
    batch.old_log_probs = call("old_log_prob", "old_log_probs", batch, scoring, False).log_probs
    batch.ref_log_probs = call("ref", "ref_log_probs", batch, reference).log_probs
    counts = GlobalCounts(float(batch.responses.lengths.sum()), float(batch.num_rows))
    metrics = call("update_actor", "update_actor", [MiniBatch(batch, training, counts)])
    call("update_weights", "update_weights")
    return memories, metrics


def shapes(folder: Path, work: Work, overrides: Sequence[str]) -> Shapes:
    """Gives the symbols of the formulas for a model and a rung's settings; nothing is loaded."""
    settings = ladder_settings(str(folder), work, overrides)
    model = settings.actor_rollout_ref.model
    config = load_model_config(model, folder)
    attention = choose_attention(model.attn_implementation, torch.device("cpu"), torch.float32)
    policy = PolicyModel(empty_model(config, attention, torch.float32, model.trust_remote_code), 0, False)
    update, batch = budgets(settings)[0], make_batch(work)
    computed = batch.row_tokens(update.shared)
    rows = max(update.micro_batches(computed, [""] * work.rows), key=computed.cost)
    whole, block = _count(policy), _count(policy.blocks()[0])
    return Shapes(
        settings=settings.actor_rollout_ref,
        layers=len(policy.blocks()),
        hidden=config.hidden_size,
        mlp=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", config.hidden_size // config.num_attention_heads),
        vocab=config.vocab_size,
        params=whole,
        block_params=block,
        tied=policy.tied,
        tokens=computed.cost(rows),
        responses=len(rows) * work.response,
        branch_tokens=sum(computed.answers[row] for row in rows) if update.shared and len(rows) > 1 else 0,
        unread=computed.unread(rows),
    )


def _count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def with_savings(rung: Rung, base: Rung, before: Shapes, after: Shapes) -> Rung:
    """Gives a rung with what its knob's formula says it saves on its base, beside what it does."""
    savings = [
        Saving(
            claim.phase,
            claim.kind,
            formula_bytes=round(claim.saves(before, after)),
            measured_bytes=_held(base, claim) - _held(rung, claim),
        )
        for claim in knob_named(rung.knob).claims
    ]
    return replace(rung, savings=tuple(savings), base=base.knob)


def _held(rung: Rung, claim: Claim) -> int:
    return rung.phase_kinds[claim.phase].get(claim.kind, 0)


def climb(model: str, work: Work, extra: Sequence[str] = (), only: Sequence[str] = ()) -> Iterator[Rung]:
    """Measures every rung in order, then the branches; or those whose knob is in ``only``, and the rungs below them.

    Errors: ConfigError for a model that is not there or a knob that the ladder does not have.
    """
    folder = resolve_folder(model, "--model")
    todo = steps(work)
    unknown = set(only) - {step.knob for step in todo}
    if unknown:
        raise ConfigError(f"--only {' '.join(sorted(unknown))}: not on the ladder. It has {', '.join(s.knob for s in todo)}.")
    wanted = {step.knob for step in todo if not only or step.knob in only}
    wanted |= {step.base for step in todo if step.knob in wanted}
    done: dict[str, tuple[Rung, Shapes]] = {}
    for step in todo:
        if step.knob not in wanted:
            continue
        logger.info("ladder: %s", step.knob)
        rung = measure(folder, work, step.knob, step.overrides, extra)
        at = shapes(folder, work, [*step.overrides, *extra])
        if step.base in done:
            base, before = done[step.base]
            rung = with_savings(rung, base, before, at)
        done[step.knob] = rung, at
        yield rung


def as_json(rungs: Sequence[Rung], work: Work, model: str) -> dict[str, Any]:
    """Gives a ladder as plain values: ``rungs`` first all off, last all on; ``branches``, each beside the rung ``base``."""
    climbed, branches = split(rungs)
    return {
        "schema": 2,
        "model": model,
        "work": asdict(work),
        "rungs": [asdict(rung) for rung in climbed],
        "branches": [asdict(rung) for rung in branches],
    }


def split(rungs: Sequence[Rung]) -> tuple[list[Rung], list[Rung]]:
    """Gives the rungs of the climb, and the branches."""
    return [rung for rung in rungs if rung.knob not in BRANCHES], [rung for rung in rungs if rung.knob in BRANCHES]
