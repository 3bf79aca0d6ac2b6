"""Spellings of verl that mean one of our keys: each is read as that key, and a conflict between two is a problem.

Rows are (spelling, our key). A spelling may carry a value of another unit or vocabulary; :func:`translated` says what it means.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from verl_memopt.config.problems import Problem, problem, shown
from verl_memopt.config.schema import Model, Trainer

logger = logging.getLogger(__name__)

_AR = "actor_rollout_ref"
_CHUNK = f"{_AR}.model.logprob_chunk_tokens"

RENAMED = {
    f"{_AR}.actor.ppo_infer_max_token_len_per_gpu": f"{_AR}.rollout.log_prob_max_token_len_per_gpu",
    f"{_AR}.actor.ppo_infer_micro_batch_size_per_gpu": f"{_AR}.rollout.log_prob_micro_batch_size_per_gpu",
    f"{_AR}.actor.grad_clip": f"{_AR}.actor.optim.clip_grad",
    f"{_AR}.actor.optim.grad_clip": f"{_AR}.actor.optim.clip_grad",
    f"{_AR}.actor.optim.warmup_style": f"{_AR}.actor.optim.lr_scheduler_type",
    f"{_AR}.actor.rollout_n": f"{_AR}.rollout.n",
    f"{_AR}.ref.rollout_n": f"{_AR}.rollout.n",
    f"{_AR}.actor.use_remove_padding": f"{_AR}.model.use_remove_padding",
    f"{_AR}.actor.use_fused_kernels": f"{_AR}.model.use_fused_kernels",
    **{
        f"{_AR}.{role}.{spelling}": f"{_AR}.{role}.{key}"
        for role in ("actor", "ref")
        for spelling, key in {
            "ulysses_sequence_parallel_size": "fsdp_config.ulysses_sequence_parallel_size",
            "fsdp_config.use_torch_compile": "use_torch_compile",
            "fsdp_config.mixed_precision.param_dtype": "fsdp_config.dtype",
        }.items()
    },
    f"{_AR}.model.override_config.attn_implementation": f"{_AR}.model.attn_implementation",
    f"{_AR}.model.lora.rank": f"{_AR}.model.lora_rank",
    f"{_AR}.model.lora.alpha": f"{_AR}.model.lora_alpha",
    f"{_AR}.model.lora.target_modules": f"{_AR}.model.target_modules",
    f"{_AR}.model.lora.exclude_modules": f"{_AR}.model.exclude_modules",
    f"{_AR}.model.lora.adapter_path": f"{_AR}.model.lora_adapter_path",
    "reward.reward_model.model_path": "reward_model.model.path",
    "reward.num_workers": "reward_model.num_workers",
    "reward.reward_manager.name": "reward_model.reward_manager",
    "reward.reward_manager.source": "reward_manager.source",
    "reward_manager.name": "reward_model.reward_manager",
}
"""One spelling, one key, the same value."""

RENAMED_SECTIONS = {
    "reward.custom_reward_function.": "custom_reward_function.",
    "reward.reward_model.": "reward_model.",
}
"""Every key below the one section stands for the same key below the other."""

GLOBAL_MICRO_BATCHES = {
    f"{_AR}.actor.ppo_micro_batch_size": f"{_AR}.actor.ppo_micro_batch_size_per_gpu",
    f"{_AR}.rollout.log_prob_micro_batch_size": f"{_AR}.rollout.log_prob_micro_batch_size_per_gpu",
    f"{_AR}.ref.log_prob_micro_batch_size": f"{_AR}.ref.log_prob_micro_batch_size_per_gpu",
}
"""Sequences over all devices -> sequences per device."""

MET_BY_CHUNKING = frozenset(
    f"{_AR}.{place}"
    for place in (
        "model.use_fused_kernels",
        *(
            f"{role}.{below}{name}"
            for role in ("actor", "ref")
            for below in ("", "fsdp_config.")
            for name in ("entropy_from_logits_with_chunking", "entropy_checkpointing")
        ),
    )
)
"""Switches whose purpose ``model.logprob_chunk_tokens`` serves already."""

REMOVE_PREVIOUS = "trainer.remove_previous_ckpt_in_save"

_KL_TYPES = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}
_PRECISIONS = {"bf16": "bfloat16", "float32": "fp32"}
VALUES = {
    "trainer.logger": {"file": "jsonl", "tracking": "wandb"},
    "algorithm.adv_estimator": {"rloo_vectorized": "rloo", "grpo_vectorized": "grpo"},
    "algorithm.kl_penalty": _KL_TYPES,
    f"{_AR}.actor.kl_loss_type": _KL_TYPES | {f"{short}+": f"{name}+" for short, name in _KL_TYPES.items()},
    f"{_AR}.actor.optim.state_dtype": _PRECISIONS | {"8bit": "int8", "4bit": "int4"},
    f"{_AR}.rollout.dtype": _PRECISIONS | {"float16": "fp16", "half": "fp16"},
    **{
        f"{_AR}.{role}.fsdp_config.{key}": _PRECISIONS
        for role in ("actor", "ref")
        for key in ("model_dtype", "dtype", "mixed_precision.reduce_dtype")
    },
}
"""Our key -> {spelling of a value: our value}."""


def apply_aliases(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Return the given dotted keys under our names with our values, and two spellings that disagree as problems."""
    problems: list[Problem] = []
    spellings: dict[str, list[tuple[str, Any, Any]]] = {}
    for key, value in _lifted(given).items():
        outcome = translated(key, value, given)
        if isinstance(outcome, Problem):
            problems.append(outcome)
        elif outcome is not None:
            spellings.setdefault(outcome[0], []).append((key, value, outcome[1]))
    for canonical, found in spellings.items():
        if any(meant != found[0][2] for _, _, meant in found):
            asked = {key: value for key, value, _ in found}
            problems.append(problem(asked, "spellings of one key with different values", f"Keep one; the name is {canonical}."))
    return {canonical: found[0][2] for canonical, found in spellings.items()}, problems


