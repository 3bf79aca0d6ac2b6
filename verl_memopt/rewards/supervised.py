"""A supervised program as the run sees it: start it, connect to it, learn how it ended, and end all that it has started."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import astuple
from multiprocessing.connection import Connection
from pathlib import Path

from verl_memopt.distributed.threads import THREADS
from verl_memopt.rewards.score import PROGRESS, Limits
from verl_memopt.rewards.supervisor import MARK, VERDICT, VERDICT_AT, last_lines
from verl_memopt.run.process_tree import END_SECONDS, STOP_SIGNALS, kill_marked, safe_path

logger = logging.getLogger(__name__)

SEND_SECONDS = 60
"""Longest time in which a program must take what is sent to it."""


class SupervisedProgram:
    """A new interpreter that runs one program under a supervisor. It starts in the background.

    The interpreter and all processes that it starts end with this process, however this process ends. It has its own session and
    ignores the signals that end a run, so that a stopped run can still finish its step.

    Args:
        module: The module of the program, see :func:`verl_memopt.rewards.supervisor.main`.
        limits: Limits of the program and of all that it starts.
        threads: OMP_NUM_THREADS of the program.
        log: File for the program's output. None = the standard output of this process.
        variables: Environment variables, unless this process has them.
    """

    def __init__(
        self, module: str, limits: Limits, threads: int, log: Path | None = None, variables: Mapping[str, str] | None = None
    ) -> None:
        run_end, process_end = socket.socketpair()
        lifeline_end, self._lifeline = os.pipe()
        self._progress = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        # Without this, a process that dies before its first row would seem to have been at row 0.
        os.pwrite(self._progress.fileno(), PROGRESS.pack(-1, 0.0), 0)
        self._log = log
        self._log_start = log.stat().st_size if log is not None and log.is_file() else 0
        self._mark = f"{MARK}={secrets.token_hex(16)}"
        fds = (process_end.fileno(), lifeline_end, self._progress.fileno())
        # The program gets the import path of this process. The code before it must not import from the working directory.
        arguments = (module, *fds, None if log is None else str(log.absolute()), astuple(limits), sys.path)
        program = f"import sys; sys.path[:] = {safe_path()!r}; from verl_memopt.rewards.supervisor import main; main{arguments!r}"
        # The new process inherits the blocked signals, so that none can end it before the supervisor has its handlers.
        previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", program],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={THREADS: str(threads), **(variables or {}), **os.environ, MARK: self._mark.partition("=")[2]},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
        # If this process kept the other end open itself, it would never see the connection close.
        process_end.close()
        os.close(lifeline_end)
        run_end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_SECONDS, 0))
        self.connection = Connection(run_end.detach())

    @property
    def pid(self) -> int:
        return self._process.pid

    def shared(self, offset: int, size: int) -> bytes:
        """Return bytes of the file that the program shares with this process."""
        return os.pread(self._progress.fileno(), size, offset)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ending(self) -> str:
        return f"{self.end_reason()}{self.last_output()}"

    def end_reason(self) -> str:
        """Wait until the program has ended, and return in one line how it did. Call this when the connection has closed."""
        try:
            code = self._process.wait(2 * END_SECONDS)
        except subprocess.TimeoutExpired:
            self._end()
            return "closed its connection"
        clean, reason = self._verdict()
        if not clean:
            self._kill_left_over()
        return reason or (f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}")

    def last_output(self) -> str:
        return last_lines(self._log, self._log_start)

    def release(self) -> None:
        """Let the supervisor end the program, without waiting for it."""
        if not self.connection.closed:
            # The supervisor ends all its processes once the lifeline closes. If it were killed first, the orphans that it has
            # adopted would be left behind.
            self.connection.close()
            os.close(self._lifeline)

    def close(self) -> None:
        if self._progress.closed:
            return
        self._end()
        if not self._verdict()[0]:
            self._kill_left_over()
        self._progress.close()

    def _end(self) -> None:
        self.release()
        try:
            self._process.wait(2 * END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _verdict(self) -> tuple[bool, str]:
        """Return whether the supervisor left no process behind, and the exceeded limit for which it ended the process, if any."""
        record = self.shared(VERDICT_AT, 4096)
        if len(record) < VERDICT.size:
            return False, ""
        clean, length = VERDICT.unpack_from(record)
        return clean, record[VERDICT.size : VERDICT.size + length].decode(errors="replace")

    def _kill_left_over(self) -> None:
        killed = kill_marked(self._mark)
        if killed:
            logger.warning("killed %d processes that code of the user had started and left behind", len(killed))
