"""Keys of verl and names of TRL that have no effect here, and keys of ours that have no effect together with other keys.

A value of such a key passes with a warning if it changes no result: if it is off, or only chooses another way to compute the same
numbers. The warning says what happens instead. Any other value needs a feature that does not exist here, and is a problem. A row
of the tables is deleted in the change that gives its key an effect.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from verl_memopt.algorithms.records import ESTIMATORS, LOSSES, RECORDS, WITH_GREEDY_RESPONSES, WITHOUT_GROUPS, with_option
from verl_memopt.config.algorithm_rules import CORRECTION_UNUSED
from verl_memopt.config.keys import IS_SET, Problem, above, belongs, field_types, idle, other_than, problem, refused, shown
from verl_memopt.config.reward_rules import SANDBOX_UNUSED
from verl_memopt.config.schema import Fsdp, Settings, TrainedFsdp
from verl_memopt.config.teacher_rules import TEACHER_UNUSED
from verl_memopt.config.trl_distillation import WITHOUT_EQUAL
from verl_memopt.memory import lora
from verl_memopt.memory.critic_rules import twin_unused, unused_keys
from verl_memopt.memory.knob import Refusal, UnusedKey, needs_reference, num_devices, pool_keys

logger = logging.getLogger(__name__)

_AR = "actor_rollout_ref"


@dataclass(frozen=True)
class NoEffect:
    """Why a key has no effect, and which of its values pass with a warning. All other values are refused."""

    inert: tuple[Any, ...] | None
    """Values that pass; null always passes. None = every value passes."""
    reason: str
    """The text after ``key=value`` in the message: a fact that holds with any other settings, then a way out if there is one."""


ANY = None
EITHER = (True, False)
_AFTER_ROLLOUT = (
    "reward functions score each response when it is complete, and a reward model scores all of them after the rollout"
)
_TEXT_ONLY = "prompts are text only. Remove the key"
_UNREAD = "it has no effect in verl either. Remove the key"
_FSDP1 = "it exists in FSDP1 only, and the only strategy here is fsdp2. Remove the key"
_PARAMETERS_KEPT = "it belongs to FSDP1; fsdp2 always keeps each parameter as a separate tensor"
_ONE_BACKEND = "the only strategy here is fsdp2. Remove the key"
_COMPILED = "actor_rollout_ref.actor.use_torch_compile decides whether models are compiled"
_CHUNKED = "actor_rollout_ref.model.logprob_chunk_tokens limits the memory of logits"
_TWO_ENGINES = "the engines are vllm and hf. Use actor_rollout_ref.rollout.engine_kwargs.vllm"
_NOT_HERE = "this feature of verl does not exist here. Remove the key"
_NO_RECORD_FILE = "a record of experts travels with its step, and is not written to a file. Remove the key"
_PACKED = "rows are always packed, so no pad token is computed"
_USE_TENSOR_PARALLEL = "Use actor_rollout_ref.rollout.tensor_model_parallel_size"
_TENSOR_PARALLEL = f"an engine is split only by tensor parallelism. {_USE_TENSOR_PARALLEL}"
_PHASE_TABLE = "no profiler runs. The phase table of every run shows the seconds and the peak bytes of each phase"
_OWN_REWARD = "reward classes are not loaded. Use custom_reward_function.path with a function"
_WRAP = (
    "decoder blocks are sharded as units, whatever their size. wrap_policy.transformer_layer_cls_to_wrap selects other modules"
)
_LORA_DROPOUT = (
    "LoRA has no dropout here: old log-probs and update would use different masks, so their ratio would compare two models. "
    "Set 0, or remove the key"
)
_LORA_KEYS = (
    "only the LoRA settings rank, alpha, target_modules, exclude_modules and adapter_path have an effect. Remove this key"
)
_NO_LORA: tuple[Any, ...] = (None, False, [], {})


def _absent(*switches: str) -> dict[str, NoEffect]:
    # Rows of a feature that does not exist here: its switches may only be false, and its other keys have no effect.
    section = switches[0].rpartition(".")[0]
    return {**dict.fromkeys(switches, NoEffect((False,), _NOT_HERE)), f"{section}.*": NoEffect(ANY, _NOT_HERE)}


_FSDP = {
    "wrap_policy.min_num_params": NoEffect(ANY, _WRAP),
    "use_orig_params": NoEffect(EITHER, _PARAMETERS_KEPT),
    "mixed_precision.buffer_dtype": NoEffect(("fp32", "float32"), _FSDP1),
    "forward_only": NoEffect(ANY, "the role of a model decides whether it is trained. Remove the key"),
}

_MODEL = {
    "use_remove_padding": NoEffect(EITHER, _PACKED),
    "torch_dtype": NoEffect(ANY, f"{_UNREAD}. actor_rollout_ref.actor.fsdp_config.model_dtype is the dtype of the weights"),
    **dict.fromkeys(("lora.dropout", "lora_dropout"), NoEffect((0, 0.0), _LORA_DROPOUT)),
    "lora.type": NoEffect(("lora",), "the only adapters here are low-rank adapters of linear layers. Set lora"),
    "lora.merge": NoEffect(
        EITHER,
        "an engine that shares the base weights gets separate adapters, any other engine gets merged weights. Remove the key",
    ),
    "lora.dtype": NoEffect((), "adapters have the policy's dtype. Use actor_rollout_ref.actor.fsdp_config.model_dtype"),
    "lora.dropout_position": NoEffect(("pre", "post"), _LORA_DROPOUT),
    "lora.lora_A_init_method": NoEffect(
        ("kaiming", "xavier"), "A is initialised by Kaiming's uniform method, as in peft. Remove the key"
    ),
    "lora.lora_B_init_method": NoEffect(("zero",), "B starts at zero, so that training starts from the base model. Set zero"),
    **dict.fromkeys(("lora.freeze_vision_model", "lora.freeze_vision_projection"), NoEffect(EITHER, _TEXT_ONLY)),
    "lora.freeze_language_model": NoEffect((True,), "with LoRA the base is always frozen. Set true, or remove the key"),
    "lora.*": NoEffect((False,), _LORA_KEYS),
    **{name: NoEffect(_NO_LORA, f"{reason}. Remove the key") for name, reason in lora.NOT_HERE.items()},
    "use_liger": NoEffect(EITHER, f"Liger's kernels are not used. {_CHUNKED}"),
    "fused_kernel_options.impl_backend": NoEffect(("torch", "triton"), f"log-probs are computed with PyTorch. {_CHUNKED}"),
    **_absent("mtp.enable"),
    "use_shm": NoEffect(EITHER, "weights are read from the model folder, which is not copied to shared memory"),
}

_ACTOR_KEYS = {
    "freeze_vision_tower": NoEffect((False,), _TEXT_ONLY),
    **dict.fromkeys(("router_replay.record_file", "router_replay.replay_file"), NoEffect((), _NO_RECORD_FILE)),
    **_absent("qat.enable"),
}

_CHECKPOINT = {"checkpoint.async_save": NoEffect(EITHER, "a checkpoint is always complete before the next step starts")}

_CRITIC_KEYS = {
    "use_torch_compile": NoEffect(EITHER, _COMPILED),
    "model.use_fused_kernels": NoEffect(EITHER, "the critic computes no logits. Remove the key"),
    **dict.fromkeys(("megatron.*", "veomni.*"), NoEffect((), _ONE_BACKEND)),
}

_PROFILER = {"profiler.*": NoEffect(ANY, _PHASE_TABLE)}

_MULTI_TURN = {
    "multi_turn.use_inference_chat_template": NoEffect(
        EITHER, "the model always reads what the chat template writes, and learns the tokens that it sampled. Remove the key"
    ),
    "multi_turn.tokenization_sanity_check_mode": NoEffect(
        ("disable", "strict", "ignore_strippable"), "sampled tokens are never encoded again. Remove the key"
    ),
    "multi_turn.num_repeat_rollouts": NoEffect((), "rollout.n is the number of conversations of a prompt. Remove the key"),
    "multi_turn.completion_callback": NoEffect((), "it has no effect in verl either. Remove the key"),
}

_ROLLOUT_KEYS = {
    "data_parallel_size": NoEffect((1,), f"each tensor-parallel group is a separate engine already. {_USE_TENSOR_PARALLEL}"),
    "enable_sleep_mode": NoEffect(
        (True,), "actor_rollout_ref.rollout.free_cache_engine decides whether the engine sleeps. Use that key"
    ),
    "layered_summon": NoEffect(EITHER, "weights are always sent to the engine tensor by tensor, also with LoRA"),
    "checkpoint_engine.backend": NoEffect(("naive",), "trainer and engine share a process. Remove the key"),
    **_MULTI_TURN,
    **_absent("prometheus.enable"),
    "trace.backend": NoEffect((), _NOT_HERE),
    "trace.*": NoEffect(ANY, _NOT_HERE),
    **_absent("disaggregation.enable", "disaggregation.enabled"),
    **dict.fromkeys(
        ("quantization", "quantization_config_file"), NoEffect((), "the engine computes in rollout.dtype. Remove the key")
    ),
    **dict.fromkeys(("pipeline_model_parallel_size", "expert_parallel_size"), NoEffect((1,), _TENSOR_PARALLEL)),
    "over_sample_rate": NoEffect((0, 0.0), "exactly rollout.n responses per prompt are generated. Remove the key"),
    "enable_rollout_routing_replay": NoEffect(EITHER, "the engine records experts if actor.router_replay.mode is R3"),
    "multi_stage_wake_up": NoEffect(ANY, "the engine always wakes up its weights before its KV cache. Remove the key"),
    "skip_tokenizer_init": NoEffect(ANY, "the engine always gets token ids. Remove the key"),
    **dict.fromkeys(
        ("agent.custom_async_server.path", "agent.custom_async_server.name"),
        NoEffect((), "the engine runs in the worker's process, so there is no server. Remove the key"),
    ),
    **dict.fromkeys(("engine_kwargs.sglang.*", "engine_kwargs.trtllm.*"), NoEffect(({},), _TWO_ENGINES)),
}

_DATA = {
    "dataloader_num_workers": NoEffect(ANY, "rows are read in the driver's process"),
    "filter_overlong_prompts_workers": NoEffect(ANY, "prompts are measured in one tokenizer call"),
    "image_key": NoEffect(("images",), _TEXT_ONLY),
    "video_key": NoEffect(("videos",), _TEXT_ONLY),
    "image_patch_size": NoEffect((14,), _TEXT_ONLY),
    "return_multi_modal_inputs": NoEffect(EITHER, _TEXT_ONLY),
    **{
        name: NoEffect((), f"tools belong to the rollout. Use {_AR}.rollout.multi_turn.{name}")
        for name in ("tool_config_path", "function_tool_path")
    },
    "need_tools_kwargs": NoEffect(EITHER, "rows without tools_kwargs are never refused. Remove the key"),
    "enable_thinking_default": NoEffect(
        ("none",), "for rows without the column, the chat template's own default applies. Set data.apply_chat_template_kwargs"
    ),
    "datagen.*": NoEffect((), "rows are read from files. Use data.custom_cls.path"),
    "tokenizer": NoEffect(ANY, "it has no effect in verl either. Use actor_rollout_ref.model.tokenizer_path"),
    **dict.fromkeys(("return_raw_chat", "return_raw_input_ids", "return_full_prompt"), NoEffect(ANY, _UNREAD)),
    "use_shm": NoEffect(EITHER, "files are read where they are, and not copied to shared memory"),
}

_REWARD_MODEL = {
    "launch_reward_fn_async": NoEffect(
        EITHER, "reward functions always run in separate processes, as soon as a response is complete"
    ),
    "use_reward_loop": NoEffect(EITHER, _AFTER_ROLLOUT),
    "reward_loop_source": NoEffect(("register",), _OWN_REWARD),
    **dict.fromkeys(("reward_loop_module_path", "reward_loop_class_name"), NoEffect((), _OWN_REWARD)),
    "rollout.*": NoEffect(ANY, "the reward model computes one forward per conversation in the workers, without an engine"),
    "strategy": NoEffect(("fsdp", "fsdp2"), "the reward model is sharded by fsdp2"),
    "model.use_remove_padding": NoEffect(EITHER, _PACKED),
    "model.use_shm": NoEffect(EITHER, _MODEL["use_shm"].reason),
    "model.fsdp_config.use_torch_compile": NoEffect(EITHER, "the reward model is not compiled"),
    "model.use_fused_kernels": NoEffect(EITHER, "a reward model computes no logits"),
    "model_config.*": NoEffect((), "it belongs to an engine, and the reward model has none. Remove the key"),
}

_TRAINER = {
    "default_hdfs_dir": NoEffect((), "checkpoints are written to trainer.default_local_dir. Remove the key"),
    "del_local_ckpt_after_load": NoEffect((False,), "a loaded checkpoint is kept. Use trainer.max_actor_ckpt_to_keep"),
    "esi_redundant_time": NoEffect(
        (0,), "the end of a cloud instance is not known, so no checkpoint is saved before it. Use trainer.save_freq"
    ),
    "use_legacy_worker_impl": NoEffect(("auto", "enable", "disable"), "there is one implementation. Remove the key"),
}

_TOP = {
    "reward_manager.source": NoEffect(("register",), _OWN_REWARD),
    "reward_manager.module.*": NoEffect((), _OWN_REWARD),
    "model_engine": NoEffect(("dp",), _ONE_BACKEND),
    **_absent("transfer_queue.enable"),
    "global_profiler.*": NoEffect(ANY, _PHASE_TABLE),
}


def _below(prefix: str, rows: Mapping[str, NoEffect]) -> dict[str, NoEffect]:
    return {f"{prefix}.{name}": row for name, row in rows.items()}


REFUSED: dict[str, NoEffect] = {
    **_TOP,
    **_below("data", _DATA),
    **_below("critic", _CRITIC_KEYS | _CHECKPOINT | _PROFILER | _below("model", _MODEL | _below("fsdp_config", _FSDP))),
    **_below("reward_model", _REWARD_MODEL),
    **_below("trainer", _TRAINER),
    **_below(f"{_AR}.model", _MODEL),
    **_below(f"{_AR}.actor", _ACTOR_KEYS | _CHECKPOINT | _PROFILER | _below("fsdp_config", _FSDP)),
    **_below(f"{_AR}.ref", _PROFILER | _below("fsdp_config", _FSDP)),
    **_below(f"{_AR}.rollout", _ROLLOUT_KEYS | _PROFILER),
    **_below(_AR, _PROFILER),
    **_below("reward_model", _PROFILER | _below("model.fsdp_config", _FSDP)),
    **{
        f"{frozen}.fsdp_config.{name}": NoEffect(ANY, "a model that is not trained has no optimizer")
        for frozen in (f"{_AR}.ref", "reward_model.model")
        for name in sorted(field_types(TrainedFsdp).keys() - field_types(Fsdp).keys())
    },
    f"{_AR}.ref.strategy": NoEffect(("fsdp", "fsdp2"), "the reference is sharded as the actor is, by fsdp2. Remove the key"),
    **{f"{_AR}.{role}.{name}.*": NoEffect((), _ONE_BACKEND) for name in ("megatron", "veomni") for role in ("actor", "ref")},
}


def refusal_of(key: str) -> NoEffect | None:
    """Return the row of a key, else the row of the nearest section above it (``section.*``), else None."""
    parts = key.split(".")
    rows = (key, *(f"{'.'.join(parts[:depth])}.*" for depth in range(len(parts), 0, -1)))
    return next((REFUSED[row] for row in rows if row in REFUSED), None)


def refuse(keys: Mapping[str, tuple[Any, NoEffect]]) -> list[Problem]:
    """Return a problem for each value that does not pass, and log a warning for each value that passes.

    Keys in the same section with the same reason are one problem. Other keys in such a section with the same reason get no
    warning.

    ``keys``: key as the user wrote it -> (value, row of the key).
    """
    asking: dict[tuple[str, str], dict[str, Any]] = {}
    passing: dict[str, tuple[Any, NoEffect]] = {}
    for key, (value, row) in keys.items():
        if passes(value, row):
            passing[key] = value, row
        else:
            asking.setdefault((key.rpartition(".")[0], row.reason), {})[key] = value
    sections = tuple(f"{section}." for section, _ in asking)
    for key, (value, row) in passing.items():
        if not key.startswith(sections) or row.reason not in {reason for _, reason in asking}:
            logger.warning("%s=%s does nothing here: %s.", key, shown(value), row.reason)
    return [problem(values, reason, "") for (_, reason), values in asking.items()]


def passes(value: Any, refusal: NoEffect) -> bool:
    # In Python 0 == False and 1 == True, but here they are different values.
    if value is None or refusal.inert is ANY:
        return True
    return any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in refusal.inert)


# A reference that follows the policy: what it refuses, and when its keys have no effect.

EVERY, ALPHA = f"{_AR}.ref.sync_every_steps", f"{_AR}.ref.sync_mixup_alpha"
_RANK, _QUANTIZATION, _LOAD = f"{_AR}.model.lora_rank", f"{_AR}.ref.quantization", f"{_AR}.model.load_mode"
_SIZE, _OFFLOAD = f"{_AR}.ref.fsdp_config.fsdp_size", f"{_AR}.ref.fsdp_config.param_offload"


def _has_other_shards(settings: Settings) -> bool:
    roles = settings.actor_rollout_ref
    return num_devices(settings) > 1 and roles.ref.fsdp_config.fsdp_size != roles.actor.fsdp_config.fsdp_size


def _starts_from_adapters(settings: Settings) -> bool:
    return needs_reference(settings) and settings.actor_rollout_ref.model.lora_adapter_path is not None


def _rules() -> Iterator[Refusal]:
    keep = f"or {EVERY}=null to keep the reference's weights."
    yield refused(
        {EVERY: IS_SET, _RANK: above(0)},
        "with LoRA the reference is the policy's frozen base, which cannot follow the policy",
        f"Set {_RANK}=0, {keep}",
    )
    yield refused(
        {EVERY: IS_SET, _QUANTIZATION: other_than("none")},
        "quantised weights are too coarse for small updates",
        f"Set {_QUANTIZATION}=none with {_OFFLOAD}=true, {keep}",
    )
    yield refused(
        {EVERY: IS_SET, _LOAD: "mmap"},
        "the weights are then the mapped files of the model's folder, which must not change",
        f"Set {_LOAD}=stream, {keep}",
    )
    way_out, shards = f"Set {_SIZE} to {_AR}.actor.fsdp_config.fsdp_size.", {EVERY: IS_SET, _SIZE: other_than()}
    yield refused(shards, "reference and policy must be sharded over the same number of devices", way_out, _has_other_shards)


REFERENCE_RULES: tuple[Refusal, ...] = tuple(_rules())
"""What a reference that follows the policy refuses."""

REFERENCE_UNUSED: tuple[UnusedKey, ...] = (
    UnusedKey(
        EVERY, lambda settings: not needs_reference(settings), "no KL is used and no teacher is the reference, so there is none"
    ),
    *idle(EVERY, None, ALPHA),
    UnusedKey(
        f"{_AR}.ref.adapter",
        lambda settings: not _starts_from_adapters(settings),
        "no reference is needed, or the policy does not start from trained adapters",
    ),
)
"""When a key of the reference has no effect."""


# Keys of ours that have no effect together with other keys. A user who gives one gets a warning.

_AGG_MODE, _LOSS_MODE = f"{_AR}.actor.loss_agg_mode", f"{_AR}.actor.policy_loss.loss_mode"
_FILTER, _KL, _CTRL = "algorithm.filter_groups", "algorithm.kl_ctrl", f"{_AR}.actor.entropy_ctrl"
_REWARD, _OVERLONG = "custom_reward_function", "reward_model.reward_kwargs.overlong_buffer_cfg"
_NAMED_ON_SIGHT = "algorithm.norm_adv_by_std_in_grpo"
"""A user who gives this key expects normalisation, even with the key's default. So giving the default causes the warning too."""


