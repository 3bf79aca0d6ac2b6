"""The processes that this one has started: how to end all of them, and the guardian that does so when this process is gone.

It imports nothing heavy (psutil takes 15 ms), so that a command can watch for signals before anything else is imported.
psutil is not first imported by a search, for that is done while the process is being ended, whatever its other threads do.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable

import psutil

from verl_memopt.run import process_tree

PR_SET_CHILD_SUBREAPER = 36
"""The prctl option that makes orphans children of this process instead of children of init."""

ROUNDS = 50
ROUND_SECONDS = 0.05
"""Rounds of killing, and the wait after each, because new processes may appear meanwhile."""

TRACKER = "multiprocessing.resource_tracker"
"""Python's own process that cleans up shared memory. It ends by itself after the last process that used it."""


def descendants(pid: int) -> list[int]:
    """Return the ids of the children of ``pid``, of their children and so on, without zombies, parents first."""
    return [child.pid for child in process_tree.descendants(pid) if is_alive(child.pid)]


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False


def kill(pids: Iterable[int]) -> None:
    """Send SIGKILL to each process that still exists and belongs to this user."""
    process_tree.send_signal(pids, signal.SIGKILL)


def kill_descendants() -> list[int]:
    """Kill every process that descends from this one, and return those that are left.

    An orphan becomes a child of this process. So if the parent of a process was killed first, the next round finds it.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    left: list[int] = []
    for _ in range(ROUNDS):
        left = [pid for pid in descendants(os.getpid()) if not _is_tracker(pid)]
        if not left:
            break
        kill(left)
        process_tree.reap()
        time.sleep(ROUND_SECONDS)
    return left


def wait_until_gone(pids: Iterable[int], seconds: float) -> list[int]:
    """Wait until none of these processes runs, at most ``seconds``, and return those that still run."""
    deadline = time.monotonic() + seconds
    left = list(pids)
    while (left := [pid for pid in left if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(ROUND_SECONDS)
    return left


def _is_tracker(pid: int) -> bool:
    try:
        return TRACKER in " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


# A process that outlives its starter for a moment, and kills the processes that the starter had started.
#
# Ray's own processes follow a killed driver, but the two agents of its node outlive it by a minute, and so do processes that Ray
# was about to start when the driver died. The guardian waits for the end of a pipe that only the starter holds. It has its own
# session, where no Ctrl-C reaches it. It imports nothing heavy.
#
# It looks for new processes ten times a second. A process may start between two looks and lose its parent together with the
# driver. It is then nobody's descendant any more, and Ray's agents start so if the driver is killed at that moment. So every
# process that starts before :meth:`Guardian.all_started` has an environment variable by which the guardian finds it.


LOOK_SECONDS = 0.1
"""Time between two searches for new processes, until all have started."""

GUARDIAN_ROUNDS, GUARDIAN_ROUND_SECONDS = 20, 0.1
"""Largest number of killing rounds, each for the processes that appeared since the last one."""

STARTED = b"all have started\n"

MARK = "VERL_MEMOPT_GUARDED_BY"
"""Environment variable of the guarded processes. Its value is the guardian's own."""


class Guardian:
    """Kills descendants of this process once this process is gone.

    It kills those that are born from now on until :meth:`all_started`, and their descendants. Until then this process has the
    environment variable ``VERL_MEMOPT_GUARDED_BY``, which they inherit.
    """

    def __init__(self) -> None:
        """Start the guardian, and return once it watches."""
        value = secrets.token_hex(16)
        # Without site (-S) an interpreter starts twice as fast. The path it then lacks is this process's own.
        program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import guard; guard({os.getpid()}, {value!r})"
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", program],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self.pid = self._process.pid
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._pipe = self._process.stdin
        # The guardian says that it watches. Before that, a process born now would count as one that existed already.
        self._process.stdout.readline()
        os.environ[MARK] = value

    def all_started(self) -> None:
        """Report that all processes to be guarded have started.

        Processes that they start later are guarded too. Other processes are not.
        """
        os.environ.pop(MARK, None)
        self._pipe.write(STARTED)
        self._pipe.flush()

    def dismiss(self) -> None:
        """End the guardian without killing anything. May be called again."""
        os.environ.pop(MARK, None)
        self._process.kill()
        self._process.communicate()


def guard(starter: int, value: str) -> None:
    """Watch the descendants of ``starter`` that are born from now on, and kill them when standard input ends.

    Processes whose environment has ``VERL_MEMOPT_GUARDED_BY`` with this value are killed as well.
    """
    # A scheduler sends these to every process of a job, and the guardian must outlive the one that it watches.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Processes are equal if id and start time are. An id alone may be used again.
    # What exists already is not the guardian's: it belongs to the program that starts Ray, or is the guardian itself.
    others, guarded = set(process_tree.descendants(starter)), set[psutil.Process]()
    os.write(1, b"ready\n")
    starting = True
    while True:
        ready, _, _ = select.select([0], [], [], LOOK_SECONDS if starting else None)
        if ready and not os.read(0, len(STARTED)):
            break
        guarded |= set(process_tree.descendants(starter)) - others
        starting = starting and not ready
    for _ in range(GUARDIAN_ROUNDS):
        below = [process_tree.descendants(process.pid) for process in guarded if process.is_running()]
        guarded |= {*process_tree.marked(f"{MARK}={value}")}.union(*below)
        alive = [process.pid for process in guarded if process.is_running() and is_alive(process.pid)]
        if not alive:
            break
        kill(alive)
        time.sleep(GUARDIAN_ROUND_SECONDS)
