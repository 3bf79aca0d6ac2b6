"""Measures the rows of the ladder: each is one real update of a model, with the bytes that it needed."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.config.schema import Actor, Settings
from verl_memopt.data.batch import RolloutBatch, rollout_batch
from verl_memopt.data.ragged import Ragged
from verl_memopt.distributed.device import empty_cache, local_device, resolve_device
from verl_memopt.distributed.process_group import leave_process_group
from verl_memopt.errors import DeviceMemoryError
from verl_memopt.knobs.critic_rules import has_critic
from verl_memopt.knobs.shapes import Shapes
from verl_memopt.ladder.plan import Work, choose_rows, row_settings
from verl_memopt.ladder.row import HOST, OutOfMemory, Row, with_savings
from verl_memopt.memory.host.host_buffers import host_allocator
from verl_memopt.models.attention import choose_attention
from verl_memopt.models.build import empty_model, load_model_config
from verl_memopt.models.folder import resolve_folder
from verl_memopt.models.policy_model import PolicyModel
from verl_memopt.observe.phase import PhaseMemory
from verl_memopt.trainer.critic_update import critic_budgets
from verl_memopt.trainer.passes import budgets, cut_ranks
from verl_memopt.trainer.update import with_selection
from verl_memopt.workers.local_group import LocalGroup
from verl_memopt.workers.plan import WorkerPlan
from verl_memopt.workers.trained_model import MiniBatch
from verl_memopt.workers.worker import Worker

ROUNDS = 2
"""Optimizer steps of a row. The first, a short one, creates the optimizer state; the second is measured."""

SHORT = 8
"""Most tokens of a prompt, and of a response, in the first round."""


def run_ablation(
    model: str,
    work: Work,
    extra: Sequence[str] = (),
    only: Sequence[str] = (),
    before: Callable[[str], None] = lambda knob: None,
) -> Iterator[Row]:
    """Measure the rows in order, first the ablation and then the alternatives, and yield each as soon as it is measured.

    Args:
        model: Folder or hub id.
        work: The update that every row runs.
        extra: Further settings of every row, as ``key=value``.
        only: Knobs whose rows are measured, with the rows they are compared with; empty for all.
        before: Called with the knob of each row before it is measured.

    Raises:
        ConfigError: The model is not there, or the ladder does not have a knob of ``only``.
    """
    folder = resolve_folder(model, "--model")
    measured: dict[str, tuple[Row, Shapes]] = {}
    for plan in choose_rows(work, only):
        before(plan.knob)
        row = measure_row(folder, work, plan.knob, plan.overrides, extra)
        row_shapes = shapes(folder, work, [*plan.overrides, *extra])
        # The formulas are of a run without a critic.
        if plan.base in measured and "update_critic" not in row.phases:
            base, base_shapes = measured[plan.base]
            row = with_savings(row, base, base_shapes, row_shapes)
        measured[plan.knob] = row, row_shapes
        yield row


def measure_row(folder: Path, work: Work, knob: str, overrides: tuple[str, ...], extra: Sequence[str] = ()) -> Row:
    """Run log-probs, update and weight sync with a row's settings, after a short round, and return the bytes they needed.

    A row that runs out of device memory is a result too: its ``out_of_memory`` says where. Its memory is free again then.

    Args:
        folder: Folder of the model.
        work: The update.
        knob: Name of the row.
        overrides: Settings of the row, as ``key=value``.
        extra: Further settings, which win.
    """
    settings = row_settings(str(folder), work, [*overrides, *extra])
    device = local_device(resolve_device(settings.trainer.device), 0)
    memories: list[PhaseMemory] = []
    # The parts of a worker refer to each other. Free what the row before left, so that it does not count here.
    _free(device)
    host_bytes_before = host_allocator().held_bytes
    try:
        seconds, metrics = _update(settings, folder, work, device.type, memories)
    except DeviceMemoryError as error:
        ran_out = OutOfMemory.of(error)
    else:
        return _measured_row(knob, overrides, memories, host_bytes_before, seconds, metrics)
    # The error is gone here, and with it the frames of its traceback, which held the tensors of the row.
    leave_process_group()
    _free(device)
    return Row(knob, overrides, phases=_peaks(memories), out_of_memory=ran_out)


def _update(
    settings: Settings, folder: Path, work: Work, device: str, memories: list[PhaseMemory]
) -> tuple[float, dict[str, float]]:
    """Run both rounds and return seconds and metrics of the second; its phases are appended to ``memories``."""
    short = replace(work, prompt=min(SHORT, work.prompt), response=min(SHORT, work.response))
    group = LocalGroup(functools.partial(Worker, _plan(settings, folder)), device)
    try:
        _round(group, settings, make_batch(short, settings.actor_rollout_ref.actor), [])
        started = time.perf_counter()
        metrics = _round(group, settings, make_batch(work, settings.actor_rollout_ref.actor), memories)
        return time.perf_counter() - started, metrics
    finally:
        group.shutdown()


def _free(device: torch.device) -> None:
    gc.collect()
    empty_cache(device)


def _peaks(memories: Sequence[PhaseMemory]) -> dict[str, int]:
    return {memory.name: memory.peak_allocated_bytes or 0 for memory in memories}


def _measured_row(
    knob: str,
    overrides: tuple[str, ...],
    memories: Sequence[PhaseMemory],
    host_bytes_before: int,
    seconds: float,
    metrics: dict[str, float],
) -> Row:
    highest = max(memories, key=lambda memory: memory.peak_allocated_bytes or 0)
    host_bytes = {memory.name: memory.host_buffer_bytes - host_bytes_before for memory in memories}
    return Row(
        knob=knob,
        overrides=overrides,
        phases=_peaks(memories),
        kinds=dict(highest.kinds),
        peak_device_bytes=highest.peak_allocated_bytes or 0,
        host_bytes=max(host_bytes.values()),
        seconds=seconds,
        loss=metrics["actor/loss"],
        grad_norm=metrics["actor/grad_norm"],
        phase_kinds={memory.name: {**memory.kind_peaks, HOST: host_bytes[memory.name]} for memory in memories},
    )


def make_batch(work: Work, actor: Actor) -> RolloutBatch:
    """Return rollouts of random tokens with random advantages, one prompt for each group. Equal work gives equal rollouts.

    Args:
        work: The numbers of rows and tokens, and the seed.
        actor: The ``actor`` section of the settings. It says how the passes compute prompts.
    """
    generator = torch.Generator().manual_seed(work.seed)

    def random_ids(rows: int, length: int) -> torch.Tensor:
        return torch.randint(0, 256, (rows, length), generator=generator)

    def ragged(tokens: torch.Tensor) -> Ragged:
        return Ragged(flat=tokens.reshape(-1), lengths=torch.full((tokens.shape[0],), tokens.shape[1]), batch_size=[])

    advantages = torch.randn(work.rows, generator=generator).repeat_interleave(work.response)
    prompts = ragged(random_ids(work.rows // work.group, work.prompt).repeat_interleave(work.group, 0))
    batch = rollout_batch(prompts, ragged(random_ids(work.rows, work.response)), torch.arange(work.rows) // work.group, actor)
    batch.advantages = advantages
    return batch


def _plan(settings: Settings, folder: Path) -> WorkerPlan:
    text = str(folder)
    with_reference = settings.actor_rollout_ref.model.lora_rank == 0
    with_critic = has_critic(settings)
    return WorkerPlan(
        settings=settings.actor_rollout_ref,
        folder=text,
        engine_folder=text,
        reference_folder=text if with_reference else None,
        critic=settings.critic if with_critic else None,
        critic_folder=text if with_critic else None,
        critic_steps=ROUNDS,
        tokenizer_folder=text,
        eos_token_ids=(0,),
        optimizer_steps=ROUNDS,
        free_engine=bool(settings.actor_rollout_ref.rollout.free_cache_engine),
        track_init=False,
        memory=settings.memory,
        kinds_on_gpu=True,
    )


def _round(group: Any, settings: Settings, batch: RolloutBatch, memories: list[PhaseMemory]) -> dict[str, float]:
    """Run the phases of one update and return its metrics; each phase is appended to ``memories`` as it ends."""
    names = [f"row {index}" for index in range(batch.num_rows)]
    bins = (cut_ranks([batch.row_tokens()], [names], budget)[0] for budget in budgets(settings.actor_rollout_ref))
    update_bins, old_bins, ref_bins = bins

    def call(phase: str, method: str, *args: Any) -> Any:
        (reply,) = group.all("call", phase, True, method, *args)
        memories.append(reply.memory)
        return reply.value

    group.all("call", "gen", False, "release_engine")
    batch.old_log_probs = call("old_log_prob", "old_log_probs", batch, old_bins, False).log_probs
    batch.ref_log_probs = call("ref", "ref_log_probs", batch, ref_bins).log_probs
    if has_critic(settings):
        critic_bins, values_bins = (cut_ranks([batch.row_tokens()], [names], each)[0] for each in critic_budgets(settings.critic))
        batch.old_values = call("values", "values", batch, values_bins)
        assert batch.advantages is not None
        batch.returns = batch.old_values + batch.advantages
    # Losses that act on some tokens only get them chosen here, as in a training step.
    batch = with_selection(batch, range(batch.num_rows), settings.actor_rollout_ref.actor.policy_loss, seed=0)
    counts = GlobalCounts(float(batch.responses.lengths.sum()), float(batch.num_rows))
    if batch.returns is not None:
        call("update_critic", "update_critic", [MiniBatch(batch, critic_bins, counts)])
    metrics: dict[str, float] = call("update_actor", "update_actor", [MiniBatch(batch, update_bins, counts)])
    call("update_weights", "update_weights")
    return metrics


def shapes(folder: Path, work: Work, overrides: Sequence[str]) -> Shapes:
    """Return the sizes that the knobs' formulas read, for a model and a row's settings. No weights are loaded."""
    settings = row_settings(str(folder), work, overrides)
    model = settings.actor_rollout_ref.model
    config = load_model_config(model, folder)
    attention = choose_attention(model.attn_implementation, torch.device("cpu"), torch.float32)
    policy = PolicyModel(empty_model(config, attention, torch.float32, model.trust_remote_code), 0, False)
    budget = budgets(settings.actor_rollout_ref)[0]
    tokens = make_batch(work, settings.actor_rollout_ref.actor).row_tokens()
    largest = max(budget.micro_batches(tokens, [""] * work.rows), key=tokens.cost)
    return Shapes(
        settings=settings.actor_rollout_ref,
        layers=len(policy.blocks()),
        hidden=config.hidden_size,
        mlp=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", config.hidden_size // config.num_attention_heads),
        vocab=config.vocab_size,
        params=_count(policy),
        block_params=_count(policy.blocks()[0]),
        tied=policy.tied,
        tokens=tokens.cost(largest),
        responses=len(largest) * work.response,
        suffix_tokens=tokens.suffixes(largest),
        skipped=tokens.skipped(largest),
    )


def _count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
