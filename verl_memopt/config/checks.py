"""What keys must hold together: every rule that can be decided before a device or a file is looked at.

A rule is a :class:`verl_memopt.memory.knob.Refusal`, as the knobs declare theirs: a question about the typed settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import suppress
from typing import Any, cast

from verl_memopt.config.algorithm_rules import ALGORITHM_RULES, CRITIC_RULES, SUPERVISED_RULES, WITHOUT_CRITIC, WITHOUT_ENGINE
from verl_memopt.config.correction_rules import CORRECTION_RULES
from verl_memopt.config.debug_modes import WITHOUT_DATA, debug_rules
from verl_memopt.config.keys import Problem, leaf_values, problem
from verl_memopt.config.reward_limits import LARGEST_SCORE
from verl_memopt.config.reward_rules import REWARD_RULES, SANDBOX_RULES, WITHOUT_REWARD_MODEL
from verl_memopt.config.schema import Settings
from verl_memopt.config.unused_keys import REFERENCE_RULES, UNUSED_KEYS, warn_unused
from verl_memopt.config.values import LINKS, check_values, followers_of
from verl_memopt.memory.critic_rules import refusals
from verl_memopt.memory.knob import Predicate, Refusal, SettingsView
from verl_memopt.memory.ranges import DEVICES, needs_reference, num_devices, uneven_shards
from verl_memopt.recipes.registry import RECIPES

_AR = "actor_rollout_ref"
_ROLLOUT = f"{_AR}.rollout"
_ENGINE_ARGUMENTS = f"{_ROLLOUT}.engine_kwargs.vllm"

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
    """A rule reads a key that is wrong by itself."""


def without_wrong(settings: Settings, wrong: Set[str]) -> Settings:
    """Return the settings as rules may read them: a key that is wrong by itself raises WrongKeyError."""

    def address(key: str) -> str:
        if key in wrong:
            raise WrongKeyError(key)
        return key

    return cast(Settings, SettingsView(settings, address)) if wrong else settings


def check(settings: Settings, values: Mapping[str, Any], user_keys: frozenset[str], wrong: set[str]) -> list[Problem]:
    """Return what is wrong with the settings, all at once, and log a warning for each given key that has no effect.

    A value that is wrong by itself is reported alone: no rule about several keys looks at it.

    Args:
        settings: typed, with the default of each key whose value is of a wrong type.
        values: dotted key -> value of the settings, of every key.
        user_keys: the keys that the user set.
        wrong: keys that have a problem already.
    """
    wrong = followers_of(wrong)
    problems = [each for each in check_values(values) if wrong.isdisjoint(each.keys)]
    # A key that follows a wrong key has a wrong value too, and a rule about it would name a mistake that nobody made.
    wrong = wrong | followers_of(key for each in problems for key in each.keys)
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
    return problems + [each for each in _set_twice(values[_ENGINE_ARGUMENTS]) if wrong.isdisjoint(each.keys)]


def _set_twice(arguments: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield each further argument of vLLM that a key of its own sets."""
    for name, value in arguments.items():
        if name in ENGINE_NAMES:
            key = ENGINE_NAMES[name]
            address = {f"{_ENGINE_ARGUMENTS}.{name}": value}
            text = problem(address, f"{key} sets this argument already", f"Use {key} alone.").text
            yield Problem((_ENGINE_ARGUMENTS, key), text)


def _uneven(number: int, parts: int) -> bool:
    """Return whether a number does not divide into parts."""
    return parts > 0 and number % parts != 0


def _is_no_path(value: Any) -> bool:
    paths = value if isinstance(value, list | tuple) else [value]
    return not paths or not all(isinstance(path, str) and path for path in paths)


def _is_no_folder_name(name: str) -> bool:
    return name.strip() in ("", ".", "..") or "/" in name or "\\" in name


