"""Rollout settings as arguments of vLLM, and the check that vLLM uses each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl_memopt.config import schema
from verl_memopt.distributed.device import is_gpu, memory_info
from verl_memopt.errors import ConfigError
from verl_memopt.memory.lora import slot_rank
from verl_memopt.memory.rollout_memory import AUTO
from verl_memopt.model.packed_model import dtype_of
from verl_memopt.rollout.engine import KEY, EnginePlace, SamplingSettings, max_model_len

GIB = 1 << 30
CPU_KV_CACHE_GB = 1.0

SET_BY = {
    "model": "actor_rollout_ref.model.path",
    "tokenizer": "actor_rollout_ref.model.tokenizer_path",
    "trust_remote_code": "actor_rollout_ref.model.trust_remote_code",
    "tensor_parallel_size": f"{KEY}.tensor_model_parallel_size",
    "kv_cache_memory_bytes": f"{KEY}.kv_cache_memory_gb",
    "enable_sleep_mode": f"{KEY}.free_cache_engine",
    "compilation_config": f"{KEY}.cudagraph_capture_sizes",
    "distributed_executor_backend": f"{KEY}.tensor_model_parallel_size",
    "generation_config": f"{KEY}.temperature and its neighbours",
    "skip_tokenizer_init": f"{KEY}.ignore_eos and the model's end-of-sequence tokens",
    **dict.fromkeys(("enable_lora", "max_loras", "max_lora_rank"), "actor_rollout_ref.model.lora_rank"),
}
"""The setting behind each engine argument that has another name."""


SAME_NAME = (
    *("load_format", "max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "enable_prefix_caching"),
    *("enforce_eager", "logprobs_mode", "disable_log_stats", "scheduling_policy", "kv_cache_dtype"),
)
"""Rollout keys that vLLM knows under the same name."""

ARRIVED_IN = {
    "model_config": ("seed", "max_model_len", "enforce_eager", "logprobs_mode", "enable_sleep_mode"),
    "scheduler_config": ("max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill"),
    "cache_config": ("enable_prefix_caching", "gpu_memory_utilization", "kv_cache_memory_bytes"),
    "parallel_config": ("tensor_parallel_size", "distributed_executor_backend"),
}
"""Part of vLLM's resolved settings -> the arguments that it holds under their own names."""


def engine_arguments(rollout: schema.Rollout, place: EnginePlace) -> dict[str, Any]:
    """Return vLLM's keyword arguments. Those of ``engine_kwargs.vllm`` come last.

    Raises:
        ConfigError: A further argument repeats a rollout key, or the engine should sleep on a CPU.
    """
    if rollout.free_cache_engine and not is_gpu(place.device):
        raise ConfigError(
            f"{KEY}.free_cache_engine=true: vLLM cannot sleep on a CPU. Set it to false, leave it at null, or use {KEY}.name=hf."
        )
    arguments: dict[str, Any] = {
        "model": place.model_folder,
        "tokenizer": place.tokenizer_folder,
        "skip_tokenizer_init": True,
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
    return arguments | further


def _cache_bytes(rollout: schema.Rollout, place: EnginePlace) -> int | None:
    """Return the size of the KV cache. None = what weights and scratch leave of the engine's share of a GPU."""
    gigabytes = rollout.kv_cache_memory_gb
    if gigabytes == AUTO:
        assert place.cache_bytes is not None, "the worker measures what its device has free"
        return place.cache_bytes
    if gigabytes is None:
        return None if is_gpu(place.device) else int(CPU_KV_CACHE_GB * GIB)
    return int(float(gigabytes) * GIB)


def can_sleep(rollout: schema.Rollout, place: EnginePlace) -> bool:
    """Return whether the engine must be able to sleep: as set, or by default on a GPU."""
    return is_gpu(place.device) if rollout.free_cache_engine is None else rollout.free_cache_engine


def _share(rollout: schema.Rollout, place: EnginePlace) -> float:
    """Return the engine's share of the whole device, of which the process may be allowed only a part."""
    limited = is_gpu(place.device) and place.device_limit_bytes is not None
    total = memory_info(place.device)[1] if limited else 0
    return engine_share(rollout.gpu_memory_utilization, total, place.device_limit_bytes)


def engine_share(utilization: float, total: int, limit: int | None) -> float:
    """Return the share of a device's ``total`` bytes that is ``utilization`` of the limit, if there is one."""
    return utilization if limit is None or limit >= total else utilization * limit / total


def check_arrived(arguments: dict[str, Any], resolved: Any, log_stats: bool) -> None:
    """Compare the settings that vLLM uses with those that it was given.

    Raises:
        ConfigError: A setting differs. The message names the first one.
    """
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
        "compilation_config": {"cudagraph_capture_sizes": resolved.compilation_config.cudagraph_capture_sizes},
    }
    for name, value in arrived.items():
        if name in arguments and arguments[name] != value:
            raise ConfigError(
                f"{SET_BY.get(name, f'{KEY}.{name}')}: vLLM was given {name}={arguments[name]} and uses {value}. "
                "Change the setting to what vLLM can use here, or unset the VLLM_ environment variable that overrides it."
            )


def sampling_arguments(sampling: SamplingSettings, seed: int, eos_token_ids: Sequence[int]) -> dict[str, Any]:
    """Return the arguments of vLLM's ``SamplingParams`` for one row."""
    return {
        "temperature": sampling.temperature if sampling.do_sample else 0.0,
        "top_k": sampling.top_k if sampling.do_sample else -1,
        "top_p": sampling.top_p if sampling.do_sample else 1.0,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": seed if sampling.do_sample else None,
        "max_tokens": sampling.max_tokens,
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": [] if sampling.ignore_eos else list(eos_token_ids),
        "logprobs": 0 if sampling.log_probs else None,
        "detokenize": False,
    }


def copies_in_place(model_config: Any) -> bool:
    """Return whether weights may be copied straight into the engine's parameters.

    Quantized, mixture-of-experts and latent-attention models keep tensors derived from their weights, so vLLM must rebuild
    each module. It then holds one module twice.
    """
    return model_config.quantization is None and not model_config.is_moe and not model_config.use_mla


def advice_for(error: BaseException) -> str:
    """Return advice, in the keys of this project, for an error of vLLM about a small cache or a model without adapters."""
    if "LoRA" in str(error):
        return f" Here: set {KEY}.share_weights=false, with which vLLM gets merged weights."
    if "KV cache" not in str(error) and "cache blocks" not in str(error):
        return ""
    raised = f"raise {KEY}.gpu_memory_utilization or {KEY}.kv_cache_memory_gb (with auto: free memory, as verl-memopt fit says)"
    return f" Here: {raised}, or lower data.max_response_length or {KEY}.max_num_seqs."
