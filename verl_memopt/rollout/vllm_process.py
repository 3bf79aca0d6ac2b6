"""vLLM in this process: its arguments, and what it shares with training: device memory, process-wide state, and logs.

This file does not import vLLM. It finds vLLM's allocator among the loaded modules.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from verl_memopt.config import schema
from verl_memopt.distributed.device import empty_cache, is_gpu, memory_info
from verl_memopt.errors import ConfigError, RolloutError
from verl_memopt.memory.lora import slot_rank
from verl_memopt.memory.rollout_memory import AUTO, host_bytes_asleep
from verl_memopt.model.families import STATE_LAYER, family_of, layer_types
from verl_memopt.model.packed_model import dtype_of
from verl_memopt.observe.device_ledger import Asleep
from verl_memopt.rollout.engine import KEEP_WEIGHTS, KEY, EnginePlace, SamplingSettings, max_model_len, random_state_kept

logger = logging.getLogger(__name__)

# The arguments of vLLM from the settings of rollouts, and the check that vLLM uses each of them.


GIB = 1 << 30

SET_BY = {
    "model": "actor_rollout_ref.model.path",
    "tokenizer": "actor_rollout_ref.model.tokenizer_path",
    "trust_remote_code": "actor_rollout_ref.model.trust_remote_code",
    "tensor_parallel_size": f"{KEY}.tensor_model_parallel_size",
    "kv_cache_memory_bytes": f"{KEY}.kv_cache_memory_gb",
    "enable_sleep_mode": f"{KEY}.free_cache_engine",
    "enable_return_routed_experts": "actor_rollout_ref.actor.router_replay.mode",
    "compilation_config": f"{KEY}.cudagraph_capture_sizes",
    "distributed_executor_backend": f"{KEY}.tensor_model_parallel_size",
    "generation_config": f"{KEY}.temperature and its neighbours",
    "skip_tokenizer_init": f"{KEY}.ignore_eos and the model's end-of-sequence tokens",
    "quantization": "actor_rollout_ref.model.quantization",
    **dict.fromkeys(("enable_lora", "max_loras", "max_lora_rank"), "actor_rollout_ref.model.lora_rank"),
}
"""Argument of the engine -> the setting that it comes from, for arguments whose setting has another name."""


SAME_NAME = (
    *("load_format", "max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "enable_prefix_caching"),
    *("enforce_eager", "logprobs_mode", "disable_log_stats", "scheduling_policy", "kv_cache_dtype"),
)
"""Rollout keys that vLLM knows under the same name."""

CPU_BLOCK_TOKENS = 32
"""Tokens in a block of the KV cache on a CPU, the fewest that vLLM's kernels take. Requests share only whole blocks. With vLLM's
default of 128 the answers to a short prompt would share nothing, and each would compute the whole prompt."""

ARRIVED_IN = {
    "model_config": ("seed", "max_model_len", "enforce_eager", "logprobs_mode", "enable_sleep_mode", "quantization"),
    "scheduler_config": ("max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill"),
    "cache_config": ("enable_prefix_caching", "gpu_memory_utilization", "kv_cache_memory_bytes"),
    "parallel_config": ("tensor_parallel_size", "distributed_executor_backend"),
}
"""Part of vLLM's resolved settings -> the arguments that it contains under the same names."""