def _files() -> Iterator[Refusal]:
    """Yield the rules of paths and names. Names become folders and must not lead anywhere else."""
    folder = "this is one part of the run folder's path, and cannot be empty, a dot, or hold a slash"
    plain = "Give a plain name; trainer.default_local_dir sets the run folder itself."
    project, experiment = "trainer.project_name", "trainer.experiment_name"
    yield Refusal((project,), lambda settings: _is_no_folder_name(settings.trainer.project_name), folder, plain)
    yield Refusal((experiment,), lambda settings: _is_no_folder_name(settings.trainer.experiment_name), folder, plain)
    yield Refusal(
        ("data.train_files",),
        lambda settings: settings.debug.mode not in WITHOUT_DATA and _is_no_path(settings.data.train_files),
        "expected a path or a list of paths",
        "Set data.train_files=/path/to/file.parquet.",
    )
    yield Refusal(
        ("data.val_files",),
        lambda settings: settings.data.val_files is not None and _is_no_path(settings.data.val_files),
        "expected a path or a list of paths",
        "Set data.val_files=/path/to/file.parquet.",
    )
    yield Refusal(
        ("trainer.logger",),
        lambda settings: not isinstance(settings.trainer.logger, str | list | tuple),
        "expected a name or a list of names",
        "Set trainer.logger=[console,jsonl].",
    )
    a_class = ("a class needs its file and its name", "Set both, or neither.")
    yield Refusal(
        ("data.custom_cls.path", "data.custom_cls.name"),
        lambda settings: (settings.data.custom_cls.path is None) != (settings.data.custom_cls.name is None),
        *a_class,
    )
    yield Refusal(
        ("data.sampler.class_path", "data.sampler.class_name"),
        lambda settings: (settings.data.sampler.class_path is None) != (settings.data.sampler.class_name is None),
        *a_class,
    )


def _engine_tokens(settings: Settings) -> int:
    """Return the tokens of the longest prompt and response that the engine takes."""
    rollout = settings.actor_rollout_ref.rollout
    return (rollout.prompt_length or 0) + (rollout.response_length or 0)


def _over_devices(key: str, prompts: Callable[[Settings], int]) -> Refusal:
    """Return the rule that the sequences of a number of prompts divide over the devices."""
    samples = f"{_ROLLOUT}.n"

    def sequences(settings: Settings) -> int:
        return prompts(settings) * settings.actor_rollout_ref.rollout.n

    return Refusal(
        (key, samples, *DEVICES),
        lambda settings: _uneven(sequences(settings), num_devices(settings)),
        "the sequences do not divide over the devices",
        lambda settings: f"Make {key} x {samples} a multiple of {num_devices(settings)}.",
        lambda settings: f"{sequences(settings)} sequences do not divide over {num_devices(settings)} devices",
    )


def _batches() -> Iterator[Refusal]:
    """Yield the rules of prompts, samples and tokens."""
    batch, mini = "data.train_batch_size", f"{_AR}.actor.ppo_mini_batch_size"
    prompt, response, longest = (f"{_ROLLOUT}.{key}" for key in ("prompt_length", "response_length", "max_model_len"))
    yield Refusal(
        (batch, mini),
        lambda settings: _uneven(settings.data.train_batch_size, settings.actor_rollout_ref.actor.ppo_mini_batch_size),
        "the prompts of a step do not divide into mini-batches",
        f"Set {mini} to a divisor of {batch}.",
    )
    yield _over_devices(batch, lambda settings: settings.data.train_batch_size)
    yield _over_devices(mini, lambda settings: settings.actor_rollout_ref.actor.ppo_mini_batch_size)
    yield Refusal(
        (prompt, "data.max_prompt_length"),
        lambda settings: (settings.actor_rollout_ref.rollout.prompt_length or 0) < settings.data.max_prompt_length,
        "the engine would refuse prompts that the data allows",
        f"Remove {prompt}.",
    )
    yield Refusal(
        (response, "data.max_response_length"),
        lambda settings: (settings.actor_rollout_ref.rollout.response_length or 0) > settings.data.max_response_length,
        "the engine would generate more than the trainer takes",
        f"Remove {response}.",
    )
    yield Refusal(
        (prompt, response, longest),
        lambda settings: (settings.actor_rollout_ref.rollout.max_model_len or 0) < _engine_tokens(settings),
        "prompt and response need more tokens",
        lambda settings: f"Raise {longest} to at least {_engine_tokens(settings)}, or remove it.",
        lambda settings: f"prompt and response need {_engine_tokens(settings)} tokens",
    )


def _is_local(settings: Settings) -> bool:
    return settings.trainer.worker_group == "local"


