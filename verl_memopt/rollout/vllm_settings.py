"""Rollout settings as arguments of vLLM, and the check that vLLM uses each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from verl_memopt.config import schema
from verl_memopt.distributed.device import is_gpu, memory_info
from verl_memopt.errors import ConfigError
from verl_memopt.memory.limits_torch import engine_share
from verl_memopt.model.policy_model import dtype_of
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
}
"""The setting behind each engine argument that has another name."""


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
        "load_format": rollout.load_format,
        "seed": (rollout.seed or 0) % (1 << 32),
        "max_model_len": max_model_len(rollout),
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "enable_chunked_prefill": rollout.enable_chunked_prefill,
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "enforce_eager": rollout.enforce_eager,
        "logprobs_mode": rollout.logprobs_mode,
        "disable_log_stats": rollout.disable_log_stats,
        "scheduling_policy": rollout.scheduling_policy,
        "gpu_memory_utilization": _share(rollout, place),
        "kv_cache_dtype": rollout.kv_cache_dtype,
        "enable_sleep_mode": can_sleep(rollout, place),
        "tensor_parallel_size": place.tensor_parallel_size,
        "distributed_executor_backend": "uni" if place.world_size == 1 else "external_launcher",
        "use_tqdm_on_load": False,
    }
    kv_cache_gb = rollout.kv_cache_memory_gb
    if kv_cache_gb is None and not is_gpu(place.device):
        kv_cache_gb = CPU_KV_CACHE_GB
    if kv_cache_gb is not None:
        arguments["kv_cache_memory_bytes"] = int(kv_cache_gb * GIB)
    if rollout.cudagraph_capture_sizes is not None:
        arguments["compilation_config"] = {"cudagraph_capture_sizes": list(rollout.cudagraph_capture_sizes)}
    return _with_further(arguments, rollout.engine_kwargs.vllm)


def can_sleep(rollout: schema.Rollout, place: EnginePlace) -> bool:
    """Return whether the engine must be able to sleep: as set, or by default on a GPU."""
    return is_gpu(place.device) if rollout.free_cache_engine is None else rollout.free_cache_engine


def _share(rollout: schema.Rollout, place: EnginePlace) -> float:
    """Return the engine's share of the whole device, of which the process may be allowed only a part."""
    if place.device_limit_bytes is None or not is_gpu(place.device):
        return rollout.gpu_memory_utilization
    return engine_share(rollout.gpu_memory_utilization, memory_info(place.device)[1], place.device_limit_bytes)


def check_arrived(arguments: dict[str, Any], resolved: Any, log_stats: bool) -> None:
    """Compare the settings that vLLM uses with those that it was given.

    Raises:
        ConfigError: A setting differs. The message names the first one.
    """
    model, scheduler, cache = resolved.model_config, resolved.scheduler_config, resolved.cache_config
    arrived: dict[str, Any] = {
        "dtype": str(model.dtype).removeprefix("torch."),
        "load_format": getattr(resolved.load_config.load_format, "value", resolved.load_config.load_format),
        "seed": model.seed,
        "max_model_len": model.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "enable_chunked_prefill": scheduler.enable_chunked_prefill,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "enforce_eager": model.enforce_eager,
        "logprobs_mode": model.logprobs_mode,
        "disable_log_stats": not log_stats,
        "scheduling_policy": scheduler.policy,
        "gpu_memory_utilization": cache.gpu_memory_utilization,
        "kv_cache_memory_bytes": cache.kv_cache_memory_bytes,
        "kv_cache_dtype": cache.cache_dtype,
        "enable_sleep_mode": model.enable_sleep_mode,
        "tensor_parallel_size": resolved.parallel_config.tensor_parallel_size,
        "distributed_executor_backend": resolved.parallel_config.distributed_executor_backend,
        "compilation_config": {"cudagraph_capture_sizes": resolved.compilation_config.cudagraph_capture_sizes},
    }
    for name, value in arrived.items():
        if name in arguments and arguments[name] != value:
            raise ConfigError(
                f"{SET_BY.get(name, f'{KEY}.{name}')}: vLLM was given {name}={arguments[name]} and uses {value}. "
                "Change the setting to what vLLM can use here, or unset the VLLM_ environment variable that overrides it."
            )


def weight_dtype(rollout: schema.Rollout) -> torch.dtype:
    """Return the dtype of the engine's weights."""
    return dtype_of(rollout.dtype, f"{KEY}.dtype")


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


def cache_advice(error: BaseException) -> str:
    """Return advice for vLLM's error about a cache that is too small, in the keys of this project; empty for other errors."""
    if "KV cache" not in str(error) and "cache blocks" not in str(error):
        return ""
    return f" Here: raise {KEY}.gpu_memory_utilization or {KEY}.kv_cache_memory_gb, or lower data.max_response_length."


def _with_further(arguments: dict[str, Any], further: dict[str, Any]) -> dict[str, Any]:
    for name in further:
        if name in arguments or name == "kv_cache_memory_bytes":
            raise ConfigError(
                f"{KEY}.engine_kwargs.vllm.{name}: {SET_BY.get(name, f'{KEY}.{name}')} sets it already. Use that key alone."
            )
    return arguments | further
