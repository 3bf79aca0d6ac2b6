"""What a reward function returns or raises, as an outcome that can be sent to the run."""

from __future__ import annotations

import json
import math
import numbers
import resource
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from verl_memopt.config.reward_limits import LARGEST_SCORE
from verl_memopt.errors import RewardError

if TYPE_CHECKING:
    from verl_memopt.config.schema import CustomReward

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

    ``limits`` are named where memory was missing. ``frames`` counts outermost frames that belong to this package, and are left
    out.
    """
    if isinstance(problem, RewardError):
        return index, 0.0, {}, str(problem)
    trace = problem.__traceback__
    for _ in range(frames):
        trace = trace and trace.tb_next
    within = traceback.format_exception(type(problem), problem, trace)
    hint = ""
    if isinstance(problem, MemoryError) or "allocate memory" in str(problem):  # torch raises a RuntimeError
        limit = f"{KEY}.memory_gb={limits.memory_gb:g}"
        hint = f"\n{limit} limits the memory of a reward process. Raise it if the function needs more."
    return index, 0.0, {}, f"raised:\n{''.join(within).rstrip()}{hint}"


def outcomes_of_batch(indices: Sequence[int], values: Any) -> list[Outcome]:
    """Return the outcome of each row of a call that scored them all.

    ``values`` is what the function returned: a number or a dict with ``score`` for each row.
    """
    if isinstance(values, str | dict) or not hasattr(values, "__iter__") or not hasattr(values, "__len__"):
        what = f"returned {values!r:.200} of type {type(values).__name__}, not a list of scores"
    elif len(values) != len(indices):
        what = f"returned {len(values)} scores for {len(indices)} rows"
    else:
        return [outcome_of(index, value) for index, value in zip(indices, values, strict=True)]
    return [(index, 0.0, {}, what) for index in indices]


def read_score(value: Any) -> tuple[float, dict[str, Any]]:
    """Return the score in the return value of a reward function, and its other entries. None is no score: NaN."""
    if not isinstance(value, dict):
        return _finite(value, "returned"), {}
    if "score" not in value:
        raise RewardError(f"returned a dict without 'score': it has {', '.join(map(str, value)) or 'nothing'}")
    extra = {_plain(str(name), ""): _plain(entry, str(name)) for name, entry in value.items() if name != "score"}
    return _finite(value["score"], "returned the score"), extra


def _finite(value: Any, phrase: str) -> float:
    """Return a finite number, or NaN for None."""
    if value is None:
        return math.nan
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
        return str.encode(entry, "utf-8", "replace").decode("utf-8")  # half of a surrogate pair cannot be written to any file
    if isinstance(entry, int) and not isinstance(entry, bool) and abs(entry) > LARGEST_INTEGER:
        raise RewardError(f"returned the entry {name!r} with a whole number of {entry.bit_length()} bits; return a float")
    if entry is None or isinstance(entry, bool | int | float):
        return entry
    if isinstance(entry, list | tuple):
        return [_plain(part, name) for part in entry]
    if isinstance(entry, dict):
        return {_plain(str(key), name): _plain(part, name) for key, part in entry.items()}
    raise RewardError(
        f"returned the entry {name!r} of type {type(entry).__name__}; only numbers, strings, lists and dicts can be kept"
    )


# A reward process runs code of the user, and what it sends is read as data: a pickle could run code in the run's process.


LARGEST_INTEGER = 2**1000
"""A float can still hold it."""


def as_message(value: Any) -> bytes:
    """Return lists, strings and numbers as the bytes that :func:`read_message` takes."""
    return json.dumps(value).encode()


def read_message(message: bytes) -> Any:
    """Return what a reward process sent."""
    try:
        return json.loads(message)
    except (ValueError, RecursionError) as error:
        raise _no_message(error) from error


def read_outcomes(message: bytes) -> list[Outcome]:
    """Return the outcomes that a reward process sent.

    A RewardError says that they are none: the reward function wrote to the connection itself.
    """
    try:
        return [(int(index), float(score), dict(extra), failure) for index, score, extra, failure in read_message(message)]
    except (TypeError, ValueError) as error:
        raise _no_message(error) from error


def _no_message(error: Exception) -> RewardError:
    return RewardError(f"a reward process sent what is no score ({error}). Let the reward function leave open files alone.")


# Input and result of a reward function for one row.


@dataclass(frozen=True)
class RewardRow:
    """One response with what its reward function receives."""

    data_source: str
    """Selects the rule when there is no custom function."""
    solution: str
    """The response, decoded without special tokens."""
    ground_truth: Any
    """The reference answer of the dataset row."""
    extra_info: dict[str, Any]
    """The dataset row's extra_info."""
    address: str
    """File and row of the prompt, for errors."""


@dataclass(frozen=True)
class RewardResult:
    """The score of one row."""

    score: float
    """A finite number, or NaN for none: no reward function applies to the row."""
    extra: dict[str, Any] = field(default_factory=dict)
    """The other entries, when the function returned a dict."""
    failed: bool = False
    """The function failed on this row, and ``score`` is the fallback score."""


# Limits of one reward process and of everything it starts: memory, processor time, open files.


KEY = "custom_reward_function"

CPU_PER_SECOND = 32
"""Default limit: processor seconds of a row for each second of its time limit."""


@dataclass(frozen=True)
class Limits:
    """Limits of one reward process."""

    memory_gb: float
    """Largest GiB of one process, and of a reward process together with all that it starts."""
    cpu_seconds: float
    """Largest processor time of one row, over all threads and processes."""
    open_files: int
    """Largest number of open files of one process."""

    @classmethod
    def of(cls, custom: CustomReward) -> Self:
        """Return the limits of the settings."""
        cpu_seconds = CPU_PER_SECOND * custom.timeout_seconds if custom.cpu_seconds is None else custom.cpu_seconds
        return cls(custom.memory_gb, cpu_seconds, custom.open_files)

    @property
    def memory_bytes(self) -> int:
        """``memory_gb`` in bytes."""
        return int(self.memory_gb * 2**30)

    def bind_process(self) -> None:
        """Set the limits that the kernel enforces per process, for this process and all that it starts from now on."""
        for kind, limit in ((resource.RLIMIT_DATA, self.memory_bytes), (resource.RLIMIT_NOFILE, self.open_files)):
            hard = resource.getrlimit(kind)[1]
            limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(kind, (limit, limit))
