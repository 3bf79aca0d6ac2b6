"""Combinations of the settings of a sandbox service that are refused or have no effect."""

from __future__ import annotations

import math
from collections.abc import Iterator
from urllib.parse import urlsplit

from verl_memopt.config.schema import Settings
from verl_memopt.knobs.knob import Refusal, UnusedKey

KEY = "reward_model.sandbox_fusion"
URL, MAX_CONCURRENT = f"{KEY}.url", f"{KEY}.max_concurrent"
_LIMIT, _FUNCTION, _MODEL = "custom_reward_function.timeout_seconds", "custom_reward_function.path", "reward_model.enable"

CASES = 10
"""Most test cases of a task that count, as in verl."""

CASE_SECONDS = 10
"""Longest time of a program on one test case, as in verl. The service stops it then."""

ROUND_SECONDS = CASE_SECONDS + 5
"""Longest time of a call with a margin for the service itself."""


def rows_at_a_time(slots: int) -> int:
    """Return how many rows a reward process has under way.

    With 4 slots or more their test cases are at most 2.5 times the slots. So other rows use the slots of a row whose last
    case is slow, and no case waits for more than two programs that never end.

    Args:
        slots: Programs that the process may have under way.
    """
    return max(1, slots // 4)


def longest_row_seconds(max_concurrent: int) -> int:
    """Return the longest time of a row in which every program runs until the service stops it.

    With fewer than 4 slots the cases of one row wait for each other.

    Args:
        max_concurrent: Programs that all reward processes together may have under way.
    """
    return max(3, math.ceil(CASES / max_concurrent)) * ROUND_SECONDS


def _is_http(address: str) -> bool:
    """Return whether a text is an http or https address with a host."""
    try:
        parts = urlsplit(address)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False


def _has_no_address(settings: Settings) -> bool:
    address = settings.reward_model.sandbox_fusion.url
    return address is not None and not _is_http(address)


def _is_bypassed(settings: Settings) -> bool:
    """Return whether a function or a model decides the reward."""
    return settings.custom_reward_function.path is not None or settings.reward_model.enable


def _longest(settings: Settings) -> int:
    return longest_row_seconds(settings.reward_model.sandbox_fusion.max_concurrent)


def _is_too_short(settings: Settings) -> bool:
    is_used = settings.reward_model.sandbox_fusion.url is not None and not _is_bypassed(settings)
    return is_used and settings.custom_reward_function.timeout_seconds < _longest(settings)


def _refusals() -> Iterator[Refusal]:
    """Yield the rules that refuse."""
    yield Refusal(
        (URL,),
        _has_no_address,
        "it is no http or https address",
        "Set it to that of the service's run_code, such as http://localhost:8080/run_code.",
    )
    yield Refusal(
        (_LIMIT, MAX_CONCURRENT),
        _is_too_short,
        f"a row whose programs all run into the service's limit of {CASE_SECONDS} s takes longer",
        lambda settings: f"Set {_LIMIT} to at least {_longest(settings)}{_or_more(settings)}.",
    )


def _or_more(settings: Settings) -> str:
    """Return the other way out, where more programs at a time would make the limit long enough."""
    limit, slots = settings.custom_reward_function.timeout_seconds, settings.reward_model.sandbox_fusion.max_concurrent
    enough = next((calls for calls in range(slots + 1, CASES + 1) if longest_row_seconds(calls) <= limit), None)
    return "" if enough is None else f", or {MAX_CONCURRENT} to at least {enough}"


def _unused() -> Iterator[UnusedKey]:
    """Yield when a key has no effect."""
    yield UnusedKey(URL, _is_bypassed, f"{_FUNCTION} or {_MODEL} decides the reward, and no rule does")
    for key in (MAX_CONCURRENT, f"{KEY}.memory_limit_mb"):
        yield UnusedKey(key, lambda settings: settings.reward_model.sandbox_fusion.url is None, f"{URL} is null")


SANDBOX_RULES: tuple[Refusal, ...] = tuple(_refusals())
"""All refusals of this file, for :mod:`verl_memopt.config.checks`."""

SANDBOX_UNUSED: tuple[UnusedKey, ...] = tuple(_unused())
"""All keys of this file without effect, for :mod:`verl_memopt.config.checks`."""