def engine_arguments(rollout: schema.Rollout, place: EnginePlace, with_state: bool = False) -> dict[str, Any]:
    """Return vLLM's keyword arguments. ``with_state``: the model has layers of linear attention.

    Raises:
        ConfigError: A name in ``engine_kwargs.vllm`` repeats a rollout key, the engine should sleep on a CPU, or vLLM cannot
            compute layers of linear attention with these settings.
    """
    if rollout.free_cache_engine and not is_gpu(place.device):
        raise ConfigError(
            f"{KEY}.free_cache_engine=true: vLLM cannot sleep on a CPU. Set it to false, leave it at null, or use {KEY}.name=hf."
        )
    arguments: dict[str, Any] = {
        "model": place.model_folder,
        "tokenizer": place.tokenizer_folder,
        "skip_tokenizer_init": not rollout.stop,  # vLLM needs its tokenizer only to find stop texts
        "generation_config": "vllm",
        "trust_remote_code": place.trust_remote_code,
        "dtype": str(dtype_of(rollout.dtype, f"{KEY}.dtype")).removeprefix("torch."),
        "seed": (rollout.seed or 0) % (1 << 32),
        "max_model_len": max_model_len(rollout),
        "gpu_memory_utilization": _share(rollout, place),
        "enable_sleep_mode": can_sleep(rollout, place),
        "tensor_parallel_size": place.tensor_parallel_size,
        "distributed_executor_backend": "uni" if place.world_size == 1 else "external_launcher",
        "use_tqdm_on_load": False,
        **{name: getattr(rollout, name) for name in SAME_NAME},
    }
    if place.quantization != "none":
        arguments["quantization"] = own_quantization(place.quantization)
    if place.records_routes:
        # Needs vLLM's second model runner, which no CPU has.
        arguments["enable_return_routed_experts"] = True
    if place.lora_rank:
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": slot_rank(place.lora_rank)}
    cache_bytes = _cache_bytes(rollout, place)
    if cache_bytes is not None:
        arguments["kv_cache_memory_bytes"] = cache_bytes
    if rollout.cudagraph_capture_sizes is not None:
        arguments["compilation_config"] = {"cudagraph_capture_sizes": list(rollout.cudagraph_capture_sizes)}
    further = rollout.engine_kwargs.vllm
    for name in further:
        if name in arguments or name == "kv_cache_memory_bytes":
            raise ConfigError(
                f"{KEY}.engine_kwargs.vllm.{name}: {SET_BY.get(name, f'{KEY}.{name}')} sets it already. Use that key alone."
            )
    if with_state:
        arguments |= _with_state(arguments, rollout, place)
    elif rollout.enable_prefix_caching and not is_gpu(place.device):
        arguments["block_size"] = CPU_BLOCK_TOKENS
    if not is_gpu(place.device) and rollout.max_num_batched_tokens >= max_model_len(rollout):
        # For a part of a prompt vLLM draws a token and takes the draw back, which the seeded generators of a CPU cannot do.
        arguments["enable_chunked_prefill"] = False
    return arguments | further


OWN_HEAD = ("glm4_moe",)
"""Types whose head vLLM (0.32) does not tie to the embedding, whatever the config says. Published ones have their own."""


def carries_state(place: EnginePlace) -> bool:
    # Whether the model has layers of linear attention, which carry a state from token to token. Refuse one whose weights vLLM
    # cannot load a second time.
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(place.model_folder, trust_remote_code=place.trust_remote_code)
    if config.model_type in OWN_HEAD and config.tie_word_embeddings:
        raise ConfigError(
            f"{KEY}.name=vllm: vLLM gives {config.model_type} models a head of their own, and this model's is tied to its "
            f"embedding. Set {KEY}.name=hf."
        )
    if family_of(config.model_type).sinks:
        # Its loader (0.32) copies experts that are one tensor past the code that takes weights at a later load.
        raise ConfigError(
            f"{KEY}.name=vllm: vLLM loads the experts of {config.model_type} models only when it starts, so after an update it "
            f"would generate with the old ones. Set {KEY}.name=hf."
        )
    return STATE_LAYER in layer_types(config.get_text_config())


def _with_state(arguments: Mapping[str, Any], rollout: schema.Rollout, place: EnginePlace) -> dict[str, Any]:
    # Arguments for a model with layers of linear attention. Refuse what vLLM refuses only in its first forward.
    assert not place.lora_rank, "vLLM has no adapters for these layers"
    if is_gpu(place.device):
        return {}
    if arguments["dtype"] != "bfloat16":
        raise ConfigError(
            f"{KEY}.dtype={rollout.dtype}: on a CPU vLLM computes layers of linear attention in bfloat16 alone. Set "
            f"{KEY}.dtype=bfloat16, or {KEY}.name=hf, which computes them in any dtype."
        )
    if not rollout.enable_prefix_caching:
        return {}
    # With it vLLM would compute a prompt in parts, and draw a token for each part. See enable_chunked_prefill below.
    logger.info("%s.enable_prefix_caching: off, because a block of the cache would have to be as large as a layer's state", KEY)
    return {"enable_prefix_caching": False}


