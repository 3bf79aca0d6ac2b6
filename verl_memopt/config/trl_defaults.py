"""The defaults of TRL's configs. A script of TRL runs with these defaults, and not with ours.

Source: ``GRPOConfig`` and ``RLOOConfig`` of TRL 1.16 with transformers 5.19.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set
from typing import Any

from verl_memopt.config.keys import shown, value_at
from verl_memopt.config.names import estimator_of, keys_set
from verl_memopt.config.schema import Settings
from verl_memopt.config.spelling import ESTIMATOR
from verl_memopt.config.trl_names import BATCH_NAMES, NAMES, ONE_SETTING, SPELLINGS

logger = logging.getLogger(__name__)

_OPEN = (
    "output_dir lr_scheduler_kwargs optim_args optim_target_modules bf16 tf32 gradient_checkpointing_kwargs "
    "torch_compile_backend torch_compile_mode liger_kernel_config neftune_noise_alpha torch_empty_cache_steps disable_tqdm "
    "run_name trackio_space_id trackio_bucket_id trackio_static_space_id eval_steps eval_accumulation_steps "
    "save_total_limit hub_token hub_private_repo hub_model_id hub_revision metric_for_best_model greater_is_better "
    "data_seed accelerator_config parallelism_config dataloader_prefetch_factor dataloader_multiprocessing_context "
    "label_names ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend fsdp "
    "fsdp_config deepspeed resume_from_checkpoint model_init_kwargs router_aux_loss_coef num_generations_eval "
    "generation_batch_size steps_per_generation min_p generation_kwargs chat_template_kwargs cache_implementation "
    "vllm_structured_outputs_regex vllm_server_base_url vllm_max_model_length epsilon_high reward_weights "
    "num_completions_to_print transformers_continuous_batching_config"
)
"""Fields whose default is null."""
_COMMON: dict[str, Any] = {
    **dict.fromkeys(_OPEN.split()),
    # The run.
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_train_epochs": 3.0, "max_steps": -1, "seed": 42,
    "use_cpu": False, "fp16": False, "shuffle_dataset": True, "remove_unused_columns": False, "trust_remote_code": False,
    # The optimizer.
    "learning_rate": 1e-6, "lr_scheduler_type": "linear", "warmup_steps": 0, "optim": "adamw_torch_fused", "weight_decay": 0.0,
    "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "max_grad_norm": 1.0, "label_smoothing_factor": 0.0,
    "average_tokens_across_devices": True,
    # Responses and rewards.
    "max_completion_length": 512, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0,
    "mask_truncated_completions": False, "disable_dropout": False, "ds3_gather_for_generation": True,
    "pad_to_multiple_of": "auto", "use_transformers_continuous_batching": False, "use_transformers_paged": False,
    "use_vllm": False, "vllm_mode": "colocate", "vllm_model_impl": "vllm", "vllm_enable_sleep_mode": False,
    "vllm_server_host": "0.0.0.0", "vllm_server_port": 8000, "vllm_server_timeout": 240.0, "vllm_group_port": 51216,
    "vllm_gpu_memory_utilization": 0.3, "vllm_tensor_parallel_size": 1,
    # The loss.
    "num_iterations": 1, "epsilon": 0.2, "sync_ref_model": False, "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512,
    # Logs, validations and checkpoints.
    "logging_strategy": "steps", "logging_steps": 10, "logging_first_step": False, "log_on_each_node": True,
    "logging_nan_inf_filter": True, "include_num_input_tokens_seen": "no", "log_level": "passive", "log_level_replica": "warning",
    "report_to": "none", "project": "huggingface", "log_completions": False, "log_multimodal": True, "log_unique_prompts": False,
    "skip_memory_metrics": True, "debug": "", "eval_strategy": "no", "eval_delay": 0, "per_device_eval_batch_size": 8,
    "prediction_loss_only": False, "eval_on_start": False, "eval_do_concat_batches": True, "eval_use_gather_object": False,
    "include_for_metrics": [], "batch_eval_metrics": False, "save_only_model": False, "save_strategy": "steps", "save_steps": 500,
    "save_on_each_node": False, "enable_jit_checkpoint": False, "push_to_hub": False, "hub_strategy": "every_save",
    "hub_always_push": False, "load_best_model_at_end": False, "ignore_data_skip": False,
    "restore_callback_states_from_checkpoint": False, "do_train": False, "do_eval": False, "do_predict": False,
    # The machine.
    "bf16_full_eval": False, "fp16_full_eval": False, "gradient_checkpointing": True, "torch_compile": False,
    "use_liger_kernel": False, "use_cache": False, "auto_find_batch_size": False, "full_determinism": False,
    "dataloader_drop_last": False, "dataloader_num_workers": 0, "dataloader_pin_memory": True,
    "dataloader_persistent_workers": False, "dataloader_in_order": True, "train_sampling_strategy": "random",
    "length_column_name": "length", "ddp_timeout": 1800, "local_rank": -1,
}  # fmt: skip
_GRPO: dict[str, Any] = {
    "num_generations": 8, "beta": 0.0, "delta": None, "loss_type": "dapo", "scale_rewards": "group",
    "importance_sampling_level": "token", "multi_objective_aggregation": "sum_then_normalize", "use_bias_correction_kl": True,
    "sapo_temperature_neg": 1.05, "sapo_temperature_pos": 1.0, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0, "top_entropy_quantile": 1.0, "entropy_coef": 0.0, "use_adaptive_entropy": False,
    "entropy_coef_min": 0.0, "entropy_coef_max": 1.0, "entropy_coef_delta": 0.005, "entropy_target": 0.2,
    "off_policy_mask_threshold": None, "vllm_importance_sampling_correction": True, "vllm_importance_sampling_cap": None,
    "vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None, "cast_lm_head_to_fp32": False, "max_tool_calling_iterations": None,
    "log_completions_hub_repo": None,
}  # fmt: skip
_RLOO: dict[str, Any] = {"num_generations": 2, "beta": 0.05, "normalize_advantages": False, "reward_clip_range": None}


def _without(names: str) -> dict[str, Any]:
    return {name: value for name, value in _COMMON.items() if name not in names.split()}


_OF_REWARDS = (
    "epsilon epsilon_high log_multimodal mask_truncated_completions ref_model_mixup_alpha ref_model_sync_steps reward_weights "
    "sync_ref_model transformers_continuous_batching_config use_transformers_continuous_batching use_transformers_paged "
)
_OF_VLLM = " ".join(name for name in _COMMON if name.startswith("vllm_") or name == "use_vllm") + " "
_OF_ROLLOUTS = (
    "cache_implementation chat_template_kwargs ds3_gather_for_generation generation_kwargs min_p num_generations_eval "
    "num_iterations repetition_penalty steps_per_generation log_unique_prompts "
)
_TEACHER: dict[str, Any] = dict.fromkeys(("teacher_model_name_or_path", "teacher_model_init_kwargs"))
_DISTILL = _TEACHER | {"teacher_model_revision": None, "beta": 1.0, "max_tool_calling_iterations": None}
_GKD: dict[str, Any] = {
    **dict.fromkeys(("chat_template_path", "dataset_kwargs", "dataset_num_proc", "eos_token", "eval_packing", "pad_token")),
    **_TEACHER, "completion_only_loss": None, "remove_unused_columns": True, "dataset_text_field": "text", "max_length": 1024,
    "truncation_mode": "keep_start", "shuffle_dataset": False, "packing": False, "packing_strategy": "bfd", "padding_free": False,
    "assistant_only_loss": False, "loss_type": "nll", "activation_offloading": False, "temperature": 0.9, "lmbda": 0.5,
    "beta": 0.5, "disable_dropout": True, "seq_kd": False,
}  # fmt: skip
_GOLD: dict[str, Any] = {
    "learning_rate": 1e-7, "top_p": 0.95, "max_completion_length": 128, "teacher_model_revision": None, "num_generations": 1,
    "teacher_tokenizer_name_or_path": None, "use_uld_loss": False, "uld_token_merge_strategy": "observed",
    "use_extended_uld": True, "uld_use_hybrid_loss": False, "uld_hybrid_matched_weight": None,
    "uld_hybrid_unmatched_weight": None, "uld_crossentropy_weight": 0.0, "uld_distillation_weight": 1.0,
    "uld_student_temperature": 1.0, "uld_teacher_temperature": 1.0, "uld_skip_student_eos": True, "uld_skip_teacher_eos": True,
    "vllm_server_port": 8001, "vllm_gpu_memory_utilization": 0.9, "vllm_sync_frequency": 1, "log_completions_steps": 100,
    "wandb_log_unique_prompts": True, "callbacks": [],
}  # fmt: skip
_SDFT: dict[str, Any] = {
    "learning_rate": 5e-5, "disable_dropout": True, "max_prompt_length": 512, "num_generations": 8, "max_completion_length": 256,
    "use_teacher_server": False, "teacher_model_kind": "base", "teacher_update_rate": 0.05, "teacher_sync_steps": 1,
    "distillation_alpha": 0.5, "distillation_mode": "topk_logits", "distillation_topk": 100, "distillation_is_clip": 2.0,
    "distillation_add_tail": False, "generate_from_teacher": False, "num_loss_tokens_to_skip": 0,
    "teacher_prompt_template": "{prompt}\n\n{privileged_context}",
}  # fmt: skip
_TABLES = "log_completions log_unique_prompts num_completions_to_print "

DEFAULTS = {
    "grpo": _COMMON | _GRPO,
    "rloo": _COMMON | _RLOO,
    "distill": _without(
        f"{_OF_REWARDS}generation_batch_size num_generations_eval num_iterations router_aux_loss_coef steps_per_generation"
    ) | _DISTILL,
    "gkd": _without(
        f"{_OF_REWARDS}{_OF_VLLM}{_OF_ROLLOUTS}{_TABLES}generation_batch_size max_completion_length top_k top_p"
    ) | _GKD | {"learning_rate": 2e-5, "max_new_tokens": 128},
    "gold": _without(f"{_OF_REWARDS}{_OF_ROLLOUTS}") | _GKD | _GOLD,
    "sdft": _without(f"{_OF_REWARDS}{_TABLES}pad_to_multiple_of router_aux_loss_coef vllm_structured_outputs_regex") | _SDFT,
}  # fmt: skip
"""Config -> {field of TRL's config: its default}."""

_SAY_NOTHING = frozenset({"max_steps", "use_cpu", "adam_epsilon", "report_to"})
"""Names that are read, but whose default changes no setting here."""
_OFF = frozenset({"delta"})
"""Names whose default is null and thereby switches off something that is on by default here."""
_COUNT_WITH = {
    "vllm_": "use_vllm", "ref_model_": "sync_ref_model", "entropy_coef_": "use_adaptive_entropy",
    "entropy_target": "use_adaptive_entropy",
}  # fmt: skip
"""Prefix of names -> the switch that these names need to have an effect."""


def defaults_beside(defaults: Mapping[str, Any], given: Mapping[str, Any], algorithm: str) -> dict[str, Any]:
    """Return the defaults of TRL that apply in addition to the settings that a user gave.

    A default does not apply if the user gave its setting in another spelling.

    Args:
        defaults: Name of TRL -> default.
        given: The user's settings: name of TRL, short name or key -> value.
        algorithm: ``grpo``, ``rloo`` or ``distill``.
    """
    estimator = {ESTIMATOR: algorithm} | {name: value for name, value in given.items() if name == ESTIMATOR}
    if estimator_of(estimator) != algorithm:
        return {}
    by_key = {key for name, keys in keys_set({**given, **estimator}).items() if name not in NAMES for key in keys} - {ESTIMATOR}
    keys, values = keys_set({**defaults, **estimator}), {**defaults, **given}
    read = {name for spelling in SPELLINGS if algorithm in spelling.estimators for name in spelling.names}

    def holds(name: str) -> bool:
        said_otherwise = any(name in names and not given.keys().isdisjoint(names) for names in ONE_SETTING)
        off = any(name.startswith(start) and values.get(switch) is not True for start, switch in _COUNT_WITH.items())
        idle = (defaults[name] is None and name not in _OFF) or name in _SAY_NOTHING or name not in read
        return not (said_otherwise or off or idle or keys[name] & by_key)

    held = {name: value for name, value in defaults.items() if name not in given and holds(name)}
    if any(name not in held and name not in given for name in BATCH_NAMES if defaults.get(name) is not None):
        held = {name: value for name, value in held.items() if name not in BATCH_NAMES}  # they have a meaning only together
    return held


def log_defaults(keys: Mapping[str, Set[str]], values: Mapping[str, Any], loaded: Settings, before: Mapping[str, Any]) -> None:
    """Log a table of the defaults of TRL that changed a setting.

    Args:
        keys: Name of TRL -> the keys that it can set.
        values: Name of TRL -> the default that was read.
        loaded: The settings of the run.
        before: Key -> the value that it would have without TRL's defaults. A missing key would have our default.
    """
    rows = {
        key: (
            f"{name}={shown(values[name])}",
            f"{key}={shown(value_at(loaded, key))}",
            shown(before.get(key, value_at(Settings(), key))),
        )
        for name, set_keys in keys.items()
        for key in sorted(set_keys)
        if value_at(loaded, key) != before.get(key, value_at(Settings(), key))
    }
    lines = [f"  {name:<32} {meaning} (our default: {ours})" for name, meaning, ours in rows.values()]
    if lines:
        logger.info("the run uses these defaults of TRL, which differ from ours:\n%s", "\n".join(lines))