def _estimator(settings: Settings) -> str:
    return settings.algorithm.adv_estimator


def _unused_advantages() -> Iterator[UnusedKey]:
    for key in dict.fromkeys(key for record in ESTIMATORS.values() for key in record.options.values()):
        owners = with_option(key)
        yield belongs(f"algorithm.{key}", "algorithm.adv_estimator", owners, f"it belongs to {' and '.join(owners)}")
    yield from idle("algorithm.custom_estimator.path", None, "algorithm.custom_estimator.name")
    yield UnusedKey(
        f"{_FILTER}.enable", lambda settings: settings.actor_rollout_ref.rollout.n < 2, "a group of one is always kept"
    )
    yield from idle(f"{_FILTER}.enable", False, f"{_FILTER}.metric", f"{_FILTER}.max_num_gen_batches")
    yield from idle("algorithm.use_kl_in_reward", False, "algorithm.kl_penalty", f"{_KL}.type", f"{_KL}.kl_coef")
    yield from idle(f"{_KL}.type", "fixed", f"{_KL}.horizon", f"{_KL}.target_kl")
    for key in ("kl_loss_coef", "kl_loss_type", "kl_loss_by_ratio"):
        yield UnusedKey(
            f"{_AR}.actor.{key}", lambda settings: not settings.actor_rollout_ref.actor.use_kl_loss, "actor.use_kl_loss is false"
        )


