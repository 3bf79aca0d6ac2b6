"""What one key may hold by itself: the words of a choice, the range of a number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from verl_memopt.config.keys import leaf_keys, value_at
from verl_memopt.config.problems import Problem, problem, shown
from verl_memopt.config.schema import Settings

_AR = "actor_rollout_ref"
_KL = ("kl", "abs", "mse", "low_var_kl")
_PARTS = ("model", "optimizer", "extra", "hf_model")
_SCHEDULES = (
    "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_min_lr", "cosine_with_restarts", "polynomial",
    "inverse_sqrt", "warmup_stable_decay",
)  # fmt: skip

CHOICES: dict[str, tuple[str, ...]] = {
    "data.truncation": ("error", "left", "right", "middle"),
    f"{_AR}.model.attn_implementation": ("auto", "flash_attention_2", "sdpa", "eager"),
    f"{_AR}.model.load_mode": ("stream", "mmap"),
    f"{_AR}.ref.quantization": ("none", "int8", "nf4"),
    f"{_AR}.model.gradient_checkpointing_mode": ("full", "every_n", "selective"),
    f"{_AR}.actor.strategy": ("fsdp2",),
    f"{_AR}.actor.fsdp_config.gradient_sync": ("every", "last"),
    f"{_AR}.actor.policy_loss.loss_mode": ("vanilla", "sequence", "gspo"),
    f"{_AR}.actor.old_log_prob_pass": ("always", "auto"),
    f"{_AR}.actor.loss_agg_mode": ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"),
    f"{_AR}.actor.kl_loss_type": _KL + tuple(f"{name}+" for name in _KL),
    f"{_AR}.actor.optim.lr_scheduler_type": _SCHEDULES,
    f"{_AR}.actor.optim.state_dtype": ("fp32", "bfloat16", "int8", "int4"),
    f"{_AR}.actor.checkpoint.save_contents": _PARTS,
    f"{_AR}.actor.checkpoint.load_contents": _PARTS,
    f"{_AR}.rollout.name": ("vllm", "hf"),
    f"{_AR}.rollout.mode": ("async",),
    f"{_AR}.rollout.dtype": ("bfloat16", "fp16", "fp32"),
    f"{_AR}.rollout.load_format": ("dummy", "auto"),
    f"{_AR}.rollout.logprobs_mode": ("processed_logprobs", "raw_logprobs"),
    f"{_AR}.rollout.scheduling_policy": ("fcfs", "priority"),
    f"{_AR}.rollout.kv_cache_dtype": ("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"),
    "algorithm.adv_estimator": ("rloo", "grpo"),
    "algorithm.kl_penalty": _KL,
    "algorithm.kl_ctrl.type": ("fixed", "adaptive"),
    "algorithm.expansion": ("string", "token"),
    "reward_model.reward_manager": ("naive",),
    "custom_reward_function.on_error": ("raise", "score"),
    "trainer.worker_group": ("ray", "local"),
    "trainer.logger": ("console", "jsonl", "tensorboard", "wandb"),
    "trainer.resume_mode": ("auto", "disable", "resume_path"),
    "debug.mode": ("off", "dry"),
    **{
        f"{_AR}.{role}.fsdp_config.{key}": ("fp32", "bfloat16")
        for role in ("actor", "ref")
        for key in ("model_dtype", "dtype", "mixed_precision.reduce_dtype")
    },
}
"""Key -> the words it takes; of a list, each item."""

_FSDP_ONLY = "fsdp2 is the one sharding backend"
_NO_ESTIMATOR = "only RLOO and GRPO are available"
_NO_GAE = (
    "gae needs a critic, which is not available. gae is verl's default, and stands where the key is not given. "
    "--config-name rloo_trainer and grpo_trainer choose an estimator, a loss and a group size together"
)
_NO_ENGINE = "this engine is not available"
WHY_NOT: dict[tuple[str, str], str] = {
    **{(f"{_AR}.actor.strategy", name): _FSDP_ONLY for name in ("fsdp", "megatron", "veomni")},
    **{(f"{_AR}.rollout.name", name): _NO_ENGINE for name in ("sglang", "trtllm")},
    **{
        ("algorithm.adv_estimator", name): _NO_ESTIMATOR
        for name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo", "gpg", "rloo_lm")
    },
    ("algorithm.adv_estimator", "gae"): _NO_GAE,
    (f"{_AR}.rollout.mode", "sync"): "the engine lives in the worker's process and has no other mode",
    (f"{_AR}.actor.kl_loss_type", "full"): "a KL over the whole vocabulary would need whole logits",
    **{("algorithm.expansion", name): "this way of expansion is not available" for name in ("lazy", "repeat_sampler")},
    **{
        (f"{_AR}.{role}.fsdp_config.{key}", name): "half precision needs loss scaling, which is not available"
        for role in ("actor", "ref")
        for key in ("model_dtype", "dtype", "mixed_precision.reduce_dtype")
        for name in ("fp16", "float16")
    },
}
"""(key, word) -> why a word that verl knows is not among the choices."""

Range = tuple[str, Callable[[Any], bool]]
_POSITIVE: Range = ("must be above 0", lambda value: value > 0)
_NOT_NEGATIVE: Range = ("must not be negative", lambda value: value >= 0)
_MINUS_ONE_OR_POSITIVE: Range = ("must be above 0, or -1", lambda value: value > 0 or value == -1)
_MINUS_ONE_OR_MORE: Range = ("must not be negative, except -1", lambda value: value >= -1)
_SHARE: Range = ("must lie between 0 and 1", lambda value: 0 <= value <= 1)
_POSITIVE_SHARE: Range = ("must be above 0 and at most 1", lambda value: 0 < value <= 1)


def _rows(limits: Range, *keys: str) -> dict[str, Range]:
    return dict.fromkeys(keys, limits)


RANGES: dict[str, Range] = {
    **_rows(_POSITIVE, *(f"data.{key}" for key in ("max_prompt_length", "max_response_length", "train_batch_size"))),
    **_rows(_POSITIVE, "data.val_batch_size", f"{_AR}.nccl_timeout"),
    **_rows(
        _POSITIVE,
        *(
            f"{_AR}.model.{key}"
            for key in ("gradient_checkpointing_every", "activation_offload_in_flight", "tiled_mlp.num_shards")
        ),
    ),
    **_rows(_NOT_NEGATIVE, f"{_AR}.model.activation_offload_min_bytes"),
    **_rows(_MINUS_ONE_OR_POSITIVE, "data.train_max_samples", "data.val_max_samples"),
    **_rows(_NOT_NEGATIVE, "data.seed", f"{_AR}.model.lora_rank"),
    **_rows(_NOT_NEGATIVE, f"{_AR}.model.logprob_chunk_tokens", f"{_AR}.model.logprob_vocab_tile"),
    **_rows(_POSITIVE, f"{_AR}.model.lora_alpha"),
    **_rows(
        _POSITIVE,
        *(f"{_AR}.actor.{key}" for key in ("ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "ppo_epochs")),
        *(f"{_AR}.actor.{key}" for key in ("ppo_max_token_len_per_gpu", "clip_ratio", "clip_ratio_low", "clip_ratio_high")),
        *(f"{_AR}.actor.{key}" for key in ("loss_scale_factor", "optim.clip_grad", "optim.num_cycles", "optim.bucket_megabytes")),
    ),
    **_rows(("must be above 1", lambda value: value > 1), f"{_AR}.actor.clip_ratio_c"),
    **_rows(_NOT_NEGATIVE, *(f"{_AR}.actor.{key}" for key in ("entropy_coeff", "kl_loss_coef", "data_loader_seed"))),
    **_rows(_NOT_NEGATIVE, f"{_AR}.actor.optim.lr", f"{_AR}.actor.optim.weight_decay"),
    **_rows(("must each be at least 0 and below 1", lambda pair: all(0 <= b < 1 for b in pair)), f"{_AR}.actor.optim.betas"),
    **_rows(_SHARE, f"{_AR}.actor.optim.min_lr_ratio", f"{_AR}.actor.optim.lr_warmup_steps_ratio"),
    **_rows(_MINUS_ONE_OR_MORE, f"{_AR}.actor.optim.lr_warmup_steps"),
    **_rows(_MINUS_ONE_OR_POSITIVE, f"{_AR}.actor.optim.total_training_steps"),
    **_rows(_MINUS_ONE_OR_POSITIVE, f"{_AR}.actor.fsdp_config.fsdp_size", f"{_AR}.ref.fsdp_config.fsdp_size"),
    **_rows(_NOT_NEGATIVE, f"{_AR}.actor.fsdp_config.seed", f"{_AR}.ref.fsdp_config.seed"),
    **_rows(
        _POSITIVE,
        *(f"{_AR}.{role}.log_prob_{key}_per_gpu" for role in ("ref", "rollout") for key in ("micro_batch_size", "max_token_len")),
        *(f"{_AR}.rollout.{key}" for key in ("n", "temperature", "repetition_penalty", "prompt_length", "response_length")),
        *(f"{_AR}.rollout.{key}" for key in ("kv_cache_memory_gb", "max_model_len", "max_num_seqs", "max_num_batched_tokens")),
        *(f"{_AR}.rollout.{key}" for key in ("tensor_model_parallel_size", "val_kwargs.n")),
        f"{_AR}.rollout.checkpoint_engine.update_weights_bucket_megabytes",
    ),
    **_rows(_MINUS_ONE_OR_POSITIVE, f"{_AR}.rollout.top_k", f"{_AR}.rollout.val_kwargs.top_k"),
    **_rows(_POSITIVE_SHARE, *(f"{_AR}.rollout.{key}" for key in ("top_p", "val_kwargs.top_p", "gpu_memory_utilization"))),
    **_rows(_NOT_NEGATIVE, f"{_AR}.rollout.seed", f"{_AR}.rollout.val_kwargs.temperature", "algorithm.kl_ctrl.kl_coef"),
    **_rows(_POSITIVE, "algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl"),
    **_rows(_POSITIVE, "reward_model.num_workers"),
    **_rows(_POSITIVE, *(f"custom_reward_function.{key}" for key in ("timeout_seconds", "cpu_seconds", "memory_gb"))),
    "custom_reward_function.open_files": ("must be at least 64", lambda value: value >= 64),
    **_rows(
        _POSITIVE,
        *(f"trainer.{key}" for key in ("nnodes", "n_gpus_per_node", "total_epochs", "total_training_steps")),
        *(f"trainer.{key}" for key in ("table_every_steps", "max_actor_ckpt_to_keep", "ray_wait_register_center_timeout")),
        *("trainer.max_skipped_steps", "trainer.stop_deadline_seconds"),
    ),
    **_rows(
        ("must be a number above 0, or auto", lambda value: value == "auto" or (isinstance(value, float) and value > 0)),
        f"{_AR}.rollout.max_logprob_diff",
    ),
    **_rows(("must be 1 or 2", lambda level: level in (1, 2)), f"{_AR}.rollout.sleep_level"),
    **_rows(_POSITIVE, *(f"memory.{key}" for key in ("device_limit_gb", "host_limit_gb", "pinned_limit_gb"))),
    **_rows(_NOT_NEGATIVE, "trainer.track_memory_every_steps", "trainer.log_val_generations"),
    **_rows(_MINUS_ONE_OR_POSITIVE, "trainer.save_freq", "trainer.test_freq"),
}
"""Key -> what its number must be."""


LARGEST_SCORE = 1e12
"""Largest size of a score. Advantages are at most twice as large, so in fp32 (up to 3.4e38) the sum of their squares is finite
for 8e13 tokens, and so is the squared norm of a gradient of up to 9e6 for an advantage of 1."""

LARGEST = 2**63 - 1
"""Largest whole number that random generators, tensors and files take."""


def check_values(settings: Settings) -> Iterator[Problem]:
    """Every key whose value is no choice of it or out of its range; null is left to the key's type."""
    for key in leaf_keys():
        value = value_at(settings, key)
        if isinstance(value, int) and value > LARGEST:
            yield problem({key: value}, f"must be at most {LARGEST}", "Change the value, or leave it out for the default.")
    for key, words in CHOICES.items():
        value = value_at(settings, key)
        for item in value if isinstance(value, list | tuple) else [value]:
            if item is not None and item not in words:
                why = WHY_NOT.get((key, item) if isinstance(item, str) else (key, ""), f"{shown(item)} is no choice")
                yield problem({key: value}, why, f"Set {' or '.join(words)}.")
    for key, (what, holds) in RANGES.items():
        value = value_at(settings, key)
        if value is not None and not holds(value):
            yield problem({key: value}, what, "Change the value, or leave it out for the default.")
