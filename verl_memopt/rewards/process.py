"""The run's side of one reward process: start it, send rows, receive scores, find the row it is at, end it."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import astuple
from multiprocessing.connection import Connection
from pathlib import Path

from verl_memopt.errors import RewardError
from verl_memopt.rewards.score import Limits, Outcome, RewardRow, printable, read_message, read_outcomes
from verl_memopt.rewards.scorer import PROGRESS, FunctionCall
from verl_memopt.rewards.supervisor import END_SECONDS, MARK, RUN_SIGNALS, VERDICT, VERDICT_AT, last_lines
from verl_memopt.run.process_tree import kill_marked, safe_path

logger = logging.getLogger(__name__)

LOAD_SECONDS = 120.0
"""Longest time in which the file with the reward function must be imported."""


class RewardProcess:
    """A new interpreter that runs one reward function under a supervisor. It starts in the background.

    It and all that it starts end with this process, however this process ends. It has its own session and ignores the signals
    that end a run, so that a stopped run can still finish its step.

    Args:
        call: The function, and how it is called.
        limits: Memory, processor time and open files.
        log: File for what the function prints. None = the standard output of this process.
    """

    def __init__(self, call: FunctionCall, limits: Limits, log: Path | None = None) -> None:
        """Start the process and send it the name of its function."""
        self.runs_concurrently = False
        """The function is async and has many rows under way at a time. Known once it is loaded."""
        run_end, process_end = socket.socketpair()
        lifeline_end, self._lifeline = os.pipe()
        self._progress = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        # A process that dies before its first row must not look as if it were at row 0.
        os.pwrite(self._progress.fileno(), PROGRESS.pack(-1, 0.0), 0)
        self._log = log
        self._log_start = log.stat().st_size if log is not None and log.is_file() else 0
        self._mark = f"{MARK}={secrets.token_hex(16)}"
        fds = (process_end.fileno(), lifeline_end, self._progress.fileno())
        # The function gets this process's own import path; what runs before it does not import from the working directory.
        arguments = (*fds, None if log is None else str(log.absolute()), astuple(limits), sys.path)
        program = f"import sys; sys.path[:] = {safe_path()!r}; from verl_memopt.rewards.supervisor import main; main{arguments!r}"
        # In this thread, and in the process until the supervisor has its handlers.
        previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, RUN_SIGNALS)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", program],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, MARK: self._mark.partition("=")[2]},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
        # Otherwise this process would itself hold the other end open and never see the connection close.
        process_end.close()
        os.close(lifeline_end)
        self.connection = Connection(run_end.detach())
        self.connection.send(call)
        self._started = time.monotonic()
        self.loaded = False
        """The function is imported."""

    @property
    def pid(self) -> int:
        """Process id of the supervisor."""
        return self._process.pid

    def wait_until_loaded(self) -> None:
        """Wait until the function is imported.

        Raises:
            RewardError: It could not be imported. The message gives the reason.
        """
        if self.loaded:
            return
        if not self.connection.poll(max(0.0, self._started + LOAD_SECONDS - time.monotonic())):
            raise RewardError(
                f"custom_reward_function.path: the file did not finish importing in {LOAD_SECONDS:.0f} s. "
                "Move long work out of its top level."
            )
        try:
            problem, self.runs_concurrently = read_message(self.connection.recv_bytes())
        except (EOFError, ConnectionError):
            problem = (
                f"custom_reward_function.path: the process that imports the file {self.ending()}. Import it alone to see why."
            )
        if problem is not None:
            raise RewardError(printable(problem))
        self.loaded = True

    def send(self, indices: Sequence[int], rows: Sequence[RewardRow]) -> None:
        """Send rows, with an index for each.

        A dead process raises no error here; :meth:`receive` reports it.
        """
        self.wait_until_loaded()
        with contextlib.suppress(ConnectionError):
            self.connection.send((indices, [(row.data_source, row.solution, row.ground_truth, row.extra_info) for row in rows]))

    def receive(self) -> list[Outcome] | None:
        """Return the outcomes that have arrived, or None if the process has died."""
        # Asked before the poll: what a process sends just before its death would otherwise be lost.
        alive = self.is_alive()
        try:
            if self.connection.poll():
                return read_outcomes(self.connection.recv_bytes())
        except (EOFError, ConnectionError):
            return None
        return [] if alive else None

    def position(self) -> tuple[int, float]:
        """Return the index of the row that is being scored (-1 = none) and the seconds since it began."""
        index, since = PROGRESS.unpack(os.pread(self._progress.fileno(), PROGRESS.size, 0))
        return index, time.monotonic() - since if index >= 0 else 0.0

    def is_alive(self) -> bool:
        """Return whether the supervisor is running."""
        return self._process.poll() is None

    def ending(self) -> str:
        """Return, in words, how the process ended, followed by its last output."""
        code = self._process.wait()
        clean, reason = self._verdict()
        if not clean:
            self._kill_left_over()
        words = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return f"{reason or words}{self.last_output()}"

    def last_output(self) -> str:
        """Return the last lines that the function printed, for messages. Empty where there are none."""
        return last_lines(self._log, self._log_start)

    def close(self) -> None:
        """End the process and all that it started. May be called twice."""
        if self.connection.closed:
            return
        # The supervisor ends everything once the lifeline closes. Killing it first would leave the orphans that it has
        # adopted.
        self.connection.close()
        os.close(self._lifeline)
        try:
            self._process.wait(2 * END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if not self._verdict()[0]:
            self._kill_left_over()
        self._progress.close()

    def _verdict(self) -> tuple[bool, str]:
        """Return whether the supervisor left no process behind, and the limit for which it ended the process."""
        record = os.pread(self._progress.fileno(), 4096, VERDICT_AT)
        if len(record) < VERDICT.size:
            return False, ""
        clean, length = VERDICT.unpack_from(record)
        return clean, record[VERDICT.size : VERDICT.size + length].decode()

    def _kill_left_over(self) -> None:
        """Kill the processes with the mark, where the supervisor was killed itself or could not end all of them."""
        killed = kill_marked(self._mark, END_SECONDS)
        if killed:
            logger.warning("killed %d processes that a reward function had started and left behind", len(killed))