def _cache_bytes(rollout: schema.Rollout, place: EnginePlace) -> int | None:
    gigabytes = rollout.kv_cache_memory_gb
    if gigabytes == AUTO:
        assert place.cache_bytes is not None, "the worker measures what its device has free"
        return place.cache_bytes
    # On a GPU vLLM gives the cache the part of its share that weights and scratch memory leave free.
    if gigabytes is None:
        return None if is_gpu(place.device) else GIB
    return int(float(gigabytes) * GIB)


def can_sleep(rollout: schema.Rollout, place: EnginePlace) -> bool:
    return is_gpu(place.device) if rollout.free_cache_engine is None else rollout.free_cache_engine


def _share(rollout: schema.Rollout, place: EnginePlace) -> float:
    # vLLM takes a share of the whole device, although the process may be allowed only a part of it.
    limited = is_gpu(place.device) and place.device_limit_bytes is not None
    total = memory_info(place.device)[1] if limited else 0
    return engine_share(rollout.gpu_memory_utilization, total, place.device_limit_bytes)


def engine_share(utilization: float, total: int, limit: int | None) -> float:
    """Convert a share of the process's limit into the share of the whole device that vLLM expects. Sizes are in bytes."""
    return utilization if limit is None or limit >= total else utilization * limit / total


def check_arrived(arguments: dict[str, Any], resolved: Any, log_stats: bool) -> None:
    arrived: dict[str, Any] = {
        name: getattr(getattr(resolved, part), name) for part, names in ARRIVED_IN.items() for name in names
    }
    load_format = resolved.load_config.load_format
    arrived |= {
        "dtype": str(resolved.model_config.dtype).removeprefix("torch."),
        "load_format": getattr(load_format, "value", load_format),
        "disable_log_stats": not log_stats,
        "scheduling_policy": resolved.scheduler_config.policy,
        "kv_cache_dtype": resolved.cache_config.cache_dtype,
    }
    compilation, sizes = arguments.get("compilation_config"), "cudagraph_capture_sizes"
    if isinstance(compilation, dict) and sizes in compilation:
        # What else engine_kwargs sets in it has forms that vLLM replaces by its own.
        arrived["compilation_config"] = compilation | {sizes: getattr(resolved.compilation_config, sizes)}
    for name, value in arrived.items():
        if name in arguments and arguments[name] != value:
            raise ConfigError(
                f"{SET_BY.get(name, f'{KEY}.{name}')}: vLLM was given {name}={arguments[name]} and uses {value}. "
                "Change the setting to what vLLM can use here, or unset the VLLM_ environment variable that overrides it."
            )


def sampling_arguments(sampling: SamplingSettings, seed: int, eos_token_ids: Sequence[int]) -> dict[str, Any]:
    return {
        "temperature": sampling.temperature if sampling.do_sample else 0.0,
        "top_k": sampling.top_k if sampling.do_sample else -1,
        "top_p": sampling.top_p if sampling.do_sample else 1.0,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": seed if sampling.do_sample else None,
        "max_tokens": sampling.max_tokens,
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": [*([] if sampling.ignore_eos else eos_token_ids), *sampling.stop_token_ids],
        "stop": list(sampling.stop),
        "min_p": sampling.min_p if sampling.do_sample else 0.0,
        "logprobs": 0 if sampling.log_probs else None,
        "detokenize": bool(sampling.stop),
    }


def cuts(rollout: schema.Rollout) -> bool:
    return rollout.do_sample and (rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0)


