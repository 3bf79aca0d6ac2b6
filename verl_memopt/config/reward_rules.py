"""Combinations of reward settings that are refused."""

from __future__ import annotations

from collections.abc import Iterator

from verl_memopt.knobs.knob import Refusal

MANAGER = "reward_model.reward_manager"
_OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg"
_LONGEST = "reward_model.reward_kwargs.max_resp_len"


def _overlong() -> Iterator[Refusal]:
    """Yield the rules of DAPO's penalty for long responses."""
    yield Refusal(
        (f"{_OVERLONG}.enable", MANAGER),
        lambda enabled, manager: enabled and manager != "dapo",
        "the penalty for long responses belongs to the manager dapo",
        f"Set {MANAGER}=dapo, or {_OVERLONG}.enable=false.",
    )
    yield Refusal(
        (f"{_OVERLONG}.len", _LONGEST),
        lambda length, longest, enabled: enabled and not 0 < length <= longest,
        "the buffer must have a token at least, and no more than the longest response",
        lambda length, longest, enabled: f"Set {_OVERLONG}.len between 1 and {longest}.",
        about=(f"{_OVERLONG}.enable",),
    )


REWARD_RULES: tuple[Refusal, ...] = (*_overlong(),)
"""All rules of this file, for :mod:`verl_memopt.config.checks`."""
