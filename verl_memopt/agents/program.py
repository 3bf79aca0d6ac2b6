"""The program of a process of environments: it runs the calls of many conversations at once, and sends their answers.

Async methods and functions run on one event loop. Each environment has a thread for its plain methods, so that what one method
opened (a database, a browser) belongs to the thread of the next one, too. A plain function without an environment runs in any.

The program writes into the shared file which conversations have code that is running now. If the process dies or hangs, the pool
reads there which of them may be to blame.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import math
import os
import pickle
import queue
import struct
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any, Literal

from verl_memopt.agents.tools import Source, Tool, schema_of, tools_of
from verl_memopt.errors import AgentError, RewardError
from verl_memopt.rewards.score import LARGEST_MESSAGE, PROGRESS, Limits, as_message, read_score, shortened
from verl_memopt.rewards.scorer import Noted, is_async

BEAT = struct.Struct("d")
BEAT_AT = 8184
"""Position in the shared file of the time at which the event loop last ran (seconds of the monotonic clock)."""
BEAT_SECONDS = 0.25

RUNNING = struct.Struct("q")
RUNNING_AT = 8192
"""Position in the shared file of the runs whose code is running now: one entry for the event loop, and one for each thread.
0 = none."""
MOST_THREADS = 8192

FRAME = struct.Struct("!Q")
"""Length of a message to this program. A pickle follows."""

GRACE_SECONDS = 1.0
"""Longest time that a cancelled async call may take to end."""

STACK_BYTES = 2 << 20
"""Stack of a thread. All stacks count as memory of the process, and there may be hundreds."""

LARGEST_OBSERVATION = LARGEST_MESSAGE // 4
LARGEST_SNAPSHOT = LARGEST_MESSAGE // 16
"""Largest sizes in bytes of what `reset` returns, and of the attributes that reward functions can read."""
LARGEST_TURN = LARGEST_MESSAGE // 8
"""Largest number of characters of the answers to the calls of one turn. As JSON a character has up to six bytes."""


@dataclass(frozen=True)
class Program:
    environments: Mapping[str | None, Source]
    """The class of each environment, or a function without arguments that makes one. The name None = the only environment."""
    tools: Sequence[Source] = ()
    """Functions that the model may call besides the methods of the environment, or without any environment."""
    key: str = "environments"
    """Section of the settings that has the next values, for errors."""
    timeout_seconds: float = 60.0
    """Longest time of one call of a tool, and of `reset`, `get_reward` and the class."""
    max_tool_response_length: int = 256
    """Largest number of characters of the answer of a tool. A longer answer is cut."""
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"
    """Which characters of a longer answer are kept, as in verl: left = the first ones, right = the last ones, middle = both."""


class FailedError(Exception):
    """A conversation cannot go on. The text says in one line why."""


class Snapshot:
    """The attributes that an environment had when its conversation ended, for reward functions that read them.

    They stay pickled until a reward function reads them, because unpickling runs code of the user.

    Args:
        owner: Name of the environment's class.
        pickles: The pickled value of each attribute.
        missing: Why the other attributes are not there.
    """

    def __init__(self, owner: str, pickles: Mapping[str, bytes], missing: Mapping[str, str]) -> None:
        self.__dict__.update(_owner=owner, _pickles=dict(pickles), _missing=dict(missing))

    def __getattr__(self, name: str) -> Any:
        state = self.__dict__
        if "_pickles" in state and name in state["_pickles"]:
            value = state[name] = pickle.loads(state["_pickles"][name])
            return value
        why = state.get("_missing", {}).get(name, "the environment has no such attribute, or it is a method")
        raise AttributeError(
            f"{state.get('_owner')}.{name} cannot be read by a reward function: {why}. A reward function gets the values that "
            "the environment's attributes had when the conversation ended."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return Snapshot, (self._owner, self._pickles, self._missing)


def main(pipe: int, progress: int, limits: Limits) -> None:
    threading.stack_size(STACK_BYTES)
    program, describes = _receive(pipe)
    try:
        factories = {name: source.load() for name, source in program.environments.items()}
        functions = _by_name([source.load() for source in program.tools])
        _pickle_by_value()
    except AgentError as problem:
        _send(pipe, ("loaded", str(problem), []))
        return
    with asyncio.Runner() as runner:
        serving = Serving(pipe, progress, limits, program, factories, functions)
        runner.run(serving.serve(describes))


def _by_name(functions: Sequence[Tool]) -> dict[str, Tool]:
    found: dict[str, Tool] = {}
    for function in functions:
        name = getattr(function, "__name__", type(function).__name__)
        if name in found:
            raise AgentError(f"tools: two functions have the name {name}. Rename one.")
        found[name] = function
    return found


def _receive(pipe: int) -> Any:
    return pickle.loads(_exactly(pipe, FRAME.unpack(_exactly(pipe, FRAME.size))[0]))


def _exactly(pipe: int, size: int) -> bytearray:
    data = bytearray()
    while len(data) < size:
        part = os.read(pipe, min(size - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return data


def _send(pipe: int, message: Any) -> None:
    data = memoryview(as_message(0, message))
    try:
        while data:
            data = data[os.write(pipe, data) :]
    except OSError:  # the run has ended, or code of the user has closed the pipe
        os._exit(1)


def _pickle_by_value() -> None:
    # The modules of the user's files exist only in this process, so the classes of attributes must travel with them.
    import cloudpickle

    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and module.__name__.startswith("verl_memopt_plugin_"):
            cloudpickle.register_pickle_by_value(module)


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
        self._calls: queue.SimpleQueue[tuple[int, Callable[[], Any], asyncio.Future[Outcome]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def start(self, run: int, function: Callable[[], Any]) -> asyncio.Future[Outcome]:
        future: asyncio.Future[Outcome] = self._loop.create_future()
        self._calls.put((run, function, future))
        return future

    def end(self) -> None:
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            run, function, future = call
            self._entry.enter(run)
            outcome = _outcome(function)
            self._entry.leave()
            self._loop.call_soon_threadsafe(_finish, future, outcome)
            del call, function, outcome


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


def _finish(future: asyncio.Future[Outcome], outcome: Outcome) -> None:
    if not future.done():
        future.set_result(outcome)


@dataclass
class Environment:
    """An instance of an environment with its tools. ``instance`` = None: there are only functions."""

    instance: Any
    tools: dict[str, Tool]
    thread: Thread


@dataclass
class Run:
    """A conversation from its begin to its end in this process."""

    number: int
    name: str | None
    environment: Environment | None = None
    under_way: bool = False
    abandoned: bool = False
    tasks: set[asyncio.Future[Outcome]] = field(default_factory=set)
    """Calls on the event loop."""


Operation = Callable[..., Coroutine[Any, Any, tuple[Any, ...]]]
"""What a conversation asks for. Takes its run and the values of the request, and returns the message to send."""


class Serving:
    """Receives what conversations ask for, and sends what comes of it."""

    def __init__(
        self,
        pipe: int,
        progress: int,
        limits: Limits,
        program: Program,
        factories: Mapping[str | None, Callable[[], Any]],
        functions: Mapping[str, Tool],
    ) -> None:
        self._pipe, self._progress, self._limits, self._program = pipe, progress, limits, program
        self._factories, self._functions = factories, functions
        self._running = Running(progress)
        self._on_loop = self._running.entry()
        self._runs: dict[int, Run] = {}
        self._idle: dict[str | None, list[Environment]] = {name: [] for name in [*factories, None]}
        """Environments that a later conversation uses again."""
        self._idle_threads: list[Thread] = []
        self._calls: dict[int, float] = {}
        self._num_calls = 0
        self._operations: set[asyncio.Task[None]] = set()

    async def serve(self, describes: bool) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            described = [await self._describe(name) for name in self._factories or [None]] if describes else []
        except AgentError as problem:
            _send(self._pipe, ("loaded", str(problem), []))
            return
        _send(self._pipe, ("loaded", None, described))
        threading.Thread(target=self._read, daemon=True).start()
        while True:
            os.pwrite(self._progress, BEAT.pack(time.monotonic()), BEAT_AT)
            await asyncio.sleep(BEAT_SECONDS)

    async def _describe(self, name: str | None) -> tuple[str | None, str, bool, list[Any]]:
        try:
            environment = await self._make(Run(0, name), within=math.inf)
        except FailedError as problem:
            source = self._program.environments[name]
            raise AgentError(f"{source.key}={source.path}: {source.name}: {problem}. Correct it.") from problem
        self._idle[name].append(environment)
        has_reward = callable(getattr(environment.instance, "get_reward", None))
        schemas = [schema_of(tool) for tool in environment.tools.values()]
        return name, type(environment.instance).__name__ if name in self._factories else "", has_reward, schemas

    def _read(self) -> None:
        operations: dict[str, Operation] = {"begin": self._begin, "call": self._answer_all, "finish": self._finish}
        while True:
            try:
                kind, number, *values = _receive(self._pipe)
            except (EOFError, OSError):
                os._exit(0)
            if kind == "abandon":
                self._loop.call_soon_threadsafe(self._abandon, number)
            else:
                self._loop.call_soon_threadsafe(self._start, operations[kind], number, values)

    def _start(self, operation: Operation, number: int, values: list[Any]) -> None:
        run = self._runs.get(number) or Run(number, values[0])
        self._runs[number] = run
        task = self._loop.create_task(self._operate(run, operation, values))
        self._operations.add(task)
        task.add_done_callback(self._operations.discard)

    async def _operate(self, run: Run, operation: Operation, values: list[Any]) -> None:
        run.under_way = True
        try:
            message = await operation(run, *values)
        except (FailedError, AgentError) as problem:
            message = ("failed", _line(str(problem)))
        except Exception as problem:  # noqa: BLE001 - attributes of the environment may be code of the user, too
            message = ("failed", _line(f"raised {type(problem).__name__}: {_words(problem)}{_place_of(problem)}"))
        run.under_way = False
        kind, *rest = message
        if kind in ("finished", "failed") or run.abandoned:
            self._release(run, reusable=kind != "failed")
        if not run.abandoned:
            _send(self._pipe, (kind, run.number, *rest))

    def _abandon(self, number: int) -> None:
        run = self._runs.get(number)
        if run is None:
            return
        run.abandoned = True
        for task in run.tasks:
            task.cancel()
        if not run.under_way:
            self._release(run, reusable=True)

    def _release(self, run: Run, reusable: bool) -> None:
        self._runs.pop(run.number, None)
        if run.environment is None:
            return
        if reusable:
            self._idle[run.name].append(run.environment)
        else:
            run.environment.thread.end()

    # What a conversation asks for.

    async def _begin(self, run: Run, name: str | None, row: Mapping[str, Any], seed: int | None) -> tuple[Any, ...]:
        run.environment = self._idle[name].pop() if self._idle[name] else await self._make(run)
        reset = getattr(run.environment.instance, "reset", None)
        if reset is None:
            return "ready", None
        given = {column: value for column, value in row.items() if name is None or column != "environment"}
        if seed is not None and "seed" in inspect.signature(reset).parameters:
            given.setdefault("seed", seed)
        observation = await self._raising(run, "reset", partial(reset, **given), run.environment.thread)
        if not isinstance(observation, str | list | None):
            raise FailedError(f"reset returned {type(observation).__name__}; return a text, a list of messages, or None")
        try:
            size = len(json.dumps(observation))
        except (TypeError, ValueError, RecursionError) as problem:
            raise FailedError(f"reset returned messages that are not plain data ({problem})") from problem
        if size > LARGEST_OBSERVATION:
            raise FailedError(f"reset returned {size} bytes; at most {LARGEST_OBSERVATION} are possible")
        return "ready", _valid(observation)

    async def _make(self, run: Run, within: float | None = None) -> Environment:
        thread = self._idle_threads.pop() if self._idle_threads else self._thread()
        factory = self._factories.get(run.name)
        if factory is None:
            return Environment(None, dict(self._functions), thread)
        instance = await self._raising(run, "the class", factory, thread, within)
        if not callable(getattr(instance, "reset", None)):
            raise AgentError(
                f"{self._program.environments[run.name].key}: {type(instance).__name__} has no method reset. Define reset(self, "
                "**row), which returns a text for the model, or None."
            )
        methods = tools_of(instance)
        for name in methods.keys() & self._functions.keys():
            raise AgentError(f"{type(instance).__name__}.{name} and a function of tools have the same name. Rename one.")
        return Environment(instance, {**self._functions, **methods}, thread)

    def _thread(self) -> Thread:
        return Thread(self._running.entry(), self._loop)

    async def _answer_all(self, run: Run, calls: Sequence[tuple[str, Any]]) -> tuple[Any, ...]:
        """Answer the calls of one turn.

        Plain methods of an environment run one after another in the order of the calls, because they share its state; then the
        async ones run together, as in TRL. Functions do not wait for each other.
        """
        environment = run.environment
        assert environment is not None
        answers: list[tuple[str, bool]] = [("", True)] * len(calls)
        tools = [environment.tools.get(name) for name, _ in calls]

        async def answer(index: int) -> None:
            answers[index] = await self._answer(run, tools[index], *calls[index])

        async def in_order(indices: Sequence[int]) -> None:
            for index in indices:
                await answer(index)

        methods = [index for index, tool in enumerate(tools) if inspect.ismethod(tool)]
        plain = [index for index in methods if not is_async(tools[index] or _same)]
        others = [index for index in range(len(calls)) if index not in methods]
        await asyncio.gather(in_order(plain), *map(answer, others))
        await asyncio.gather(*(answer(index) for index in methods if index not in plain))
        if (size := sum(len(text) for text, _ in answers)) > LARGEST_TURN:
            raise FailedError(f"the answers of a turn have {size} characters; at most {LARGEST_TURN} are possible")
        return "answers", answers

    async def _answer(self, run: Run, tool: Tool | None, name: str, arguments: Any) -> tuple[str, bool]:
        if tool is None:
            return self._error(f"Tool {name} not found.")
        if not isinstance(arguments, dict):
            return self._error(f"The arguments of {name} must be an object.")
        assert run.environment is not None
        is_method = inspect.ismethod(tool)
        thread = run.environment.thread if is_method else None
        text, problem = await self._called(run, name, partial(tool, **arguments), thread, self._text)
        if problem is None:
            return text, False
        return self._error(_words(problem))

    def _error(self, text: str) -> tuple[str, bool]:
        # The text that TRL gives to the model.
        return self._cut(str({"error": text})), True

    def _text(self, result: Any) -> str:
        if isinstance(result, list) and result and all(isinstance(block, dict) and "type" in block for block in result):
            kinds = {block["type"] for block in result} - {"text"}
            if kinds:
                raise FailedError(f"the answer has a block of type {min(map(str, kinds))!r}; only text is possible")
            result = "".join(str(block.get("text", "")) for block in result)
        return self._cut(result if isinstance(result, str) else str(result))

    def _cut(self, text: str) -> str:
        most, side = self._program.max_tool_response_length, self._program.tool_response_truncate_side
        if len(text) > most:
            half = most // 2
            text = {
                "left": lambda: f"{text[:most]}...(truncated)",
                "right": lambda: f"(truncated)...{text[len(text) - most :]}",
                "middle": lambda: f"{text[:half]}...(truncated)...{text[len(text) - half :]}",
            }[side]()
        return _valid(text)

    async def _finish(self, run: Run) -> tuple[Any, ...]:
        environment = run.environment
        assert environment is not None
        get_reward = getattr(environment.instance, "get_reward", None)
        reward = None
        if get_reward is not None:
            given = await self._raising(run, "get_reward", get_reward, environment.thread)
            if isinstance(given, dict):
                raise FailedError("get_reward returned a dict; return a number, or None")
            try:
                score = read_score(given)[0]
            except RewardError as problem:
                raise FailedError(f"get_reward {problem}") from problem
            reward = None if math.isnan(score) else score
        owner = type(environment.instance).__name__
        taken = partial(snapshot_of, environment.instance)
        pickles, missing = await self._raising(run, "a property", taken, environment.thread)
        return "finished", reward, owner, pickles, missing

    # Calls of the user's code.

    async def _raising(
        self, run: Run, what: str, function: Callable[[], Any], thread: Thread, within: float | None = None
    ) -> Any:
        value, problem = await self._called(run, what, function, thread, within=within)
        if problem is not None:
            raise FailedError(f"{what} raised {type(problem).__name__}: {_words(problem)}{_place_of(problem)}")
        return value

    async def _called(
        self,
        run: Run,
        what: str,
        function: Callable[[], Any],
        thread: Thread | None,
        convert: Callable[[Any], Any] = lambda value: value,
        within: float | None = None,
    ) -> Outcome:
        """Return the outcome of a call, async or not.

        Args:
            run: The conversation.
            what: The call, for errors.
            function: Takes no arguments.
            thread: Where a plain function runs. None = any thread.
            convert: Changes the returned value, which may run code of the user, too.
            within: Time limit. None = the limit of the settings.

        Raises:
            FailedError: The call took too long, or memory ran out.
        """
        seconds = self._program.timeout_seconds if within is None else within
        self._num_calls += 1
        call = self._num_calls
        self._note(call, time.monotonic())
        try:
            if is_async(function):
                outcome = await self._wait_async(run, what, _chained(function, convert), seconds)
            else:
                borrowed = thread or (self._idle_threads.pop() if self._idle_threads else self._thread())
                future = borrowed.start(run.number, lambda: _converted(function(), convert))
                if not (await asyncio.wait({future}, timeout=None if math.isinf(seconds) else seconds))[0]:
                    self._retire()
                    raise self._too_long(what)
                if thread is None:
                    self._idle_threads.append(borrowed)
                outcome = future.result()
                if inspect.isawaitable(outcome[0]):  # the function is plain, but returned a coroutine
                    outcome = await self._wait_async(run, what, _chained(partial(_same, outcome[0]), convert), seconds)
        finally:
            self._note(call, None)
        value, problem = outcome
        if isinstance(problem, MemoryError) or (problem is not None and "allocate memory" in _words(problem)):
            raise FailedError(f"{what} needed more memory than {self._limits.key}.memory_gb={self._limits.memory_gb:g}")
        if isinstance(problem, FailedError):
            raise FailedError(f"{what}: {problem}")
        return value, problem

    async def _wait_async(self, run: Run, what: str, coroutine: Awaitable[Any], seconds: float) -> Outcome:
        task = asyncio.ensure_future(_outcome_async(coroutine, run.number, self._on_loop))
        run.tasks.add(task)
        task.add_done_callback(run.tasks.discard)
        if (await asyncio.wait({task}, timeout=None if math.isinf(seconds) else seconds))[0]:
            return (None, asyncio.CancelledError()) if task.cancelled() else task.result()
        task.cancel()
        self._loop.call_later(GRACE_SECONDS, self._retire_unless, task)
        raise self._too_long(what)

    def _too_long(self, what: str) -> FailedError:
        return FailedError(f"{what} took longer than {self._program.key}.timeout_seconds={self._program.timeout_seconds:g}")

    def _retire_unless(self, task: asyncio.Future[Outcome]) -> None:
        if not task.done():
            self._retire()

    def _retire(self) -> None:
        # A call that nothing can end goes on in this process, so it gets no more conversations.
        _send(self._pipe, ("retire", 0))

    def _note(self, call: int, since: float | None) -> None:
        # The supervisor counts processor time from the moment at which the oldest call that is under way became the oldest.
        if since is None:
            del self._calls[call]
        else:
            self._calls[call] = since
        oldest = next(iter(self._calls), -1)
        os.pwrite(self._progress, PROGRESS.pack(oldest, self._calls.get(oldest, 0.0)), 0)


def _converted(value: Any, convert: Callable[[Any], Any]) -> Any:
    return value if inspect.isawaitable(value) else convert(value)


async def _chained(function: Callable[[], Any], convert: Callable[[Any], Any]) -> Any:
    return convert(await function())


def _same(value: Any) -> Any:
    return value


def _words(problem: BaseException) -> str:
    try:
        return str(problem)
    except BaseException:  # noqa: BLE001 - code of the user
        return ""


def _line(text: str) -> str:
    return shortened(" ".join(text.split()))


def _place_of(problem: BaseException) -> str:
    trace, place = problem.__traceback__, ""
    while trace is not None:
        place = f" in {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def _valid(value: Any) -> Any:
    # Half of a surrogate pair cannot be written to any file.
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, list):
        return [_valid(part) for part in value]
    if isinstance(value, dict):
        return {_valid(name): _valid(part) for name, part in value.items()}
    return value


def snapshot_of(instance: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Return the pickled attributes of an environment in base64, and why the others are missing."""
    import cloudpickle

    pickles: dict[str, str] = {}
    missing: dict[str, str] = {}
    left = LARGEST_SNAPSHOT
    for name in dir(instance) if instance is not None else ():
        if name.startswith("__"):
            continue
        try:
            value = getattr(instance, name)
            if inspect.isroutine(value):
                continue
            data = base64.b64encode(cloudpickle.dumps(value)).decode()
        except BaseException as problem:  # noqa: BLE001 - code of the user
            missing[name] = f"it cannot leave the environment's process ({type(problem).__name__}: {_words(problem)[:200]})"
            continue
        if len(data) > left:
            missing[name] = f"it has {len(data)} bytes, and {LARGEST_SNAPSHOT} bytes can leave the environment's process"
            continue
        left -= len(data)
        pickles[name] = data
    return pickles, missing
