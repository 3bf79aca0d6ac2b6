"""What every rollout engine offers, and the choice of one by name."""

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
    response_ids: list[list[int]]
    """One list a row, the end-of-sequence token included when it was generated, at most ``max_tokens`` long."""
    log_probs: list[list[float]] | None
    """fp32 log-probs of those tokens, or None when they were not asked for."""
    finish_reasons: list[str]
    """stop = an end-of-sequence token was generated; length = the cap was reached."""
    cached_tokens: int = 0
    """Prompt tokens that were not computed, since their keys and values were in the prefix cache."""


class RolloutEngine(Protocol):
    """Generates responses with weights of its own, which come from the trainer."""

    def generate(
        self, prompt_ids: list[list[int]], seeds: list[int], sampling: SamplingSettings, stopped: Callable[[], bool] = never
    ) -> Generation:
        """One response for each row. A row's response depends on its prompt, its seed and the weights, not on other rows.

        stopped: asked between engine steps; once it says yes, all rows are given up.
        Errors: RolloutError while the engine sleeps, or before it has whole weights; Stopped when the rows were given up.
        """

    def load_weights(self, weights: Weights) -> None:
        """Replaces all weights, in place, and forgets the prefix cache.

        weights: Hugging Face names with tensors of any dtype, whole or in row ranges of any order. They are asked for one by
        one, and each is used up before the next is asked for. Of tied weights the second name may be left out.
        Errors: RolloutError for a name that is unknown or missing, or a shape that differs; the engine then refuses to
        generate until a load succeeds.
        """

    def sleep(self) -> None:
        """Frees the memory of weights and KV cache; both are lost. Errors: RolloutError when the engine cannot sleep."""

    def wake_up(self, part: str) -> None:
        """Takes memory for ``weights`` (first; load them before generating) or for the ``kv_cache``."""

    def resident_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The engine's tensors that exist now, as ("rollout weights", tensor) and ("kv", tensor)."""

    def shutdown(self) -> None:
        """Releases everything. The caller's default process group stays."""


@dataclass(frozen=True)
class EnginePlace:
    rank: int
    """This process among all."""
    world_size: int
    """All processes; they build their engines together."""
    local_rank: int
    """This process's device on its machine."""
    tensor_parallel_size: int
    """Neighbouring ranks that share one engine; each calls every method with the same arguments."""
    device: torch.device
    """Where the engine computes."""
    model_folder: str
    """Folder with config.json; weights are read from it only with load_format=auto."""
    tokenizer_folder: str
    """Folder of the tokenizer."""
    trust_remote_code: bool
    """Let the model's folder run its own code."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end a response."""
    device_limit_bytes: int | None = None
    """What this process may take of the device, where that is less than all; the engine's share is of this."""


def _vllm(rollout: schema.Rollout, place: EnginePlace) -> RolloutEngine:
    from verl_memopt.rollout.vllm_engine import VllmEngine

    return VllmEngine(rollout, place)


def _hf(rollout: schema.Rollout, place: EnginePlace) -> RolloutEngine:
    from verl_memopt.rollout.hf_engine import HfEngine

    return HfEngine(rollout, place)


ENGINES: dict[str, Callable[[schema.Rollout, EnginePlace], RolloutEngine]] = {"vllm": _vllm, "hf": _hf}


def build_engine(rollout: schema.Rollout, place: EnginePlace) -> RolloutEngine:
    """The engine that ``rollout.name`` asks for, started, and with ``load_format=dummy`` still without weights.

    Errors: ConfigError for an unknown name, an engine that is not installed, ranks that do not divide into engines, or a
    setting the engine refuses.
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
    """The longest sequence in tokens: prompt plus response, unless it is set."""
    if rollout.max_model_len is not None:
        return rollout.max_model_len
    assert rollout.prompt_length is not None, "rollout.prompt_length is linked before an engine is built"
    assert rollout.response_length is not None, "rollout.response_length is linked before an engine is built"
    return rollout.prompt_length + rollout.response_length


def check_rows(prompt_ids: list[list[int]], seeds: list[int], max_tokens: int, longest: int) -> None:
    """Raises RolloutError, naming the row, for an empty prompt or one that leaves no room for max_tokens."""
    assert len(prompt_ids) == len(seeds), f"{len(prompt_ids)} prompts, {len(seeds)} seeds"
    for row, ids in enumerate(prompt_ids):
        if not ids:
            raise RolloutError(f"rollout engine: the prompt of row {row} is empty. Give at least one token.")
        if len(ids) + max_tokens > longest:
            raise RolloutError(
                f"rollout engine: row {row} has {len(ids)} prompt tokens and may grow by {max_tokens}, but a sequence has at "
                f"most {longest}. Raise {KEY}.max_model_len, or lower the prompt or response length."
            )
