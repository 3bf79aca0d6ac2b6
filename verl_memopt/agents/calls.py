"""Calls of the user's code in a process of environments: on the event loop or in threads, each with its time limit.

The shared file says whose code is running now. If the process dies or hangs, the pool reads there which conversations
may be to blame.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import queue
import struct
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from verl_memopt.data.plugin import raised
from verl_memopt.rewards.score import PROGRESS, Limits
from verl_memopt.rewards.scorer import Noted, is_async

RUNNING = struct.Struct("q")
RUNNING_AT = 8192
"""Position in the shared file of the conversations whose code is running now: one entry for the event loop, and one for each
thread. 0 = none."""
MOST_THREADS = 8192

GRACE_SECONDS = 1.0
"""Longest time that a cancelled async call may take to end."""


class FailedError(Exception):
    """A conversation cannot go on. The text says why."""


@dataclass
class Caller:
    """The conversation that calls."""

    number: int
    tasks: set[asyncio.Future[Outcome]] = field(default_factory=set)
    """Its calls on the event loop."""
    waits: int = 0
    """Requests to the engine that are under way."""
    stretch: int = 0
    """Number of the stretch between two waits for the engine that runs now. 0 = none."""
    since: float = 0.0
    """When it began."""


class Running:
    """Writes into the shared file whose code is running. A fork of this process ends here, because it must send nothing."""

    def __init__(self, progress: int) -> None:
        self._progress, self._pid, self._entries = progress, os.getpid(), 0

    def entry(self) -> Entry:
        self._entries = min(self._entries + 1, MOST_THREADS - 1)
        return Entry(self, RUNNING_AT + RUNNING.size * (self._entries - 1))

    def write(self, at: int, run: int) -> None:
        if os.getpid() != self._pid:
            os._exit(0)
        os.pwrite(self._progress, RUNNING.pack(run), at)


@dataclass
class Entry:
    running: Running
    at: int

    def enter(self, run: int) -> None:
        self.running.write(self.at, run)

    def leave(self) -> None:
        self.running.write(self.at, 0)


Outcome = tuple[Any, BaseException | None]
"""The value that a call returned, or what it raised. As a value, so that not even SystemExit can end the event loop."""


class Thread:
    """Runs plain calls one after another."""

    def __init__(self, entry: Entry, loop: asyncio.AbstractEventLoop) -> None:
        self._entry, self._loop = entry, loop
        self.pending = 0
        """Calls that have not ended."""
        self._calls: queue.SimpleQueue[tuple[int, Callable[[], Any], asyncio.Future[Outcome]]] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def start(self, run: int, function: Callable[[], Any]) -> asyncio.Future[Outcome]:
        future: asyncio.Future[Outcome] = self._loop.create_future()
        self.pending += 1
        self._calls.put((run, function, future))
        return future

    def _work(self) -> None:
        while True:
            run, function, future = self._calls.get()
            self._entry.enter(run)
            outcome = _outcome(function)
            self._entry.leave()
            self._loop.call_soon_threadsafe(self._end, future, outcome)
            del function, outcome

    def _end(self, future: asyncio.Future[Outcome], outcome: Outcome) -> None:
        self.pending -= 1
        if not future.done():
            future.set_result(outcome)


def _outcome(function: Callable[[], Any]) -> Outcome:
    try:
        return function(), None
    except BaseException as problem:  # noqa: BLE001 - reported as the outcome of the call
        return None, problem


async def _outcome_async(awaitable: Awaitable[Any], run: int, entry: Entry) -> Outcome:
    async def steps() -> Any:
        return await awaitable

    try:
        return await Noted(steps(), run, entry), None
    except BaseException as problem:  # noqa: BLE001 - reported as the outcome of the call
        return None, problem


class Calls:
    """Makes calls, and keeps their limits.

    Args:
        progress: File descriptor of the shared file.
        limits: Limits of the process.
        key: Section of the settings with ``timeout_seconds``, for errors.
        timeout_seconds: Longest time of a call.
        retire: Called if a call goes on that nothing can end.
    """

    def __init__(self, progress: int, limits: Limits, key: str, timeout_seconds: float, retire: Callable[[], None]) -> None:
        self._progress, self._limits, self._key, self._timeout_seconds = progress, limits, key, timeout_seconds
        self._retire = retire
        self._loop = asyncio.get_running_loop()
        self._running = Running(progress)
        self._on_loop = self._running.entry()
        self._idle: list[Thread] = []
        self._under_way: dict[int, float] = {}
        self._count = 0

    def take_thread(self) -> Thread:
        return self._idle.pop() if self._idle else Thread(self._running.entry(), self._loop)

    def give_back(self, thread: Thread) -> None:
        if not thread.pending:
            self._idle.append(thread)

    async def value(self, caller: Caller, what: str, function: Callable[[], Any], thread: Thread, limited: bool = True) -> Any:
        """Return what a call returned. If it raised, the conversation fails."""
        value, problem = await self.outcome(caller, what, function, thread, limited=limited)
        if problem is not None:
            raise FailedError(f"{what} raised {raised(problem)}")
        return value

    async def outcome(
        self,
        caller: Caller,
        what: str,
        function: Callable[[], Any],
        thread: Thread | None,
        convert: Callable[[Any], Any] = lambda value: value,
        limited: bool = True,
    ) -> Outcome:
        """Return the outcome of a call, async or not.

        Args:
            caller: The conversation.
            what: The call, for errors.
            function: Takes no arguments.
            thread: Where a plain function runs. None = any thread.
            convert: Changes the returned value, which may run code of the user, too.
            limited: The call has the time limit.

        Raises:
            FailedError: The call took too long, or memory ran out.
        """
        seconds = self._timeout_seconds if limited else None
        self._count += 1
        call = self._count
        self._note(call, time.monotonic())
        try:
            if is_async(function):
                outcome = await self._on_the_loop(caller, what, _chained(function, convert), seconds)
            else:
                outcome = await self._in_thread(caller, what, lambda: _converted(function(), convert), thread, seconds)
                if inspect.isawaitable(outcome[0]):  # the function is plain, but returned a coroutine
                    later = _chained(partial(_same, outcome[0]), convert)
                    outcome = await self._on_the_loop(caller, what, later, seconds)
        finally:
            self._note(call, None)
        return self._checked(what, outcome)

    async def driven(self, caller: Caller, what: str, function: Callable[[], Awaitable[Any]]) -> Outcome:
        """Return the outcome of an async call that waits for the engine in between.

        The time limit is that of each stretch between two waits.

        Raises:
            FailedError: As in :meth:`outcome`.
        """
        task = asyncio.ensure_future(_outcome_async(function(), caller.number, self._on_loop))
        caller.tasks.add(task)
        task.add_done_callback(caller.tasks.discard)
        self._begin_stretch(caller)
        try:
            while not task.done():
                seconds = self._timeout_seconds
                left = seconds if caller.waits else caller.since + seconds - time.monotonic()
                if left <= 0:
                    self._cancel(task)
                    raise self._too_long(f"{what}, between two requests,")
                await asyncio.wait({task}, timeout=left)
        finally:
            self._end_stretch(caller)
        return self._checked(what, (None, asyncio.CancelledError()) if task.cancelled() else task.result())

    @contextmanager
    def waiting(self, caller: Caller) -> Iterator[None]:
        """Within this context the caller waits for the engine."""
        caller.waits += 1
        is_driven = caller.stretch > 0 or caller.waits > 1
        self._end_stretch(caller)
        try:
            yield
        finally:
            caller.waits -= 1
            if is_driven and not caller.waits and caller.tasks:
                self._begin_stretch(caller)

    def _begin_stretch(self, caller: Caller) -> None:
        self._count += 1
        caller.stretch, caller.since = self._count, time.monotonic()
        self._note(caller.stretch, caller.since)

    def _end_stretch(self, caller: Caller) -> None:
        if caller.stretch:
            self._note(caller.stretch, None)
            caller.stretch = 0

    def _checked(self, what: str, outcome: Outcome) -> Outcome:
        value, problem = outcome
        if isinstance(problem, MemoryError) or (problem is not None and "allocate memory" in words(problem)):
            raise FailedError(f"{what} needed more memory than {self._limits.key}.memory_gb={self._limits.memory_gb:g}")
        if isinstance(problem, FailedError):
            raise FailedError(f"{what}: {problem}")
        return value, problem

    async def _in_thread(
        self, caller: Caller, what: str, function: Callable[[], Any], thread: Thread | None, seconds: float | None
    ) -> Outcome:
        taken = thread or self.take_thread()
        future = taken.start(caller.number, function)
        if not (await asyncio.wait({future}, timeout=seconds))[0]:
            self._retire()
            raise self._too_long(what)
        if thread is None:
            self.give_back(taken)
        return future.result()

    async def _on_the_loop(self, caller: Caller, what: str, coroutine: Awaitable[Any], seconds: float | None) -> Outcome:
        task = asyncio.ensure_future(_outcome_async(coroutine, caller.number, self._on_loop))
        caller.tasks.add(task)
        task.add_done_callback(caller.tasks.discard)
        if (await asyncio.wait({task}, timeout=seconds))[0]:
            return (None, asyncio.CancelledError()) if task.cancelled() else task.result()
        self._cancel(task)
        raise self._too_long(what)

    def _cancel(self, task: asyncio.Future[Outcome]) -> None:
        task.cancel()
        self._loop.call_later(GRACE_SECONDS, self._retire_unless, task)

    def _too_long(self, what: str) -> FailedError:
        return FailedError(f"{what} took longer than {self._key}.timeout_seconds={self._timeout_seconds:g}")

    def _retire_unless(self, task: asyncio.Future[Outcome]) -> None:
        if not task.done():
            self._retire()

    def _note(self, call: int, since: float | None) -> None:
        # The supervisor counts processor time from the moment at which the oldest call that is under way became the oldest.
        if since is None:
            del self._under_way[call]
        else:
            self._under_way[call] = since
        oldest = next(iter(self._under_way), -1)
        os.pwrite(self._progress, PROGRESS.pack(oldest, self._under_way.get(oldest, 0.0)), 0)


def _converted(value: Any, convert: Callable[[Any], Any]) -> Any:
    return value if inspect.isawaitable(value) else convert(value)


async def _chained(function: Callable[[], Any], convert: Callable[[Any], Any]) -> Any:
    return convert(await function())


def _same(value: Any) -> Any:
    return value


def words(problem: BaseException) -> str:
    try:
        return str(problem)
    except BaseException:  # noqa: BLE001 - code of the user
        return ""
