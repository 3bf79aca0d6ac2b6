"""The sections ``reward_model`` and ``custom_reward_function``: what scores a response, and how."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from verl_memopt.knobs.ranges import POSITIVE, NaturalFloat, NaturalInt, PositiveFloat, PositiveInt, Range

FILES = Range("must be at least 64", lambda value: value >= 64)


@dataclass(frozen=True)
class OverlongBuffer:
    """DAPO's penalty for long responses."""

    enable: bool = False
    """Subtract up to ``penalty_factor`` from the reward of a response that is longer than ``max_resp_len - len`` tokens, in
    proportion to how far it reaches into the last ``len`` tokens. Only reward_manager=dapo does so."""
    len: NaturalInt = 0
    """Length of the buffer in tokens."""
    penalty_factor: NaturalFloat = 1.0
    """Penalty of a response of ``max_resp_len`` tokens."""
    log: bool = False
    """Report ``overlong_reward`` (the penalty, 0 or less) and ``overlong`` (1 = there is one) of each response."""


@dataclass(frozen=True)
class RewardKwargs:
    """Arguments of the reward manager."""

    overlong_buffer_cfg: OverlongBuffer = field(default_factory=OverlongBuffer)
    """DAPO's penalty for long responses."""
    max_resp_len: Annotated[int | None, POSITIVE] = None
    """Tokens of a response that gets the whole penalty."""


@dataclass(frozen=True)
class RewardModel:
    """How responses are scored."""

    reward_manager: Literal["naive", "batch", "dapo", "prime"] = "naive"
    """How the reward function is called. naive = with one row; batch = once, with the lists of all rows; prime = with one row, in
    one process per core at least (at most 64), and a row that fails scores ``custom_reward_function.fallback_score``; dapo =
    naive, and ``reward_kwargs.overlong_buffer_cfg`` acts."""
    reward_kwargs: RewardKwargs = field(default_factory=RewardKwargs)
    """Arguments of the reward manager."""
    num_workers: PositiveInt = 1
    """Processes that run the reward function."""
    max_concurrent: PositiveInt = 64
    """Reward functions that are ``async def`` only: rows that one process has under way at a time."""


@dataclass(frozen=True)
class CustomReward:
    """A reward function of the user's own."""

    path: str | None = None
    """Python file with the reward function; null = the rule that belongs to ``data_source``."""
    name: str = "compute_score"
    """Function name: (data_source, solution_str, ground_truth, extra_info=None, **reward_kwargs), or with reward_manager=batch
    (data_sources, solution_strs, ground_truths, extra_infos, **reward_kwargs). It may be ``async def``."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Fixed arguments of the function."""
    timeout_seconds: PositiveFloat = 60.0
    """Longest time one row may take; with reward_manager=batch, the one call."""
    cpu_seconds: Annotated[float | None, POSITIVE] = None
    """Most processor time of one row, summed over all threads and processes that work on it; null = 32 x ``timeout_seconds``."""
    memory_gb: PositiveFloat = 16
    """Most GiB of memory that one reward process, with all that it starts, may hold. Each of ``reward_model.num_workers`` has
    this limit for itself."""
    open_files: Annotated[int, FILES] = 4096
    """Most files that one reward process may have open."""
    on_error: Literal["raise", "score"] | None = None
    """raise = a row that fails stops the run; score = it takes ``fallback_score``, is counted and logged; null = score with
    reward_manager=prime, else raise."""
    fallback_score: float = 0.0
    """Score of a failed row with on_error=score."""
