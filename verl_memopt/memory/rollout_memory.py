"""Limit the memory of the rollout engine (weights, KV cache, scratch), and let it sleep while the trainer computes.

Use it when: generation runs out of memory, or training needs the memory that the engine holds.
Saves: ``free_cache_engine`` frees the engine's weights and its whole KV cache while the trainer computes. The other keys make the
    cache, the scratch memory of an engine step, or the CUDA graphs smaller.
Costs: with fewer sequences at once, generation takes more rounds of decoding. Sleeping costs one wake-up per step. An fp8 cache
    changes the engine's log-probs (watch ``rollout/logprob_diff_mean``).
Works with: ``memory.device_limit_gb``, of which the engine takes its share, and the weight sync, for which the engine wakes its
    weights before its cache. vLLM cannot sleep on a CPU; ``rollout.name=hf`` can.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from verl_memopt.memory.knob import (
    LOWER,
    POSITIVE,
    Advice,
    Claim,
    Knob,
    LadderRow,
    Need,
    PositiveInt,
    PositiveShare,
    Range,
    Refusal,
    UnusedKey,
    enough_rows,
)
from verl_memopt.memory.precision import width

if TYPE_CHECKING:
    from verl_memopt.config.schema import Settings

_ROLLOUT = "actor_rollout_ref.rollout"
_ENGINE = f"{_ROLLOUT}.name"
_SLEEP, _LEVEL, _SEQUENCES = f"{_ROLLOUT}.free_cache_engine", f"{_ROLLOUT}.sleep_level", f"{_ROLLOUT}.max_num_seqs"
_SHARE, CACHE, _CACHE_DTYPE = (f"{_ROLLOUT}.{key}" for key in ("gpu_memory_utilization", "kv_cache_memory_gb", "kv_cache_dtype"))
GIB = 2**30
LEAST_SHARE = 0.1
"""With a smaller share of the device an engine has almost no room for a cache."""
_VLLM_ALONE = ("gpu_memory_utilization", "kv_cache_memory_gb", "max_num_batched_tokens", "enforce_eager", "enable_prefix_caching")
AUTO = "auto"
CACHE_SIZE = Range("must be above 0, or auto", lambda value: value == AUTO if isinstance(value, str) else value > 0)
SLEEP_LEVELS = Range("must be 1 or 2", lambda level: level in (1, 2))


@dataclass(frozen=True)
class RolloutMemory:
    gpu_memory_utilization: PositiveShare = 0.5
    """vLLM's share of the total device memory; only on a GPU."""
    kv_cache_memory_gb: Annotated[float | str | None, CACHE_SIZE] = None
    """Size of the KV cache in GiB. null = what ``gpu_memory_utilization`` leaves on a GPU, and 1 GiB on a CPU. auto = the memory
    that is free when the engine starts (on the device, or below ``memory.device_limit_gb``), less what the run holds beside the
    cache by the formulas of ``verl-memopt fit``: in rollout if the engine sleeps, otherwise in any phase. The log says how many
    tokens fit in the cache."""
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """dtype of the KV cache: auto = ``dtype``; bfloat16; fp8 (the same as fp8_e4m3), fp8_e4m3 and fp8_e5m2 take one byte per
    element. Change it when the size of the cache limits how many sequences run at once, and watch rollout/logprob_diff_mean."""
    max_model_len: Annotated[int | None, POSITIVE] = None
    """Most tokens per sequence; null = prompt_length + response_length."""
    max_num_seqs: PositiveInt = 256
    """Most sequences decoded at once. On a GPU vLLM's sampler keeps about 4 bytes per sequence and vocabulary entry, beside the
    cache: 165 MB for 256 sequences and 151,936 entries."""
    max_num_batched_tokens: PositiveInt = 8192
    """Most tokens that one engine step computes; this limits how many prompt tokens it prefills at once."""
    enforce_eager: bool = False
    """Run the engine without CUDA graphs."""
    enable_prefix_caching: bool = True
    """Reuse the KV cache of prompts that begin alike. It is reset after every weight sync."""
    free_cache_engine: bool | None = None
    """Let the engine sleep outside rollout and validation. null = true on a GPU, false on a CPU, where hf can sleep and vllm
    cannot."""
    sleep_level: Annotated[int | None, SLEEP_LEVELS] = None
    """What a sleeping engine keeps: 1 = its weights, in host memory; 2 = nothing. null = 2, because a weight sync replaces all
    weights."""