def _averages_sequences(settings: Settings) -> bool:
    actor = settings.actor_rollout_ref.actor
    return LOSSES[actor.policy_loss.loss_mode].by_sequence and not actor.use_kl_loss and not _has_bonus(settings)


def _has_bonus(settings: Settings) -> bool:
    actor = settings.actor_rollout_ref.actor
    return actor.entropy_coeff != 0 or actor.entropy_ctrl.target is not None


def _unused_losses() -> Iterator[UnusedKey]:
    scale_factor = UnusedKey(
        f"{_AR}.actor.loss_scale_factor",
        lambda settings: settings.actor_rollout_ref.actor.loss_agg_mode != "seq-mean-token-sum-norm",
        "actor.loss_agg_mode is not seq-mean-token-sum-norm",
    )
    yield from (scale_factor, twin_unused(scale_factor))
    for key in dict.fromkeys(key for record in LOSSES.values() for key in record.options):
        owners = with_option(key)
        because = f"it belongs to {_LOSS_MODE}={owners[0]}" if len(owners) == 1 else "the policy loss has no clip"
        yield belongs(f"{_AR}.actor.{key}", _LOSS_MODE, owners, because)
    yield UnusedKey(f"{_AR}.actor.entropy_agg_mode", lambda settings: not _has_bonus(settings), "there is no entropy bonus")
    yield from idle(f"{_CTRL}.target", None, f"{_CTRL}.delta", f"{_CTRL}.min", f"{_CTRL}.max")
    yield from idle(f"{_AR}.actor.policy_loss.custom.path", None, f"{_AR}.actor.policy_loss.custom.name")
    yield from (unused for record in RECORDS for unused in record.unused_keys)
    yield UnusedKey(_AGG_MODE, _averages_sequences, "actor.policy_loss.loss_mode averages over sequences")


