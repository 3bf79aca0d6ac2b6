"""The settings that the search of ``verl-memopt fit`` may change: the knobs of the ladder, and sizes that depend on the run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from verl_memopt.config.keys import leaf_types, replaced, value_at
from verl_memopt.config.schema import Settings
from verl_memopt.memory import grad_offload, quantized_base, split_masters
from verl_memopt.memory.critic_rules import has_critic, twin
from verl_memopt.memory.knob import has_own_teacher, has_teacher, knob_named, longest_sample, needs_reference, num_devices
from verl_memopt.memory.param_offload import ACTOR_KEY, REFERENCE_KEY, STREAM, TEACHER_KEY
from verl_memopt.memory.rollout_memory import AUTO, CACHE
from verl_memopt.memory.sequence_parallel import KEYS as SEQUENCE
from verl_memopt.memory.shared_weights import KEY as SHARED
from verl_memopt.model.sizes import ModelSize
from verl_memopt.plan.model_refusals import why_refused
from verl_memopt.plan.peaks import Sizes

_AR = "actor_rollout_ref"
_MODEL, _ROLLOUT, _ACTOR = f"{_AR}.model", f"{_AR}.rollout", f"{_AR}.actor"
SHARE, BUDGET, DYNAMIC = (
    f"{_ROLLOUT}.gpu_memory_utilization",
    f"{_ACTOR}.ppo_max_token_len_per_gpu",
    f"{_ACTOR}.use_dynamic_bsz",
)
BUDGETS = (
    BUDGET, f"{_ROLLOUT}.log_prob_max_token_len_per_gpu", f"{_AR}.ref.log_prob_max_token_len_per_gpu",
    "critic.ppo_max_token_len_per_gpu", "critic.forward_max_token_len_per_gpu", "teacher.log_prob_max_token_len_per_gpu",
)  # fmt: skip
"""Keys of the largest number of tokens per micro-batch, for each pass."""
UPDATES = (BUDGET, "critic.ppo_max_token_len_per_gpu")
_TEACHER_DTYPE = "teacher.fsdp_config.model_dtype"
SHARES = tuple(percent / 100 for percent in range(95, 15, -5))
"""The shares of the card's memory that are tried for the engine."""
RANKS = (16, 8, 4)
"""The LoRA ranks that are tried."""

Keys = Mapping[str, Any]


@dataclass(frozen=True)
class Level:
    knob: str
    keys: Keys
    changes_numbers: bool = False


AS_IS = Level("", {})
"""The level that keeps the run's values."""


@dataclass(frozen=True)
class Lever:
    levels: tuple[Level, ...]
    """First the run's values, then others. If ``is_choice`` is false, each level needs less memory and more time than the one
    before."""
    cost: int
    """How much time the lever costs, compared with other levers. Levers that change numbers have the highest costs."""
    is_choice: bool = False
    """Which level needs the least memory depends on the other levers, so every level is tried."""


def levers_of(settings: Settings, sizes: Sizes, host_is_bounded: bool) -> tuple[Lever, ...]:
    """Return the levers of a run, without levels that its models refuse. If two levers set the same key, the later one wins.

    ``host_is_bounded``: host memory has a limit. Offloading to the host may then be too much, so each offload is a choice.
    """
    size = sizes.policy
    made = (*_passes(settings, size), *_engine(settings, size), *_weights(settings, sizes, host_is_bounded))
    made += tuple(_lossy(settings, size))
    return tuple(lever for candidate in made if (lever := _useful(settings, sizes, candidate)) is not None)


def _useful(settings: Settings, sizes: Sizes, lever: Lever) -> Lever | None:
    # Keep the levels that the models accept and that differ from the run's values and from each other. Return None if there is
    # no such level.
    kept: list[Level] = [AS_IS]
    accepted = tuple(level for level in lever.levels if why_refused(replaced(settings, level.keys), sizes) is None)
    lever = Lever(accepted, lever.cost, lever.is_choice)
    differing = [{key: value for key, value in level.keys.items() if value_at(settings, key) != value} for level in lever.levels]
    # Levels are ordered from most memory to least. If the run already uses one, that level and all before it are skipped.
    own = max((at for at, keys in enumerate(differing) if not keys), default=-1)
    for level, keys in list(zip(lever.levels, differing, strict=True))[0 if lever.is_choice else own + 1 :]:
        if keys and keys not in [dict(kept_level.keys) for kept_level in kept]:
            # All keys of the level, even those that the run has already, because an earlier lever may change them.
            kept.append(Level(level.knob, level.keys, level.changes_numbers))
    return Lever(tuple(kept), lever.cost, lever.is_choice) if len(kept) > 1 else None


