"""The outcome of a reward function for a row, its score or its error, and the messages that carry outcomes to the run."""

from __future__ import annotations

import json
import math
import numbers
import resource
import struct
import traceback
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from verl_memopt.config.reward_limits import LARGEST_SCORE
from verl_memopt.errors import RewardError

if TYPE_CHECKING:
    from verl_memopt.config.schema import CustomReward

Outcome = tuple[int, float, dict[str, Any], str | None]
"""Row index, score, further entries, and the description of the failure (None = no failure)."""


def outcome_of(index: int, value: Any) -> Outcome:
    try:
        score, extra = read_score(value)
    except RewardError as problem:
        return index, 0.0, {}, shortened(str(problem))
    if extra and (size := len(json.dumps(extra))) > LARGEST_ENTRIES:
        return index, 0.0, {}, f"returned entries of {size} bytes besides the score; a row may have {LARGEST_ENTRIES}"
    return index, score, extra, None


def failure(index: int, problem: BaseException, limits: Limits, frames: int = 1) -> Outcome:
    """Return the outcome of a row whose function raised.

    The failure names ``limits`` if memory ran out. The ``frames`` outermost frames belong to this package, and are left out of
    the traceback.
    """
    if isinstance(problem, RewardError):
        return index, 0.0, {}, shortened(str(problem))
    trace = problem.__traceback__
    for _ in range(frames):
        trace = trace and trace.tb_next
    within = traceback.format_exception(type(problem), problem, trace)
    hint = ""
    if isinstance(problem, MemoryError) or "allocate memory" in str(problem):  # torch raises a RuntimeError
        limit = f"{limits.key}.memory_gb={limits.memory_gb:g}"
        hint = f"\n{limit} limits the memory of a reward process. Raise it if the function needs more."
    return index, 0.0, {}, f"raised:\n{shortened(''.join(within).rstrip())}{hint}"


def shortened(text: str) -> str:
    half = LARGEST_ENTRIES // 16
    return text if len(text) <= 2 * half else f"{text[:half]}\n[...]\n{text[-half:]}"


def outcomes_of_batch(indices: Sequence[int], values: Any) -> list[Outcome]:
    if isinstance(values, str | dict) or not hasattr(values, "__iter__") or not hasattr(values, "__len__"):
        what = f"returned {values!r:.200} of type {type(values).__name__}, not a list of scores"
    elif len(values) != len(indices):
        what = f"returned {len(values)} scores for {len(indices)} rows"
    else:
        return [outcome_of(index, value) for index, value in zip(indices, values, strict=True)]
    return [(index, 0.0, {}, what) for index in indices]


def read_score(value: Any) -> tuple[float, dict[str, Any]]:
    """Return the score and the other entries in the return value of a reward function. A score of None becomes NaN."""
    if not isinstance(value, dict):
        return _finite(value, "returned"), {}
    if "score" not in value:
        raise RewardError(f"returned a dict without 'score': it has {', '.join(map(str, value)) or 'nothing'}")
    extra = {_plain(str(name), ""): _plain(entry, str(name)) for name, entry in value.items() if name != "score"}
    return _finite(value["score"], "returned the score"), extra


def _finite(value: Any, phrase: str) -> float:
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
    # A score may be an array or tensor of one element.
    numel = getattr(value, "numel", None)
    count = numel() if callable(numel) else getattr(value, "size", None)
    return value.item() if count == 1 and hasattr(value, "item") else value


def _plain(entry: Any, name: str) -> Any:
    # Only plain data can be sent to the run's process.
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


# A reward process runs code of the user. Its messages are JSON, because a pickle could run that code in the run's process.


LARGEST_INTEGER = 2**1000
"""Largest whole number in an entry. A float can still represent it."""


LARGEST_ENTRIES = 2**19
"""Largest size of a row's entries besides its score, in bytes of JSON."""
LARGEST_MESSAGE = 2**24
"""Largest size of a message in bytes. If the outcomes need more, they are sent in several messages."""
_HEADER = struct.Struct("!4sQI")
_MAGIC = b"vmr1"


class InvalidMessageError(Exception):
    """A reward process sent something that is not a valid message. Its function wrote to the connection, or sent too much."""


