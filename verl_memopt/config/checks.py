"""What keys must hold together: every rule that can be decided before a device or a file is looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from verl_memopt.config.allowed import LARGEST_SCORE, check_values
from verl_memopt.config.idle import warn_idle
from verl_memopt.config.keys import leaf_keys, value_at
from verl_memopt.config.links import DERIVED, LINKS, followers_of
from verl_memopt.config.problems import Problem, problem
from verl_memopt.config.schema import Settings
from verl_memopt.knobs.conditions import needs_reference, world_size
from verl_memopt.knobs.index import knobs

_AR = "actor_rollout_ref"

ENGINE_NAMES = {
    "model": f"{_AR}.model.path",
    "tokenizer": f"{_AR}.model.tokenizer_path",
    "trust_remote_code": f"{_AR}.model.trust_remote_code",
    "tensor_parallel_size": f"{_AR}.rollout.tensor_model_parallel_size",
    "enable_sleep_mode": f"{_AR}.rollout.free_cache_engine",
    "kv_cache_memory_bytes": f"{_AR}.rollout.kv_cache_memory_gb",
    **{
        name: f"{_AR}.rollout.{name}"
        for name in (
            *("dtype", "load_format", "seed", "gpu_memory_utilization", "max_model_len", "max_num_seqs", "enforce_eager"),
            *("max_num_batched_tokens", "enable_chunked_prefill", "enable_prefix_caching", "disable_log_stats"),
            *("cudagraph_capture_sizes", "scheduling_policy", "logprobs_mode", "kv_cache_dtype"),
        )
    },
}
"""Argument of vLLM -> the key that sets it."""


def check(settings: Settings, given: frozenset[str]) -> list[Problem]:
    """Return what is wrong with linked settings, all at once, and log a warning for each given key that has no effect.

    A value out of its own range is reported alone: no rule about several keys looks at it. ``given`` holds the dotted
    keys that the user set.
    """
    alone = list(check_values(settings))
    wrong = {key for found in alone for key in found.keys}
    alone = [found for found in alone if not any(_echoes(settings, key, wrong) for key in found.keys)]
    wrong = followers_of(wrong)
    warn_idle(settings, given - wrong)
    together = [found for rule in RULES for found in rule(settings)]
    return alone + [found for found in together if not wrong.intersection(found.keys)]


def _echoes(settings: Settings, key: str, wrong: set[str]) -> bool:
    """Whether a key only repeats the wrong value of the key that it follows."""
    target = LINKS.get(key)
    return target is not None and target in wrong and value_at(settings, key) == value_at(settings, target)


def _uneven(number: int, parts: int) -> bool:
    """Whether a number does not divide into parts; parts below 1 are reported by their own range."""
    return parts > 0 and number % parts != 0


def _values(settings: Settings, *keys: str) -> dict[str, Any]:
    return {key: value_at(settings, key) for key in keys}


def _batches(settings: Settings) -> Iterator[Problem]:
    batch, mini, n = "data.train_batch_size", f"{_AR}.actor.ppo_mini_batch_size", f"{_AR}.rollout.n"
    devices = {"trainer.nnodes": settings.trainer.nnodes, "trainer.n_gpus_per_node": settings.trainer.n_gpus_per_node}
    values, world = _values(settings, batch, mini, n), world_size(settings)
    if _uneven(values[batch], values[mini]):
        picked = _values(settings, batch, mini)
        yield problem(picked, "the prompts of a step do not divide into mini-batches", f"Set {mini} to a divisor of {batch}.")
    for key in (batch, mini):
        if _uneven(values[key] * values[n], world):
            rows = values[key] * values[n]
            what = f"{rows} sequences do not divide over {world} devices"
            yield problem(_values(settings, key, n) | devices, what, f"Make {key} x {n} a multiple of {world}.")


def _groups(settings: Settings) -> Iterator[Problem]:
    picked = _values(settings, f"{_AR}.rollout.n", "algorithm.adv_estimator")
    if settings.actor_rollout_ref.rollout.n < 2:
        yield problem(picked, "a group of one has no baseline to compare with", f"Set {_AR}.rollout.n to 2 or more.")


def _lengths(settings: Settings) -> Iterator[Problem]:
    prompt, response, longest = (f"{_AR}.rollout.{key}" for key in ("prompt_length", "response_length", "max_model_len"))
    values = _values(settings, prompt, response, longest)
    if values[prompt] < settings.data.max_prompt_length:
        picked = _values(settings, prompt, "data.max_prompt_length")
        yield problem(picked, "the engine would refuse prompts that the data allows", f"Remove {prompt}.")
    if values[response] > settings.data.max_response_length:
        picked = _values(settings, response, "data.max_response_length")
        yield problem(picked, "the engine would generate more than the trainer takes", f"Remove {response}.")
    needed = values[prompt] + values[response]
    if values[longest] < needed:
        yield problem(values, f"prompt and response need {needed} tokens", f"Raise {longest} to at least {needed}, or remove it.")


def _devices(settings: Settings) -> Iterator[Problem]:
    world, local = world_size(settings), settings.trainer.worker_group == "local"
    devices = _values(settings, "trainer.nnodes", "trainer.n_gpus_per_node")
    tensor_parallel = f"{_AR}.rollout.tensor_model_parallel_size"
    if _uneven(world, value_at(settings, tensor_parallel)):
        what = f"does not divide the {world} devices"
        yield problem(_values(settings, tensor_parallel) | devices, what, f"Set {tensor_parallel} to a divisor of {world}.")
    for role in ("actor", "ref") if needs_reference(settings) else ("actor",):
        key = f"{_AR}.{role}.fsdp_config.fsdp_size"
        size = value_at(settings, key)
        if _uneven(world, size):
            yield problem({key: size} | devices, f"does not divide the {world} devices", f"Set a divisor of {world}, or -1.")
    if local and world > 1:
        what = "the local worker group has one device"
        yield problem({"trainer.worker_group": "local"} | devices, what, "Set trainer.worker_group=ray, or one device.")
    if local:
        for key in ("ray_kwargs.ray_init", "ray_kwargs.timeline_json_file"):
            if value_at(settings, key):
                picked = _values(settings, key, "trainer.worker_group")
                yield problem(picked, "Ray is not started", f"Remove {key}, or set trainer.worker_group=ray.")


def _engine(settings: Settings) -> Iterator[Problem]:
    rollout = settings.actor_rollout_ref.rollout
    for name, value in rollout.engine_kwargs.vllm.items():
        if name in ENGINE_NAMES:
            ours = ENGINE_NAMES[name]
            what = f"{ours} sets this argument already"
            found = problem({f"{_AR}.rollout.engine_kwargs.vllm.{name}": value}, what, f"Use {ours} alone.")
            yield Problem((f"{_AR}.rollout.engine_kwargs.vllm", ours), found.text)
    if rollout.name == "hf" and rollout.tensor_model_parallel_size > 1:
        picked = _values(settings, f"{_AR}.rollout.name", f"{_AR}.rollout.tensor_model_parallel_size")
        yield problem(picked, "this engine runs on one device", f"Set {_AR}.rollout.name=vllm, or 1.")
    if not settings.actor_rollout_ref.hybrid_engine:
        picked = _values(settings, f"{_AR}.hybrid_engine")
        yield problem(picked, "trainer and engine always share their devices", "Set true, or remove the key.")


def _validation(settings: Settings) -> Iterator[Problem]:
    sample, heat = f"{_AR}.rollout.val_kwargs.do_sample", f"{_AR}.rollout.val_kwargs.temperature"
    values = _values(settings, sample, heat)
    if not values[sample] and values[heat] > 0:
        yield problem(values, "greedy decoding has no temperature", f"Set {sample}=true, or {heat}=0.")
    if values[sample] and values[heat] == 0:
        yield problem(values, "sampling needs a temperature", f"Set {heat} above 0, or {sample}=false.")
    if settings.trainer.val_only and settings.data.val_files is None:
        picked = _values(settings, "trainer.val_only", "data.val_files")
        yield problem(picked, "there is nothing to validate on", "Set data.val_files, or trainer.val_only=false.")


def _files(settings: Settings) -> Iterator[Problem]:
    for key in ("data.train_files", "data.val_files"):
        value = value_at(settings, key)
        paths = value if isinstance(value, list | tuple) else [value]
        if value is None and key == "data.val_files":
            continue
        if not paths or not all(isinstance(path, str) and path for path in paths):
            yield problem({key: value}, "expected a path or a list of paths", f"Set {key}=/path/to/file.parquet.")
    logger_value = settings.trainer.logger
    if not isinstance(logger_value, str | list | tuple):
        way_out = "Set trainer.logger=[console,jsonl]."
        yield problem({"trainer.logger": logger_value}, "expected a name or a list of names", way_out)


def _names(settings: Settings) -> Iterator[Problem]:
    """Names become folders and must not lead anywhere else."""
    for key in ("trainer.project_name", "trainer.experiment_name"):
        name = value_at(settings, key)
        if name.strip() in ("", ".", "..") or "/" in name or "\\" in name:
            what = "this is one part of the run folder's path, and cannot be empty, a dot, or hold a slash"
            yield problem({key: name}, what, "Give a plain name; trainer.default_local_dir sets the run folder itself.")


def _fallback(settings: Settings) -> Iterator[Problem]:
    key = "custom_reward_function.fallback_score"
    if abs(value_at(settings, key)) > LARGEST_SCORE:
        what = f"scores beyond {LARGEST_SCORE:g} would train nothing"
        yield problem({key: value_at(settings, key)}, what, f"Give a score between -{LARGEST_SCORE:g} and {LARGEST_SCORE:g}.")


def _texts(settings: Settings) -> Iterator[Problem]:
    """Texts that no path, file or message can hold."""
    found: set[str] = set()
    for key in leaf_keys():
        if any("\0" in text or not _is_utf8(text) for text in _texts_in(value_at(settings, key))):
            found.add(key)
    for key in found - {follower for follower, parts in DERIVED.items() if found.intersection(parts)}:
        yield problem({key: ascii(value_at(settings, key))}, "it holds a character that no file can hold", "Remove it.")


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, entry in value.items():
            yield from (*_texts_in(name), *_texts_in(entry))
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _texts_in(entry)


def _is_utf8(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _resume(settings: Settings) -> Iterator[Problem]:
    picked = _values(settings, "trainer.resume_mode", "trainer.resume_from_path")
    mode, path = picked.values()
    if path is not None and mode != "resume_path":
        yield problem(picked, "the path is not used in this mode", "Set trainer.resume_mode=resume_path, or remove the path.")
    if path is None and mode == "resume_path":
        yield problem(picked, "no path is given", "Set trainer.resume_from_path to a global_step_N folder.")


def _classes(settings: Settings) -> Iterator[Problem]:
    for path, name in (("custom_cls.path", "custom_cls.name"), ("sampler.class_path", "sampler.class_name")):
        picked = _values(settings, f"data.{path}", f"data.{name}")
        if len([value for value in picked.values() if value is None]) == 1:
            yield problem(picked, "a class needs its file and its name", "Set both, or neither.")


def _knobs(settings: Settings) -> Iterator[Problem]:
    """Yield what the knobs refuse."""
    for refusal in (refusal for knob in knobs() for refusal in knob.refuses):
        if refusal.when(settings):
            refused = problem(_values(settings, *refusal.keys), refusal.reason_for(settings), refusal.way_out_for(settings))
            yield Problem((*refusal.keys, *refusal.about), refused.text)


RULES: tuple[Callable[[Settings], Iterator[Problem]], ...] = (
    _texts,
    _names,
    _fallback,
    _files,
    _groups,
    _batches,
    _knobs,
    _lengths,
    _devices,
    _engine,
    _validation,
    _resume,
    _classes,
)
