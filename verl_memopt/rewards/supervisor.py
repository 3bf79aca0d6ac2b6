"""The program between a run and a reward function: it starts the function's process, the scorer, and leaves no process behind.

It does the same for the tools and environments of agents, whose program is :mod:`verl_memopt.agents.program`.

A reward function may start processes, which may start others and detach themselves from their parents. This program adopts
orphans among its descendants (PR_SET_CHILD_SUBREAPER), so that all of them stay its descendants. It ends all of them when the run
closes the pipe ``lifeline`` or dies, when the scorer ends, and when a limit is exceeded. Then it ends with the same exit code or
signal as the scorer. Signals that are sent to every process of the run do not end it: the run decides when its rewards end.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import select
import signal
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from verl_memopt.observe.files import written_aside
from verl_memopt.rewards.score import PROGRESS, Limits
from verl_memopt.run.process_tree import (
    STOP_SIGNALS,
    cpu_seconds,
    descendants,
    end_descendants,
    proportional_bytes,
    resident_bytes,
)

MARK = "VERL_MEMOPT_REWARD_PROCESS"
"""Environment variable with a value that is unique to one supervisor. All processes that a reward function starts inherit it."""

WATCH_SECONDS = 0.25
WATCH_SHARE = 0.005
"""Limits are checked every ``WATCH_SECONDS``, or less often if the checks would take more than ``WATCH_SHARE`` of the time."""

VERDICT = struct.Struct("?H")
"""Whether no process is left, and the length of the reason that follows."""
VERDICT_AT = 256
"""Position of the verdict in the shared file. The scorer's record is before it."""

MOST_PROCESSES = 1000
"""Largest number of descendants of one reward process. More are a mistake that would use up the processes of the machine."""

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36


def main(
    program: str, pipe: int, lifeline: int, progress: int, log: str | None, limits: tuple[float, float, int, str], path: list[str]
) -> None:
    """Start a program on the file descriptor ``pipe`` and watch it. Does not return.

    Args:
        program: Module whose ``main(pipe, progress, limits)`` runs the user's code: the scorer, or the program of environments.
        pipe: Connection to the run, which only the scorer keeps.
        lifeline: Read end of a pipe whose write end the run holds.
        progress: Shared file with the position of the scorer and the verdict on its end.
        log: File for what the function prints. None = the standard output of this program.
        limits: The fields of :class:`Limits`.
        path: The import path (``sys.path``) of the reward function.
    """
    for number in STOP_SIGNALS:
        # An empty handler, because programs that the function starts would inherit SIG_IGN.
        signal.signal(number, _ignore)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    bound, run = Limits(*limits), import_module(program).main
    output, printed = os.pipe() if log is not None else (-1, -1)
    # Programs that a reward function starts must not inherit these: the run would never see them close.
    for fd in (pipe, lifeline, progress):
        os.set_inheritable(fd, False)
    # This comes before the fork, so that no orphan of the scorer can become a child of init.
    _prctl(_SET_CHILD_SUBREAPER, 1)
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(lifeline)
        sys.path[:] = path
        _run(run, parent, pipe, progress, output, printed, bound)
    # Now only the scorer has this end open, so the run sees the connection close as soon as the scorer dies.
    os.close(pipe)
    if printed >= 0:
        os.close(printed)
    watch = _Watch(child, lifeline, progress, output, None if log is None else OutputLog(Path(log)), bound)
    _end_as(watch.run())


def _ignore(number: int, frame: object) -> None: ...


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def _run(
    program: Callable[[int, int, Limits], None],
    parent: int,
    pipe: int,
    progress: int,
    output: int,
    printed: int,
    limits: Limits,
) -> None:
    code = 1
    try:
        _prctl(_SET_PDEATHSIG, signal.SIGKILL)
        # The supervisor may have died before the death signal was set, and then nobody would send it.
        if os.getppid() != parent:
            os._exit(0)
        if printed >= 0:
            os.close(output)
            os.dup2(printed, 1)
            os.dup2(printed, 2)
            os.close(printed)
        # New stream objects, which flush each line and replace characters that cannot be encoded.
        sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, errors="backslashreplace", closefd=False) for fd in (1, 2))
        faulthandler.enable()
        limits.bind_process()
        program(pipe, progress, limits)
        code = 0
    except BaseException:  # noqa: BLE001 - printed, and shown by the exit code
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        # A normal exit would also run the cleanup that this process has inherited from the supervisor by the fork.
        os._exit(code)


