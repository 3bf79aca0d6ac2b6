"""Environments and tools as the run sees them: a pool of processes that answers many conversations at once."""

from __future__ import annotations

import base64
import os
import pickle
import select
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from verl_memopt.agents.calls import MOST_THREADS, RUNNING, RUNNING_AT
from verl_memopt.agents.program import BEAT, BEAT_AT, FRAME, Program
from verl_memopt.agents.snapshot import Snapshot
from verl_memopt.distributed.threads import threads_for
from verl_memopt.errors import AgentError, printable
from verl_memopt.rewards.score import InvalidMessageError, Limits, MessageReader
from verl_memopt.rewards.supervised import SupervisedProgram

CHECK_SECONDS = 0.2
"""How often limits and dead processes are checked."""

GRACE_SECONDS = 5.0
"""A process is ended if its event loop has not run for the time limit of a call plus these seconds."""

AWAY_SECONDS = 2.0
"""If the run has not polled for this long, a process may have waited for it, and its silence counts from now on."""

LOAD_SECONDS = 120.0
"""Longest time for the import of the user's files and the creation of one environment of each kind."""

MOST_RESTARTS = 2
"""A conversation that lost its process this often, with no code running that might be to blame, runs alone in a process, where it
finishes or fails."""

PROCESSES_PER_WORKER = 3
"""Bound on the number of processes, with those of conversations that run alone, and those with a call that does not end."""

SAME_HASHES = {"PYTHONHASHSEED": "0"}
"""Without this the order of a set of texts, and so what a tool answers, would differ between two processes and two runs."""


@dataclass(frozen=True)
class EnvironmentKind:
    class_name: str
    """"" = there are only functions."""
    schemas: Sequence[dict[str, Any]]
    """The schemas of its tools, for the chat template."""
    has_reward: bool
    """It has the method ``get_reward``."""
    drives: bool = False
    """It is an agent loop, which drives the conversation itself."""
    users: Sequence[str] = ()
    """Names of those who may answer a turn without calls. A row chooses one."""


# What comes of a conversation's requests. ``conversation`` is the number that ``begin`` got.


@dataclass(frozen=True)
class Ready:
    conversation: int
    observation: str | list[Any] | None
    """What ``reset`` returned."""


@dataclass(frozen=True)
class Answers:
    conversation: int
    answers: Sequence[tuple[str, bool]]
    """The text of each call of the turn, and whether the call failed."""


@dataclass(frozen=True)
class UserTurn:
    """The user has answered a turn without calls."""

    conversation: int
    text: str
    ends: bool
    """The conversation ends with it."""


@dataclass(frozen=True)
class Generate:
    """An agent loop asks for tokens. ``answer_request`` follows."""

    conversation: int
    request: int
    prompt_ids: list[int]
    sampling: Mapping[str, Any]


@dataclass(frozen=True)
class Driven:
    """An agent loop has ended."""

    conversation: int
    sequences: Sequence[tuple[list[int], list[int]]]
    """Token ids, and for each 1 if the engine sampled it. The loop says so; it is not checked yet."""
    num_turns: int
    """0 = the loop does not count turns."""


@dataclass(frozen=True)
class Finished:
    conversation: int
    reward: float | None
    """What ``get_reward`` returned. None = the environment has no such method, or it returned None."""
    snapshot: Snapshot
    """The attributes of the environment, for reward functions that read them."""


@dataclass(frozen=True)
class Failed:
    conversation: int
    reason: str
    """One line."""


@dataclass(frozen=True)
class Restart:
    """The environment is lost through no fault of this conversation, which must begin again from its first turn."""

    conversation: int


Event = Ready | Answers | UserTurn | Generate | Driven | Finished | Failed | Restart


