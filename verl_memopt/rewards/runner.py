"""Scores rows in reward processes, with a time limit per row. An error names the row on which the function failed."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Self

from verl_memopt.config import schema
from verl_memopt.config.reward_rules import rows_at_a_time
from verl_memopt.distributed.threads import threads_for
from verl_memopt.errors import RewardError, Stopped, printable
from verl_memopt.recipes import RECIPES
from verl_memopt.rewards.sandbox import Sandbox, share_out
from verl_memopt.rewards.score import (
    LARGEST_MESSAGE,
    PROGRESS,
    InvalidMessageError,
    Limits,
    MessageReader,
    Outcome,
    RewardResult,
    RewardRow,
    read_outcomes,
)
from verl_memopt.rewards.scorer import FunctionCall
from verl_memopt.rewards.supervised import SupervisedProgram

logger = logging.getLogger(__name__)

CHUNKS_PER_PROCESS = 4
"""Number of chunks per process. With several, an idle process can take rows that a slow process has not begun."""

CHECK_SECONDS = 0.2
"""Longest wait for scores before time limits and dead processes are checked."""

Chunk = Sequence[int]
"""Indices of the rows that a process gets together."""


@dataclass(eq=False)
class RewardRunner:
    """Runs the reward function in processes, which start at once and in the background.

    A row that raises, hangs, kills its process or returns no finite score ends the run with a RewardError that names the row.
    With ``on_error=score`` the row gets the fallback score and is marked as failed. Use as a context manager, or call
    :meth:`close`, to end the processes.

    Args:
        custom: The ``custom_reward_function`` section of the settings.
        num_workers: Number of reward processes; the manager ``prime`` may start more.
        logs: Folder for what the function prints, one file per process. None = the standard output of this process.
        manager: How rows reach the function, ``reward_model.reward_manager``.
        max_concurrent: Rows that an async function scores at the same time in one process.
        sandbox: The service that runs programs for the rules, ``reward_model.sandbox_fusion``. None = no service.
        tolerant_rules: Score GSM8K and MATH by rules that are more lenient than verl's, ``reward_model.tolerant_rules``.
    """

    custom: schema.CustomReward
    num_workers: int
    logs: Path | None = None
    manager: str = schema.RewardModel.reward_manager
    max_concurrent: int = schema.RewardModel.max_concurrent
    sandbox: schema.SandboxFusion | None = None
    tolerant_rules: bool = schema.RewardModel.tolerant_rules

    def __post_init__(self) -> None:
        number, sandbox = num_processes(self.manager, self.num_workers), self.sandbox
        self._sandboxes: Sequence[Sandbox | None] = [None] * number if sandbox is None else share_out(sandbox, number)
        self._manager = MANAGERS[self.manager]
        self.stopped: Callable[[], bool] = lambda: False
        """Called while rows are scored. Once it returns True, ``score`` abandons the rows and raises Stopped."""
        self.trainer_state: dict[str, int] = {}
        """``global_step`` and ``max_steps`` of the run, for functions that have the argument ``trainer_state``."""
        self._processes = [self._start(index) for index in range(len(self._sandboxes))]
        self._begun: Round | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def check(self) -> None:
        for process in self._processes:
            process.wait_until_loaded()

    def begin(self, num_rows: int) -> Round:
        if self._begun is not None:
            # The earlier round was abandoned. Its scores must not be mistaken for scores of the new round.
            self.close()
        if not self._processes:
            self._processes = [self._start(index) for index in range(len(self._sandboxes))]
        self._begun = Round(num_rows, self)
        return self._begun

    def score(self, rows: Sequence[RewardRow], begun: Round | None = None) -> list[RewardResult]:
        """Return the result of each row, in order.

        ``begun``: a round of :meth:`begin` that has some of the rows already. None = a new round.

        Raises:
            RewardError: A row failed, with ``on_error=raise``. The message names the row.
            Stopped: ``stopped`` returned True.
        """
        try:
            round_ = self.begin(len(rows)) if begun is None else begun
            results = round_.finish(rows)
        except BaseException:
            self.close()
            raise
        self._begun = None
        failures, fallback = round_.failures, self.custom.fallback_score
        if failures:
            first = min(failures)
            logger.warning("the reward function failed on %d of %d rows, which get the fallback score %s; the first is %s: %s",
                           len(failures), len(rows), fallback, rows[first].address, failures[first])  # fmt: skip
        without = [row for row, result in zip(rows, results, strict=True) if math.isnan(result.score)]
        if without:  # the warning begins with the words of TRL's warning
            kwargs = {**without[0].extra_info, "completion": without[0].solution}
            logger.warning(
                "All reward functions returned None for the following kwargs: %.500s\nThis is %s, the first of %d of %d rows "
                "without a reward. Nothing is learned from these rows. Let one function return a number.",
                kwargs, without[0].address, len(without), len(rows),
            )  # fmt: skip
        return results

    def close(self) -> None:
        for process in self._processes:
            process.close()
        self._processes, self._begun = [], None

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def _start(self, index: int) -> RewardProcess:
        custom = self.custom
        log = None if self.logs is None else self.logs / f"process_{index}.log"
        sandbox = self._sandboxes[index]
        rows = self.max_concurrent if sandbox is None else min(self.max_concurrent, rows_at_a_time(sandbox.slots))
        call = FunctionCall(
            path=custom.path,
            name=custom.name,
            reward_kwargs={"tolerant": self.tolerant_rules} if custom.path is None else dict(custom.reward_kwargs),
            whole_batch=self._manager.whole_batch,
            max_concurrent=rows,
            timeout_seconds=custom.timeout_seconds,
            sandbox=sandbox,
        )
        return RewardProcess(call, Limits.of(custom), threads_for(len(self._sandboxes)), log)


class Round:
    """The rows of one call of ``score``: the waiting rows, the rows that a process is scoring, and the results so far."""

    def __init__(self, num_rows: int, runner: RewardRunner) -> None:
        self.failures: dict[int, str] = {}
        self.busy_seconds = 0.0
        """Seconds of :meth:`turn` in which processes were scoring."""
        self.error: BaseException | None = None
        """An error of another thread, which :meth:`finish` raises."""
        self._rows: list[RewardRow | None] = [None] * num_rows
        self._processes, self._custom, self._manager = runner._processes, runner.custom, runner._manager
        self._start, self._stopped = runner._start, runner.stopped
        self._results: dict[int, RewardResult] = {}
        self._waiting: deque[Chunk] = deque()
        self._at_work: dict[RewardProcess, Chunk] = {}
        self._retried: set[int] = set()

    def add(self, rows: Mapping[int, RewardRow]) -> None:
        new = [index for index in rows if self._rows[index] is None]
        for index in new:
            self._rows[index] = rows[index]
        if new:
            self._waiting = deque(self._pieces(sorted([*itertools.chain.from_iterable(self._waiting), *new])))

    def finish(self, rows: Sequence[RewardRow]) -> list[RewardResult]:
        """Wait for all results and return them in row order. ``rows`` are all rows, including those added before."""
        if self.error is not None:
            raise self.error
        self.add(dict(enumerate(rows)))
        while len(self._results) < len(self._rows):
            self.turn(CHECK_SECONDS)
        return [self._results[index] for index in range(len(self._rows))]

    def turn(self, seconds: float) -> None:
        if self._stopped():
            raise Stopped
        self._hand_out()
        began, busy = time.monotonic(), bool(self._at_work)
        wait([process.connection for process in self._at_work], min(seconds, self._custom.timeout_seconds / 4))
        self.busy_seconds += (time.monotonic() - began) * busy
        for process in list(self._at_work):
            self._collect(process)

    def _pieces(self, indices: Sequence[int]) -> list[Chunk]:
        if self._manager.whole_batch:
            return [indices] if indices else []
        if self._manager.row_by_row and indices:
            self._processes[0].wait_until_loaded()
            # An async function scores many rows at the same time by itself. Single rows would only make it slower.
            if not self._processes[0].runs_concurrently:
                return [[index] for index in indices]
        return _chunks(indices, len(self._processes))

    def _hand_out(self) -> None:
        idle = [process for process in self._processes if process not in self._at_work]
        for process in idle[: len(self._waiting)]:
            # If a process could not load the function, `send` below reports the reason.
            if process.loaded and (not process.program.is_alive() or process.has_news()):
                # A process that is ending would lose the row, so a new one is started. A process without rows has nothing to
                # send. If data has arrived, the function has forked, or has written to the connection itself.
                process = self._start_again(process)
            chunk = self._waiting.popleft()
            self._at_work[process] = chunk
            process.send(chunk, [row for index in chunk if (row := self._rows[index]) is not None])

    def _collect(self, process: RewardProcess) -> None:
        chunk = self._at_work[process]
        try:
            outcomes = process.receive({index for index in chunk if index not in self._results})
        except InvalidMessageError as problem:
            text = f"sent what is no score ({problem}). The reward function must not use file descriptors that it did not open."
            self._replace(process, text, blames_row=True)
            return
        for outcome in outcomes or []:
            self._record(*outcome)
        if all(index in self._results for index in self._at_work[process]):
            del self._at_work[process]
        elif outcomes is None or not (outcomes or process.program.is_alive()):
            self._replace(process, f"ended its process, which {process.program.ending()}")
        elif not outcomes and process.position()[1] > self._custom.timeout_seconds:
            limit = f"custom_reward_function.timeout_seconds={self._custom.timeout_seconds:g}"
            self._replace(process, f"took longer than {limit}{process.program.last_output()}")
        elif process.silent_seconds() > (seconds := SILENCE * self._custom.timeout_seconds + SILENCE_SECONDS):
            self._replace(process, f"sent no score for {seconds:.0f} s{process.program.last_output()}", blames_row=True)

    def _replace(self, process: RewardProcess, failure: str, blames_row: bool = False) -> None:
        """Fail the row that the process was scoring, and put the rest of its chunk at the head of the queue.

        If a process died between rows, something else ended it, and no row fails. If that happens again, the next row fails.

        With ``blames_row`` one of the rows is at fault, but the process does not say which. All are tried again, one by one, and
        a row that fails alone is the faulty one. If one call scores all rows, they fail together.
        """
        at, _ = process.position()
        chunk = self._at_work.pop(process)
        self._start_again(process)
        missing = [index for index in chunk if index not in self._results]
        is_alone = len(missing) == 1 or self._manager.whole_batch
        if is_alone if blames_row else at in missing or missing[0] in self._retried:
            failed = at if at in missing else missing[0]
            for index in missing if self._manager.whole_batch else [failed]:
                self._record(index, 0.0, {}, failure)
        if not blames_row:
            self._retried.add(missing[0])
        if self._manager.whole_batch:
            self._waiting.extend([chunk] if chunk[0] not in self._results else [])
        else:
            self._waiting.extendleft([index] for index in reversed(missing) if index not in self._results)

    def _start_again(self, process: RewardProcess) -> RewardProcess:
        process.close()
        place = self._processes.index(process)
        self._processes[place] = self._start(place)
        return self._processes[place]

    def _record(self, index: int, score: float, extra: dict[str, Any], failure: str | None) -> None:
        if failure is None:
            self._results[index] = RewardResult(score, extra)
            return
        failure = printable(failure)
        if self._custom.on_error != "score":
            name = "of the rules" if self._custom.path is None else f"{self._custom.name} of {self._custom.path}"
            row = self._rows[index]
            assert row is not None, index
            raise RewardError(
                f"{row.address}: the reward function {name} {failure}\nCorrect it, or set "
                "custom_reward_function.on_error=score to continue with custom_reward_function.fallback_score."
            )
        self.failures[index] = failure
        self._results[index] = RewardResult(self._custom.fallback_score, {}, failed=True)


def _chunks(indices: Sequence[int], num_processes: int) -> list[Chunk]:
    size = max(1, math.ceil(len(indices) / (1 if num_processes == 1 else num_processes * CHUNKS_PER_PROCESS)))
    return [indices[first : first + size] for first in range(0, len(indices), size)]


# Reward managers: how the rows of a step reach the reward function.


MOST_PROCESSES = 64
"""Largest number of processes of the manager ``prime``, as in verl."""


@dataclass(frozen=True)
class Manager:
    whole_batch: bool = False
    """The function is called once, with lists of the arguments of all rows."""
    row_by_row: bool = False
    """A process gets one row at a time, so that a slow row delays no other row. There is at least one process per core."""
    calls_function: bool = True
    """False = a model of a recipe scores in the workers, and there are no reward processes."""


MANAGERS = {
    "naive": Manager(),
    "batch": Manager(whole_batch=True),
    "dapo": Manager(),
    "prime": Manager(row_by_row=True),
    **dict.fromkeys(RECIPES, Manager(calls_function=False)),
}
"""Value of ``reward_model.reward_manager`` -> manager. The trainer subtracts DAPO's penalty, because it knows the lengths."""


