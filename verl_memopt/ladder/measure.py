"""Measure the rows of the ladder: run one real update of a model per row, and record the bytes that it needs."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from verl_memopt.algorithms.records import WITH_CRITIC
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.config.keys import leaf_types
from verl_memopt.config.loader import settings_from_mapping
from verl_memopt.config.schema import Actor, Settings
from verl_memopt.data.batch import Ragged, RolloutBatch, rollout_batch
from verl_memopt.distributed.device import empty_cache, leave_process_group, local_device, resolve_device
from verl_memopt.errors import ConfigError, DeviceMemoryError, OutOfMemory
from verl_memopt.memory.critic_rules import has_critic, twin
from verl_memopt.memory.host_buffers import host_allocator
from verl_memopt.memory.knob import knob_named, knobs
from verl_memopt.model.families import POLICY_KEY
from verl_memopt.model.folder import resolve_folder
from verl_memopt.model.sizes import size_of
from verl_memopt.observe.phase import PhaseMemory
from verl_memopt.plan.formulas import Pass, Shapes
from verl_memopt.trainer.micro_batching import budgets, critic_budgets, cut_ranks, with_selection
from verl_memopt.worker.group import LocalGroup
from verl_memopt.worker.roles import WorkerPlan
from verl_memopt.worker.trained_model import MiniBatch
from verl_memopt.worker.worker import Worker

ROUNDS = 2
"""Optimizer steps per row. The first step is short and creates the optimizer state. The second is measured."""

SHORT = 8
"""Most tokens per prompt, and per response, in the first step."""


def run_ablation(
    model: str,
    work: UpdateSize,
    extra: Sequence[str] = (),
    only: Sequence[str] = (),
    before: Callable[[str], None] = lambda knob: None,
) -> Iterator[Row]:
    """Measure the rows in order, first the ablation, then the alternatives. Yield each row as soon as it is measured.

    Args:
        model: Folder or hub id.
        work: The update that every row runs.
        extra: Further settings of all rows, as ``key=value``.
        only: Measure only the rows of these knobs, and the rows with which they are compared. Empty = all rows.
        before: Called with the name of the row's knob before each measurement.

    Raises:
        ConfigError: The model does not exist, or a knob in ``only`` is not on the ladder.
    """
    folder = resolve_folder(model, "--model")
    measured: dict[str, tuple[Row, Shapes]] = {}
    for plan in choose_rows(work, only):
        before(plan.knob)
        row = measure_row(folder, work, plan.knob, plan.overrides, extra)
        row_shapes = shapes(folder, work, [*plan.overrides, *extra])
        # The formulas hold only for runs without a critic.
        if plan.base in measured and "update_critic" not in row.phases:
            base, base_shapes = measured[plan.base]
            row = with_savings(row, base, base_shapes, row_shapes)
        measured[plan.knob] = row, row_shapes
        yield row


def measure_row(folder: Path, work: UpdateSize, knob: str, overrides: tuple[str, ...], extra: Sequence[str] = ()) -> Row:
    """Warm up, run log-probs, update and weight sync with the settings of a row, and return the bytes that they needed.

    A row that runs out of device memory is a result too: ``out_of_memory`` says where, and its memory is freed. Settings are
    ``key=value``; ``extra`` overrides ``overrides``.
    """
    settings = row_settings(str(folder), work, [*overrides, *extra])
    device = local_device(resolve_device(settings.trainer.device), 0)
    memories: list[PhaseMemory] = []
    # The parts of a worker refer to each other, so the worker of the previous row is still in memory. It must not count in this
    # row.
    _free(device)
    host_bytes_before = host_allocator().held_bytes
    try:
        seconds, metrics = _update(settings, folder, work, device.type, memories)
    except DeviceMemoryError as error:
        ran_out = error.figures  # not the error itself, whose traceback keeps the tensors of the row alive
    else:
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
    leave_process_group()
    _free(device)
    return Row(knob, overrides, phases=_peaks(memories), out_of_memory=ran_out)


def _update(
    settings: Settings, folder: Path, work: UpdateSize, device: str, memories: list[PhaseMemory]
) -> tuple[float, dict[str, float]]:
    # Run both steps, and return the seconds and metrics of the second. Its phases are appended to `memories`.
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


def make_batch(work: UpdateSize, actor: Actor) -> RolloutBatch:
    """Make rollouts of random tokens with random advantages, one prompt per group. Equal ``work`` gives equal rollouts.

    The settings of ``actor`` say whether a group computes its prompt once.
    """
    generator = torch.Generator().manual_seed(work.seed)

    def random_rows(rows: int, length: int, copies: int) -> Ragged:
        ids = torch.randint(0, 256, (rows, length), generator=generator).repeat_interleave(copies, 0)
        return Ragged.from_rows(list(ids), torch.int64)

    advantages = torch.randn(work.rows, generator=generator).repeat_interleave(work.response)
    prompts = random_rows(work.rows // work.group, work.prompt, work.group)
    batch = rollout_batch(prompts, random_rows(work.rows, work.response, 1), torch.arange(work.rows) // work.group, actor)
    batch.advantages = advantages
    return batch


def _plan(settings: Settings, folder: Path) -> WorkerPlan:
    text, roles, with_critic = str(folder), settings.actor_rollout_ref, has_critic(settings)
    return WorkerPlan(
        settings=roles,
        folder=text,
        engine_folder=text,
        reference_folder=text if roles.model.lora_rank == 0 else None,
        critic=settings.critic if with_critic else None,
        critic_folder=text if with_critic else None,
        critic_schedule_steps=ROUNDS,
        tokenizer_folder=text,
        eos_token_ids=(0,),
        schedule_steps=ROUNDS,
        free_engine=bool(roles.rollout.free_cache_engine),
        track_init=False,
        memory=settings.memory,
        kinds_on_gpu=True,
    )


def _round(group: Any, settings: Settings, batch: RolloutBatch, memories: list[PhaseMemory]) -> dict[str, float]:
    # Run the phases of one update and return its metrics. Each phase is appended to `memories` when it ends.
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
        critic_bins, values_bins = (
            cut_ranks([batch.row_tokens()], [names], critic_budget)[0] for critic_budget in critic_budgets(settings.critic)
        )
        batch.old_values = call("values", "values", batch, values_bins)
        assert batch.advantages is not None
        batch.returns = batch.old_values + batch.advantages
    # For losses that act on only some tokens, the tokens are chosen here, as in a training step.
    batch = with_selection(batch, range(batch.num_rows), settings.actor_rollout_ref.actor, seed=0)
    counts = GlobalCounts(float(batch.responses.lengths.sum()), float(batch.num_rows))
    if batch.returns is not None:
        call("update_critic", "update_critic", [MiniBatch(batch, critic_bins, counts)])
    metrics: dict[str, float] = call("update_actor", "update_actor", [MiniBatch(batch, update_bins, counts)])
    call("update_weights", "update_weights")
    return metrics


def shapes(folder: Path, work: UpdateSize, overrides: Sequence[str]) -> Shapes:
    """Return the sizes that the knobs' memory formulas need, for the model in ``folder`` and the settings of one ladder row.

    No weights are loaded.
    """
    settings = row_settings(str(folder), work, overrides)
    roles = settings.actor_rollout_ref
    tokens = make_batch(work, roles.actor).row_tokens()
    largest = max(budgets(roles)[0].micro_batches(tokens, [""] * work.rows), key=tokens.cost)
    cost = tokens.cost(largest)
    update = Pass(cost, len(largest) * work.response, tokens.segments(largest), cost)
    found = Shapes.of(size_of(roles.model, POLICY_KEY), roles, update, resolve_device(settings.trainer.device))
    return replace(found, suffix_tokens=tokens.suffixes(largest), skipped=tokens.skipped(largest))


# The rows of the ladder: their order, the settings of each row, and the update that all rows run.


ALL_OFF = "all off"
"""Name of the first row."""

ROWS = sorted((knob.row.place, knob.name, knob.row) for knob in knobs() if knob.row is not None)

ABLATION = tuple(name for _, name, row in ROWS if not row.on_top_of)
"""Knobs in the order in which the rows turn them on. Knobs that do not change results come first, precision comes last."""

ALTERNATIVES = {name: row.on_top_of for _, name, row in ROWS if row.on_top_of}
"""Knob -> the row to which it is added. These knobs have rows beside the ablation, because they conflict with knobs of later
rows."""


@dataclass(frozen=True)
class UpdateSize:
    """The update that each row runs: rollouts, tokens per prompt and per response, rollouts per prompt (``group``), seed."""

    rows: int = 8
    prompt: int = 1024
    response: int = 256
    group: int = 8
    seed: int = 0

    @property
    def row_tokens(self) -> int:
        return self.prompt + self.response


@dataclass(frozen=True)
class RowPlan:
    """A row to measure: its knob, its settings (``key=value``), and the knob of the row to compare it with ("" = none)."""

    knob: str
    overrides: tuple[str, ...]
    base: str = ""


def row_settings(folder: str, work: UpdateSize, overrides: Sequence[str]) -> Settings:
    """Return the settings of a row: one optimizer step over all rollouts, in this process, with the hf engine.

    With ``algorithm.adv_estimator=gae`` the row has a critic, whose knobs are set like those of the policy. ``overrides`` replace
    settings that all rows share. Raises a ConfigError if one of them is unknown or invalid.
    """
    shared = {
        "data.train_files": "none", "data.val_files": None, "data.seed": work.seed,
        "data.train_batch_size": work.rows // work.group,
        "data.max_prompt_length": work.prompt, "data.max_response_length": work.response,
        "actor_rollout_ref.model.path": folder, "actor_rollout_ref.actor.ppo_mini_batch_size": work.rows // work.group,
        "actor_rollout_ref.actor.use_dynamic_bsz": True, "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.actor.use_torch_compile": False, "actor_rollout_ref.actor.optim.clip_grad": None,
        "actor_rollout_ref.rollout.name": "hf", "actor_rollout_ref.rollout.n": work.group,
        "algorithm.adv_estimator": "rloo",
        "actor_rollout_ref.rollout.dtype": "fp32",
        "actor_rollout_ref.actor.fsdp_config.dtype": "fp32", "actor_rollout_ref.ref.fsdp_config.dtype": "fp32",
        "trainer.worker_group": "local",
    }  # fmt: skip
    texts = dict(override.lstrip("+").split("=", 1) for override in overrides)
    if texts.get("algorithm.adv_estimator") in WITH_CRITIC:
        shared["critic.optim.clip_grad"] = shared["actor_rollout_ref.actor.optim.clip_grad"]
        shared["critic.model.fsdp_config.dtype"] = shared["actor_rollout_ref.actor.fsdp_config.dtype"]
        texts = {twin(key): text for key, text in texts.items() if twin(key) in leaf_types()} | texts
    return settings_from_mapping({**shared, **{key: yaml.safe_load(text) for key, text in texts.items()}})


def plan_rows(work: UpdateSize) -> list[RowPlan]:
    """Plan all rows: first all knobs off, then one more knob on per row until all are on, then the alternatives."""
    rows = {name: row for _, name, row in ROWS}
    state = {key: text for row in rows.values() for key, text in _pairs(row.off, work)}
    plans = [RowPlan(ALL_OFF, _overrides(state))]
    states: dict[str, dict[str, str]] = {}
    for name in ABLATION:
        state = states[name] = state | dict(_pairs(rows[name].on, work))
        plans.append(RowPlan(name, _overrides(state), base=plans[-1].knob))
    for name, base in ALTERNATIVES.items():
        states[name] = states[base] | dict(_pairs(rows[name].on, work))
        plans.append(RowPlan(name, _overrides(states[name]), base))
    return plans


def choose_rows(work: UpdateSize, only: Sequence[str] = ()) -> list[RowPlan]:
    """Return the rows to measure, in order: all rows, or the rows of ``only`` and the rows with which they are compared.

    Raises:
        ConfigError: A knob is not on the ladder.
    """
    plans = plan_rows(work)
    unknown = set(only) - {plan.knob for plan in plans}
    if unknown:
        raise ConfigError(f"--only {' '.join(sorted(unknown))}: not on the ladder. It has {', '.join(p.knob for p in plans)}.")
    wanted = {plan.knob for plan in plans if not only or plan.knob in only}
    wanted |= {plan.base for plan in plans if plan.knob in wanted}
    return [plan for plan in plans if plan.knob in wanted]


def _pairs(overrides: Sequence[str], work: UpdateSize) -> Iterator[tuple[str, str]]:
    sizes = {"{pair}": 2 * work.row_tokens, "{all}": work.rows * work.row_tokens}
    for override in overrides:
        key, text = override.split("=", 1)
        yield key, str(sizes.get(text, text))


def _overrides(state: dict[str, str]) -> tuple[str, ...]:
    return tuple(f"{key}={text}" for key, text in state.items())


# The record of one row, and the whole ladder as plain values for JSON.


HOST = "host buffers"
"""Kind that a claim uses for bytes in host buffers."""

OK = "ok"
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class Saving:
    """One saving that the knob of a row promises, and the measured saving.

    ``measured_bytes`` is None if this row, or the row with which it is compared, ran out of memory.
    """

    phase: str
    kind: str
    formula_bytes: int
    measured_bytes: int | None


@dataclass(frozen=True)
class Row:
    """One measured row of the ladder. If it ran out of memory, each figure of the whole update is None.

    ``overrides`` are all settings of the row. ``base`` is the knob of the row with which it is compared.
    """

    knob: str
    overrides: tuple[str, ...]
    phases: dict[str, int]
    """Phase -> peak of live tensor bytes on the device, for phases that ended."""
    kinds: dict[str, int] = field(default_factory=dict)
    """Kind -> bytes at the highest peak of all phases."""
    peak_device_bytes: int | None = None
    host_bytes: int | None = None
    seconds: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    phase_kinds: dict[str, dict[str, int]] = field(default_factory=dict)
    """Phase -> kind -> most bytes of that kind. The kinds of a phase may peak at different moments."""
    savings: tuple[Saving, ...] = ()
    base: str = ""
    out_of_memory: OutOfMemory | None = None

    @property
    def status(self) -> str:
        return OK if self.out_of_memory is None else OUT_OF_MEMORY


def with_savings(row: Row, base: Row, before: Shapes, after: Shapes) -> Row:
    """Add the savings of a row compared with ``base``: those that the knob's formulas predict, and those measured."""
    savings = []
    for claim in knob_named(row.knob).claims:
        measured = None
        if not (row.out_of_memory or base.out_of_memory):
            was, now = (measured_row.phase_kinds[claim.phase].get(claim.kind, 0) for measured_row in (base, row))
            measured = was - now
        savings.append(Saving(claim.phase, claim.kind, round(claim.num_bytes(before, after)), measured))
    return replace(row, savings=tuple(savings), base=base.knob)


def as_json(rows: Sequence[Row], work: UpdateSize, model: str) -> dict[str, Any]:
    rungs, branches = ([{"knob": row.knob, "status": row.status, **asdict(row)} for row in part] for part in split(rows))
    return {"schema": 3, "model": model, "work": asdict(work), "rungs": rungs, "branches": branches}


def split(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    return [row for row in rows if row.knob not in ALTERNATIVES], [row for row in rows if row.knob in ALTERNATIVES]
