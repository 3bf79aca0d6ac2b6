"""What one key may hold by itself: the words of a choice, the range of a number. Both are read from the types of the schema."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Literal, get_args, get_origin

from verl_memopt.config.debug_modes import REPLAYING
from verl_memopt.config.keys import Problem, annotated_types, leaf_types, problem, shown
from verl_memopt.memory.knob import Range, Words

_AR = "actor_rollout_ref"

_FSDP_ONLY = "fsdp2 is the one sharding backend"
_NO_ENGINE = "this engine is not available"
WHY_NOT: dict[tuple[str, str], str] = {
    **{(f"{role}.strategy", name): _FSDP_ONLY for role in (f"{_AR}.actor", "critic") for name in ("fsdp", "megatron", "veomni")},
    **{(f"{_AR}.rollout.name", name): _NO_ENGINE for name in ("sglang", "trtllm")},
    (f"{_AR}.rollout.mode", "sync"): "the engine lives in the worker's process and has no other mode",
    (f"{_AR}.actor.kl_loss_type", "full"): "a KL over the whole vocabulary would need whole logits",
    **{
        (f"{role}.fsdp_config.{key}", name): "half precision needs loss scaling, which is not available"
        for role in (f"{_AR}.actor", f"{_AR}.ref", "critic.model", "reward_model.model")
        for key in ("model_dtype", "dtype", "mixed_precision.reduce_dtype")
        for name in ("fp16", "float16")
    },
}
"""(key, word) -> why a word that verl knows is not among the choices."""

LARGEST = 2**63 - 1
"""Largest whole number that random generators, tensors and files take."""


@cache
def choices() -> dict[str, tuple[str, ...]]:
    """Return key -> the words it takes; of a list, each item."""
    of_types = {key: words for key, kind in leaf_types().items() if (words := _words(kind))}
    return of_types | {key: mark.words for key, mark in _marks() if isinstance(mark, Words)}


@cache
def ranges() -> dict[str, Range]:
    """Return key -> what its number must be."""
    return {key: mark for key, mark in _marks() if isinstance(mark, Range)}


def _words(kind: Any) -> tuple[str, ...]:
    if get_origin(kind) is Literal:
        return get_args(kind)
    return tuple(dict.fromkeys(word for part in get_args(kind) for word in _words(part)))


def _marks() -> Iterator[tuple[str, Any]]:
    for key, kind in annotated_types().items():
        for mark in getattr(kind, "__metadata__", ()):
            yield key, mark


def check_values(values: Mapping[str, Any]) -> list[Problem]:
    """Return a problem for each value that is no choice of its key, out of its range, or a text that no file can hold.

    Null is left to the type of the key. A key that takes a wrong value from another key is not reported again.

    Args:
        values: dotted key -> typed value, of every key; each follower has its value.
    """
    way_out = "Change the value, or leave it out for the default."
    problems: list[Problem] = []
    for key, value in values.items():
        if isinstance(value, int) and value > LARGEST:
            problems.append(problem({key: value}, f"must be at most {LARGEST}", way_out))
    for key, words in choices().items():
        value = values[key]
        for item in value if isinstance(value, list | tuple) else [value]:
            if item is not None and item not in words:
                why = WHY_NOT.get((key, item) if isinstance(item, str) else (key, ""), f"{shown(item)} is no choice")
                problems.append(problem({key: value}, why, f"Set {' or '.join(words)}."))
    for key, limits in ranges().items():
        value = values[key]
        if value is not None and not limits.holds(value):
            problems.append(problem({key: value}, limits.text, way_out))
    wrong = {key for each in problems for key in each.keys}
    for key, value in values.items():
        is_text = isinstance(value, str | list | tuple | dict) and key not in wrong
        if is_text and not all(map(_is_writable, _texts(value))):
            problems.append(problem({key: ascii(value)}, "it holds a character that no file can hold", "Remove it."))
    wrong = {key for each in problems for key in each.keys}
    repeated = {key for key, target in LINKS.items() if target in wrong and values[key] == values[target]}
    repeated |= {key for key, parts in DERIVED.items() if wrong.intersection(parts) and values[key] == derived(key, values)}
    return [each for each in problems if repeated.isdisjoint(each.keys)]


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in a value, however deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _is_writable(text: str) -> bool:
    try:
        return "\0" not in text and text.encode("utf-8") is not None
    except UnicodeEncodeError:
        return False


# Keys that follow another key unless they are given.

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
    f"{_AR}.ref.log_prob_adaptive_token_budget": f"{_AR}.actor.adaptive_token_budget",
    f"{_AR}.rollout.log_prob_adaptive_token_budget": f"{_AR}.actor.adaptive_token_budget",
    f"{_AR}.ref.fsdp_config.ulysses_sequence_parallel_size": f"{_AR}.actor.fsdp_config.ulysses_sequence_parallel_size",
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
    f"{_CRITIC}.adaptive_token_budget": f"{_AR}.actor.adaptive_token_budget",
    **{f"{_CRITIC}.forward_{key}": f"{_CRITIC}.ppo_{key}" for key in ("micro_batch_size_per_gpu", "max_token_len_per_gpu")},
    "trainer.max_critic_ckpt_to_keep": "trainer.max_actor_ckpt_to_keep",
    f"{_CRITIC}.optim.state_dtype": f"{_CRITIC}.model.fsdp_config.model_dtype",
    f"{_CRITIC}.checkpoint.load_contents": f"{_CRITIC}.checkpoint.save_contents",
    "reward_model.reward_kwargs.max_resp_len": "data.max_response_length",
    "reward_model.model.external_lib": f"{_AR}.model.external_lib",
    "reward_model.micro_batch_size_per_gpu": f"{_AR}.rollout.log_prob_micro_batch_size_per_gpu",
    "reward_model.use_dynamic_bsz": f"{_CRITIC}.use_dynamic_bsz",
    "reward_model.adaptive_token_budget": f"{_CRITIC}.adaptive_token_budget",
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