def translated(key: str, value: Any, given: Mapping[str, Any]) -> tuple[str, Any] | Problem | None:
    """Our key and value for a spelling; None when it asks for nothing; a Problem when its value cannot be read."""
    canonical = our_key(key)
    if canonical in MET_BY_CHUNKING:
        return _met_by_chunking(key, value, given)
    if canonical in GLOBAL_MICRO_BATCHES:
        return _per_device(canonical, value, given)
    if canonical == REMOVE_PREVIOUS:
        return _keep_one(value)
    meant = _our_value(canonical, value)
    if canonical != key or meant != value:
        logger.info("%s=%s is read as %s=%s", key, shown(value), canonical, shown(meant))
    return canonical, meant


def our_key(key: str) -> str:
    """Our name for a key, which is the key itself when it is no alias."""
    if key in RENAMED:
        return RENAMED[key]
    for section, ours in RENAMED_SECTIONS.items():
        if key.startswith(section):
            return ours + key.removeprefix(section)
    return key


def _lifted(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given keys with an attention implementation taken out of ``model.override_config``."""
    place, name = f"{_AR}.model.override_config", "attn_implementation"
    opened = given.get(place)
    if not isinstance(opened, Mapping) or name not in opened:
        return dict(given)
    rest = {key: value for key, value in opened.items() if key != name}
    return {**given, place: rest, f"{place}.{name}": opened[name]}


def _our_value(key: str, value: Any) -> Any:
    names = VALUES.get(key, {})
    if isinstance(value, list | tuple):
        return [_our_value(key, item) for item in value] if names else value
    if key == f"{_AR}.actor.policy_loss.loss_mode" and isinstance(value, str):
        return value.replace("-", "_")
    return names.get(value, value) if isinstance(value, str) else value


def _met_by_chunking(key: str, value: Any, given: Mapping[str, Any]) -> Problem | None:
    if value not in (None, True, False):
        return problem({key: value}, "expected true or false", f"Remove it: {_CHUNK} decides.")
    chunk = given.get(_CHUNK, Model.logprob_chunk_tokens)
    if value and chunk == 0:
        return problem({key: value, _CHUNK: chunk}, "one asks for chunking, the other switches it off", "Keep one of the two.")
    if value is not None:
        logger.info("%s=%s: log-probs and entropy are chunked by %s=%s, whatever this key says", key, shown(value), _CHUNK, chunk)
    return None


def _per_device(key: str, value: Any, given: Mapping[str, Any]) -> tuple[str, Any] | Problem | None:
    ours = GLOBAL_MICRO_BATCHES[key]
    if value is None:
        return None
    counts = [given.get("trainer.nnodes", Trainer.nnodes), given.get("trainer.n_gpus_per_node", Trainer.n_gpus_per_node)]
    if not all(_is_count(number) for number in (value, *counts)):
        return problem({key: value}, "expected a whole number of sequences over all devices", f"Set {ours} instead.")
    devices = counts[0] * counts[1]
    if value % devices:
        return problem({key: value}, f"not divisible by the {devices} devices", f"Set {ours} instead.")
    logger.info("%s=%s is read as %s=%s", key, value, ours, value // devices)
    return ours, value // devices


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _keep_one(value: Any) -> tuple[str, Any] | Problem | None:
    if value not in (None, True, False):
        return problem({REMOVE_PREVIOUS: value}, "expected true or false", "Set trainer.max_actor_ckpt_to_keep instead.")
    return ("trainer.max_actor_ckpt_to_keep", 1) if value else None


def spelled() -> Iterable[tuple[str, str]]:
    """Every (alias, our key) pair, for the documentation and the tests."""
    yield from RENAMED.items()
    yield from ((f"{section}*", f"{ours}*") for section, ours in RENAMED_SECTIONS.items())
    yield from GLOBAL_MICRO_BATCHES.items()
    yield from ((key, _CHUNK) for key in sorted(MET_BY_CHUNKING))
    yield REMOVE_PREVIOUS, "trainer.max_actor_ckpt_to_keep"