def as_message(round_number: int, value: Any) -> bytes:
    body = json.dumps(value).encode()
    return _HEADER.pack(_MAGIC, round_number, len(body)) + body


@dataclass
class MessageReader:
    """Assembles messages from the bytes that have arrived. It never waits, and its buffer is hardly larger than one message."""

    _held: bytearray = field(default_factory=bytearray)

    @property
    def holds_part(self) -> bool:
        return bool(self._held)

    def feed(self, data: bytes) -> Iterator[tuple[int, Any]]:
        """Yield the round number and the value of each message that is complete now.

        Raises:
            InvalidMessageError: The bytes are not a message.
        """
        self._held += data
        if not _MAGIC.startswith(self._held[: len(_MAGIC)]):
            raise InvalidMessageError("bytes that are no message")
        while len(self._held) >= _HEADER.size:
            magic, round_number, length = _HEADER.unpack_from(self._held)
            if magic != _MAGIC or length > LARGEST_MESSAGE:
                raise InvalidMessageError(f"a message of {length} bytes" if magic == _MAGIC else "bytes that are no message")
            end = _HEADER.size + length
            if len(self._held) < end:
                return
            body = bytes(self._held[_HEADER.size : end])
            del self._held[:end]
            try:
                yield round_number, json.loads(body)
            except (ValueError, RecursionError) as error:
                raise InvalidMessageError(str(error)) from error


def read_outcomes(value: Any, expected: Collection[int]) -> list[Outcome]:
    """Check the outcomes that a reward process sent. ``expected``: the rows that it may report.

    Raises:
        InvalidMessageError: The value is not a list of outcomes of these rows.
    """
    try:
        outcomes = [(index, score, extra, failed) for index, score, extra, failed in value]
    except (TypeError, ValueError) as error:
        raise InvalidMessageError(str(error)) from error
    for index, score, extra, failed in outcomes:
        if type(index) is not int or index not in expected:
            raise InvalidMessageError(f"the outcome of row {index!r:.50}, which was not asked for")
        # NaN stands for a row without a reward.
        if type(score) not in (int, float) or abs(score) > LARGEST_SCORE:
            raise InvalidMessageError(f"the score {score!r:.50}")
        if not isinstance(extra, dict) or not (failed is None or isinstance(failed, str)):
            raise InvalidMessageError(f"an outcome of the wrong form: {extra!r:.50}")
    return [(index, float(score), extra, failed) for index, score, extra, failed in outcomes]


# Input and result of a reward function for one row.


@dataclass(frozen=True)
class RewardRow:
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
    score: float
    """A finite number, or NaN if no reward function applies to the row."""
    extra: dict[str, Any] = field(default_factory=dict)
    """The other entries of the dict that the function returned."""
    failed: bool = False
    """The function failed on this row, and ``score`` is the fallback score."""


PROGRESS = struct.Struct("qd")
"""Record at the start of the file that a reward process shares with its parent: index of the row that is being scored (-1 = no
row), and when it began (seconds of the monotonic clock)."""


# Limits of one reward process and of everything it starts: memory, processor time, open files.


KEY = "custom_reward_function"

CPU_PER_SECOND = 32
"""Default limit of a row's processor time, in seconds per second of its time limit."""


@dataclass(frozen=True)
class Limits:
    memory_gb: float
    """Memory limit in GiB: of each process, and of a reward process together with all processes that it starts."""
    cpu_seconds: float
    """Largest processor time of one row in seconds, summed over all threads and processes."""
    open_files: int
    """Largest number of open files of one process."""
    key: str = KEY
    """Section of the settings that has the limits, for errors."""

    @classmethod
    def of(cls, custom: CustomReward) -> Self:
        cpu_seconds = CPU_PER_SECOND * custom.timeout_seconds if custom.cpu_seconds is None else custom.cpu_seconds
        return cls(custom.memory_gb, cpu_seconds, custom.open_files)

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gb * 2**30)

    def bind_process(self) -> None:
        for kind, limit in ((resource.RLIMIT_DATA, self.memory_bytes), (resource.RLIMIT_NOFILE, self.open_files)):
            hard = resource.getrlimit(kind)[1]
            limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(kind, (limit, limit))
