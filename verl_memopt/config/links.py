"""Keys that follow another key unless they are given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from verl_memopt.config.debug_modes import REPLAYING

_AR = "actor_rollout_ref"
_CRITIC = "critic"

LINKS = {
    "data.gen_batch_size": "data.train_batch_size",
    f"{_AR}.actor.clip_ratio_low": f"{_AR}.actor.clip_ratio",
    f"{_AR}.actor.clip_ratio_high": f"{_AR}.actor.clip_ratio",
    f"{_AR}.actor.loss_scale_factor": "data.max_response_length",
    f"{_AR}.actor.optim.state_dtype": f"{_AR}.actor.fsdp_config.model_dtype",
    f"{_AR}.actor.checkpoint.load_contents": f"{_AR}.actor.checkpoint.save_contents",
    f"{_AR}.ref.model.path": f"{_AR}.model.path",
    f"{_AR}.ref.log_prob_micro_batch_size_per_gpu": f"{_AR}.actor.ppo_micro_batch_size_per_gpu",
    f"{_AR}.ref.log_prob_use_dynamic_bsz": f"{_AR}.actor.use_dynamic_bsz",
    f"{_AR}.ref.log_prob_max_token_len_per_gpu": f"{_AR}.actor.ppo_max_token_len_per_gpu",
    f"{_AR}.ref.use_torch_compile": f"{_AR}.actor.use_torch_compile",
    f"{_AR}.rollout.log_prob_micro_batch_size_per_gpu": f"{_AR}.actor.ppo_micro_batch_size_per_gpu",
    f"{_AR}.rollout.log_prob_use_dynamic_bsz": f"{_AR}.actor.use_dynamic_bsz",
    f"{_AR}.rollout.log_prob_max_token_len_per_gpu": f"{_AR}.actor.ppo_max_token_len_per_gpu",
    f"{_AR}.rollout.prompt_length": "data.max_prompt_length",
    f"{_AR}.rollout.response_length": "data.max_response_length",
    f"{_AR}.rollout.seed": "data.seed",
    f"{_AR}.rollout.skip_dump_dir": "trainer.rollout_data_dir",
    **{
        f"{_CRITIC}.model.{key}": f"{_AR}.model.{key}"
        for key in ("path", "tokenizer_path", "trust_remote_code", "external_lib", "attn_implementation")
    },
    **{
        f"{_CRITIC}.{key}": f"{_AR}.actor.{key}"
        for key in ("ppo_mini_batch_size", "ppo_epochs", "shuffle", "use_dynamic_bsz", "loss_agg_mode", "loss_scale_factor")
    },
    **{f"{_CRITIC}.forward_{key}": f"{_CRITIC}.ppo_{key}" for key in ("micro_batch_size_per_gpu", "max_token_len_per_gpu")},
    "trainer.max_critic_ckpt_to_keep": "trainer.max_actor_ckpt_to_keep",
    f"{_CRITIC}.optim.state_dtype": f"{_CRITIC}.model.fsdp_config.model_dtype",
    f"{_CRITIC}.checkpoint.load_contents": f"{_CRITIC}.checkpoint.save_contents",
    "reward_model.reward_kwargs.max_resp_len": "data.max_response_length",
    "reward_model.model.external_lib": f"{_AR}.model.external_lib",
    "reward_model.micro_batch_size_per_gpu": f"{_AR}.rollout.log_prob_micro_batch_size_per_gpu",
    "reward_model.use_dynamic_bsz": f"{_CRITIC}.use_dynamic_bsz",
    "reward_model.forward_max_token_len_per_gpu": f"{_CRITIC}.forward_max_token_len_per_gpu",
}
"""Follower -> the key it follows while it is null."""

DERIVED = {
    f"{_AR}.rollout.max_model_len": (f"{_AR}.rollout.prompt_length", f"{_AR}.rollout.response_length"),
    f"{_AR}.rollout.val_kwargs.do_sample": (f"{_AR}.rollout.val_kwargs.temperature",),
    "trainer.default_local_dir": ("trainer.project_name", "trainer.experiment_name"),
    "custom_reward_function.on_error": ("reward_model.reward_manager",),
    f"{_AR}.rollout.skip_rollout": ("debug.mode",),
}
"""Follower -> the keys it is computed from while it is null."""


LINKED = frozenset({*LINKS, *LINKS.values(), *DERIVED, *(part for parts in DERIVED.values() for part in parts)})
"""Every key that follows another or is followed."""


def with_links(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with each follower that is null set to what it follows.

    Args:
        values: dotted key -> typed value, of the keys of :data:`LINKED` at least. Nothing in it is changed.
    """
    linked = dict(values)
    for follower, target in LINKS.items():
        if linked[follower] is None:
            value = linked[target]
            linked[follower] = list(value) if isinstance(value, list) else value
    for follower in DERIVED:
        if linked[follower] is None:
            linked[follower] = derived(follower, linked)
    return linked


def derived(key: str, values: Mapping[str, Any]) -> Any:
    """Return what a key of :data:`DERIVED` is while it is null, from the values of the keys that it is computed from."""
    parts = [values[part] for part in DERIVED[key]]
    if key.endswith("do_sample"):
        return parts[0] > 0
    if key.endswith("skip_rollout"):
        return parts[0] in REPLAYING
    if key.endswith("on_error"):
        return "score" if parts[0] == "prime" else "raise"
    return sum(parts) if key.endswith("max_model_len") else "/".join(["checkpoints", *parts])


def followers_of(keys: Iterable[str]) -> set[str]:
    """Return the keys whose value depends on one of the given keys."""
    dependent = set(keys)
    for follower, target in LINKS.items():
        if target in dependent:
            dependent.add(follower)
    for follower, parts in DERIVED.items():
        if dependent.intersection(parts):
            dependent.add(follower)
    return dependent