def _has_equal_answers(settings: Settings) -> bool:
    # Greedy responses to one prompt are equal, so an estimator that compares them gives advantages of 0.
    compares = _estimator(settings) not in WITHOUT_GROUPS or _estimator(settings) in WITH_GREEDY_RESPONSES
    return not settings.actor_rollout_ref.rollout.do_sample and compares


def _unused_rollouts() -> Iterator[UnusedKey]:
    yield UnusedKey(
        f"{_AR}.rollout.do_sample", _has_equal_answers, "greedy responses to one prompt are identical, so every advantage is 0"
    )
    for key in ("enable_chunked_prefill", "cudagraph_capture_sizes", "disable_log_stats", "scheduling_policy"):
        yield UnusedKey(
            f"{_AR}.rollout.{key}",
            lambda settings: settings.actor_rollout_ref.rollout.name == "hf",
            f"it belongs to {_AR}.rollout.name=vllm",
        )


def _never_ranks_checkpoints(settings: Settings) -> bool:
    trainer = settings.trainer
    return settings.data.val_files is None or trainer.test_freq <= 0 or trainer.max_actor_ckpt_to_keep is None


def _unused_rewards_and_runs() -> Iterator[UnusedKey]:
    yield from idle(f"{_REWARD}.path", None, f"{_REWARD}.name")
    yield from idle(f"{_REWARD}.on_error", "raise", f"{_REWARD}.fallback_score")
    penalty_keys = (
        *(f"{_OVERLONG}.{name}" for name in ("len", "penalty_factor", "log")),
        "reward_model.reward_kwargs.max_resp_len",
    )
    yield from idle(f"{_OVERLONG}.enable", False, *penalty_keys)
    yield from SANDBOX_UNUSED
    yield from idle("data.val_files", None, "trainer.test_freq")
    yield from idle("data.streaming", False, "data.shuffle_buffer_size")
    yield UnusedKey(
        "trainer.resume_from_path",
        lambda settings: settings.trainer.resume_mode != "resume_path",
        "it needs trainer.resume_mode=resume_path",
    )
    yield UnusedKey(
        "trainer.keep_best",
        _never_ranks_checkpoints,
        "it needs validation (data.val_files, trainer.test_freq) and a number of checkpoints (trainer.max_actor_ckpt_to_keep)",
    )


