"""The interface of every rollout engine, and the choice of one by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from verl_memopt.config import schema
from verl_memopt.errors import ConfigError, RolloutError
from verl_memopt.memory.rollout.weight_buckets import Weights
from verl_memopt.rollout.sampling import SamplingSettings
from verl_memopt.rollout.stop_file import never

KEY = "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class Generation:
    """The responses to the prompts of one call, one entry per row."""

    response_ids: list[list[int]]
    """Token ids of each row, at most ``max_tokens``, including the end-of-sequence token if it was generated."""
    log_probs: list[list[float]] | None
    """fp32 log-probs of those tokens. None = not requested."""
    finish_reasons: list[str]
    """stop = an end-of-sequence token was generated; length = ``max_tokens`` was reached."""
    cached_tokens: int = 0
    """Prompt tokens that were not computed, because their keys and values were in the prefix cache."""


@dataclass(frozen=True)
class WeightComparison:
    """How the weights of an engine compare with those of the policy, by name."""

    equal: list[str]
    """Equal in every bit."""
    different: list[str]
    """Different in at least one element."""
    unknown: list[str]
    """Stored in another form, so that they cannot be compared."""


class RolloutEngine(Protocol):
    """Generates responses with its own copy of the weights, which the trainer loads into it."""

    def generate(
        self, prompt_ids: list[list[int]], seeds: list[int], sampling: SamplingSettings, stopped: Callable[[], bool] = never
    ) -> Generation:
        """Return one response per row. It depends on the row's prompt, its seed and the weights, not on other rows.

        Args:
            prompt_ids: Token ids of each row.
            seeds: One seed per row.
            sampling: How tokens are drawn.
            stopped: Called between engine steps. Once it returns True, all rows are abandoned.

        Raises:
            RolloutError: The engine is asleep, or its weights are incomplete.
            Stopped: ``stopped`` returned True.
        """

    def load_weights(self, weights: Weights) -> None:
        """Replace all weights in place, and clear the prefix cache.

        Args:
            weights: Hugging Face names with tensors of any dtype, whole or as row ranges in any order. The engine reads one at a
                time and is done with it before the next. The second name of tied weights may be left out.

        Raises:
            RolloutError: A name is unknown or missing, or a shape differs. The engine then refuses to generate until a load
                succeeds.
        """

    def compare_weights(self, weights: Weights) -> WeightComparison:
        """Compare the engine's weights with others, after a cast to the engine's dtype. The whole stream is read.

        Args:
            weights: As for :meth:`load_weights`.
        """

    def sleep(self) -> None:
        """Free the device memory of weights and KV cache.

        Raises:
            RolloutError: This engine cannot sleep.
        """

    def wake_up(self, part: str) -> None:
        """Allocate memory for a part: ``weights`` first (load them before generating), then ``kv_cache``."""

    def resident_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the engine's present tensors, as ("rollout weights", tensor) and ("kv", tensor)."""

    def shutdown(self) -> None:
        """Free everything. The caller's default process group stays."""


@dataclass(frozen=True)
class EnginePlace:
    """Where and for which model an engine runs."""

    rank: int
    """Rank of this process."""
    world_size: int
    """Number of processes. They build their engines together."""
    local_rank: int
    """Rank of this process on its machine, which selects its device."""
    tensor_parallel_size: int
    """Neighbouring ranks that share one engine. Each calls every method with the same arguments."""
    device: torch.device
    """The device of the engine."""
    model_folder: str
    """Folder with config.json. Its weights are read only with load_format=auto."""
    tokenizer_folder: str
    """Folder of the tokenizer."""
    trust_remote_code: bool
    """Allow the model's folder to run its own code."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end a response."""
    device_limit_bytes: int | None = None
    """Limit of this process on the device. None = the whole device. The engine's share is a share of this limit."""


def _vllm(rollout: schema.Rollout, place: EnginePlace) -> RolloutEngine:
    from verl_memopt.rollout.vllm_engine import VllmEngine

    return VllmEngine(rollout, place)


def _hf(rollout: schema.Rollout, place: EnginePlace) -> RolloutEngine:
    from verl_memopt.rollout.hf_engine import HfEngine

    return HfEngine(rollout, place)


ENGINES: dict[str, Callable[[schema.Rollout, EnginePlace], RolloutEngine]] = {"vllm": _vllm, "hf": _hf}


def build_engine(rollout: schema.Rollout, place: EnginePlace) -> RolloutEngine:
    """Start the engine that ``rollout.name`` selects. With ``load_format=dummy`` it has no weights yet.

    Raises:
        ConfigError: The name is unknown, the engine is not installed, the number of workers is not a multiple of the engine's
            size, or the engine refuses a setting.
    """
    if rollout.name not in ENGINES:
        raise ConfigError(f"{KEY}.name={rollout.name}: unknown rollout engine. Use one of {', '.join(ENGINES)}.")
    if place.world_size % place.tensor_parallel_size:
        raise ConfigError(
            f"{KEY}.tensor_model_parallel_size={place.tensor_parallel_size}: {place.world_size} workers do not divide into "
            "engines of that size. Use a divisor of the number of workers."
        )
    return ENGINES[rollout.name](rollout, place)


def max_model_len(rollout: schema.Rollout) -> int:
    """Return the longest sequence in tokens: prompt plus response, unless it is set."""
    if rollout.max_model_len is not None:
        return rollout.max_model_len
    assert rollout.prompt_length is not None, "rollout.prompt_length is linked before an engine is built"
    assert rollout.response_length is not None, "rollout.response_length is linked before an engine is built"
    return rollout.prompt_length + rollout.response_length


def check_rows(prompt_ids: list[list[int]], seeds: list[int], max_tokens: int, longest: int) -> None:
    """Check that every prompt can be answered.

    Args:
        prompt_ids: Token ids of each row.
        seeds: One seed per row.
        max_tokens: Tokens that may be generated.
        longest: The longest sequence that the engine supports.

    Raises:
        RolloutError: A prompt is empty or leaves no room for ``max_tokens``. The message names the row.
    """
    assert len(prompt_ids) == len(seeds), f"{len(prompt_ids)} prompts, {len(seeds)} seeds"
    for row, ids in enumerate(prompt_ids):
        if not ids:
            raise RolloutError(f"rollout engine: the prompt of row {row} is empty. It needs at least one token.")
        if len(ids) + max_tokens > longest:
            raise RolloutError(
                f"rollout engine: row {row} has {len(ids)} prompt tokens and may grow by {max_tokens}, but a sequence has at "
                f"most {longest}. Raise {KEY}.max_model_len, or lower the prompt or response length."
            )