def _row(settings: Settings, name: str, changes_numbers: bool = False) -> Level:
    # Return the level that a row of the ladder switches on, also for the critic.
    row = knob_named(name).row
    assert row is not None, name
    return Level(name, _with_critic(settings, dict(_parsed(row.on))), changes_numbers)


def _with_critic(settings: Settings, keys: Keys) -> Keys:
    if not has_critic(settings):
        return keys
    return {**{twin(key): value for key, value in keys.items() if twin(key) in leaf_types()}, **keys}


def _parsed(overrides: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for override in overrides:
        key, text = override.split("=", 1)
        yield key, yaml.safe_load(text)


def _levels(settings: Settings, knob: str, key: str, values: Iterable[Any]) -> tuple[Level, ...]:
    return tuple(Level(knob, _with_critic(settings, {key: value})) for value in values)


def _below(value: float | None, steps: Sequence[int]) -> list[int]:
    # None = no limit, so all steps are below it.
    return [step for step in steps if value is None or step < value]


# Levers for the memory of a pass: activations and logits.


def _passes(settings: Settings, size: ModelSize) -> Iterator[Lever]:
    model = settings.actor_rollout_ref.model
    yield Lever(_levels(settings, "chunked_logprob", f"{_MODEL}.logprob_chunk_tokens", _chunks(model.logprob_chunk_tokens)), 2)
    # These are choices, because each of them can also need more memory: recomputed values and pruned blocks have other tiles and
    # copies, and a shared prompt is kept for later micro-batches if its group is split.
    for cost, knob, key in (
        (1, "recompute_elementwise", f"{_MODEL}.recompute_elementwise"),
        (1, "prune_last_block", f"{_MODEL}.prune_last_block"),
        (9, "shared_prompt", f"{_ACTOR}.use_prefix_grouper"),
    ):
        yield Lever(_levels(settings, knob, key, (True, False)), cost, is_choice=True)
    tiled, tile = f"{_MODEL}.tiled_mlp", f"{_MODEL}.block_tile_tokens"
    mlps: list[tuple[str, Keys]] = [("tiled_mlp", {f"{tiled}.enabled": True, f"{tiled}.num_shards": tiles}) for tiles in (4, 16)]
    blocks: list[tuple[str, Keys]] = [("tiled_block", {tile: tokens}) for tokens in (4096, 1024)]
    both: tuple[str, Keys] = ("tiled_block", {**mlps[0][1], tile: 1024})
    plain: tuple[str, Keys] = ("tiled_mlp", {f"{tiled}.enabled": False, tile: None})
    ways = (plain, *mlps, *blocks, both)
    yield Lever(tuple(Level(knob, _with_critic(settings, keys)) for knob, keys in ways), 6, is_choice=True)
    full = {f"{_MODEL}.enable_gradient_checkpointing": True, f"{_MODEL}.gradient_checkpointing_mode": "full"}
    yield Lever((Level("activation_checkpointing", _with_critic(settings, full)),), 10)
    yield from _budgets(settings)
    yield Lever((_row(settings, "sharding_units"),), 1)
    yield Lever((_row(settings, "resharding"),), 3)
    devices = num_devices(settings)
    if devices > 1:
        groups = [ranks for ranks in range(2, devices + 1) if devices % ranks == 0 and size.heads % ranks == 0]
        keys = [{key: ranks for role, key in SEQUENCE.items() if _is_there(settings, role)} for ranks in groups]
        yield Lever(tuple(Level("sequence_parallel", group_keys) for group_keys in keys), 8, is_choice=True)


def _is_there(settings: Settings, role: str) -> bool:
    return {"actor": True, "ref": needs_reference(settings), "critic": has_critic(settings)}.get(role, False)


def _chunks(present: int) -> list[int]:
    return _below(present or None, (128, 32))


def _budgets(settings: Settings) -> Iterator[Lever]:
    # Levers for the largest number of tokens per micro-batch, down to the longest row: one for updates, one for other passes.
    longest, devices = longest_sample(settings), num_devices(settings)
    read = [key for key in BUDGETS if has_critic(settings) or not key.startswith("critic.")]
    read = [key for key in read if needs_reference(settings) or ".ref." not in key]
    read = [key for key in read if has_teacher(settings) or not key.startswith("teacher.")]
    sizes = [
        8 * longest,
        4 * longest,
        2 * longest,
        *(-(-longest // size) for size in range(1, devices + 1) if devices % size == 0),
    ]
    for cost, in_update in ((7, True), (4, False)):
        keys = [key for key in read if (key in UPDATES) is in_update]
        levels = []
        for size in sizes:
            now = {key: value_at(settings, key) for key in keys}
            set_to = {
                key: size for key, value in now.items() if value is not None and (value > size or not _is_dynamic(settings))
            }
            if set_to:
                levels.append(Level("token_budget", {**set_to, **({} if _is_dynamic(settings) else _dynamic(settings))}))
        yield Lever(tuple(levels), cost)


def _is_dynamic(settings: Settings) -> bool:
    return settings.actor_rollout_ref.actor.use_dynamic_bsz


def _dynamic(settings: Settings) -> Keys:
    return {DYNAMIC: True, "critic.use_dynamic_bsz": True} if has_critic(settings) else {DYNAMIC: True}


# Levers for the memory of the engine.


def _engine(settings: Settings, size: ModelSize) -> Iterator[Lever]:
    rollout, devices = settings.actor_rollout_ref.rollout, num_devices(settings)
    yield Lever((_row(settings, "rollout_memory"),), 2)
    yield Lever(
        _levels(settings, "rollout_memory", f"{_ROLLOUT}.max_num_seqs", _below(rollout.max_num_seqs, (128, 64, 16, 4, 1))), 8
    )
    yield Lever((_row(settings, "weight_buckets"),), 1)
    if rollout.name != "vllm":
        return
    yield Lever((Level("rollout_memory", {f"{_ROLLOUT}.enforce_eager": True}),), 5)
    if rollout.enable_chunked_prefill:
        steps = [tokens for tokens in (4096, 2048, 1024) if rollout.max_num_seqs <= tokens < rollout.max_num_batched_tokens]
        yield Lever(_levels(settings, "rollout_memory", f"{_ROLLOUT}.max_num_batched_tokens", steps), 3)
    if isinstance(rollout.kv_cache_memory_gb, float | int):
        sizes = [rollout.kv_cache_memory_gb / part for part in (2, 4, 8, 16, 32)]
        yield Lever(_levels(settings, "rollout_memory", CACHE, sizes), 3)
    elif rollout.kv_cache_memory_gb != AUTO:
        # A share can be too large, with no room for the trainer, or too small, with no room for the KV cache.
        yield Lever(_levels(settings, "rollout_memory", SHARE, SHARES), 3, is_choice=True)
    parts = [ranks for ranks in range(2, devices + 1) if devices % ranks == 0 and size.heads % ranks == 0]
    key = f"{_ROLLOUT}.tensor_model_parallel_size"
    yield Lever(_levels(settings, "rollout_memory", key, [1, *parts] if devices > 1 else []), 6, is_choice=True)


# Levers for the place of weights, gradients and optimizer moments.


def _weights(settings: Settings, sizes: Sizes, host_is_bounded: bool) -> Iterator[Lever]:
    model, actor = settings.actor_rollout_ref.model, settings.actor_rollout_ref.actor
    if actor.optim.override_optimizer_config:
        yield Lever((_row(settings, "bucketed_adamw"),), 2)
    bucket = f"{_ACTOR}.optim.bucket_megabytes"
    yield Lever(
        _levels(
            settings, "bucketed_adamw", bucket, [megabytes for megabytes in (16, 4) if megabytes < actor.optim.bucket_megabytes]
        ),
        2,
    )
    off, on = host_is_bounded, (True, False)
    for cost, knob, key in (
        (11, "activation_offload", f"{_MODEL}.enable_activation_offload"),
        (7, "optimizer_offload", f"{_ACTOR}.fsdp_config.optimizer_offload"),
        (6, "grad_offload", grad_offload.KEY),
    ):
        levels = _levels(settings, knob, key, on if off else on[:1])
        if knob == "activation_offload":
            one_at_a_time = {key: True, f"{_MODEL}.activation_offload_in_flight": 1, f"{_MODEL}.activation_offload_device_gb": 0}
            levels = (*levels, Level(knob, _with_critic(settings, one_at_a_time)))
        yield Lever(levels, cost, is_choice=off)
    # Files of mixtures may store experts in another form than the model, which only the files say.
    maps = all((size or sizes.policy).mixture is None for size in (sizes.reference, sizes.teacher, sizes.student))
    if model.load_mode == "stream" and off and maps:
        yield Lever((_row(settings, "load_mode"),), 4, is_choice=True)
    if needs_reference(settings):
        rests = [
            Level("streamed_params" if value == STREAM else "param_offload", {REFERENCE_KEY: value}) for value in (True, STREAM)
        ]
        yield Lever(tuple(rests), 4, is_choice=off)
    if has_own_teacher(settings):
        yield Lever(tuple(_rests_of_teacher(settings)), 4, is_choice=off)
    yield Lever(_levels(settings, "split_masters", split_masters.KEY, on), 4, is_choice=True)
    yield Lever(tuple(_homes(settings)), 9, is_choice=True)


def _rests_of_teacher(settings: Settings) -> Iterator[Level]:
    # Weights that are only read lose nothing in the dtype in which the teacher computes.
    rest = {_TEACHER_DTYPE: settings.teacher.fsdp_config.dtype}
    yield Level("precision", rest)
    yield Level("param_offload", {**rest, TEACHER_KEY: True})
    yield Level("streamed_params", {**rest, TEACHER_KEY: STREAM})


def _homes(settings: Settings) -> Iterator[Level]:
    # The policy's weights can be shared with the engine, be on the host between their phases, stay on the device, or always be on
    # the host.
    share, native = SHARED, f"{_ACTOR}.fsdp_config.offload_policy"
    settled = {share: "auto"} if settings.actor_rollout_ref.rollout.share_weights is True else {}
    yield Level("shared_weights", {share: True, ACTOR_KEY: False, native: False})
    yield Level("param_offload", _with_critic(settings, {ACTOR_KEY: True, native: False, **settled}))
    yield Level("param_offload", {ACTOR_KEY: False, native: False, **settled})
    keys = dict.fromkeys((ACTOR_KEY, f"{_ACTOR}.fsdp_config.optimizer_offload", grad_offload.KEY, split_masters.KEY), False)
    yield Level("native_offload", _with_critic(settings, {**keys, native: True, **settled}))


# Levers that change numbers: half precision, moments in 8 bits, adapters, quantised models.


def _lossy(settings: Settings, size: ModelSize) -> Iterator[Lever]:
    model = settings.actor_rollout_ref.model
    if needs_reference(settings) or settings.reward_model.enable:
        yield Lever((_row(settings, "quantized_frozen", changes_numbers=True),), 20)
    if has_own_teacher(settings):
        kinds = [{"teacher.quantization": kind} for kind in ("int8", "nf4")]
        yield Lever(tuple(Level("quantized_frozen", keys, changes_numbers=True) for keys in kinds), 20)
    yield Lever((_row(settings, "precision", changes_numbers=True),), 30)
    yield Lever((_row(settings, "stochastic_rounding", changes_numbers=True),), 25)
    yield Lever((_row(settings, "optimizer_state_dtype", changes_numbers=True),), 22)
    yield Lever((_row(settings, "optimizer_in_backward", changes_numbers=True),), 28, is_choice=True)
    base: Keys = {f"{_ACTOR}.fsdp_config.model_dtype": "bfloat16"}
    ranks = [rank for rank in RANKS if not model.lora_rank or rank < model.lora_rank]
    adapters = [{f"{_MODEL}.lora_rank": rank, **({} if model.lora_rank else base)} for rank in ranks]
    yield Lever(tuple(Level("lora", keys, changes_numbers=True) for keys in adapters), 50)
    bits = [{quantized_base.KEY: kind} for kind in ("int8", "nf4")]
    yield Lever(tuple(Level("quantized_base", keys, changes_numbers=True) for keys in bits), 40)