UNUSED_KEYS = {
    unused.key: unused
    for unused in (
        *_unused_advantages(), *_unused_losses(), *_unused_rollouts(), *_unused_rewards_and_runs(),
        *CORRECTION_UNUSED, *REFERENCE_UNUSED, *TEACHER_UNUSED,
        *idle("critic.enable_resource_pool", False, *pool_keys("critic")), *unused_keys(),
    )
}  # fmt: skip
"""Key -> the rule that says when it has no effect, and why."""


def warn_unused(unused: UnusedKey, value: Any, if_not_given: Any) -> None:
    """Warn that a key of the user has no effect. There is no warning if the user gave the value that the key has anyway.

    ``if_not_given``: the value that the key would have if the user had not given it.
    """
    if value != if_not_given or unused.key == _NAMED_ON_SIGHT:
        logger.warning("%s=%s has no effect here: %s.", unused.key, shown(value), unused.because)


# Names of TRL's configs, which include transformers' arguments, that have no equal here.

_ACTOR, _ROLLOUT = f"{_AR}.actor", f"{_AR}.rollout"
_REWARD_FUNCTION = "Use custom_reward_function.path: it belongs in the reward function"

_ROWS: tuple[tuple[str, tuple[Any, ...] | None, str], ...] = (
    ("missing_eos_penalty", (), f"a score has no further penalty. {_REWARD_FUNCTION}"),
    ("reward_weights", (), f"there is only one reward. {_REWARD_FUNCTION}"),
    ("reward_funcs", (), "a reward function is loaded from a file. Use custom_reward_function.path"),
    ("whiten_rewards", (False,), "rewards are not whitened. Use algorithm.normalize_advantages"),
    ("token_level_kl", (False,), "RLOO subtracts the KL of the whole response from its reward. Set false, or remove the key"),
    ("vllm_mode", ("colocate",), f"the engine always runs in the worker's process. Set only {_ROLLOUT}.name=vllm"),
    ("disable_dropout", EITHER, "dropout is always off"),
    ("local_rollout_forward_batch_size", ANY,
     f"passes without gradients are cut by tokens. Use {_ROLLOUT}.log_prob_max_token_len_per_gpu"),
    ("per_device_eval_batch_size", ANY, "all validation prompts are in one call. Use data.val_batch_size to split it"),
    ("stop_token", ("eos",), "a response ends at the end-of-sequence tokens of the model's folder. Remove the key"),
    ("dataset_name", (), "rows are read from files. Use data.train_files and data.val_files"),
    ("log_completions", EITHER, "samples are written to the run folder. Use trainer.log_val_generations for a table"),
    ("remove_unused_columns", EITHER, "a reward function gets every column. Remove the key"),
    ("router_aux_loss_coef", (0, 0.0), "the loss has no term that balances experts. Set 0, or remove the key"),
    ("pad_to_multiple_of", ANY, "nothing is padded: sequences are packed"),
    ("cache_implementation", ANY, "the engine chooses its cache"),
    ("use_transformers_continuous_batching use_transformers_paged", (False,), f"vLLM does that. Set {_ROLLOUT}.name=vllm"),
    ("transformers_continuous_batching_config", (), f"vLLM does that. Set {_ROLLOUT}.name=vllm"),
    ("vllm_model_impl", ("vllm", "auto"), f"set an argument of vLLM by {_ROLLOUT}.engine_kwargs.vllm"),
    ("vllm_structured_outputs_regex", (), "responses cannot be constrained. Reward the format in the reward function"),
    ("vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port", (),
     "the engine always runs in the worker's process, and there is no server. Remove the key"),
    ("log_multimodal", EITHER, "prompts are text only"),
    ("num_completions_to_print log_unique_prompts", ANY, "samples are written to the run folder, each with its prompt"),
    ("log_completions_hub_repo", (), "nothing is sent to the hub. Remove the key"),
    ("use_liger_kernel", EITHER, "this package computes head and loss with its own code"),
    ("torch_empty_cache_steps", ANY, "freed memory is given back to the device between phases that need it"),
    ("fp16 fp16_full_eval", (False,),
     f"float16 needs loss scaling, which is not available. Use {_ACTOR}.fsdp_config.dtype=bfloat16"),
    ("bf16_full_eval tf32", EITHER, f"validation generates with {_ROLLOUT}.dtype, and fp32 matrices are multiplied in fp32"),
    ("do_train do_eval do_predict prediction_loss_only batch_eval_metrics eval_do_concat_batches eval_use_gather_object "
     "include_for_metrics include_num_input_tokens_seen eval_accumulation_steps eval_delay label_names", ANY,
     "a validation reports rewards. Use trainer.test_freq"),
    ("logging_strategy", ("no", "steps"), "every step is logged"),
    ("logging_first_step logging_nan_inf_filter log_level log_level_replica log_on_each_node disable_tqdm "
     "skip_memory_metrics", ANY, "every step is logged, and the console has a progress bar"),
    ("load_best_model_at_end", (False,), "the best checkpoint is kept. Use trainer.keep_best_checkpoint"),
    ("metric_for_best_model greater_is_better", ANY, "the best checkpoint is chosen by trainer.keep_best_checkpoint"),
    ("save_only_model", (False,), f"another key decides. Use {_ACTOR}.checkpoint.save_contents"),
    ("save_on_each_node enable_jit_checkpoint restore_callback_states_from_checkpoint ignore_data_skip", (False,),
     "a checkpoint is one folder that holds the whole state. Set false, or remove the key"),
    ("push_to_hub hub_always_push", (False,), "nothing is sent to the hub. Remove the key"),
    ("hub_model_id hub_token hub_private_repo", ANY, "a run sends nothing to the hub; only a trainer's push_to_hub() uses it"),
    ("hub_revision", (), "nothing is sent to the hub. Remove the key"),
    ("trackio_space_id trackio_bucket_id trackio_static_space_id", ANY,
     "Trackio keeps its metrics here. The environment variable TRACKIO_SPACE_ID sends them to a Space"),
    ("hub_strategy project", ANY, "nothing is sent to the hub"),
    ("dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
     "dataloader_prefetch_factor dataloader_in_order dataloader_multiprocessing_context length_column_name", ANY,
     "rows are read on the driver, while the devices compute"),
    ("data_seed", (), "another key decides. Use data.seed"),
    ("train_sampling_strategy", ("random",), "other keys decide. Use data.shuffle or data.sampler.class_path"),
    ("ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout local_rank "
     "average_tokens_across_devices", ANY, "FSDP2 shards the model over the ranks, and token sums are over all ranks"),
    ("fsdp fsdp_config deepspeed parallelism_config", ((), [], {}, ""),
     f"FSDP2 always shards the models. Use {_ACTOR}.fsdp_config.fsdp_size"),
    ("accelerator_config", ANY, "the accelerate library is not used"),
    ("auto_find_batch_size", (False,),
     f"another key decides. Use {_ACTOR}.adaptive_token_budget=true, which never changes the batch"),
    ("optim", ("adamw_torch", "adamw_torch_fused"), f"other keys decide. Use {_ACTOR}.optim.optimizer and optimizer_impl"),
    ("optim_args optim_target_modules", (), f"another key decides. Use {_ACTOR}.optim.override_optimizer_config"),
    ("full_determinism", (False,), f"another key decides. Use {_ACTOR}.fsdp_config.full_determinism"),
    ("gradient_checkpointing_kwargs", ANY, "gradient checkpointing is always non-reentrant"),
    ("torch_compile", EITHER, f"another key decides. Use {_ACTOR}.use_torch_compile"),
    ("torch_compile_backend torch_compile_mode", ANY, f"another key decides. Use {_ACTOR}.use_torch_compile"),
    ("use_cache liger_kernel_config", ANY, "this package computes head, loss and attention with its own code"),
    ("label_smoothing_factor", (0, 0.0), "the loss has no label smoothing. Set 0, or remove the key"),
    ("neftune_noise_alpha", (), "embeddings get no noise. Remove the key"),
    ("ds3_gather_for_generation", EITHER, "the engine gets the weights within its process, piece by piece. Remove the key"),
)  # fmt: skip
"""(names, separated by spaces; values that pass; reason and way out)."""

NO_EQUAL: dict[str, NoEffect] = {
    name: NoEffect(inert, reason) for names, inert, reason in (*_ROWS, *WITHOUT_EQUAL) for name in names.split()
}
"""Name of TRL without an equal here -> its row."""
