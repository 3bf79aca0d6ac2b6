"""The program of a process of environments: it runs the calls of many conversations at once, and sends their answers.

Async methods and functions run on one event loop. Each environment has a thread for its plain methods, so that what one method
opened (a database, a browser) belongs to the thread of the next one, too. A plain function without an environment runs in any.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import math
import os
import pickle
import signal
import struct
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from verl_memopt.agents.agent_loops import OwnLoop, TokenOutput
from verl_memopt.agents.calls import Caller, Calls, FailedError, Thread, words
from verl_memopt.agents.snapshot import pickle_by_value, snapshot_of
from verl_memopt.agents.tools import Loads, OwnTools, Source, Tool, schema_of, tools_of
from verl_memopt.data.plugin import raised
from verl_memopt.errors import AgentError, RewardError
from verl_memopt.rewards.score import LARGEST_MESSAGE, Limits, as_message, read_score, shortened
from verl_memopt.rewards.scorer import is_async

logger = logging.getLogger(__name__)

BEAT = struct.Struct("d")
BEAT_AT = 8184
"""Position in the shared file of the time at which the event loop last ran (seconds of the monotonic clock)."""
BEAT_SECONDS = 0.25

FRAME = struct.Struct("!Q")
"""Length of a message to this program. A pickle follows."""

STACK_BYTES = 2 << 20
"""Stack of a thread. All stacks count as memory of the process, and there may be hundreds."""

LARGEST_OBSERVATION = LARGEST_MESSAGE // 4
"""Largest size in bytes of what `reset` returns."""
LARGEST_IDS = LARGEST_MESSAGE // 16
"""Largest number of token ids in a message. As JSON an id has up to ten bytes, and each may have an entry of a mask."""
LARGEST_TURN = LARGEST_MESSAGE // 8
"""Largest number of characters of the answers to the calls of one turn. As JSON a character has up to six bytes."""


@dataclass(frozen=True)
class Program:
    environments: Mapping[str | None, Loads]
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
    """Where a longer answer is cut, as in verl since 0.9: left = at its begin, right = at its end, middle = between both."""
    agent_loops: Loads | None = None
    """Loops that drive conversations themselves: ``load`` returns functions that make an ``OwnLoop``, by name."""


def main(pipe: int, progress: int, limits: Limits) -> None:
    threading.stack_size(STACK_BYTES)
    _ignore_alarms_of_threads()
    program, describes = _receive(pipe)
    try:
        factories = {name: source.load() for name, source in program.environments.items()}
        loops = {} if program.agent_loops is None else program.agent_loops.load()
        if both := sorted(loops.keys() & factories.keys()):
            raise AgentError(f"{program.key}: {both[0]} is the name of an environment and of an agent loop. Rename one.")
        factories |= loops
        functions = _by_name([source.load() for source in program.tools])
        pickle_by_value()
    except AgentError as problem:
        _send(pipe, ("loaded", str(problem), []))
        return
    with asyncio.Runner() as runner:
        runner.run(_serve(Serving(pipe, program, factories, functions), progress, limits, describes))


def _ignore_alarms_of_threads() -> None:
    """Let tools in threads set alarms without an effect, because the time limit of a call ends what takes too long.

    Tools that were written for the main thread of a trainer limit their own time by SIGALRM. Python lets only the main thread set
    a handler, and an alarm of one conversation would end the calls of all.
    """
    in_main = {name: getattr(signal, name) for name in ("signal", "alarm", "setitimer")}

    def here() -> bool:
        return threading.current_thread() is threading.main_thread()

    def set_handler(number: int, handler: Any) -> Any:
        return in_main["signal"](number, handler) if here() or number != signal.SIGALRM else signal.SIG_DFL

    def alarm(seconds: int) -> int:
        return int(in_main["alarm"](seconds)) if here() else 0

    def set_timer(which: int, seconds: float, interval: float = 0.0) -> tuple[float, float]:
        return tuple(in_main["setitimer"](which, seconds, interval)) if here() else (0.0, 0.0)

    vars(signal).update(signal=set_handler, alarm=alarm, setitimer=set_timer)


async def _serve(serving: Serving, progress: int, limits: Limits, describes: bool) -> None:
    if not await serving.load(describes, progress, limits):
        return
    threading.Thread(target=serving.read, daemon=True).start()
    while True:
        os.pwrite(progress, BEAT.pack(time.monotonic()), BEAT_AT)
        await asyncio.sleep(BEAT_SECONDS)


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


@dataclass
class Environment:
    """An instance of an environment with its tools. ``instance`` = None: there are only functions."""

    instance: Any
    tools: dict[str, Tool]
    thread: Thread


@dataclass
class Run:
    """A conversation from its begin to its end in this process."""

    name: str | None
    caller: Caller
    environment: Environment | None = None
    under_way: bool = False
    abandoned: bool = False
    requests: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    """Number of a request to the engine -> its response."""
    num_requests: int = 0


Operation = Callable[..., Coroutine[Any, Any, tuple[Any, ...]]]
"""What a conversation asks for. Takes its run and the values of the request, and returns the message to send."""


class Serving:
    """Receives what conversations ask for, and sends what comes of it."""

    def __init__(
        self, pipe: int, program: Program, factories: Mapping[str | None, Callable[[], Any]], functions: Mapping[str, Tool]
    ) -> None:
        self._pipe, self._program, self._factories, self._functions = pipe, program, factories, functions
        self._runs: dict[int, Run] = {}
        self._idle: dict[str | None, list[Environment]] = {
            name: [] for name in (factories if program.environments else [None, *factories])
        }
        """Environments that a later conversation uses again."""
        self._operations: set[asyncio.Task[None]] = set()

    async def load(self, describes: bool, progress: int, limits: Limits) -> bool:
        """Say that the environments are loaded, or what is wrong with them. ``describes``: send the schemas of their tools."""
        self._loop = asyncio.get_running_loop()
        self._calls = Calls(progress, limits, self._program.key, self._program.timeout_seconds, self._retire)
        described, problem = [], None
        try:
            described = [await self._describe(name) for name in self._idle] if describes else []
        except AgentError as error:
            problem = str(error)
        _send(self._pipe, ("loaded", problem, described))
        return problem is None

    async def _describe(self, name: str | None) -> tuple[str | None, str, bool, list[Any], bool, list[str]]:
        try:
            environment = await self._make(Run(name, Caller(0)), limited=False)
            if is_loop := isinstance(environment.instance, OwnLoop):
                await self._calls.value(Caller(0), "the class", environment.instance.check, environment.thread, limited=False)
        except FailedError as problem:
            source = self._program.environments.get(name) or self._program.agent_loops
            assert source is not None, name
            named = source.name if name in self._program.environments else name
            raise AgentError(f"{source.key}={source.path}: {named}: {problem}. Correct it.") from problem
        self._idle[name].append(environment)
        own = isinstance(environment.instance, OwnTools)
        has_reward = not own and callable(getattr(environment.instance, "get_reward", None))
        if is_loop:
            has_reward = environment.instance.gives_reward
        schemas = [schema_of(tool) for tool in environment.tools.values()]
        owner = type(environment.instance).__name__ if name in self._factories else ""
        return name, owner, has_reward, schemas, is_loop, environment.instance.users if own else []

    def read(self) -> None:
        operations: dict[str, Operation] = {
            "begin": self._begin,
            "call": self._answer_all,
            "finish": self._finish,
            "drive": self._drive,
            "respond": self._respond,
        }
        while True:
            try:
                kind, number, *values = _receive(self._pipe)
            except (EOFError, OSError):
                os._exit(0)
            if kind == "abandon":
                self._loop.call_soon_threadsafe(self._abandon, number)
            elif kind == "generated":
                self._loop.call_soon_threadsafe(self._generated, number, *values)
            else:
                self._loop.call_soon_threadsafe(self._start, operations[kind], number, values)

    def _start(self, operation: Operation, number: int, values: list[Any]) -> None:
        run = self._runs.get(number) or Run(values[0], Caller(number))
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
            message = ("failed", _line(f"raised {raised(problem)}"))
        run.under_way = False
        kind, *rest = message
        if kind in ("finished", "failed") or run.abandoned:
            self._release(run, reusable=kind != "failed")
        if not run.abandoned:
            _send(self._pipe, (kind, run.caller.number, *rest))

    def _abandon(self, number: int) -> None:
        run = self._runs.get(number)
        if run is None:
            return
        run.abandoned = True
        for task in run.caller.tasks:
            task.cancel()
        if not run.under_way:
            self._release(run, reusable=True)

    def _release(self, run: Run, reusable: bool) -> None:
        self._runs.pop(run.caller.number, None)
        if run.environment is None:
            return
        if isinstance(run.environment.instance, OwnTools):
            task = self._loop.create_task(self._end(run))
            self._operations.add(task)
            task.add_done_callback(self._operations.discard)
        elif reusable:
            self._idle[run.name].append(run.environment)
        else:
            self._calls.give_back(run.environment.thread)

    async def _end(self, run: Run) -> None:
        assert run.environment is not None
        try:
            await self._calls.value(run.caller, "release", run.environment.instance.end, run.environment.thread)
        except FailedError as problem:
            logger.warning("%s", problem)
        self._calls.give_back(run.environment.thread)

    # What a conversation asks for.

    async def _begin(self, run: Run, name: str | None, row: Mapping[str, Any], seed: int | None) -> tuple[Any, ...]:
        if name not in self._idle:
            raise FailedError(f"environment={name!r} is none of the environments ({', '.join(map(repr, self._idle))})")
        run.environment = self._idle[name].pop() if self._idle[name] else await self._make(run)
        reset = getattr(run.environment.instance, "reset", None)
        if reset is None:
            return "ready", None
        given = {column: value for column, value in row.items() if name is None or column != "environment"}
        if seed is not None and "seed" in inspect.signature(reset).parameters:
            given.setdefault("seed", seed)
        observation = await self._calls.value(run.caller, "reset", partial(reset, **given), run.environment.thread)
        if not isinstance(observation, str | list | None):
            raise FailedError(f"reset returned {type(observation).__name__}; return a text, a list of messages, or None")
        try:
            size = len(json.dumps(observation))
        except (TypeError, ValueError, RecursionError) as problem:
            raise FailedError(f"reset returned messages that are not plain data ({problem})") from problem
        if size > LARGEST_OBSERVATION:
            raise FailedError(f"reset returned {size} bytes; at most {LARGEST_OBSERVATION} are possible")
        return "ready", _valid(observation)

    async def _make(self, run: Run, limited: bool = True) -> Environment:
        factory, thread = self._factories.get(run.name), self._calls.take_thread()
        if factory is None:
            return Environment(None, dict(self._functions), thread)
        try:
            instance = await self._calls.value(run.caller, "the class", factory, thread, limited)
        except FailedError:
            self._calls.give_back(thread)
            raise
        if not callable(getattr(instance, "reset", None)):
            raise AgentError(
                f"{self._program.environments[run.name].key}: {type(instance).__name__} has no method reset. Define reset(self, "
                "**row), which returns a text for the model, or None."
            )
        methods = tools_of(instance)
        for name in methods.keys() & self._functions.keys():
            raise AgentError(f"{type(instance).__name__}.{name} and a function of tools have the same name. Rename one.")
        return Environment(instance, {**self._functions, **methods}, thread)

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
        plain = [index for index in methods if not is_async(tools[index] or print)]
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
        text, problem = await self._calls.outcome(run.caller, name, partial(tool, **arguments), thread, self._text)
        if problem is None:
            return text, False
        return self._error(words(problem))

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
                "left": lambda: f"(truncated)...{text[len(text) - most :]}",
                "right": lambda: f"{text[:most]}...(truncated)",
                "middle": lambda: f"{text[:half]}...(truncated)...{text[len(text) - half :]}",
            }[side]()
        return _valid(text)

    async def _respond(self, run: Run, messages: list[dict[str, Any]]) -> tuple[Any, ...]:
        assert run.environment is not None
        respond = partial(run.environment.instance.respond, messages)
        text, ends = await self._calls.value(run.caller, "generate_response", respond, run.environment.thread)
        if len(text) > LARGEST_TURN:
            raise FailedError(f"the user's turn has {len(text)} characters; at most {LARGEST_TURN} are possible")
        return "user", _valid(text), ends

    async def _drive(self, run: Run, sampling: Mapping[str, Any]) -> tuple[Any, ...]:
        assert run.environment is not None
        loop: OwnLoop = run.environment.instance
        drive = partial(loop.drive, partial(self._generate, run), sampling)
        sequences, problem = await self._calls.driven(run.caller, "run", drive)
        if problem is not None:
            raise FailedError(f"run raised {raised(problem)}")
        if (size := sum(len(each.ids) for each in sequences)) > LARGEST_IDS:
            raise FailedError(f"run returned {size} tokens; at most {LARGEST_IDS} are possible")
        return "driven", [[each.ids, each.sampled] for each in sequences], loop.num_turns

    async def _generate(self, run: Run, prompt_ids: Sequence[int], sampling: Mapping[str, Any]) -> TokenOutput:
        ids = [int(token) for token in prompt_ids]
        if len(ids) > LARGEST_IDS:
            raise ValueError(f"the prompt has {len(ids)} tokens; at most {LARGEST_IDS} are possible")
        given = json.loads(json.dumps(dict(sampling)))  # plain data, or an error in the user's call
        number, future = run.num_requests, self._loop.create_future()
        run.num_requests, run.requests[number] = number + 1, future
        _send(self._pipe, ("generate", run.caller.number, number, ids, given))
        try:
            with self._calls.waiting(run.caller):
                return TokenOutput(*await future)
        finally:
            del run.requests[number]

    def _generated(self, number: int, request: int, values: Any) -> None:
        run = self._runs.get(number)
        future = None if run is None else run.requests.get(request)
        if future is None or future.done():
            return
        if isinstance(values, str):
            future.set_exception(ValueError(values))
        else:
            token_ids, log_probs, finish_reason = values
            future.set_result((token_ids, log_probs, "completed", finish_reason))

    async def _finish(self, run: Run) -> tuple[Any, ...]:
        environment = run.environment
        assert environment is not None
        get_reward = getattr(environment.instance, "get_reward", None)
        reward = None
        if get_reward is not None:
            given = await self._calls.value(run.caller, "get_reward", get_reward, environment.thread)
            if isinstance(given, dict):
                raise FailedError("get_reward returned a dict; return a number, or None")
            try:
                score = read_score(given)[0]
            except RewardError as problem:
                raise FailedError(f"get_reward {problem}") from problem
            reward = None if math.isnan(score) else score
        owner = type(environment.instance).__name__
        taken = partial(snapshot_of, environment.instance)
        pickles, missing = await self._calls.value(run.caller, "a property", taken, environment.thread)
        return "finished", reward, owner, pickles, missing

    def _retire(self) -> None:
        # A call that nothing can end goes on in this process, so it gets no more conversations.
        _send(self._pipe, ("retire", 0))


def _line(text: str) -> str:
    return shortened(" ".join(text.split()))


def _valid(value: Any) -> Any:
    # Half of a surrogate pair cannot be written to any file.
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, list):
        return [_valid(part) for part in value]
    if isinstance(value, dict):
        return {_valid(name): _valid(part) for name, part in value.items()}
    return value
