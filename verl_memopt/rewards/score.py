"""What a reward function returns or raises, as an outcome that can be sent to the run."""

from __future__ import annotations

import math
import numbers
import traceback
from collections.abc import Sequence
from typing import Any

from verl_memopt.config.allowed import LARGEST_SCORE
from verl_memopt.errors import RewardError
from verl_memopt.rewards.limits import Limits

Outcome = tuple[int, float, dict[str, Any], str | None]
"""Row index, score, further entries, and what went wrong (None = nothing)."""


def outcome_of(index: int, value: Any) -> Outcome:
    """Return the outcome of a row whose function returned ``value``."""
    try:
        return (index, *read_score(value), None)
    except RewardError as problem:
        return index, 0.0, {}, str(problem)


def failure(index: int, problem: BaseException, limits: Limits, frames: int = 1) -> Outcome:
    """Return the outcome of a row whose function raised.

    Args:
        index: The row.
        problem: What it raised.
        limits: Limits of the process, named where it found no memory.
        frames: Outermost frames that belong to this package, and are left out.
    """
    if isinstance(problem, RewardError):
        return index, 0.0, {}, str(problem)
    trace = problem.__traceback__
    for _ in range(frames):
        trace = trace and trace.tb_next
    within = traceback.format_exception(type(problem), problem, trace)
    no_memory = isinstance(problem, MemoryError) or "allocate memory" in str(problem)  # torch raises a RuntimeError
    hint = f"\n{limits.broken_by_memory()}" if no_memory else ""
    return index, 0.0, {}, f"raised:\n{''.join(within).rstrip()}{hint}"


def outcomes_of_batch(indices: Sequence[int], values: Any) -> list[Outcome]:
    """Return the outcome of each row of a call that scored them all.

    Args:
        indices: The rows.
        values: What the function returned: a number or a dict with ``score`` for each row.
    """
    if isinstance(values, str | dict) or not hasattr(values, "__iter__") or not hasattr(values, "__len__"):
        what = f"returned {values!r:.200} of type {type(values).__name__}, not a list of scores"
    elif len(values) != len(indices):
        what = f"returned {len(values)} scores for {len(indices)} rows"
    else:
        return [outcome_of(index, value) for index, value in zip(indices, values, strict=True)]
    return [(index, 0.0, {}, what) for index in indices]


def read_score(value: Any) -> tuple[float, dict[str, Any]]:
    """Return the finite score in the return value of a reward function, and its other entries.

    Raises:
        RewardError: There is no finite number.
    """
    if not isinstance(value, dict):
        return _finite(value, "returned"), {}
    if "score" not in value:
        raise RewardError(f"returned a dict without 'score': it has {', '.join(map(str, value)) or 'nothing'}")
    extra = {_plain(str(name), ""): _plain(entry, str(name)) for name, entry in value.items() if name != "score"}
    return _finite(value["score"], "returned the score"), extra


def _finite(value: Any, phrase: str) -> float:
    number = _unwrapped(value)
    if not isinstance(number, numbers.Real):
        raise RewardError(f"{phrase} {value!r:.200} of type {type(value).__name__}, not a number")
    score = float(number)
    if not math.isfinite(score):
        raise RewardError(f"{phrase} {score}, not a finite number")
    if abs(score) > LARGEST_SCORE:
        raise RewardError(
            f"{phrase} {score:g}, which is beyond {LARGEST_SCORE:g}: training could not compute finite numbers from it"
        )
    return score


def _unwrapped(value: Any) -> Any:
    """Return the Python number inside an array or tensor of one element; anything else unchanged."""
    numel = getattr(value, "numel", None)
    count = numel() if callable(numel) else getattr(value, "size", None)
    return value.item() if count == 1 and hasattr(value, "item") else value


def _plain(entry: Any, name: str) -> Any:
    """Return the entry as plain data, because only that can be sent to the other process."""
    entry = _unwrapped(entry)
    if isinstance(entry, str):
        return entry.encode("utf-8", "replace").decode("utf-8")  # half of a surrogate pair cannot be written to any file
    if entry is None or isinstance(entry, bool | int | float):
        return entry
    if isinstance(entry, list | tuple):
        return [_plain(part, name) for part in entry]
    if isinstance(entry, dict):
        return {_plain(str(key), name): _plain(part, name) for key, part in entry.items()}
    raise RewardError(
        f"returned the entry {name!r} of type {type(entry).__name__}; only numbers, strings, lists and dicts can be kept"
    )