def kv_bytes_per_token(
    num_layers: int, num_kv_heads: int, head_dim: int, element_bytes: int, tensor_parallel_size: int = 1
) -> int:
    # With fewer heads than ranks, each rank holds one whole head.
    heads = max(num_kv_heads // tensor_parallel_size, 1)
    return 2 * num_layers * heads * head_dim * element_bytes


def sampler_bytes(max_num_seqs: int, vocab: int) -> int:
    """Device bytes that the sampler of vLLM's second model runner keeps, even if no request uses them.

    They are allocated with the weights and sleep with them. Source: vLLM 0.32, ``vllm/v1/worker/gpu/sample``. All entries are 4
    bytes wide. Per sequence, ``penalties.py`` keeps a count for each vocabulary entry and a bit mask of the vocabulary.
    ``logit_bias.py`` keeps 1,024 allowed tokens, 1,024 biases, their 1,024 tokens, and 128 stop tokens. ``bad_words.py`` keeps
    1,024 tokens and 129 offsets.
    """
    return max_num_seqs * 4 * (vocab + -(-vocab // 32) + 3 * 1024 + 128 + 1024 + 129)


def host_bytes_asleep(segments: Iterable[int]) -> int:
    """Host bytes that a sleeping engine takes. ``segments`` are the device bytes of each of its segments.

    vLLM copies each segment to page-locked memory of torch (``CuMemAllocator.sleep`` of ``vllm/device_allocator/cumem.py``).
    Torch rounds each size up to a power of two, and does not return the memory to the system when the engine wakes.
    """
    return sum(1 << (size - 1).bit_length() for size in segments)


def _smaller_share(need: Need, settings: Settings) -> float | None:
    share = settings.actor_rollout_ref.rollout.gpu_memory_utilization - need.over_bytes / max(need.limit_bytes, 1)
    return math.floor(share * 100) / 100 if share >= LEAST_SHARE else None


def _smaller_cache(need: Need, settings: Settings) -> float | None:
    gigabytes = float(settings.actor_rollout_ref.rollout.kv_cache_memory_gb or 0) - need.over_bytes / GIB
    return math.floor(gigabytes * 1000) / 1000 if gigabytes >= 0.001 else None


def _has_cache_size(settings: Settings) -> bool:
    return settings.actor_rollout_ref.rollout.kv_cache_memory_gb is not None


def _takes_the_rest(settings: Settings) -> bool:
    return settings.actor_rollout_ref.rollout.kv_cache_memory_gb == AUTO


def _is_hf(settings: Settings) -> bool:
    return settings.actor_rollout_ref.rollout.name == "hf"


KNOB = Knob(
    cost="a wake-up per step",
    settings={"rollout": RolloutMemory},
    known_as={
        "vllm_enable_sleep_mode": "actor_rollout_ref.rollout.free_cache_engine",
        "vllm_sleep_level": "actor_rollout_ref.rollout.sleep_level",
        "vllm_gpu_memory_utilization": "actor_rollout_ref.rollout.gpu_memory_utilization",
        "vllm_max_model_length": "actor_rollout_ref.rollout.max_model_len",
        "vllm_max_model_len": "actor_rollout_ref.rollout.max_model_len",
    },
    unused_keys=(
        UnusedKey(_LEVEL, lambda settings: settings.actor_rollout_ref.rollout.free_cache_engine is False, f"{_SLEEP} is false"),
        *(UnusedKey(f"{_ROLLOUT}.{key}", _is_hf, f"it belongs to {_ENGINE}=vllm") for key in _VLLM_ALONE),
    ),
    refuses=(
        Refusal(
            (_ENGINE, _CACHE_DTYPE),
            lambda settings: _is_hf(settings) and settings.actor_rollout_ref.rollout.kv_cache_dtype != "auto",
            "this engine's cache has the dtype of its model",
            f"Set {_ENGINE}=vllm, or {_CACHE_DTYPE}=auto.",
        ),
    ),
    advice=(
        Advice("kv", _SHARE, LOWER, lambda settings: not _is_hf(settings) and not _has_cache_size(settings), to=_smaller_share),
        Advice("kv", CACHE, LOWER, lambda settings: not _is_hf(settings) and not _takes_the_rest(settings), to=_smaller_cache),
        Advice("kv", CACHE, None, lambda settings: not _is_hf(settings) and _takes_the_rest(settings)),
        *(Advice(kind, _SLEEP, True) for kind in ("kv", "rollout weights")),
        *(Advice(kind, _SEQUENCES, LOWER, phases=("gen", "testing"), to=enough_rows) for kind in ("activations", "logits")),
        Advice("rollout weights", _SEQUENCES, LOWER, lambda settings: not _is_hf(settings)),
    ),
    claims=(Claim("update_actor", "rollout weights", lambda _, after: after.params * width(str(after.settings.rollout.dtype))),),
    row=LadderRow(100, on=(f"{_SLEEP}=true",), off=(f"{_SLEEP}=false",)),
)
