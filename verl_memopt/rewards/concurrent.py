"""Async reward functions: many rows under way at a time in one process, each with its time limit."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Coroutine, Generator, Mapping
from functools import partial
from typing import Any, Protocol

from verl_memopt.rewards.limits import KEY, Limits
from verl_memopt.rewards.score import Outcome, failure, outcome_of

GRACE_SECONDS = 1.0
"""The parent ends a process whose oldest row is over its time limit by this much. Until then the process cancels the row."""

Mark = Callable[[int, float], None]
"""Writes the row that the process is at (-1 = none), and since when."""


class Concurrency(Protocol):
    """How many rows run at a time, and for how long each may."""

    @property
    def max_concurrent(self) -> int:
        """Most rows under way at a time."""
        ...

    @property
    def timeout_seconds(self) -> float:
        """Longest time of a row."""
        ...


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether a function, a ``partial`` of one, or an object's ``__call__`` is ``async def``."""
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


async def score_concurrently(
    function: Callable[..., Coroutine[Any, Any, Any]],
    rows: Mapping[int, Mapping[str, Any]],
    limits: Limits,
    concurrency: Concurrency,
    mark: Mark,
    report: Callable[[Outcome], None],
) -> None:
    """Score rows with an async function.

    Args:
        function: The reward function.
        rows: Row index -> the arguments of its call.
        limits: Limits of this process, for messages.
        concurrency: How many rows run at a time, and for how long each may.
        mark: Writes the row that the process is at.
        report: Called with each outcome as soon as it is known, in any order.
    """
    under_way = _UnderWay(mark)
    gate = asyncio.Semaphore(concurrency.max_concurrent)

    async def score(index: int, arguments: Mapping[str, Any]) -> None:
        async with gate:
            under_way.begin(index)
            try:
                outcome = await _outcome(function, index, arguments, limits, concurrency.timeout_seconds, under_way)
            finally:
                under_way.end(index)
        report(outcome)

    async with asyncio.TaskGroup() as tasks:
        for index, arguments in rows.items():
            tasks.create_task(score(index, arguments))


async def _outcome(
    function: Callable[..., Coroutine[Any, Any, Any]],
    index: int,
    arguments: Mapping[str, Any],
    limits: Limits,
    timeout_seconds: float,
    under_way: _UnderWay,
) -> Outcome:
    try:
        async with asyncio.timeout(timeout_seconds) as limit:
            value = await _Noted(function(**arguments), index, under_way)
    except (Exception, SystemExit, asyncio.CancelledError) as problem:  # noqa: BLE001 - all that a user's function raises is reported
        if isinstance(problem, TimeoutError) and limit.expired():
            return index, 0.0, {}, f"took longer than {KEY}.timeout_seconds={timeout_seconds:g}"
        return failure(index, problem, limits, frames=2)
    return outcome_of(index, value)


class _UnderWay:
    """The rows under way, and the note of the one at which the process would hang.

    While a row's own code runs, that row is noted. While all rows wait, it is the oldest: if the process does not cancel it in
    time, something has stopped the event loop.
    """

    def __init__(self, mark: Mark) -> None:
        self._mark = mark
        self._begun: dict[int, float] = {}

    def begin(self, index: int) -> None:
        self._begun[index] = time.monotonic()
        self.leave()

    def end(self, index: int) -> None:
        del self._begun[index]
        self.leave()

    def enter(self, index: int) -> None:
        """Note that the code of a row runs from now on."""
        self._mark(index, time.monotonic())

    def leave(self) -> None:
        """Note that no row's own code runs."""
        oldest = next(iter(self._begun), -1)
        self._mark(oldest, self._begun[oldest] + GRACE_SECONDS if oldest >= 0 else 0.0)


class _Noted:
    """An awaitable that runs a row's coroutine, and notes the row whenever its code runs."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], index: int, under_way: _UnderWay) -> None:
        self._coroutine, self._index, self._under_way = coroutine, index, under_way

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._coroutine.__await__()
        error: BaseException | None = None
        while True:
            self._under_way.enter(self._index)
            try:
                waits_for = steps.send(None) if error is None else steps.throw(error)
            except StopIteration as done:
                return done.value
            finally:
                self._under_way.leave()
            try:
                yield waits_for
                error = None
            except BaseException as problem:  # noqa: BLE001 - cancelling the row throws into its coroutine
                error = problem
