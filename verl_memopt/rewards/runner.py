"""Scores rows in reward processes, with a time limit per row, and names the row on which a function failed."""

from __future__ import annotations

import itertools
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Self

from verl_memopt.config import schema
from verl_memopt.config.reward_rules import rows_at_a_time
from verl_memopt.errors import RewardError, Stopped
from verl_memopt.recipes.registry import RECIPES
from verl_memopt.rewards.process import RewardProcess
from verl_memopt.rewards.sandbox import Sandbox, share_out
from verl_memopt.rewards.score import Limits, RewardResult, RewardRow, printable
from verl_memopt.rewards.scorer import FunctionCall

logger = logging.getLogger(__name__)

CHUNKS_PER_PROCESS = 4
"""Pieces per process, so that an idle process can take over rows of a slow one."""

CHECK_SECONDS = 0.2
"""Longest wait for scores before time limits and deaths are checked."""

Chunk = Sequence[int]
"""Indices of rows that one process gets at a time."""


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
        max_concurrent: Rows that an async function has under way at a time in one process.
        sandbox: The service that runs programs for the rules, ``reward_model.sandbox_fusion``. None = there is none.
        tolerant_rules: Rules that forgive more than verl's score GSM8K and MATH, ``reward_model.tolerant_rules``.
    """

    custom: schema.CustomReward
    num_workers: int
    logs: Path | None = None
    manager: str = schema.RewardModel.reward_manager
    max_concurrent: int = schema.RewardModel.max_concurrent
    sandbox: schema.SandboxFusion | None = None
    tolerant_rules: bool = schema.RewardModel.tolerant_rules

    def __post_init__(self) -> None:
        """Start the processes."""
        number, sandbox = num_processes(self.manager, self.num_workers), self.sandbox
        self._sandboxes: Sequence[Sandbox | None] = [None] * number if sandbox is None else share_out(sandbox, number)
        self._manager = MANAGERS[self.manager]
        self.stopped: Callable[[], bool] = lambda: False
        """Called while rows are scored. Once it returns True, the rows are abandoned and ``score`` raises Stopped."""
        self.trainer_state: dict[str, int] = {}
        """Where the run is: ``global_step`` and ``max_steps``, for functions that ask for it."""
        self._processes = [self._start(index) for index in range(len(self._sandboxes))]
        self._begun: Round | None = None

    def __enter__(self) -> Self:
        """Return the runner itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """End the processes."""
        self.close()

    def check(self) -> None:
        """Wait until every process has loaded the function.

        Raises:
            RewardError: A process cannot load it.
        """
        for process in self._processes:
            process.wait_until_loaded()

    def begin(self, num_rows: int) -> Round:
        """Begin to score rows that come one after another. :meth:`score` ends it."""
        if self._begun is not None:
            # The scores of that round were never asked for, and must not be taken for those of this one.
            self.close()
        if not self._processes:
            self._processes = [self._start(index) for index in range(len(self._sandboxes))]
        self._begun = Round(num_rows, self)
        return self._begun

    def score(self, rows: Sequence[RewardRow], begun: Round | None = None) -> list[RewardResult]:
        """Return the result of each row, in order.

        Args:
            rows: The rows.
            begun: The round of :meth:`begin` that has some of them already. None = a new one.

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
        return results

    def close(self) -> None:
        """End all processes. A later :meth:`score` starts new ones."""
        for process in self._processes:
            process.close()
        self._processes, self._begun = [], None

    def pids(self) -> list[int]:
        """Return the process ids of the supervisors, one per reward process."""
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
        return RewardProcess(call, Limits.of(custom), log)


class Round:
    """The rows of one call of ``score``: which wait, which process scores which rows, and the results so far."""

    def __init__(self, num_rows: int, runner: RewardRunner) -> None:
        """Begin without rows. ``num_rows`` will come."""
        self.failures: dict[int, str] = {}
        self.busy_seconds = 0.0
        """How long processes were at work in :meth:`turn`."""
        self.error: BaseException | None = None
        """What went wrong in another thread. :meth:`finish` raises it."""
        self._rows: list[RewardRow | None] = [None] * num_rows
        self._processes, self._custom, self._manager = runner._processes, runner.custom, runner._manager
        self._start, self._stopped = runner._start, runner.stopped
        self._results: dict[int, RewardResult] = {}
        self._waiting: deque[Chunk] = deque()
        self._at_work: dict[RewardProcess, Chunk] = {}
        self._retried: set[int] = set()

    def add(self, rows: Mapping[int, RewardRow]) -> None:
        """Take rows by index. A row that is there already stays as it is."""
        new = [index for index in rows if self._rows[index] is None]
        for index in new:
            self._rows[index] = rows[index]
        if new:
            self._waiting = deque(self._pieces(sorted([*itertools.chain.from_iterable(self._waiting), *new])))

    def finish(self, rows: Sequence[RewardRow]) -> list[RewardResult]:
        """Return the results in row order, once all are there. ``rows`` are all rows, also those that came before."""
        if self.error is not None:
            raise self.error
        self.add(dict(enumerate(rows)))
        while len(self._results) < len(self._rows):
            self.turn(CHECK_SECONDS)
        return [self._results[index] for index in range(len(self._rows))]

    def turn(self, seconds: float) -> None:
        """Hand out waiting rows, and take the scores that arrive within so many seconds.

        Raises:
            RewardError, Stopped: As :meth:`RewardRunner.score`.
        """
        if self._stopped():
            raise Stopped
        self._hand_out()
        began, busy = time.monotonic(), bool(self._at_work)
        wait([process.connection for process in self._at_work], min(seconds, self._custom.timeout_seconds / 4))
        self.busy_seconds += (time.monotonic() - began) * busy
        for process in list(self._at_work):
            self._collect(process)

    def _pieces(self, indices: Sequence[int]) -> list[Chunk]:
        """Return the pieces in which rows are handed out."""
        if self._manager.whole_batch:
            return [indices] if indices else []
        if self._manager.row_by_row and indices:
            self._processes[0].wait_until_loaded()
            if not self._processes[0].runs_concurrently:
                return [[index] for index in indices]
        return _chunks(indices, len(self._processes))

    def _hand_out(self) -> None:
        idle = [process for process in self._processes if process not in self._at_work]
        for process in idle[: len(self._waiting)]:
            # A process that could not load the function says why when rows are sent to it.
            if process.loaded and not process.is_alive():
                # The function's own process may live a moment longer, and would take a row with it.
                process = self._start_again(process)
            chunk = self._waiting.popleft()
            self._at_work[process] = chunk
            process.send(chunk, [row for index in chunk if (row := self._rows[index]) is not None])

    def _collect(self, process: RewardProcess) -> None:
        """Record what ``process`` has sent. Replace it if it has died or is over the time limit."""
        outcomes = process.receive()
        for outcome in outcomes or []:
            self._record(*outcome)
        if all(index in self._results for index in self._at_work[process]):
            del self._at_work[process]
        elif outcomes is None or not (outcomes or process.is_alive()):
            self._replace(process, f"ended its process, which {process.ending()}")
        elif not outcomes and process.position()[1] > self._custom.timeout_seconds:
            limit = f"custom_reward_function.timeout_seconds={self._custom.timeout_seconds:g}"
            self._replace(process, f"took longer than {limit}{process.last_output()}")

    def _replace(self, process: RewardProcess, failure: str) -> None:
        """Fail the row that the process was scoring, and queue the rest of its chunk again, first in line.

        If a process died between rows, something else ended it, and no row fails. If that happens again, the next row fails.
        Where one call scores all rows, they fail together.
        """
        at, _ = process.position()
        chunk = self._at_work.pop(process)
        self._start_again(process)
        missing = [index for index in chunk if index not in self._results]
        if at in missing or missing[0] in self._retried:
            failed = at if at in missing else missing[0]
            for index in missing if self._manager.whole_batch else [failed]:
                self._record(index, 0.0, {}, failure)
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
            of = "of the rules" if self._custom.path is None else f"{self._custom.name} of {self._custom.path}"
            row = self._rows[index]
            assert row is not None, index
            raise RewardError(
                f"{row.address}: the reward function {of} {failure}\nCorrect it, or set "
                "custom_reward_function.on_error=score to continue with custom_reward_function.fallback_score."
            )
        self.failures[index] = failure
        self._results[index] = RewardResult(self._custom.fallback_score, {}, failed=True)


def _chunks(indices: Sequence[int], num_processes: int) -> list[Chunk]:
    """Return even pieces of some rows: one piece for one process, several per process for more."""
    size = max(1, math.ceil(len(indices) / (1 if num_processes == 1 else num_processes * CHUNKS_PER_PROCESS)))
    return [indices[first : first + size] for first in range(0, len(indices), size)]


# Reward managers: how the rows of a step reach the reward function.


MOST_PROCESSES = 64
"""Most processes of ``prime``, as in verl."""


@dataclass(frozen=True)
class Manager:
    """How rows are handed to the reward processes."""

    whole_batch: bool = False
    """The function is called once, with the lists of all rows."""
    row_by_row: bool = False
    """A process gets one row at a time, so that a slow row delays no other, and there is one process per core at least."""
    calls_function: bool = True
    """There is a reward function. False = a recipe's model in the workers scores, and there are no reward processes."""


MANAGERS = {
    "naive": Manager(),
    "batch": Manager(whole_batch=True),
    "dapo": Manager(),
    "prime": Manager(row_by_row=True),
    **dict.fromkeys(RECIPES, Manager(calls_function=False)),
}
"""Managers by the value of ``reward_model.reward_manager``. DAPO's penalty is subtracted by the trainer, which knows lengths."""


def num_processes(manager: str, num_workers: int) -> int:
    """Return how many reward processes a manager has.

    Args:
        manager: ``reward_model.reward_manager``.
        num_workers: ``reward_model.num_workers``.
    """
    if not MANAGERS[manager].calls_function:
        return 0
    cores = len(os.sched_getaffinity(0)) if MANAGERS[manager].row_by_row else 0
    return max(num_workers, min(MOST_PROCESSES, cores))