class _Watch:
    def __init__(self, child: int, lifeline: int, progress: int, output: int, log: OutputLog | None, limits: Limits) -> None:
        self._child, self._lifeline, self._progress, self._limits = child, lifeline, progress, limits
        self._output, self._log = output, log
        self._parent = os.getppid()
        self._row: tuple[int, float] = (-1, 0.0)
        self._cpu_before = 0.0
        self._wakeup, write = os.pipe()
        # A signal handler that waited for a full pipe would hang the supervisor.
        os.set_blocking(write, False)
        os.set_blocking(self._wakeup, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _ignore)
        descendants(os.getpid())  # imports psutil now, because the import would make the first timed check seem slow

    def run(self) -> int:
        """Wait until the scorer ends, the run ends, or a limit is exceeded, and end all processes of the scorer.

        Returns the scorer's wait status, or 0 if the run has ended.
        """
        status, reason = self._wait()
        clean = end_descendants()
        # The last output of the killed processes is still in the pipe, and may explain their end.
        while self._take_output():
            pass
        text = reason.encode()
        os.pwrite(self._progress, VERDICT.pack(clean, len(text)) + text, VERDICT_AT)
        return status

    def _wait(self) -> tuple[int, str]:
        next_check, patience = time.monotonic() + WATCH_SECONDS, WATCH_SECONDS
        while True:
            status = self._ended()
            if status is not None:
                return status, ""
            fds = [self._lifeline, self._wakeup, *([self._output] if self._output >= 0 else [])]
            ready = select.select(fds, [], [], max(0.0, next_check - time.monotonic()))[0]
            # The parent's id is compared too, because another process may keep the other end of the pipe open after the run has
            # died.
            if self._lifeline in ready or os.getppid() != self._parent:
                return 0, ""
            if self._wakeup in ready:
                os.read(self._wakeup, 4096)
            if self._output in ready:
                self._take_output()
            if time.monotonic() >= next_check:
                began = time.monotonic()
                reason = self._passed_limit()
                if reason:
                    return signal.SIGKILL, reason
                patience = max(WATCH_SECONDS, (time.monotonic() - began) / WATCH_SHARE)
                next_check = time.monotonic() + patience

    def _ended(self) -> int | None:
        while True:
            # Adopted orphans must be waited for too, or they would remain as zombies.
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in (0, self._child):
                return status if pid else None

    def _take_output(self) -> bool:
        if self._output < 0 or self._log is None or not select.select([self._output], [], [], 0)[0]:
            return False
        data = os.read(self._output, 65536)
        if data:
            self._log.write(data)
        else:  # every writer has closed the pipe
            os.close(self._output)
            self._output = -1
        return bool(data)

    def _passed_limit(self) -> str:
        tree, limits = descendants(os.getpid()), self._limits
        if len(tree) > MOST_PROCESSES:
            return f"started more than {MOST_PROCESSES} processes"
        # The sum of resident memory is cheap, but counts shared pages several times. The exact sum is computed only if the first
        # sum exceeds the limit.
        if resident_bytes(tree) > limits.memory_bytes and proportional_bytes(tree) > limits.memory_bytes:
            return f"held more memory, with the processes it started, than {limits.key}.memory_gb={limits.memory_gb:g}"
        waited = os.times()
        # `tree` has only live processes, so the time of processes that have ended is added.
        spent = cpu_seconds(tree) + waited.children_user + waited.children_system
        row = PROGRESS.unpack(os.pread(self._progress, PROGRESS.size, 0))
        if row != self._row or row[0] < 0:
            self._row, self._cpu_before = row, spent
        if spent - self._cpu_before > limits.cpu_seconds:
            return f"took more processor time than {limits.key}.cpu_seconds={limits.cpu_seconds:g}"
        return ""


def _end_as(status: int) -> None:
    # The process that waits for this one must see the true status of the scorer.
    if os.WIFSIGNALED(status):
        # Restore the default action, because a handler would keep this process alive.
        number = os.WTERMSIG(status)
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler to remove
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.pause()
    os._exit(os.waitstatus_to_exitcode(status))


# The output of reward functions, in small log files in the run folder.


LOG_BYTES = 1 << 20
"""Largest size of one log file. A larger file loses its older half."""

QUOTED_LINES = 5
QUOTED_BYTES = 2000


@dataclass
class OutputLog:
    """A log file of bounded size that keeps its newest text. The first write creates it."""

    path: Path
    _warned: bool = False

    def write(self, data: bytes) -> None:
        # A disk error loses this output, but does not stop the run.
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.write(data)
                size = file.tell()
            if size > LOG_BYTES:
                newer_half = _end_of(self.path, LOG_BYTES // 2)
                with written_aside(self.path) as aside:
                    aside.write_bytes(newer_half.partition(b"\n")[2] or newer_half)
        except OSError as error:
            if not self._warned:
                os.write(2, f"{self.path}: the output of a reward function cannot be written ({error.strerror}).\n".encode())
            self._warned = True


def last_lines(path: Path | None, since: int = 0) -> str:
    """Return the last few lines of a log, indented, under a line that names the log; "" if there are none.

    Args:
        path: The log. None = no log.
        since: Bytes at the beginning to leave out. If the log is shorter, it was cut, and all of it counts.
    """
    if path is None or not path.is_file():
        return ""
    size = path.stat().st_size
    text = _end_of(path, min(QUOTED_BYTES, size - since if size >= since else size)).decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()][-QUOTED_LINES:]
    return "".join(f"\n  {line}" for line in [f"its last output ({path}):", *lines]) if lines else ""


def _end_of(path: Path, max_bytes: int) -> bytes:
    with path.open("rb") as file:
        file.seek(-min(max_bytes, path.stat().st_size), os.SEEK_END)
        return file.read()