def _devices() -> Iterator[Refusal]:
    """Yield the rules of devices and how models are split over them."""
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
    shards: dict[str, Predicate] = {
        "actor": lambda settings: uneven_shards(settings, settings.actor_rollout_ref.actor.fsdp_config),
        "ref": lambda settings: uneven_shards(settings, settings.actor_rollout_ref.ref.fsdp_config) and needs_reference(settings),
    }
    for role, is_uneven in shards.items():
        yield Refusal(
            (f"{_AR}.{role}.fsdp_config.fsdp_size", *DEVICES),
            is_uneven,
            "does not divide the devices",
            lambda settings: f"Set a divisor of {num_devices(settings)}, or -1.",
            uneven_here,
        )
    yield Refusal(
        (group, *DEVICES),
        lambda settings: _is_local(settings) and num_devices(settings) > 1,
        "the local worker group has one device",
        f"Set {group}=ray, or one device.",
    )
    init, timeline = "ray_kwargs.ray_init", "ray_kwargs.timeline_json_file"
    yield Refusal(
        (init, group),
        lambda settings: bool(settings.ray_kwargs.ray_init) and _is_local(settings),
        "Ray is not started",
        f"Remove {init}, or set {group}=ray.",
    )
    yield Refusal(
        (timeline, group),
        lambda settings: bool(settings.ray_kwargs.timeline_json_file) and _is_local(settings),
        "Ray is not started",
        f"Remove {timeline}, or set {group}=ray.",
    )
    yield Refusal(
        (f"{_ROLLOUT}.name", parts),
        lambda settings: (
            settings.actor_rollout_ref.rollout.name == "hf" and settings.actor_rollout_ref.rollout.tensor_model_parallel_size > 1
        ),
        "this engine runs on one device",
        f"Set {_ROLLOUT}.name=vllm, or 1.",
    )
    yield Refusal(
        (f"{_AR}.hybrid_engine",),
        lambda settings: not settings.actor_rollout_ref.hybrid_engine,
        "trainer and engine always share their devices",
        "Set true, or remove the key.",
    )


def _is_greedy_with_temperature(settings: Settings) -> bool:
    validation = settings.actor_rollout_ref.rollout.val_kwargs
    return not validation.do_sample and validation.temperature > 0


def _samples_without_temperature(settings: Settings) -> bool:
    validation = settings.actor_rollout_ref.rollout.val_kwargs
    return bool(validation.do_sample) and validation.temperature == 0


def _runs() -> Iterator[Refusal]:
    """Yield the rules of scores, validation and resuming."""
    sample, temperature = (f"{_ROLLOUT}.val_kwargs.{key}" for key in ("do_sample", "temperature"))
    yield Refusal(
        ("custom_reward_function.fallback_score",),
        lambda settings: abs(settings.custom_reward_function.fallback_score) > LARGEST_SCORE,
        f"scores beyond {LARGEST_SCORE:g} would train nothing",
        f"Give a score between -{LARGEST_SCORE:g} and {LARGEST_SCORE:g}.",
    )
    yield Refusal(
        (sample, temperature),
        _is_greedy_with_temperature,
        "greedy decoding has no temperature",
        f"Set {sample}=true, or {temperature}=0.",
    )
    yield Refusal(
        (sample, temperature),
        _samples_without_temperature,
        "sampling needs a temperature",
        f"Set {temperature} above 0, or {sample}=false.",
    )
    yield Refusal(
        ("trainer.val_only", "data.val_files"),
        lambda settings: settings.trainer.val_only and settings.data.val_files is None,
        "there is nothing to validate on",
        "Set data.val_files, or trainer.val_only=false.",
    )
    resume = ("trainer.resume_mode", "trainer.resume_from_path")
    yield Refusal(
        resume,
        lambda settings: settings.trainer.resume_from_path is not None and settings.trainer.resume_mode != "resume_path",
        "the path is not used in this mode",
        "Set trainer.resume_mode=resume_path, or remove the path.",
    )
    yield Refusal(
        resume,
        lambda settings: settings.trainer.resume_from_path is None and settings.trainer.resume_mode == "resume_path",
        "no path is given",
        "Set trainer.resume_from_path to a global_step_N folder.",
    )


def _recipes() -> Iterator[Refusal]:
    """Yield the rules of every recipe."""
    for recipe in RECIPES.values():
        yield from recipe.rules()


RULES: tuple[Refusal, ...] = (
    *_files(), *_batches(), *ALGORITHM_RULES, *CORRECTION_RULES, *REWARD_RULES, *_recipes(), *SANDBOX_RULES, *_devices(),
    *CRITIC_RULES, *REFERENCE_RULES, *SUPERVISED_RULES, *_runs(), *debug_rules(),
)  # fmt: skip
"""The rules that belong to no knob."""
