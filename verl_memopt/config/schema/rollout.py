"""The section ``actor_rollout_ref.rollout``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from verl_memopt.knobs.rollout_memory import RolloutMemory
from verl_memopt.knobs.token_budget import LogProbBudget
from verl_memopt.knobs.values import (
    NOT_NEGATIVE,
    POSITIVE,
    CountOrMinusOne,
    NaturalFloat,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Range,
)
from verl_memopt.knobs.weight_buckets import WeightBuckets

NATS = Range("must be a number above 0, or auto", lambda value: value == "auto" or (isinstance(value, float) and value > 0))


@dataclass(frozen=True)
class ValKwargs:
    """Sampling in validation."""

    n: PositiveInt = 1
    """Samples per validation prompt."""
    do_sample: bool | None = None
    """false = greedy; null = samples if the temperature is above 0, as verl does."""
    temperature: NaturalFloat = 0.0
    """Temperature when sampling; 0 = greedy."""
    top_p: PositiveShare = 1.0
    """Nucleus when sampling."""
    top_k: CountOrMinusOne = -1
    """Top-k when sampling; -1 = off."""


@dataclass(frozen=True)
class EngineKwargs:
    """Further engine arguments."""

    vllm: dict[str, Any] = field(default_factory=dict)
    """Passed to vLLM last; a name that a rollout key already sets is an error."""


@dataclass(frozen=True)
class Rollout(LogProbBudget, RolloutMemory, WeightBuckets):
    """Generation."""

    name: Literal["vllm", "hf"] = "vllm"
    """vllm, or hf (transformers generate)."""
    mode: Literal["async"] = "async"
    """Accepted for compatibility; the engine lives in the worker's process."""
    n: PositiveInt = 1
    """Samples per prompt (the group size)."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; the trainer's log-probs use the same."""
    top_k: CountOrMinusOne = -1
    """-1 = off."""
    top_p: PositiveShare = 1.0
    """1 = off."""
    repetition_penalty: PositiveFloat = 1.0
    """1 = off."""
    do_sample: bool = True
    """false = greedy."""
    prompt_length: Annotated[int | None, POSITIVE] = None
    """Follows ``data.max_prompt_length``."""
    response_length: Annotated[int | None, POSITIVE] = None
    """Exact cap of generated tokens; follows ``data.max_response_length``."""
    ignore_eos: bool = False
    """Generate exactly ``response_length`` tokens, for measurements."""
    seed: Annotated[int | None, NOT_NEGATIVE] = None
    """Seed of sampling, mixed with step, prompt and sample; follows ``data.seed``."""
    dtype: Literal["bfloat16", "fp16", "fp32"] = "bfloat16"
    """dtype of the engine's weights and KV cache."""
    load_format: Literal["dummy", "auto"] = "dummy"
    """dummy = weights come from the trainer at the first sync; auto = read from the model folder as well."""
    tensor_model_parallel_size: PositiveInt = 1
    """Ranks that share one engine."""
    enable_chunked_prefill: bool = True
    """Split long prefills."""
    cudagraph_capture_sizes: list[int] | None = None
    """Passed to vLLM."""
    calculate_log_probs: bool = True
    """Return the engine's log-probs and log how far they are from the trainer's."""
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] = "processed_logprobs"
    """processed_logprobs (after temperature and filters) or raw_logprobs."""
    max_logprob_diff: Annotated[float | str | None, NATS] = "auto"
    """Stop the run when ``rollout/logprob_diff_mean`` passes this (nats). auto = by the dtypes of engine and trainer: 0.001 where
    both compute in fp32, 0.2 where one of them rounds to 16 bits, 1 with an fp8 KV cache. null = never."""
    skip_rollout: bool | None = None
    """Read the responses of each step from a dump instead of generating them; null = true in ``debug.mode`` score_only and
    train_only."""
    skip_dump_dir: str | None = None
    """Folder of that dump, with one {step}.jsonl per step; follows ``trainer.rollout_data_dir``, and is
    {default_local_dir}/rollouts where that is null."""
    disable_log_stats: bool = True
    """Passed to vLLM."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """Passed to vLLM: fcfs or priority."""
    engine_kwargs: EngineKwargs = field(default_factory=EngineKwargs)
    """Further engine arguments."""
    val_kwargs: ValKwargs = field(default_factory=ValKwargs)
    """Sampling in validation."""
