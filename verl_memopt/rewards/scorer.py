"""The program of a reward process: it receives rows from a pipe and sends scores back until the pipe closes.

It imports neither torch nor an engine nor the user's main program, so it starts in a fraction of a second. Before each row it
writes the index of the row to a small shared file. If the process hangs or dies, its parent reads there which row is to blame.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Protocol

from verl_memopt.data.plugin import load_from_file
from verl_memopt.errors import RewardError
from verl_memopt.rewards.rules import score_batch_by_rule, score_by_rule
from verl_memopt.rewards.score import (
    KEY,
    LARGEST_ENTRIES,
    LARGEST_MESSAGE,
    PROGRESS,
    Limits,
    Outcome,
    as_message,
    failure,
    outcome_of,
    outcomes_of_batch,
    shortened,
)

if TYPE_CHECKING:
    from verl_memopt.rewards.sandbox import Sandbox

FLUSH_SECONDS = 0.005

ROWS_OF_A_MESSAGE = LARGEST_MESSAGE // LARGEST_ENTRIES // 4

ENDINGS = (Exception, SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError)
"""Exceptions of a user's function that are reported as the failure of the row."""

Row = tuple[str, str, Any, dict[str, Any]]
"""data_source, response, ground truth, extra_info."""


@dataclass(frozen=True)
class FunctionCall:
    path: str | None
    """The user's Python file. None = score by rules."""
    name: str
    """Name of the function in the file."""
    reward_kwargs: Mapping[str, Any]
    """Further keyword arguments of every call."""
    whole_batch: bool = False
    """One call gets lists of the arguments of all rows."""
    max_concurrent: int = 1
    """Rows that an async function scores at the same time."""
    timeout_seconds: float = 60.0
    """Longest time of a row. If rows are scored concurrently, this process enforces it; otherwise its parent does."""
    sandbox: Sandbox | None = None
    """The service that runs programs for the rules."""


def main(pipe: int, progress: int, limits: Limits) -> None:
    """Serve rows from a pipe until it closes.

    The first message to the run is (problem with the function or None, whether it scores rows concurrently). ``pipe`` and
    ``progress`` are the file descriptors of the connection to the run and of the shared file.
    """
    connection = Connection(pipe)
    with ExitStack() as ended_with_the_pipe:
        try:
            call: FunctionCall = connection.recv()
            try:
                function = load_reward_function(call.path, call.name, call.reward_kwargs, call.whole_batch, call.sandbox)
            except RewardError as problem:
                _send(connection, 0, (shortened(str(problem)), False))
                return
            _send(connection, 0, (None, is_async(function) and not call.whole_batch))
            loop = ended_with_the_pipe.enter_context(asyncio.Runner()) if is_async(function) else None
            serving = Serving(connection, function, progress, limits, call, loop)
            while True:
                serving.serve(*connection.recv())
        except (EOFError, ConnectionError):
            return


def _send(connection: Connection, round_number: int, value: Any) -> None:
    data = memoryview(as_message(round_number, value))
    while data:
        data = data[os.write(connection.fileno(), data) :]


