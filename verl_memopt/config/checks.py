"""What keys must hold together: every rule that can be decided before a device or a file is looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from verl_memopt.config.allowed import LARGEST_SCORE, check_values
from verl_memopt.config.idle import BUCKETED, warn_idle
from verl_memopt.config.keys import leaf_keys, value_at
from verl_memopt.config.links import DERIVED, LINKS, followers_of
from verl_memopt.config.problems import Problem, problem
from verl_memopt.config.schema import Settings

_AR = "actor_rollout_ref"

_BUDGET = "ppo_max_token_len_per_gpu"

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
    """What is wrong with linked settings, all at once; logs a warning for each given key that has no effect.

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


def world_size(settings: Settings) -> int:
    """Devices of the run, which is also the number of ranks that share a batch."""
    return settings.trainer.nnodes * settings.trainer.n_gpus_per_node


def needs_reference(settings: Settings) -> bool:
    """Whether a KL to the reference is asked for anywhere."""
    return settings.algorithm.use_kl_in_reward or settings.actor_rollout_ref.actor.use_kl_loss


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


def _micro_batches(settings: Settings) -> Iterator[Problem]:
    """Each pass has a micro-batch size or a token budget that fits a sample; a role that follows the actor is not named again."""
    names = ("log_prob_micro_batch_size_per_gpu", "log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu")
    ours = _values(settings, *(f"{_AR}.actor.{n}" for n in ("ppo_micro_batch_size_per_gpu", "use_dynamic_bsz", _BUDGET)))
    yield from _micro_batch(settings, ours)
    for role in ("rollout", "ref") if needs_reference(settings) else ("rollout",):
        theirs = _values(settings, *(f"{_AR}.{role}.{name}" for name in names))
        if tuple(theirs.values()) != tuple(ours.values()):
            yield from _micro_batch(settings, theirs)


def _micro_batch(settings: Settings, sizes: dict[str, Any]) -> Iterator[Problem]:
    lengths = ("data.max_prompt_length", "data.max_response_length")
    longest = sum(_values(settings, *lengths).values())
    (micro, per_device), (dynamic, by_tokens), (budget, tokens) = sizes.items()
    if not by_tokens and per_device is None:
        picked = _values(settings, micro, dynamic)
        yield problem(picked, "a micro-batch has no size", f"Set {micro}, or {dynamic}=true.")
    if by_tokens and tokens < longest:
        what = f"a sample may have {longest} tokens (data.max_prompt_length + data.max_response_length)"
        found = problem({budget: tokens}, what, f"Raise it to at least {longest}, or lower one of the two lengths.")
        yield Problem((budget, dynamic, *lengths), found.text)


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


def _sharding(settings: Settings) -> Iterator[Problem]:
    """Resharding to a number of ranks, and the ways in which parameters may rest off the device."""
    world = world_size(settings)
    for role in ("actor", "ref") if needs_reference(settings) else ("actor",):
        key, section = f"{_AR}.{role}.fsdp_config", value_at(settings, f"{_AR}.{role}.fsdp_config")
        ranks, number = (world if section.fsdp_size == -1 else section.fsdp_size), section.reshard_after_forward
        if not isinstance(number, bool) and not (1 < number < ranks and ranks % number == 0):
            picked = _values(settings, f"{key}.reshard_after_forward", f"{key}.fsdp_size")
            way_out = f"Set true, false, or a divisor of {ranks} between 1 and {ranks}."
            yield problem(picked, f"does not divide the {ranks} ranks of a shard group into smaller ones", way_out)
        for name in ("param_offload", "optimizer_offload"):
            if section.offload_policy and getattr(section, name, False):
                picked = _values(settings, f"{key}.offload_policy", f"{key}.{name}")
                what = "with offload_policy parameters and optimizer state never leave the host"
                yield problem(picked, what, f"Set one of the two to false; {name} is the faster one.")


def _loading(settings: Settings) -> Iterator[Problem]:
    """A mapped file needs a reference that rests on the host: one of its own, and not where it never leaves the host."""
    mode, offload = f"{_AR}.model.load_mode", f"{_AR}.ref.fsdp_config.param_offload"
    native, rank = f"{_AR}.ref.fsdp_config.offload_policy", f"{_AR}.model.lora_rank"
    values = _values(settings, mode, offload, native, rank)
    if values[mode] != "mmap":
        return
    if values[rank] > 0:
        what = "with LoRA the reference is the policy's own base, and no other rests in a file"
        yield problem(_values(settings, mode, rank), what, f"Set {mode}=stream.")
    elif values[native]:
        what = "with offload_policy the reference never leaves its host buffer, and none rests in a file"
        yield problem(_values(settings, mode, native), what, f"Set {offload}=true in place of offload_policy, or {mode}=stream.")
    elif not (values[offload] and needs_reference(settings)):
        what = "a mapped file is where a reference rests, and no reference rests on the host"
        yield problem(_values(settings, mode, offload), what, f"Set {offload}=true (with a KL), or {mode}=stream.")


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
    if rollout.name == "hf" and rollout.kv_cache_dtype != "auto":
        picked = _values(settings, f"{_AR}.rollout.name", f"{_AR}.rollout.kv_cache_dtype")
        yield problem(picked, "this engine's cache has the dtype of its model", f"Set {_AR}.rollout.name=vllm, or auto.")
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


