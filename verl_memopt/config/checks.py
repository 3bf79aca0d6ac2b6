"""Rules about several keys: every combination of settings that can be refused without a look at devices or files.

A rule is a :class:`verl_memopt.memory.knob.Refusal`, a predicate of the typed settings. Knobs declare further rules in their
files.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from functools import partial
from typing import Any, cast

from verl_memopt.config.algorithm_rules import (
    ALGORITHM_RULES,
    CORRECTION_RULES,
    CRITIC_RULES,
    SUPERVISED_RULES,
    WITHOUT_CRITIC,
    WITHOUT_ENGINE,
)
from verl_memopt.config.debug_modes import WITHOUT_DATA, debug_rules
from verl_memopt.config.keys import Problem, above, leaf_values, problem, refused, value_at
from verl_memopt.config.reward_limits import LARGEST_SCORE
from verl_memopt.config.reward_rules import REWARD_RULES, SANDBOX_RULES, WITHOUT_REWARD_MODEL, even_shards
from verl_memopt.config.schema import Settings
from verl_memopt.config.teacher_rules import TEACHER_RULES
from verl_memopt.config.unused_keys import REFERENCE_RULES, UNUSED_KEYS, warn_unused
from verl_memopt.config.values import LINKS, check_values, followers_of
from verl_memopt.memory.critic_rules import refusals
from verl_memopt.memory.knob import (
    DEVICES,
    Refusal,
    SettingsView,
    needs_reference,
    num_devices,
)
from verl_memopt.recipes import RECIPES

_AR = "actor_rollout_ref"
_ROLLOUT = f"{_AR}.rollout"
_ENGINE_ARGUMENTS = f"{_ROLLOUT}.engine_kwargs.vllm"

COLDEST, HOTTEST = 0.01, 2
"""Lowest and highest temperature of vLLM besides 0. vLLM refuses a higher one, and silently raises a lower one."""

ENGINE_NAMES = {
    "model": f"{_AR}.model.path",
    "tokenizer": f"{_AR}.model.tokenizer_path",
    "trust_remote_code": f"{_AR}.model.trust_remote_code",
    "tensor_parallel_size": f"{_ROLLOUT}.tensor_model_parallel_size",
    "enable_sleep_mode": f"{_ROLLOUT}.free_cache_engine",
    "kv_cache_memory_bytes": f"{_ROLLOUT}.kv_cache_memory_gb",
    **{
        name: f"{_ROLLOUT}.{name}"
        for name in (
            *("dtype", "load_format", "seed", "gpu_memory_utilization", "max_model_len", "max_num_seqs", "enforce_eager"),
            *("max_num_batched_tokens", "enable_chunked_prefill", "enable_prefix_caching", "disable_log_stats"),
            *("cudagraph_capture_sizes", "scheduling_policy", "logprobs_mode", "kv_cache_dtype"),
        )
    },
}
"""Argument of vLLM -> the key that sets it."""


class WrongKeyError(Exception):
    """A rule read a key whose value is already known to be wrong, so the rule cannot be checked."""


def without_wrong(settings: Settings, wrong: Set[str]) -> Settings:
    """Return a view of the settings for rules: reading a key in ``wrong`` raises :class:`WrongKeyError`."""

    def address(key: str) -> str:
        if key in wrong:
            raise WrongKeyError(key)
        return key

    return cast(Settings, SettingsView(settings, address)) if wrong else settings


def check(settings: Settings, values: Mapping[str, Any], user_keys: frozenset[str], wrong: set[str]) -> list[Problem]:
    """Return all problems of the settings, and log a warning for each key of the user that has no effect.

    A key whose value is wrong is reported once: rules about several keys skip it.

    Args:
        settings: Typed settings. A key whose value has a wrong type has its default here.
        values: The value of every key.
        user_keys: Keys that the user set.
        wrong: Keys that already have a problem.
    """
    wrong = followers_of(wrong)
    problems = [found for found in check_values(values) if wrong.isdisjoint(found.keys)]
    # A key that follows a wrong key has a wrong value too. A rule about it would report a mistake that the user did not make.
    wrong = wrong | followers_of(key for found in problems for key in found.keys)
    readable, warned = without_wrong(settings, wrong), set[str]()
    if_not_given = leaf_values(Settings()) | {key: values[target] for key, target in LINKS.items()}
    for unused in (*WITHOUT_CRITIC.values(), *WITHOUT_REWARD_MODEL.values(), *WITHOUT_ENGINE.values(), *UNUSED_KEYS.values()):
        if unused.key in user_keys and unused.key not in wrong | warned:
            with suppress(WrongKeyError):
                if unused.when(readable):
                    warn_unused(unused, values[unused.key], if_not_given[unused.key])
                    warned.add(unused.key)
    for rule in (*RULES, *refusals()):
        if wrong.isdisjoint(rule.keys):
            with suppress(WrongKeyError):
                if rule.when(readable):
                    address = {key: values[key] for key in rule.keys}
                    problems.append(problem(address, rule.reason_for(readable), rule.way_out_for(readable)))
    return problems + [found for found in _set_twice(values[_ENGINE_ARGUMENTS]) if wrong.isdisjoint(found.keys)]


def _set_twice(arguments: Mapping[str, Any]) -> Iterator[Problem]:
    for name, value in arguments.items():
        if name in ENGINE_NAMES:
            key = ENGINE_NAMES[name]
            address = {f"{_ENGINE_ARGUMENTS}.{name}": value}
            text = problem(address, f"{key} sets this argument already", f"Use only {key}.").text
            yield Problem((_ENGINE_ARGUMENTS, key), text)


def _uneven(number: int, parts: int) -> bool:
    return parts > 0 and number % parts != 0


def _is_no_path(value: Any) -> bool:
    paths = value if isinstance(value, list | tuple) else [value]
    return not paths or not all(isinstance(path, str) and path for path in paths)


def _is_no_folder_name(name: str) -> bool:
    return name.strip() in ("", ".", "..") or "/" in name or "\\" in name


def _reads_files(settings: Settings) -> bool:
    # A dataset class of the user may read anything.
    return settings.data.custom_cls.path is None


def _files() -> Iterator[Refusal]:
    # These names become folders, so they must not be a path to another place.
    folder = "this is one part of the run folder's path, and cannot be empty, a dot, or hold a slash"
    plain = "Give a plain name, or set the whole run folder by trainer.default_local_dir."
    for key in ("trainer.project_name", "trainer.experiment_name"):
        yield refused({key: _is_no_folder_name}, folder, plain)
    no_path = "expected a path or a list of paths"
    yield refused(
        {"data.train_files": _is_no_path},
        no_path,
        "Set data.train_files=/path/to/file.parquet.",
        lambda settings: settings.debug.mode not in WITHOUT_DATA and _reads_files(settings),
    )
    no_val_path = {"data.val_files": lambda files: files is not None and _is_no_path(files)}
    yield refused(no_val_path, no_path, "Set data.val_files=/path/to/file.parquet.", _reads_files)
    no_names = {"trainer.logger": lambda names: not isinstance(names, str | list | tuple)}
    yield refused(no_names, "expected a name or a list of names", "Set trainer.logger=[console,jsonl].")
    for file, name in (("data.custom_cls.path", "data.custom_cls.name"), ("data.sampler.class_path", "data.sampler.class_name")):
        yield Refusal(
            (file, name),
            partial(_is_half, file, name),
            "a class needs its file and its name",
            "Set both, or neither.",
        )


def _streams() -> Iterator[Refusal]:
    key, steps, sampler = "data.streaming", "trainer.total_training_steps", "data.sampler.class_path"
    yield Refusal(
        (key, steps),
        lambda settings: (
            settings.data.streaming
            and settings.trainer.total_training_steps is None
            and not settings.trainer.val_only
            and settings.debug.mode not in WITHOUT_DATA
        ),
        "a stream has no known number of rows, so trainer.total_epochs does not give a number of steps",
        f"Set {steps} (steps=... in Python, max_steps in TRL's names), or pass list(dataset) from Python to read all rows first.",
    )
    places = "a sampler selects rows by their index, and the rows of a stream have none"
    yield refused({key: True, sampler: lambda path: path is not None}, places, f"Remove {sampler}, or set {key}=false.")
    yield Refusal(
        (key, "reward_model.reward_manager"),
        lambda settings: settings.data.streaming and settings.reward_model.recipe is not None,
        "this recipe cannot stream its rows",
        f"Set {key}=false.",
    )


def _best_checkpoint() -> Iterator[Refusal]:
    key = "trainer.keep_best_checkpoint"
    yield refused(
        {key: lambda name: name is not None and name.removeprefix("min:").removeprefix("max:").strip() == ""},
        "expected the name of a validation metric",
        f"Set {key}=val-core/openai/gsm8k/reward/mean@1, or min:val/loss for a metric that should be low.",
    )
    yield Refusal(
        (key, "data.val_files", "trainer.test_freq"),
        lambda settings: (
            settings.trainer.keep_best_checkpoint is not None
            and (settings.data.val_files is None or settings.trainer.test_freq <= 0)
        ),
        "nothing is validated during the run, so no checkpoint can be best",
        "Set data.val_files and trainer.test_freq.",
    )
    yield Refusal(
        (key, "trainer.keep_best"),
        lambda settings: settings.trainer.keep_best_checkpoint is not None and settings.trainer.keep_best is False,
        "the first key keeps the best checkpoint, the second does not",
        "Remove one of the two.",
    )


def _is_half(key: str, other: str, settings: Settings) -> bool:
    return (value_at(settings, key) is None) != (value_at(settings, other) is None)


def _engine_tokens(settings: Settings) -> int:
    rollout = settings.actor_rollout_ref.rollout
    return (rollout.prompt_length or 0) + (rollout.response_length or 0)


def _batches() -> Iterator[Refusal]:
    batch, mini = "data.train_batch_size", f"{_AR}.actor.ppo_mini_batch_size"
    prompt, response, longest = (f"{_ROLLOUT}.{key}" for key in ("prompt_length", "response_length", "max_model_len"))
    yield Refusal(
        (batch, mini),
        lambda settings: _uneven(settings.data.train_batch_size, settings.actor_rollout_ref.actor.ppo_mini_batch_size),
        "the prompts of a step do not divide into mini-batches",
        f"Set {mini} to a divisor of {batch}.",
    )
    yield Refusal(
        (prompt, "data.max_prompt_length"),
        lambda settings: (settings.actor_rollout_ref.rollout.prompt_length or 0) < settings.data.max_prompt_length,
        "the engine would refuse prompts that the data allows",
        f"Remove {prompt}.",
    )
    yield Refusal(
        (response, "data.max_response_length"),
        lambda settings: (settings.actor_rollout_ref.rollout.response_length or 0) > settings.data.max_response_length,
        "the engine would generate longer responses than the trainer accepts",
        f"Remove {response}.",
    )
    yield Refusal(
        (prompt, response, longest),
        lambda settings: (settings.actor_rollout_ref.rollout.max_model_len or 0) < _engine_tokens(settings),
        "prompt and response together need more tokens",
        lambda settings: f"Raise {longest} to at least {_engine_tokens(settings)}, or remove it.",
        lambda settings: f"prompt and response together need {_engine_tokens(settings)} tokens",
    )


def _devices() -> Iterator[Refusal]:
    group, parts = "trainer.worker_group", f"{_ROLLOUT}.tensor_model_parallel_size"

    def uneven_here(settings: Settings) -> str:
        return f"does not divide the {num_devices(settings)} devices"

    yield Refusal(
        (parts, *DEVICES),
        lambda settings: _uneven(num_devices(settings), settings.actor_rollout_ref.rollout.tensor_model_parallel_size),
        "does not divide the devices",
        lambda settings: f"Set {parts} to a divisor of {num_devices(settings)}.",
        uneven_here,
    )
    yield from even_shards(f"{_AR}.actor.fsdp_config", "actor", here=uneven_here)
    yield from even_shards(f"{_AR}.ref.fsdp_config", "ref", needs_reference, uneven_here)
    yield Refusal(
        (group, *DEVICES),
        lambda settings: settings.trainer.worker_group == "local" and num_devices(settings) > 1,
        "the local worker group has one device",
        f"Set {group}=ray, or one device.",
    )
    for key in ("ray_kwargs.ray_init", "ray_kwargs.timeline_json_file"):
        yield refused({key: bool, group: "local"}, "Ray is not started", f"Remove {key}, or set {group}=ray.")
    engine = f"{_ROLLOUT}.name"
    yield refused({engine: "hf", parts: above(1)}, "this engine runs on one device", f"Set {engine}=vllm, or 1.")
    hybrid = {f"{_AR}.hybrid_engine": False}
    yield refused(hybrid, "trainer and engine always share their devices", "Set true, or remove the key.")


def _runs() -> Iterator[Refusal]:
    yield refused(
        {"custom_reward_function.fallback_score": lambda score: abs(score) > LARGEST_SCORE},
        f"scores beyond {LARGEST_SCORE:g} would train nothing, because their gradients overflow",
        f"Give a score between -{LARGEST_SCORE:g} and {LARGEST_SCORE:g}.",
    )
    sample, heat = (f"{_ROLLOUT}.val_kwargs.{key}" for key in ("do_sample", "temperature"))
    greedy, warm = {sample: operator.not_, heat: above(0)}, {sample: bool, heat: 0}
    yield refused(greedy, "greedy decoding has no temperature", f"Set {sample}=true, or {heat}=0.")
    yield refused(warm, "sampling needs a temperature", f"Set {heat} above 0, or {sample}=false.")
    for key in (heat, f"{_ROLLOUT}.temperature"):
        beyond = {f"{_ROLLOUT}.name": "vllm", key: lambda value: value > HOTTEST or 0 < value < COLDEST}
        way_out = f"Set {_ROLLOUT}.name=hf, or a temperature in that range."
        yield refused(beyond, f"vLLM accepts temperatures from {COLDEST} to {HOTTEST}", way_out)
    nothing = {"trainer.val_only": True, "data.val_files": None}
    yield refused(nothing, "there is nothing to validate on", "Set data.val_files, or trainer.val_only=false.")
    mode, path = "trainer.resume_mode", "trainer.resume_from_path"
    missing = {mode: "resume_path", path: None}
    yield refused(missing, "no path is given", f"Set {path} to a global_step_N folder, or to the folder of a run.")


RULES: tuple[Refusal, ...] = (
    *_files(), *_streams(), *_best_checkpoint(), *_batches(), *ALGORITHM_RULES, *CORRECTION_RULES, *REWARD_RULES, *TEACHER_RULES,
    *(rule for recipe in RECIPES.values() for rule in recipe.rules()), *SANDBOX_RULES, *_devices(),
    *CRITIC_RULES, *REFERENCE_RULES, *SUPERVISED_RULES, *_runs(), *debug_rules(),
)  # fmt: skip
"""All rules that are not declared by knobs."""