@dataclass
class Serving:
    """Scores the rows that arrive, and sends their outcomes in batches, each within a few milliseconds.

    ``progress``: file descriptor of the shared file. ``loop``: runs an async function; None for any other function.
    ``outcomes``: the outcomes that are not sent yet.
    """

    connection: Connection
    function: RewardFunction
    progress: int
    limits: Limits
    call: FunctionCall
    loop: asyncio.Runner | None
    outcomes: list[Outcome] = field(default_factory=list)
    sent_at: float = 0.0
    round_number: int = 0
    pid: int = field(default_factory=os.getpid)

    def serve(self, round_number: int, indices: Sequence[int], rows: list[Row]) -> None:
        self.sent_at, self.round_number = time.monotonic(), round_number
        numbered = zip(indices, rows, strict=True)
        if self.call.whole_batch:
            self.outcomes += self._batch(indices, rows)
        elif self.loop is not None:
            arguments = {index: _arguments(row) for index, row in numbered}
            self.loop.run(self._concurrently(arguments))
        else:
            for index, row in numbered:
                self.mark(index, time.monotonic())
                self._report(score_row(self.function, self.limits, index, row))
        self.mark(-1, 0.0)
        self._flush()

    async def _concurrently(self, rows: Mapping[int, Mapping[str, Any]]) -> None:
        under_way = _UnderWay(self.mark)
        gate = asyncio.Semaphore(self.call.max_concurrent)

        async def outcome(index: int, arguments: Mapping[str, Any]) -> Outcome:
            try:
                async with asyncio.timeout(self.call.timeout_seconds) as limit:
                    value = await Noted(self.function(**arguments), index, under_way)
            except ENDINGS as problem:
                if isinstance(problem, TimeoutError) and limit.expired():
                    return index, 0.0, {}, f"took longer than {KEY}.timeout_seconds={self.call.timeout_seconds:g}"
                return failure(index, problem, self.limits, frames=2)
            return outcome_of(index, value)

        async def score(index: int, arguments: Mapping[str, Any]) -> None:
            async with gate:
                under_way.begin(index)
                try:
                    scored = await outcome(index, arguments)
                finally:
                    under_way.end(index)
            self._report(scored)

        async with asyncio.TaskGroup() as tasks:
            for index, arguments in rows.items():
                tasks.create_task(score(index, arguments))

    def _batch(self, indices: Sequence[int], rows: list[Row]) -> list[Outcome]:
        self.mark(indices[0], time.monotonic())
        try:
            values = self.function(**dict(zip(BATCH_ARGUMENTS, map(list, zip(*rows, strict=True)), strict=True)))
            if self.loop is not None:
                # The function is async, so its call has returned a coroutine, which runs here.
                values = self.loop.run(values)
        except ENDINGS as problem:
            # One call scored all rows, so all of them have failed.
            return [failure(index, problem, self.limits) for index in indices]
        return outcomes_of_batch(indices, values)

    def mark(self, index: int, since: float) -> None:
        os.pwrite(self.progress, PROGRESS.pack(index, since), 0)

    def _report(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        if time.monotonic() - self.sent_at > FLUSH_SECONDS:
            self._flush()

    def _flush(self) -> None:
        if os.getpid() != self.pid:  # the function has forked, and this is the child process, which must send nothing
            os._exit(0)
        while self.outcomes:
            # The size of a row's outcome is bounded, so this number of rows always fits into a message.
            _send(self.connection, self.round_number, self.outcomes[:ROWS_OF_A_MESSAGE])
            del self.outcomes[:ROWS_OF_A_MESSAGE]
        self.sent_at = time.monotonic()


def score_row(function: RewardFunction, limits: Limits, index: int, row: Row) -> Outcome:
    try:
        value = function(**_arguments(row))
    except ENDINGS as problem:
        return failure(index, problem, limits)
    return outcome_of(index, value)


def _arguments(row: Row) -> dict[str, Any]:
    return dict(zip(ARGUMENTS, row, strict=True))


# The reward function of a run: a function of the user, loaded from a file, or the rules.


RewardFunction = Callable[..., Any]
"""Called with the arguments of one row, by name. Returns a number, or a dict with ``score``. It may be ``async``.

A function for a whole batch is called with a list for each argument, and returns a list.
"""

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Arguments of a function that scores one row."""

BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
"""Arguments of a function that scores a whole batch."""


def load_reward_function(
    path: str | None, name: str, reward_kwargs: Mapping[str, Any], whole_batch: bool = False, sandbox: Sandbox | None = None
) -> RewardFunction:
    """Return the reward function, with its keyword arguments bound.

    ``path``: the user's Python file; None = the rules. ``sandbox``: the service that runs programs for the rules.

    Raises:
        RewardError: The file or the function is missing, or the function does not accept the arguments.
    """
    if path is None and sandbox is not None:
        # Imported only if a service is used, because its HTTP client would slow down the start of every reward process.
        from verl_memopt.rewards.sandbox import rules_with_sandbox

        return rules_with_sandbox(sandbox, whole_batch, **reward_kwargs)
    if path is None:
        return partial(score_batch_by_rule if whole_batch else score_by_rule, **reward_kwargs)
    function = load_from_file(path, name, key="custom_reward_function.path", error=RewardError)
    if not callable(function):
        raise RewardError(f"custom_reward_function.name={name}: the object in {path} is not a function. Name a function.")
    _check_signature(function, path, name, reward_kwargs, BATCH_ARGUMENTS if whole_batch else ARGUMENTS)
    return partial(function, **reward_kwargs)


def _check_signature(
    function: RewardFunction, path: str, name: str, reward_kwargs: Mapping[str, Any], arguments: tuple[str, ...]
) -> None:
    clash = sorted(set(reward_kwargs) & set(arguments))
    if clash:
        passed = "is passed for each row already" if arguments is ARGUMENTS else "is passed with each call already"
        raise RewardError(f"custom_reward_function.reward_kwargs: {', '.join(clash)} {passed}. Remove it.")
    signature = inspect.signature(function)
    try:
        signature.bind(**dict.fromkeys(arguments), **reward_kwargs)
    except TypeError as problem:
        expected = f"{name}({', '.join([*arguments[:3], f'{arguments[3]}=None', *(f'{key}=None' for key in reward_kwargs)])})"
        manager = "" if arguments is ARGUMENTS else " for reward_model.reward_manager=batch"
        raise RewardError(
            f"custom_reward_function.name={name}: {path} defines {name}{signature}, which does not accept the arguments of a "
            f"reward function{manager} ({problem}). Define {expected}."
        ) from problem


# Async reward functions: one process scores many rows at the same time, and each row has its time limit.


GRACE_SECONDS = 1.0
"""The process should cancel a row at its time limit. If it does not, the parent ends the process this many seconds later."""

Mark = Callable[[int, float], None]
"""Writes the index of the row that the process is scoring (-1 = no row), and when the row began."""


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether a function, a ``partial`` of one, or an object's ``__call__`` is ``async def``."""
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


@dataclass
class _UnderWay:
    """The rows that have begun. It also writes which row is to blame if the process hangs.

    While the code of a row runs, that row is to blame. While all rows wait, it is the oldest row: if the process does not cancel
    it in time, something has blocked the event loop.
    """

    mark: Mark
    begun: dict[int, float] = field(default_factory=dict)

    def begin(self, index: int) -> None:
        self.begun[index] = time.monotonic()
        self.leave()

    def end(self, index: int) -> None:
        del self.begun[index]
        self.leave()

    def enter(self, index: int) -> None:
        self.mark(index, time.monotonic())

    def leave(self) -> None:
        oldest = next(iter(self.begun), -1)
        self.mark(oldest, self.begun[oldest] + GRACE_SECONDS if oldest >= 0 else 0.0)


class Notes(Protocol):
    def enter(self, index: int) -> None: ...

    def leave(self) -> None: ...


@dataclass
class Noted:
    """A coroutine that notes when its own code begins to run and when it waits."""

    coroutine: Coroutine[Any, Any, Any]
    index: int
    notes: Notes

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self.coroutine.__await__()
        error: BaseException | None = None
        while True:
            self.notes.enter(self.index)
            try:
                waits_for = steps.send(None) if error is None else steps.throw(error)
            except StopIteration as done:
                return done.value
            finally:
                self.notes.leave()
            try:
                yield waits_for
                error = None
            except BaseException as problem:  # noqa: BLE001 - cancelling the row throws into its coroutine
                error = problem