def num_processes(manager: str, num_workers: int) -> int:
    if not MANAGERS[manager].calls_function:
        return 0
    cores = len(os.sched_getaffinity(0)) if MANAGERS[manager].row_by_row else 0
    return max(num_workers, min(MOST_PROCESSES, cores))


# One reward process as the run sees it: start it, send rows, receive scores, find the row that it is scoring, and end it.


SILENCE, SILENCE_SECONDS = 2, 10.0
"""A process is ended if it sends no outcome for ``SILENCE`` time limits of a row plus ``SILENCE_SECONDS``. An outcome may wait
for the next one before it is sent, so one time limit is not enough."""

LOAD_SECONDS = 120.0
"""Largest time for the import of the file with the reward function."""


class RewardProcess:
    """A process that runs one reward function. It starts in the background.

    ``threads``: OMP_NUM_THREADS of the function, which may run a model. ``log``: file for the output of the function; None = the
    standard output of this process.
    """

    def __init__(self, call: FunctionCall, limits: Limits, threads: int, log: Path | None = None) -> None:
        self.runs_concurrently = False
        """The function is async and scores many rows at the same time. Known only after the function is loaded."""
        self.program = SupervisedProgram("verl_memopt.rewards.scorer", limits, threads, log)
        self.connection = self.program.connection
        self.connection.send(call)
        self._reader, self._round, self._heard = MessageReader(), 0, time.monotonic()
        self._started = time.monotonic()
        self.loaded = False
        """The function is imported."""

    @property
    def pid(self) -> int:
        return self.program.pid

    def wait_until_loaded(self) -> None:
        if self.loaded:
            return
        try:
            messages: list[Any] = []
            while not messages:
                if not self.connection.poll(max(0.0, self._started + LOAD_SECONDS - time.monotonic())):
                    raise RewardError(
                        f"custom_reward_function.path: the file did not finish importing in {LOAD_SECONDS:.0f} s. "
                        "Move long work out of its top level."
                    )
                messages = self._messages()
            problem, concurrent = messages[0]
            self.runs_concurrently = bool(concurrent)
        except (InvalidMessageError, TypeError, ValueError) as error:
            raise RewardError(
                f"custom_reward_function.path: the import of the file sent what is no answer ({error}). It must not use file "
                "descriptors that it did not open."
            ) from error
        except (EOFError, ConnectionError):
            ending = self.program.ending()
            problem = f"custom_reward_function.path: the process that imports the file {ending}. Import it alone to see why."
        if problem is not None:
            raise RewardError(str(problem))
        self.loaded = True

    def send(self, indices: Sequence[int], rows: Sequence[RewardRow]) -> None:
        # A dead process raises no error here; receive() reports it.
        self.wait_until_loaded()
        self._round += 1
        self._heard = time.monotonic()
        sent = [(row.data_source, row.solution, row.ground_truth, row.extra_info) for row in rows]
        # A process that reads nothing from the connection is found later, because it sends nothing.
        with contextlib.suppress(ConnectionError, BlockingIOError):
            self.connection.send((self._round, indices, sent))

    def receive(self, expected: Collection[int]) -> list[Outcome] | None:
        """Return the outcomes that have arrived, or None if the process has died. ``expected``: the rows without an outcome.

        Raises:
            InvalidMessageError: Something else than outcomes of these rows has arrived.
        """
        # `alive` must be read before the poll. Otherwise outcomes that a process sends just before its death would be lost.
        alive, outcomes, left = self.program.is_alive(), list[Outcome](), set(expected)
        try:
            for value in self._messages() if self.connection.poll() else ():
                read = read_outcomes(value, left)
                left -= {index for index, *_ in read}
                outcomes += read
        except (EOFError, ConnectionError):
            return outcomes or None
        if outcomes:
            self._heard = time.monotonic()
        return outcomes if outcomes or alive else None

    def _messages(self) -> list[Any]:
        data = os.read(self.connection.fileno(), LARGEST_MESSAGE)
        if not data:
            raise EOFError
        # A message of an earlier round is from a process that the function has forked.
        return [value for number, value in self._reader.feed(data) if number == self._round]

    def has_news(self) -> bool:
        try:
            return self._reader.holds_part or self.connection.poll()
        except (EOFError, ConnectionError):
            return True

    def silent_seconds(self) -> float:
        return time.monotonic() - self._heard

    def position(self) -> tuple[int, float]:
        """Return the index of the row that is being scored (-1 = none) and the seconds since it began."""
        record = self.program.shared(0, PROGRESS.size)
        index, since = PROGRESS.unpack(record) if len(record) == PROGRESS.size else (-1, 0.0)
        return index, time.monotonic() - since if index >= 0 else 0.0

    def close(self) -> None:
        self.program.close()
