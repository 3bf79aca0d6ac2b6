"""The ladder: one real update of a model from every knob off to every knob on, a knob a rung, with what each rung holds."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from verl_memopt.algorithms.reductions import GlobalCounts
from verl_memopt.config.schema import Settings
from verl_memopt.data.batch import RolloutBatch
from verl_memopt.data.ragged import Ragged
from verl_memopt.distributed.device import empty_cache, local_device, resolve_device
from verl_memopt.distributed.process_group import leave_process_group
from verl_memopt.errors import ConfigError, DeviceMemoryError
from verl_memopt.knobs.shapes import Shapes
from verl_memopt.ladder.plan import Step, Work, ladder_settings, steps
from verl_memopt.ladder.row import HOST, OutOfMemory, Rung, with_savings
from verl_memopt.memory.host.host_buffers import host_allocator
from verl_memopt.models.attention import choose_attention
from verl_memopt.models.build import empty_model, load_model_config
from verl_memopt.models.folder import resolve_folder
from verl_memopt.models.policy_model import PolicyModel
from verl_memopt.observe.phase import PhaseMemory
from verl_memopt.trainer.passes import budgets, cut_ranks
from verl_memopt.workers.local_group import start_local_group
from verl_memopt.workers.policy import MiniBatch
from verl_memopt.workers.worker import Worker, WorkerPlan

ROUNDS = 2
"""The first has no optimizer state yet, so it is short and the second is read."""

SHORT = 8
"""Tokens of a prompt and of a response in the first round, at most."""


def measure(folder: Path, work: Work, knob: str, overrides: tuple[str, ...], extra: Sequence[str] = ()) -> Rung:
    """Run log-probs, update and weight sync with the given knobs, a short round first, and return what they held.

    A rung that runs out of device memory is a result too: its ``out_of_memory`` says where. Its memory is free again then.
    """
    settings = ladder_settings(str(folder), work, [*overrides, *extra])
    device = local_device(resolve_device(settings.trainer.device), 0)
    memories: list[PhaseMemory] = []
    # The parts of a worker refer to each other. This frees what another left, so that it is not counted here.
    _free(device)
    held_before = host_allocator().held_bytes
    try:
        seconds, metrics = _update(settings, folder, work, device.type, memories)
    except DeviceMemoryError as error:
        ran_out = OutOfMemory.of(error)
    else:
        return _measured_rung(knob, overrides, memories, held_before, seconds, metrics)
    # The error is gone here, and with it the frames of its traceback, which held the tensors of the rung.
    leave_process_group()
    _free(device)
    return Rung(knob, overrides, phases=_peaks(memories), out_of_memory=ran_out)


def _update(
    settings: Settings, folder: Path, work: Work, device: str, memories: list[PhaseMemory]
) -> tuple[float, dict[str, float]]:
    """Run the short round and the measured one; return the seconds and metrics of the second, whose phases go to ``memories``."""
    short = replace(work, prompt=min(SHORT, work.prompt), response=min(SHORT, work.response))
    group = start_local_group(functools.partial(Worker, _plan(settings, folder)), device)
    try:
        _round(group, settings, make_batch(short), [])
        started = time.perf_counter()
        metrics = _round(group, settings, make_batch(work), memories)
        return time.perf_counter() - started, metrics
    finally:
        group.shutdown()


def _free(device: torch.device) -> None:
    gc.collect()
    empty_cache(device)


def _peaks(memories: Sequence[PhaseMemory]) -> dict[str, int]:
    return {memory.name: memory.peak_allocated_bytes or 0 for memory in memories}


def _measured_rung(
    knob: str,
    overrides: tuple[str, ...],
    memories: Sequence[PhaseMemory],
    held_before: int,
    seconds: float,
    metrics: dict[str, float],
) -> Rung:
    highest = max(memories, key=lambda memory: memory.peak_allocated_bytes or 0)
    return Rung(
        knob=knob,
        overrides=overrides,
        phases=_peaks(memories),
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


def _round(group: Any, settings: Settings, batch: RolloutBatch, memories: list[PhaseMemory]) -> dict[str, float]:
    """Run the phases of one update; what each held goes to ``memories`` as it ends. Return the metrics of the update."""
    names = [f"row {row}" for row in range(batch.num_rows)]
    cuts = (cut_ranks([batch.row_tokens(budget.shared)], [names], budget)[0] for budget in budgets(settings.actor_rollout_ref))
    training, scoring, reference = cuts

    def call(phase: str, method: str, *args: Any) -> Any:
        (reply,) = group.all("call", phase, True, method, *args)
        memories.append(reply.memory)
        return reply.value

    group.all("call", "gen", False, "release_engine")
    batch.old_log_probs = call("old_log_prob", "old_log_probs", batch, scoring, False).log_probs
    batch.ref_log_probs = call("ref", "ref_log_probs", batch, reference).log_probs
    counts = GlobalCounts(float(batch.responses.lengths.sum()), float(batch.num_rows))
    metrics: dict[str, float] = call("update_actor", "update_actor", [MiniBatch(batch, training, counts)])
    call("update_weights", "update_weights")
    return metrics


def shapes(folder: Path, work: Work, overrides: Sequence[str]) -> Shapes:
    """Gives the symbols of the formulas for a model and a rung's settings; nothing is loaded."""
    settings = ladder_settings(str(folder), work, overrides)
    model = settings.actor_rollout_ref.model
    config = load_model_config(model, folder)
    attention = choose_attention(model.attn_implementation, torch.device("cpu"), torch.float32)
    policy = PolicyModel(empty_model(config, attention, torch.float32, model.trust_remote_code), 0, False)
    update, batch = budgets(settings.actor_rollout_ref)[0], make_batch(work)
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
        unread=computed.skipped(rows),
    )


def _count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def chosen_steps(work: Work, only: Sequence[str] = ()) -> list[Step]:
    """Return the steps to measure in order: all of them, or those whose knob is in ``only`` and the steps below them.

    Raises:
        ConfigError: ``only`` names a knob that the ladder does not have.
    """
    todo = steps(work)
    unknown = set(only) - {step.knob for step in todo}
    if unknown:
        raise ConfigError(f"--only {' '.join(sorted(unknown))}: not on the ladder. It has {', '.join(s.knob for s in todo)}.")
    wanted = {step.knob for step in todo if not only or step.knob in only}
    wanted |= {step.base for step in todo if step.knob in wanted}
    return [step for step in todo if step.knob in wanted]


def climb(
    model: str,
    work: Work,
    extra: Sequence[str] = (),
    only: Sequence[str] = (),
    before: Callable[[str], None] = lambda knob: None,
) -> Iterator[Rung]:
    """Measure the chosen steps in order: the rungs, then the branches. Each is given as soon as it is measured.

    before: called with the name of the knob before each measurement.

    Raises:
        ConfigError: the model is not there, or the ladder does not have a knob of ``only``.
    """
    folder = resolve_folder(model, "--model")
    done: dict[str, tuple[Rung, Shapes]] = {}
    for step in chosen_steps(work, only):
        before(step.knob)
        rung = measure(folder, work, step.knob, step.overrides, extra)
        at = shapes(folder, work, [*step.overrides, *extra])
        if step.base in done:
            base, base_shapes = done[step.base]
            rung = with_savings(rung, base, base_shapes, at)
        done[step.knob] = rung, at
        yield rung