def restrict_sampler(sampler: Any, known_ids: int | None, rollout: schema.Rollout) -> None:
    """Let vLLM's sampler draw only ids below ``known_ids`` (None = all), and return log-probs of the whole distribution.

    vLLM computes processed log-probs after its filters (top-k, top-p, min-p), from probabilities that it normalises again. The
    trainer has no filters, so it needs the log-probs before them (docs/decisions/rollout_log_probs.md).
    """
    whole = rollout.logprobs_mode == "processed_logprobs"
    if known_ids is None and not (whole and cuts(rollout)):
        return
    first = hasattr(sampler, "topk_topp_sampler")  # the sampler of vLLM's first model runner
    if first and whole:
        sampler.topk_topp_sampler.logprobs_mode = "raw_logprobs"  # saves the processed log-probs, which are replaced here
    draw, distribution = sampler.sample, _heated if first else _processed

    def sample(logits: torch.Tensor, *batch: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        found = distribution(sampler, logits, *batch, **options) if whole else None
        if known_ids is not None:
            beyond = torch.arange(known_ids, logits.shape[-1], device=logits.device)
            # vLLM computes raw log-probs from these logits afterwards. So they are changed in place only if it does not.
            logits = (logits.index_fill_ if whole else logits.index_fill)(-1, beyond, float("-inf"))
        sampled, processed = draw(logits, *batch, **options)
        return sampled, processed if found is None else found

    sampler.sample = sample


def _heated(sampler: Any, logits: torch.Tensor, metadata: Any, *_: Any) -> torch.Tensor | None:
    """Return log-probs [rows, vocab] at each row's temperature, in fp32. None = no row asks for log-probs."""
    if metadata.max_num_logprobs is None:
        return None
    if metadata.temperature is not None:  # it is None if all rows are greedy
        heat = metadata.temperature
        logits = logits / heat.where(heat >= GREEDY_BELOW, 1.0).unsqueeze(1)
    return logits.log_softmax(-1, dtype=torch.float32)


def _processed(sampler: Any, logits: torch.Tensor, *batch: Any, return_logprobs: bool = False) -> torch.Tensor | None:
    """Return logits [rows, vocab] before the filters. vLLM's second model runner computes log-probs from them itself."""
    if not return_logprobs:
        return None
    states = sampler.sampling_states
    states.apply_min_p = lambda *_: None
    try:
        found: torch.Tensor = sampler.apply_sampling_params(logits, *batch, skip_top_k_top_p=True)
    finally:
        del states.apply_min_p  # removes the attribute, so that the method of the class is used again
    return found.clone() if found is logits else found


GREEDY_BELOW = 1e-5
"""Below this temperature vLLM takes the largest logit."""


def own_quantization(kind: str) -> str:
    return f"verl_memopt_{kind}"


def copies_in_place(model_config: Any, quantization: str) -> bool:
    """Return whether weights may be copied directly into the engine's parameters.

    Mixture-of-experts, latent-attention and most quantized models have tensors that are computed from their weights. For these,
    vLLM must rebuild each module, and then holds one module twice. The trainer's ``quantization`` needs no such tensors.
    """
    plain = model_config.quantization in (None, own_quantization(quantization))
    return plain and not model_config.is_moe and not model_config.use_mla


def pack_experts_again(model: nn.Module) -> None:
    """Let vLLM pack the experts of a model on a CPU at its next load of weights, as at its first one.

    The kernel of a CPU reads experts in another order than checkpoints have. vLLM (0.32) brings them into this order only when it
    makes the kernel. Later loads would leave them as they come, and the model would compute with shuffled weights.
    """
    for layer in model.modules():
        experts = getattr(layer, "w13_weight", None)
        if experts is not None and experts.device.type == "cpu":
            method: Any = layer.quant_method
            method.moe_kernel = None


def advice_for(error: BaseException) -> str:
    """Return advice with our keys for vLLM's errors that need another setting or package; "" for other errors."""
    if "LoRA" in str(error):
        return f" Here: set {KEY}.share_weights=false, with which vLLM gets merged weights."
    if "failed to be inspected" in str(error) and find_spec("torchvision") is None:
        return (
            f" Here: install torchvision, which vLLM imports for this type of model even if only its text is used, or set "
            f"{KEY}.name=hf."
        )
    if "KV cache" not in str(error) and "cache blocks" not in str(error):
        return ""
    raised = f"raise {KEY}.gpu_memory_utilization or {KEY}.kv_cache_memory_gb (with auto: free memory, as verl-memopt fit says)"
    return f" Here: {raised}, or lower data.max_response_length or {KEY}.max_num_seqs."


KINDS = {"weights": "rollout weights", "kv_cache": "kv"}
"""Part of the engine -> the kind of its bytes in reports."""


def sleeping_allocator() -> Any:
    module = sys.modules.get("vllm.device_allocator.cumem")
    return None if module is None else module.CuMemAllocator.instance


def asleep_in_vllm() -> Asleep | None:
    """Return the bytes of vLLM's pools that torch counts but the device does not hold. None = vLLM's records cannot be read.

    These are the bytes of sleeping parts, and of segments that vLLM returned to the driver when it trimmed a pool.
    """
    allocator = sleeping_allocator()
    if allocator is None:
        return Asleep()
    try:
        held = {address for address, data in allocator.pointer_to_data.items() if not data.is_asleep}
        pools = [pool for entries in allocator.allocator_and_pools.values() for pool, _ in entries]
        gone = [segment for pool in pools for segment in pool.snapshot() if segment["address"] not in held]
    except (AttributeError, TypeError, ValueError):
        return None
    return Asleep(sum(segment["total_size"] for segment in gone), sum(segment["allocated_size"] for segment in gone))


def bytes_to_wake(part: str) -> int:
    """Return the bytes of a sleeping part and of all memory that wakes with it. 0 if vLLM's records cannot be read."""
    allocator = sleeping_allocator()
    entries = [] if allocator is None else allocator.pointer_to_data.values()
    try:
        return sum(data.handle[1] for data in entries if data.is_asleep and (data.tag == part or data.tag not in KINDS))
    except AttributeError:
        return 0


ALWAYS_BACKED_UP = ("runtime", "cudagraph")
"""Tags of memory that vLLM backs up on the host at every sleep level. Source: ``CuMemBackend.suspend`` of vLLM 0.32."""


def host_bytes_to_sleep(level: int) -> int:
    """Return the bytes of page-locked host memory that a sleep at this level needs. 0 if vLLM's records cannot be read."""
    tags = (*ALWAYS_BACKED_UP, "weights") if level == KEEP_WEIGHTS else ALWAYS_BACKED_UP
    allocator = sleeping_allocator()
    entries = [] if allocator is None else allocator.pointer_to_data.values()
    try:
        return host_bytes_asleep(data.handle[1] for data in entries if data.tag in tags)
    except AttributeError:
        return 0


def check_no_other_sleeper() -> None:
    allocator = sleeping_allocator()
    held = 0 if allocator is None else allocator.get_current_usage()
    if held:
        raise RolloutError(
            f"rollout engine: another engine of this process holds {held / 2**30:.2f} GiB, and vLLM allows one sleeping engine "
            "per process. Shut the other one down first, or start this one in a new process."
        )


def check_free_memory(utilization: float, rollout: schema.Rollout, device: torch.device) -> None:
    if not is_gpu(device):
        return
    empty_cache(device)
    free, total = memory_info(device)
    share = utilization * total
    if free < share:
        raise ConfigError(
            f"{KEY}.gpu_memory_utilization={rollout.gpu_memory_utilization}: that is {share / 2**30:.1f} GiB of the device's "
            f"{total / 2**30:.1f}, but {free / 2**30:.1f} GiB are free. Lower it to at most {int(free / total * 100) / 100}, "
            "or free device memory."
        )


def free_cached_memory(device: torch.device, with_pools: bool = False) -> None:
    """Collect garbage and return unused blocks to the driver. ``with_pools``: also those in the pools of vLLM's allocator."""
    # Only the garbage collector frees objects that refer to each other. Until then their blocks cannot be returned.
    gc.collect()
    allocator = sleeping_allocator() if with_pools else None
    if allocator is not None:
        allocator.release_pools()
    empty_cache(device)


# State of the process that an engine must leave unchanged, because training continues in the same process.


@contextmanager
def process_state_kept(device: torch.device, own_prefix: str) -> Iterator[None]:
    """Restore all process-wide state that the start of an engine changes, besides the random state.

    These are environment variables (child processes inherit them), the number of threads and the function that sets it, matmul
    precision, default dtype, exception hook, signal handlers and warning filters. Variables that begin with ``own_prefix`` belong
    to the engine and stay.
    """
    environment = dict(os.environ)
    threads, set_num_threads = torch.get_num_threads(), torch.set_num_threads
    precision, dtype, hook = torch.get_float32_matmul_precision(), torch.get_default_dtype(), sys.excepthook
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with random_state_kept(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            torch.set_num_threads = set_num_threads
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            torch.set_float32_matmul_precision(precision)
            torch.set_default_dtype(dtype)
            sys.excepthook = hook
            for number, handler in handlers.items():
                # None = the handler was not set from Python, so signal.signal() cannot restore it.
                if handler is not None and signal.getsignal(number) is not handler:
                    signal.signal(number, handler)
            for name in (name for name in {*os.environ, *environment} if not name.startswith(own_prefix)):
                if name in environment:
                    os.environ[name] = environment[name]
                else:
                    del os.environ[name]


@contextmanager
def default_group_kept(keep: bool) -> Iterator[None]:
    """If ``keep``, ignore calls of ``destroy_process_group()`` without a group. A group that is passed is still destroyed."""
    destroy = dist.destroy_process_group

    def only_named(group: Any = None) -> None:
        if group is not None:
            destroy(group)

    dist.destroy_process_group = only_named if keep else destroy
    try:
        yield
    finally:
        dist.destroy_process_group = destroy


# vLLM's logs: only errors while an engine starts, and warnings too afterwards. A log level that the user sets has priority.


LEVEL_VARIABLE = "VLLM_LOGGING_LEVEL"
"""Environment variable with the level of vLLM's loggers. If the user sets it, nothing here changes a level."""

NOISY_LOGGERS = ("vllm.renderers.base", "vllm.model_executor.model_loader.reload.layerwise")
"""Loggers whose warnings mislead: a missing tokenizer is not needed here, and tied weights are intended."""


@contextmanager
def quiet_start() -> Iterator[None]:
    if LEVEL_VARIABLE in os.environ:
        yield
        return
    os.environ[LEVEL_VARIABLE] = logging.getLevelName(logging.ERROR)
    _set_level(logging.ERROR)
    try:
        yield
    finally:
        del os.environ[LEVEL_VARIABLE]
        _set_level(logging.WARNING)
        for name in NOISY_LOGGERS:
            logging.getLogger(name).setLevel(logging.ERROR)


def _set_level(level: int) -> None:
    vllm_logger = logging.getLogger("vllm")
    vllm_logger.setLevel(level)
    for handler in vllm_logger.handlers:
        if type(handler.formatter).__module__.startswith("vllm"):
            handler.setLevel(level)


# How the ranks of one engine agree to stop. All of them must make the same number of engine steps.


STEPS_PER_AGREEMENT = 8
"""Engine steps between two agreements."""


def agreed(stopped: Callable[[], bool], group: dist.ProcessGroup) -> Callable[[], bool]:
    """Wrap ``stopped`` so that it returns True on all ranks of an engine in the same step, once any rank wants to stop.

    If one rank stopped alone, the others would wait for ever. All ranks call the returned function before each engine step, and
    exchange their answers every ``STEPS_PER_AGREEMENT`` calls. ``group``: the ranks of the engine, for host tensors.
    """
    calls = itertools.count(1)

    def any_stopped() -> bool:
        if next(calls) % STEPS_PER_AGREEMENT:
            return False
        any_rank = torch.tensor(int(stopped()))
        dist.all_reduce(any_rank, op=dist.ReduceOp.MAX, group=group)
        return bool(any_rank)

    return any_stopped
