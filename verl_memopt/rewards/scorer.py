"""The inner program of a reward process: it receives rows from a pipe and sends scores back until the pipe closes.

It imports neither torch nor an engine nor anything of the program that started it, so it starts in a fraction of a second.
Before each row it writes its position to a small shared file. When the process hangs or dies, the parent reads there which
row it was.
"""

from __future__ import annotations

import math
import numbers
import os
import struct
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from verl_memopt.config.allowed import LARGEST_SCORE
from verl_memopt.errors import RewardError
from verl_memopt.rewards.custom import RewardFunction, load_reward_function
from verl_memopt.rewards.limits import Limits

PROGRESS = struct.Struct("qd")
"""Index of the row that is being scored (-1 = none), and when it began (seconds on the monotonic clock)."""

FLUSH_SECONDS = 0.005

Outcome = tuple[int, float, dict[str, Any], str | None]
"""Row index, score, further entries, and what went wrong (None = nothing)."""


def main(pipe: int, progress: int, limits: Limits) -> None:
    """Serve rows from a pipe until it closes.

    Args:
        pipe: File descriptor of the connection to the run.
        progress: File descriptor of the shared file.
        limits: Limits of this process, for messages.
    """
    connection = Connection(pipe)
    try:
        path, name, reward_kwargs = connection.recv()
        try:
            function = load_reward_function(path, name, reward_kwargs)
        except RewardError as problem:
            connection.send(str(problem))
            return
        connection.send(None)
        while True:
            _serve_chunk(connection, function, progress, limits, *connection.recv())
    except (EOFError, ConnectionError):
        return


def _serve_chunk(
    connection: Connection, function: RewardFunction, progress: int, limits: Limits, first: int, rows: list[Any]
) -> None:
    """Score ``rows`` (indices from ``first``) and send the outcomes in batches, each within a few milliseconds."""
    outcomes: list[Outcome] = []
    sent_at = time.monotonic()
    for index, row in enumerate(rows, start=first):
        os.pwrite(progress, PROGRESS.pack(index, time.monotonic()), 0)
        outcomes.append((index, *score_row(function, limits, *row)))
        now = time.monotonic()
        if now - sent_at > FLUSH_SECONDS:
            connection.send(outcomes)
            outcomes, sent_at = [], now
    os.pwrite(progress, PROGRESS.pack(-1, 0.0), 0)
    connection.send(outcomes)


def score_row(
    function: RewardFunction, limits: Limits, data_source: str, solution: str, ground_truth: Any, extra_info: dict[str, Any]
) -> tuple[float, dict[str, Any], str | None]:
    """Score one row.

    Returns:
        The score, the further entries, and what went wrong with this row (None = nothing).
    """
    try:
        value = function(data_source=data_source, solution_str=solution, ground_truth=ground_truth, extra_info=extra_info)
        return (*read_score(value), None)
    except RewardError as problem:
        return 0.0, {}, str(problem)
    except (Exception, SystemExit) as problem:  # noqa: BLE001 - the user's function may raise anything, and all of it is reported
        trace = problem.__traceback__
        within = traceback.format_exception(type(problem), problem, trace and trace.tb_next)  # without this frame
        no_memory = isinstance(problem, MemoryError) or "allocate memory" in str(problem)  # torch raises a RuntimeError
        hint = f"\n{limits.broken_by_memory()}" if no_memory else ""
        return 0.0, {}, f"raised:\n{''.join(within).rstrip()}{hint}"


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
