"""What keys must hold together: every rule that can be decided before a device or a file is looked at.

A rule is a :class:`verl_memopt.knobs.knob.Refusal`, as the knobs declare theirs: its functions get the values of the keys that it
names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from verl_memopt.config.algorithm_rules import ALGORITHM_RULES
from verl_memopt.config.allowed import LARGEST_SCORE, check_values
from verl_memopt.config.correction_rules import CORRECTION_RULES
from verl_memopt.config.critic_rules import CRITIC_RULES, WITHOUT_CRITIC
from verl_memopt.config.debug_modes import WITHOUT_DATA, debug_rules
from verl_memopt.config.idle import IDLE, warn_idle
from verl_memopt.config.keys import leaf_values
from verl_memopt.config.links import LINKS, followers_of
from verl_memopt.config.problems import Problem, problem
from verl_memopt.config.reference_rules import REFERENCE_RULES
from verl_memopt.config.reward_rules import REWARD_RULES, WITHOUT_REWARD_MODEL
from verl_memopt.config.sandbox_rules import SANDBOX_RULES
from verl_memopt.config.schema import Settings
from verl_memopt.config.supervised_rules import SUPERVISED_RULES, WITHOUT_ENGINE
from verl_memopt.knobs.conditions import DEVICES, KL
from verl_memopt.knobs.critic_rules import refusals
from verl_memopt.knobs.knob import Refusal
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


def check(values: Mapping[str, Any], user_keys: frozenset[str], wrong: set[str]) -> list[Problem]:
    """Return what is wrong with the settings, all at once, and log a warning for each given key that has no effect.

    A value that is wrong by itself is reported alone: no rule about several keys looks at it.

    Args:
        values: dotted key -> typed value, of every key.
        user_keys: the keys that the user set.
        wrong: keys that have a problem already.
    """
    wrong = followers_of(wrong)
    problems = [each for each in check_values(values) if wrong.isdisjoint(each.keys)]
    wrong = wrong | followers_of(key for each in problems for key in each.keys)
    warned: set[str] = set()
    if_not_given = leaf_values(Settings()) | {key: values[target] for key, target in LINKS.items()}
    for idle in (*WITHOUT_CRITIC.values(), *WITHOUT_REWARD_MODEL.values(), *WITHOUT_ENGINE.values(), *IDLE.values()):
        is_set = idle.key in user_keys and idle.key not in wrong | warned
        if is_set and idle.when(*(values[other] for other in idle.under)):
            warn_idle(idle, values[idle.key], if_not_given[idle.key])
            warned.add(idle.key)
    for rule in (*RULES, *refusals()):
        arguments = [values[key] for key in rule.reads]
        if wrong.isdisjoint(rule.reads) and rule.when(*arguments):
            address = {key: values[key] for key in rule.keys}
            problems.append(problem(address, rule.reason_for(*arguments), rule.way_out_for(*arguments)))
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
    """Return whether a number does not divide into parts. Any number of parts below 1 is reported elsewhere."""
    return parts > 0 and number % parts != 0


def _is_no_path(value: Any) -> bool:
    paths = value if isinstance(value, list | tuple) else [value]
    return not paths or not all(isinstance(path, str) and path for path in paths)


def _is_no_folder_name(name: str) -> bool:
    return name.strip() in ("", ".", "..") or "/" in name or "\\" in name


def _files() -> Iterator[Refusal]:
    """Yield the rules of paths and names. Names become folders and must not lead anywhere else."""
    folder = "this is one part of the run folder's path, and cannot be empty, a dot, or hold a slash"
    for key in ("trainer.project_name", "trainer.experiment_name"):
        way_out = "Give a plain name; trainer.default_local_dir sets the run folder itself."
        yield Refusal((key,), _is_no_folder_name, folder, way_out)
    train, validation, loggers = "data.train_files", "data.val_files", "trainer.logger"
    expected = "expected a path or a list of paths"
    yield Refusal(
        (train,),
        lambda files, mode: _is_no_path(files) and mode not in WITHOUT_DATA,
        expected,
        f"Set {train}=/path/to/file.parquet.",
        about=("debug.mode",),
    )
    yield Refusal(
        (validation,),
        lambda files: files is not None and _is_no_path(files),
        expected,
        f"Set {validation}=/path/to/file.parquet.",
    )
    yield Refusal(
        (loggers,),
        lambda names: not isinstance(names, str | list | tuple),
        "expected a name or a list of names",
        "Set trainer.logger=[console,jsonl].",
    )
    for path, name in (("custom_cls.path", "custom_cls.name"), ("sampler.class_path", "sampler.class_name")):
        yield Refusal(
            (f"data.{path}", f"data.{name}"),
            lambda file, cls: (file is None) != (cls is None),
            "a class needs its file and its name",
            "Set both, or neither.",
        )


def _batches() -> Iterator[Refusal]:
    """Yield the rules of prompts, samples and tokens."""
    batch, mini, n = "data.train_batch_size", f"{_AR}.actor.ppo_mini_batch_size", f"{_ROLLOUT}.n"
    prompt, response, longest = (f"{_ROLLOUT}.{key}" for key in ("prompt_length", "response_length", "max_model_len"))
    yield Refusal(
        (batch, mini), _uneven, "the prompts of a step do not divide into mini-batches", f"Set {mini} to a divisor of {batch}."
    )
    for key in (batch, mini):
        yield Refusal(
            (key, n, *DEVICES),
            lambda prompts, samples, nodes, devices: _uneven(prompts * samples, nodes * devices),
            "the sequences do not divide over the devices",
            lambda _, samples, nodes, devices, key=key: f"Make {key} x {n} a multiple of {nodes * devices}.",
            lambda prompts, samples, nodes, devices: (
                f"{prompts * samples} sequences do not divide over {nodes * devices} devices"
            ),
        )
    yield Refusal(
        (prompt, "data.max_prompt_length"),
        lambda engine, data: engine < data,
        "the engine would refuse prompts that the data allows",
        f"Remove {prompt}.",
    )
    yield Refusal(
        (response, "data.max_response_length"),
        lambda engine, data: engine > data,
        "the engine would generate more than the trainer takes",
        f"Remove {response}.",
    )
    yield Refusal(
        (prompt, response, longest),
        lambda prompts, responses, most: most < prompts + responses,
        "prompt and response need more tokens",
        lambda prompts, responses, _: f"Raise {longest} to at least {prompts + responses}, or remove it.",
        lambda prompts, responses, _: f"prompt and response need {prompts + responses} tokens",
    )


def _devices() -> Iterator[Refusal]:
    """Yield the rules of devices and how models are split over them."""
    group, parts = "trainer.worker_group", f"{_ROLLOUT}.tensor_model_parallel_size"
    uneven = "does not divide the devices"

    def uneven_here(_: int, nodes: int, devices: int, *kl: bool) -> str:
        return f"does not divide the {nodes * devices} devices"

    yield Refusal(
        (parts, *DEVICES),
        lambda size, nodes, devices: _uneven(nodes * devices, size),
        uneven,
        lambda _, nodes, devices: f"Set {parts} to a divisor of {nodes * devices}.",
        uneven_here,
    )
    for role, kl_keys in (("actor", ()), ("ref", KL)):
        yield Refusal(
            (f"{_AR}.{role}.fsdp_config.fsdp_size", *DEVICES),
            lambda size, nodes, devices, *kl: _uneven(nodes * devices, size) and (not kl or any(kl)),
            uneven,
            lambda _, nodes, devices, *kl: f"Set a divisor of {nodes * devices}, or -1.",
            uneven_here,
            about=kl_keys,
        )
    yield Refusal(
        (group, *DEVICES),
        lambda kind, nodes, devices: kind == "local" and nodes * devices > 1,
        "the local worker group has one device",
        f"Set {group}=ray, or one device.",
    )
    for key in ("ray_kwargs.ray_init", "ray_kwargs.timeline_json_file"):
        yield Refusal(
            (key, group),
            lambda value, kind: bool(value) and kind == "local",
            "Ray is not started",
            f"Remove {key}, or set {group}=ray.",
        )
    yield Refusal(
        (f"{_ROLLOUT}.name", parts),
        lambda engine, size: engine == "hf" and size > 1,
        "this engine runs on one device",
        f"Set {_ROLLOUT}.name=vllm, or 1.",
    )
    yield Refusal(
        (f"{_AR}.hybrid_engine",),
        lambda shared: not shared,
        "trainer and engine always share their devices",
        "Set true, or remove the key.",
    )


def _runs() -> Iterator[Refusal]:
    """Yield the rules of scores, validation and resuming."""
    score, sample, heat = (
        "custom_reward_function.fallback_score",
        *(f"{_ROLLOUT}.val_kwargs.{key}" for key in ("do_sample", "temperature")),
    )
    yield Refusal(
        (score,),
        lambda value: abs(value) > LARGEST_SCORE,
        f"scores beyond {LARGEST_SCORE:g} would train nothing",
        f"Give a score between -{LARGEST_SCORE:g} and {LARGEST_SCORE:g}.",
    )
    yield Refusal(
        (sample, heat),
        lambda samples, temperature: not samples and temperature > 0,
        "greedy decoding has no temperature",
        f"Set {sample}=true, or {heat}=0.",
    )
    yield Refusal(
        (sample, heat),
        lambda samples, temperature: samples and temperature == 0,
        "sampling needs a temperature",
        f"Set {heat} above 0, or {sample}=false.",
    )
    yield Refusal(
        ("trainer.val_only", "data.val_files"),
        lambda only, files: only and files is None,
        "there is nothing to validate on",
        "Set data.val_files, or trainer.val_only=false.",
    )
    resume = ("trainer.resume_mode", "trainer.resume_from_path")
    yield Refusal(
        resume,
        lambda mode, path: path is not None and mode != "resume_path",
        "the path is not used in this mode",
        "Set trainer.resume_mode=resume_path, or remove the path.",
    )
    yield Refusal(
        resume,
        lambda mode, path: path is None and mode == "resume_path",
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