class EnvironmentPool:
    """Runs environments in processes, and hands their answers over as events.

    No method waits for an environment, except :meth:`wait_until_loaded`; :meth:`poll` waits as long as it is told. A conversation
    has one request under way at a time: begin, then calls, then finish. It ends with Finished or Failed, or by :meth:`abandon`.

    An environment that draws random numbers has an argument ``seed`` in its ``reset``, and makes a generator of its own from it.
    It cannot rely on the generators of the process, from which other conversations draw at the same time.

    A process that dies, or that does not react, takes its conversations with it. If the code of only one of them was running,
    that one fails. If it was several, each gets Restart, and runs alone in a process the next time. All others get Restart, and
    share a process again: one crash among hundreds must not start hundreds of processes.

    Args:
        program: The environments and tools, and the limits of one call.
        limits: Limits of a process and of everything that it starts.
        num_workers: Number of processes that conversations share.
        logs: Folder for what environments print, one file per process. None = the standard output of this process.
    """

    def __init__(self, program: Program, limits: Limits, num_workers: int, logs: Path | None = None) -> None:
        self._program, self._limits, self._num_workers, self._logs = program, limits, num_workers, logs
        self._kinds: dict[str | None, EnvironmentKind] | None = None
        self._conversations: dict[int, _Conversation] = {}
        self._runs: dict[int, _Conversation] = {}
        self._num_runs = 0
        self._history: dict[int, _History] = {}
        self._waiting: deque[_Conversation] = deque()
        """Conversations for which there is no process yet."""
        self._events: list[Event] = []
        self._ending: list[SupervisedProgram] = []
        self._processes: list[_Process] = []
        self._checked = self._polled = time.monotonic()
        for _ in range(num_workers):
            self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def wait_until_loaded(self) -> Mapping[str | None, EnvironmentKind]:
        """Return each environment by name, in the order of the program's. None = the only one, or functions alone.

        Raises:
            AgentError: An environment or a tool does not load, or cannot be described to the model.
        """
        while self._kinds is None:
            self._step(CHECK_SECONDS)
        return self._kinds

    def begin(self, conversation: int, environment: str | None, row: Mapping[str, Any], seed: int | None = None) -> None:
        """Make an environment ready, with ``reset(**row)``: Ready follows, perhaps only after another conversation has ended.

        ``seed``: passed to ``reset`` if that has an argument ``seed``, and the row has no column of this name.
        """
        assert conversation not in self._conversations, conversation
        self._num_runs += 1
        begun = _Conversation(conversation, self._num_runs, ("begin", self._num_runs, environment, dict(row), seed))
        self._conversations[conversation] = self._runs[begun.run] = begun
        self._waiting.append(begun)
        self._place()

    def call(self, conversation: int, calls: Sequence[tuple[str, Any]]) -> None:
        """Run the tools of one turn, given as (name, arguments): Answers follows."""
        self._request(conversation, ", ".join(dict.fromkeys(name for name, _ in calls)), "call", list(calls))

    def respond(self, conversation: int, messages: Sequence[Mapping[str, Any]]) -> None:
        """Let the user answer a turn without calls: UserTurn follows. ``messages``: the conversation so far."""
        self._request(conversation, "generate_response", "respond", list(messages))

    def drive(self, conversation: int, sampling: Mapping[str, Any]) -> None:
        """Let an agent loop run: any number of Generate follow, then Driven. ``sampling``: the parameters that it gets."""
        self._request(conversation, "run", "drive", dict(sampling))

    def answer_request(self, conversation: int, request: int, answer: tuple[list[int], list[float] | None, str] | str) -> None:
        """Send what the engine sampled: tokens, log-probs, and why it stopped. A text = the request is refused, and why."""
        found = self._conversations.get(conversation)
        if found is not None and found.process is not None:
            found.process.send(("generated", found.run, request, answer))

    def finish(self, conversation: int) -> None:
        """Ask for the reward and the snapshot: Finished follows."""
        self._request(conversation, "get_reward", "finish")

    def abandon(self, conversation: int) -> None:
        """Forget a conversation, whatever it is doing."""
        self._history.pop(conversation, None)
        found = self._conversations.get(conversation)
        if found is None:
            return
        if found.process is not None:
            found.process.send(("abandon", found.run))
        self._forget(found)

    def poll(self, seconds: float) -> list[Event]:
        """Return what has happened, and wait up to ``seconds`` if there is nothing yet.

        Raises:
            AgentError: The environments do not load.
        """
        deadline = time.monotonic() + seconds
        self._step(0.0)
        while not self._events and (left := deadline - time.monotonic()) > 0:
            self._step(min(left, CHECK_SECONDS))
        events, self._events = self._events, []
        return events

    def fds(self) -> list[int]:
        """Return file descriptors that are readable if there is news. Only ``poll`` keeps the limits, so call it regularly."""
        return [process.fd for process in self._processes]

    def pids(self) -> list[int]:
        return [process.program.pid for process in self._processes]

    def close(self) -> None:
        ending = [*self._ending, *(process.program for process in self._processes)]
        for program in ending:  # all of them end at the same time
            program.release()
        for program in ending:
            program.close()
        self._ending, self._processes = [], []
        self._conversations, self._runs, self._waiting = {}, {}, deque()

    # Conversations and their processes.

    def _request(self, conversation: int, doing: str, *request: Any) -> None:
        found = self._conversations[conversation]
        assert found.process is not None, conversation
        assert not found.doing, (conversation, found.doing)
        found.doing = doing
        kind, *values = request
        found.process.send((kind, found.run, *values))

    def _place(self) -> None:
        """Give waiting conversations a process."""
        for _ in range(len(self._waiting)):
            begun = self._waiting.popleft()
            alone = self._history.get(begun.number, _History()).alone
            shared = [process for process in self._processes if not (process.retired or process.alone)]
            process: _Process | None = None
            if alone or len(shared) < self._num_workers:
                process = self._start(alone) if len(self._processes) < PROCESSES_PER_WORKER * self._num_workers else None
            if process is None and not alone and shared:
                process = min(shared, key=lambda process: len(process.runs))
            if process is None:
                self._waiting.append(begun)
                continue
            begun.process, begun.doing = process, "reset"
            process.runs[begun.run] = begun
            process.send(begun.request)

    def _start(self, alone: bool = False) -> _Process:
        number = next(number for number in range(len(self._processes) + 1) if all(p.number != number for p in self._processes))
        log = None if self._logs is None else self._logs / f"environments_{number}.log"
        describes = not self._processes and self._kinds is None
        threads = threads_for(self._num_workers)
        program = SupervisedProgram("verl_memopt.agents.program", self._limits, threads, log, SAME_HASHES)
        process = _Process(program, number, log, alone)
        process.send((self._program, describes))
        self._processes.append(process)
        return process

    def _forget(self, found: _Conversation) -> None:
        del self._conversations[found.number], self._runs[found.run]
        if found.process is None:
            self._waiting.remove(found)
            return
        process = found.process
        process.runs.pop(found.run, None)
        if process in self._processes and not process.runs and (process.retired or process.alone):
            self._end(process)
        self._place()

    def _end(self, process: _Process) -> None:
        process.program.release()
        self._processes.remove(process)
        self._ending.append(process.program)

    # What processes send.

    def _step(self, seconds: float) -> None:
        now = time.monotonic()
        if now - self._polled > AWAY_SECONDS:
            for process in self._processes:
                process.heard = now
        self._polled = now
        self._exchange(seconds)
        if time.monotonic() - self._checked > CHECK_SECONDS:
            self._check()

    def _exchange(self, seconds: float) -> None:
        poller = select.poll()
        processes = {process.fd: process for process in self._processes}
        for fd, process in processes.items():
            poller.register(fd, select.POLLIN | (select.POLLOUT if process.unsent else 0))
        for fd, kinds in poller.poll(seconds * 1000):
            process = processes[fd]
            if process not in self._processes:
                continue
            if kinds & select.POLLOUT:
                process.flush()
            if kinds & ~select.POLLOUT:
                self._read(process)

    def _read(self, process: _Process) -> None:
        try:
            data = os.read(process.fd, 1 << 20)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._lose(process, f"ended its process, which {process.program.end_reason()}")
            return
        try:
            for _, message in process.reader.feed(data):
                self._take(process, *message)
        except (InvalidMessageError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as problem:
            text = f"sent what is no answer ({problem}); an environment must not use file descriptors that it did not open"
            self._lose(process, text)

    def _take(self, process: _Process, kind: str, number: Any, *values: Any) -> None:
        if kind == "loaded":
            if number is not None:
                raise AgentError(str(number))
            process.loaded, process.heard = True, time.monotonic()
            if values[0]:
                self._kinds = {
                    name: EnvironmentKind(owner, schemas, has, drives, users)
                    for name, owner, has, schemas, drives, users in values[0]
                }
            return
        if kind == "retire":
            process.retired = True
            if not process.runs:
                self._end(process)
            return
        found = self._runs.get(int(number))
        if found is None or found.process is not process:  # it was abandoned
            return
        self._events.append(_event(found.number, kind, *values))
        if kind != "generate":
            found.doing = ""
        if kind in ("finished", "failed"):
            self._history.pop(found.number, None)
            self._forget(found)

    def _check(self) -> None:
        now = self._checked = time.monotonic()
        for program in [program for program in self._ending if not program.is_alive()]:
            program.close()
            self._ending.remove(program)
        for process in list(self._processes):
            if not process.loaded:
                if now - process.started > LOAD_SECONDS:
                    raise AgentError(
                        f"{self._program.key}: the environments did not load in {LOAD_SECONDS:.0f} s. Move long work into reset."
                    )
                continue
            beat = process.program.shared(BEAT_AT, BEAT.size)
            if beat != process.beat or not any(found.doing for found in process.runs.values()):
                process.beat, process.heard = beat, now
            elif now - process.heard > self._program.timeout_seconds + GRACE_SECONDS:
                limit = f"{self._program.key}.timeout_seconds={self._program.timeout_seconds:g}"
                self._lose(process, f"took longer than {limit}, and let nothing else run in its process")

    def _lose(self, process: _Process, failure: str) -> None:
        if not process.loaded and self._kinds is None:
            raise AgentError(
                f"{self._program.key}: the process that imports the environments {failure}{process.program.last_output()}\n"
                "Import their file alone to see why."
            )
        running = process.running()
        suspects = [found for run, found in process.runs.items() if run in running]
        # The code of a conversation that has failed before may still run, and be to blame.
        blamed = list(process.runs.values()) if process.alone else suspects if len(running) == 1 else []
        lost = list(process.runs.values())
        process.runs = {}
        self._end(process)
        # What is not handed over yet is void, and a caller that went on with it would find the conversation gone.
        numbers = {found.number for found in lost}
        self._events = [event for event in self._events if event.conversation not in numbers]
        where = f"; its output is in {process.log}" if process.log is not None and process.log.is_file() else ""
        for found in lost:
            if found in blamed:
                self._history.pop(found.number, None)
                self._events.append(Failed(found.number, printable(f"{found.doing or 'the environment'} {failure}{where}")))
            else:
                history = self._history.setdefault(found.number, _History())
                history.restarts += not suspects
                history.alone |= found in suspects or history.restarts >= MOST_RESTARTS
                self._events.append(Restart(found.number))
            self._forget(found)
        self._place()


def _event(number: int, kind: str, *values: Any) -> Event:
    if kind == "ready":
        return Ready(number, *values)
    if kind == "answers":
        return Answers(number, [(str(text), bool(failed)) for text, failed in values[0]])
    if kind == "user":
        text, ends = values
        return UserTurn(number, str(text), bool(ends))
    if kind == "generate":
        request, ids, sampling = values
        return Generate(number, int(request), _whole_numbers(ids), dict(sampling))
    if kind == "driven":
        sequences = [(_whole_numbers(ids), _whole_numbers(sampled)) for ids, sampled in values[0]]
        return Driven(number, sequences, int(values[1]))
    if kind == "finished":
        reward, owner, pickles, missing = values
        snapshot = Snapshot(owner, {name: base64.b64decode(data) for name, data in pickles.items()}, missing)
        return Finished(number, None if reward is None else float(reward), snapshot)
    if kind == "failed":
        return Failed(number, printable(str(values[0])))
    raise ValueError(f"a message of kind {kind!r:.50}")


def _whole_numbers(values: Any) -> list[int]:
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise ValueError("ids that are no whole numbers")
    return values


@dataclass
class _History:
    """What is known of a conversation that lost its environment, until it ends."""

    restarts: int = 0
    alone: bool = False


@dataclass(eq=False)
class _Conversation:
    number: int
    run: int
    """Number of this attempt, which no other attempt has."""
    request: tuple[Any, ...]
    process: _Process | None = None
    doing: str = ""
    """The request that is under way, for errors."""


@dataclass(eq=False)
class _Process:
    program: SupervisedProgram
    number: int
    log: Path | None
    alone: bool
    """It has one conversation, and ends with it."""
    loaded: bool = False
    retired: bool = False
    """A call in it does not end, so it gets no further conversation."""
    runs: dict[int, _Conversation] = field(default_factory=dict)
    unsent: bytearray = field(default_factory=bytearray)
    reader: MessageReader = field(default_factory=MessageReader)
    started: float = field(default_factory=time.monotonic)
    beat: bytes = b""
    heard: float = field(default_factory=time.monotonic)
    """When ``beat`` was seen to change."""

    def __post_init__(self) -> None:
        self.fd = self.program.connection.fileno()
        os.set_blocking(self.fd, False)

    def send(self, message: tuple[Any, ...]) -> None:
        data = pickle.dumps(message)
        self.unsent += FRAME.pack(len(data)) + data
        self.flush()

    def flush(self) -> None:
        try:
            while self.unsent:
                del self.unsent[: os.write(self.fd, self.unsent)]
        except BlockingIOError:
            return
        except ConnectionError:  # reading finds the end of the process
            self.unsent.clear()

    def running(self) -> set[int]:
        """Return the runs whose code is running, also of conversations that this process has no more."""
        record = self.program.shared(RUNNING_AT, RUNNING.size * MOST_THREADS)
        record = record[: len(record) // RUNNING.size * RUNNING.size]
        return {run for (run,) in RUNNING.iter_unpack(record)} - {0}
