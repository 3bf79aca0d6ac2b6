"""The program of a reward process: it receives rows from a pipe and sends scores back until the pipe closes.

It imports neither torch nor an engine nor anything of the program that started it, so it starts in a fraction of a second.
Before each row it writes its position to a small shared file. When the process hangs or dies, the parent reads there which
row it was.
"""

from __future__ import annotations

import asyncio
import os
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from verl_memopt.errors import RewardError
from verl_memopt.rewards.concurrent import is_async, score_concurrently
from verl_memopt.rewards.custom import RewardFunction, load_reward_function
from verl_memopt.rewards.limits import Limits
from verl_memopt.rewards.sandbox import Sandbox
from verl_memopt.rewards.score import Outcome, failure, outcome_of, outcomes_of_batch

PROGRESS = struct.Struct("qd")
"""Index of the row that is being scored (-1 = none), and when it began (seconds on the monotonic clock)."""

FLUSH_SECONDS = 0.005

Row = tuple[str, str, Any, dict[str, Any]]
"""data_source, response, ground truth, extra_info."""


@dataclass(frozen=True)
class FunctionCall:
    """Which function scores rows, and how it is called."""

    path: str | None
    """The user's Python file. None = the rules."""
    name: str
    """The function in it."""
    reward_kwargs: Mapping[str, Any]
    """Further keyword arguments of every call."""
    whole_batch: bool = False
    """One call gets the lists of all rows."""
    max_concurrent: int = 1
    """Rows that an async function has under way at a time."""
    timeout_seconds: float = 60.0
    """Longest time of a row, which a process keeps itself where rows run concurrently."""
    sandbox: Sandbox | None = None
    """The service that runs programs for the rules."""


def main(pipe: int, progress: int, limits: Limits) -> None:
    """Serve rows from a pipe until it closes.

    The first answer says what is wrong with the function (None = nothing), and whether it scores rows concurrently.

    Args:
        pipe: File descriptor of the connection to the run.
        progress: File descriptor of the shared file.
        limits: Limits of this process, for messages.
    """
    connection = Connection(pipe)
    with ExitStack() as ended_with_the_pipe:
        try:
            call: FunctionCall = connection.recv()
            try:
                function = load_reward_function(call.path, call.name, call.reward_kwargs, call.whole_batch, call.sandbox)
            except RewardError as problem:
                connection.send((str(problem), False))
                return
            connection.send((None, is_async(function) and not call.whole_batch))
            serving = Serving(connection, function, progress, limits, call)
            ended_with_the_pipe.callback(serving.close)
            while True:
                serving.serve(*connection.recv())
        except (EOFError, ConnectionError):
            return


class Serving:
    """Scores the rows that arrive, and sends their outcomes in batches, each within a few milliseconds."""

    def __init__(
        self, connection: Connection, function: RewardFunction, progress: int, limits: Limits, call: FunctionCall
    ) -> None:
        """Keep what each chunk of rows needs.

        Args:
            connection: To the run.
            function: The reward function.
            progress: File descriptor of the shared file.
            limits: Limits of this process, for messages.
            call: How the function is called.
        """
        self._connection = connection
        self._function = function
        self._progress = progress
        self._limits = limits
        self._call = call
        self._loop = asyncio.Runner() if is_async(function) else None
        self._outcomes: list[Outcome] = []
        self._sent_at = time.monotonic()

    def close(self) -> None:
        """End the event loop of an async function."""
        if self._loop is not None:
            self._loop.close()

    def serve(self, first: int, rows: list[Row]) -> None:
        """Score ``rows``, whose indices count from ``first``."""
        self._sent_at = time.monotonic()
        if self._call.whole_batch:
            self._outcomes += self._batch(first, rows)
        elif self._loop is not None:
            arguments = {index: _arguments(row) for index, row in enumerate(rows, start=first)}
            self._loop.run(score_concurrently(self._function, arguments, self._limits, self._call, self._mark, self._report))
        else:
            for outcome in self._one_by_one(first, rows):
                self._report(outcome)
        self._mark(-1, 0.0)
        self._flush()

    def _one_by_one(self, first: int, rows: list[Row]) -> Iterator[Outcome]:
        for index, row in enumerate(rows, start=first):
            self._mark(index, time.monotonic())
            yield score_row(self._function, self._limits, index, row)

    def _batch(self, first: int, rows: list[Row]) -> list[Outcome]:
        """Score all rows in one call. What goes wrong with it goes wrong with each row."""
        indices = range(first, first + len(rows))
        self._mark(first, time.monotonic())
        sources, solutions, truths, infos = ([row[part] for row in rows] for part in range(4))
        try:
            values = self._function(data_sources=sources, solution_strs=solutions, ground_truths=truths, extra_infos=infos)
            if self._loop is not None:
                # A batch function may be async. It was called like any other, and what it gave is a coroutine that still has
                # to run.
                values = self._loop.run(values)
        except (Exception, SystemExit) as problem:  # noqa: BLE001 - the user's function may raise anything, and all of it is reported
            return [failure(index, problem, self._limits) for index in indices]
        return outcomes_of_batch(indices, values)

    def _mark(self, index: int, since: float) -> None:
        """Write which row the process is at."""
        os.pwrite(self._progress, PROGRESS.pack(index, since), 0)

    def _report(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        if time.monotonic() - self._sent_at > FLUSH_SECONDS:
            self._flush()

    def _flush(self) -> None:
        self._connection.send(self._outcomes)
        self._outcomes, self._sent_at = [], time.monotonic()


def score_row(function: RewardFunction, limits: Limits, index: int, row: Row) -> Outcome:
    """Return the outcome of one row."""
    try:
        value = function(**_arguments(row))
    except (Exception, SystemExit) as problem:  # noqa: BLE001 - the user's function may raise anything, and all of it is reported
        return failure(index, problem, limits)
    return outcome_of(index, value)


def _arguments(row: Row) -> dict[str, Any]:
    """Return the arguments of a reward function by name."""
    return dict(zip(("data_source", "solution_str", "ground_truth", "extra_info"), row, strict=True))