def _lora(settings: Settings) -> Iterator[Problem]:
    model = settings.actor_rollout_ref.model
    picked = _values(settings, f"{_AR}.model.lora_rank", f"{_AR}.ref.model.path")
    if model.lora_rank > 0 and needs_reference(settings) and settings.actor_rollout_ref.ref.model.path != model.path:
        yield problem(
            picked,
            "with LoRA the reference is the base with its adapters off",
            f"Leave {_AR}.ref.model.path out, or set {_AR}.model.lora_rank=0.",
        )
    picked = _values(settings, f"{_AR}.model.lora_rank", f"{_AR}.ref.quantization")
    if model.lora_rank > 0 and settings.actor_rollout_ref.ref.quantization != "none":
        yield problem(picked, "with LoRA the reference is the policy's own base", f"Leave {_AR}.ref.quantization out.")
    picked = _values(settings, f"{_AR}.model.load_mode", f"{_AR}.ref.quantization")
    if model.load_mode == "mmap" and settings.actor_rollout_ref.ref.quantization != "none":
        yield problem(picked, "the mapped file holds the unquantised weights", f"Set {_AR}.model.load_mode=stream.")
    picked = _values(settings, f"{_AR}.model.lora_rank", f"{_AR}.model.lora_adapter_path")
    if model.lora_rank == 0 and model.lora_adapter_path is not None:
        yield problem(picked, "adapters are given and none are asked for", f"Set {_AR}.model.lora_rank to their rank.")


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


def _optimizer(settings: Settings) -> Iterator[Problem]:
    """Ways to update that only our AdamW knows, and what must hold for each."""
    key, actor = f"{_AR}.actor.optim", settings.actor_rollout_ref.actor
    optim, masters = actor.optim, f"{_AR}.actor.fsdp_config.model_dtype"
    asked = [f"{_AR}.{name}" for name, asks in BUCKETED.items() if asks(settings)]
    if asked and (optim.optimizer, optim.optimizer_impl) != ("AdamW", "torch.optim"):
        picked = _values(settings, *asked, f"{key}.optimizer", f"{key}.optimizer_impl")
        way_out = f"Remove {', '.join(asked)}, or {key}.optimizer and optimizer_impl."
        yield problem(picked, "only AdamW of torch.optim can", way_out)
    unknown = sorted(set(optim.override_optimizer_config or {}) - {"lr", "betas", "eps", "weight_decay"})
    if asked and unknown:
        picked = _values(settings, *asked, f"{key}.override_optimizer_config")
        what = f"AdamW with {', '.join(asked)} takes lr, betas, eps and weight_decay"
        yield problem(picked, what, f"Remove {', '.join(unknown)} from {key}.override_optimizer_config.")
    if optim.stochastic_rounding and actor.fsdp_config.model_dtype != "bfloat16":
        picked = _values(settings, f"{key}.stochastic_rounding", masters)
        yield problem(picked, "fp32 weights are not rounded", f"Set {masters}=bfloat16, or remove stochastic_rounding.")


def _torchao(settings: Settings) -> Iterator[Problem]:
    """Which of torchao's optimizers update sharded parameters and can be resumed (0.18 with torch 2.13)."""
    key, optim = f"{_AR}.actor.optim", settings.actor_rollout_ref.actor.optim
    if optim.optimizer_impl != "torchao.optim":
        return
    picked = _values(settings, f"{key}.optimizer_impl", f"{key}.optimizer")
    if optim.optimizer not in ("AdamW8bit", "Adam8bit"):
        way_out = f"Remove both and set {key}.state_dtype=int4 (or int8), or set {key}.optimizer=AdamW8bit."
        yield problem(picked, "it does not update sharded parameters", way_out)
    if settings.trainer.device != "cuda" and settings.trainer.track_memory_every_steps > 0:
        picked |= _values(settings, "trainer.device", "trainer.track_memory_every_steps")
        what = "its step is compiled, and compiled steps do not run while bytes are counted on a CPU"
        yield problem(picked, what, f"Set trainer.track_memory_every_steps=0, or remove both and set {key}.state_dtype=int8.")


def _in_backward(settings: Settings) -> Iterator[Problem]:
    """An update inside the backward pass sees one gradient of one micro-batch; token budgets are looked at when they are cut."""
    key, actor = f"{_AR}.actor.optim", settings.actor_rollout_ref.actor
    if not actor.optim.in_backward:
        return
    if actor.optim.clip_grad is not None:
        picked = _values(settings, f"{key}.in_backward", f"{key}.clip_grad")
        what = "clipping needs the norm of all gradients, and each is gone once it is used"
        yield problem(picked, what, f"Set {key}.clip_grad=null, or {key}.in_backward=false.")
    sequences = actor.ppo_mini_batch_size * settings.actor_rollout_ref.rollout.n // world_size(settings)
    micro = f"{_AR}.actor.ppo_micro_batch_size_per_gpu"
    if not actor.use_dynamic_bsz and 0 < (actor.ppo_micro_batch_size_per_gpu or 0) < sequences:
        picked = _values(settings, f"{key}.in_backward", micro, f"{_AR}.actor.ppo_mini_batch_size")
        what = f"a device has {sequences} sequences per optimizer step, so gradients would have to accumulate"
        yield problem(picked, what, f"Set {micro}={sequences}, lower ppo_mini_batch_size, or set {key}.in_backward=false.")


RULES: tuple[Callable[[Settings], Iterator[Problem]], ...] = (
    _texts,
    _names,
    _fallback,
    _files,
    _groups,
    _batches,
    _micro_batches,
    _lengths,
    _devices,
    _sharding,
    _loading,
    _lora,
    _optimizer,
    _torchao,
    _in_backward,
    _engine,
    _validation,
    _resume,
    _classes,
)
