"""The processes that one process has started: how to find them and how to end all of them.

It imports nothing but psutil (15 ms), so that a command can watch for signals before anything heavy is imported. The import is
not left to the first search: that is done while the process is being ended, whatever its other threads are in the middle of.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable

import psutil

PR_SET_CHILD_SUBREAPER = 36
"""The prctl option that makes orphans children of this process instead of children of init."""

ROUNDS = 50
ROUND_SECONDS = 0.05
"""Rounds of killing, and the wait after each, because new processes may appear meanwhile."""

TRACKER = "multiprocessing.resource_tracker"
"""Python's own process that cleans up shared memory. It ends by itself after the last process that used it."""


def descendants(pid: int) -> list[int]:
    """Return the ids of the children of ``pid``, of their children and so on, without zombies, parents first."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True) if is_alive(child.pid)]
    except psutil.NoSuchProcess:
        return []


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False


def kill(pids: Iterable[int]) -> None:
    """Send SIGKILL to each process that still exists and belongs to this user."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


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
        _reap()
        time.sleep(ROUND_SECONDS)
    return left


def wait_until_gone(pids: Iterable[int], seconds: float) -> list[int]:
    """Wait until none of these processes runs, at most ``seconds``, and return those that still run."""
    deadline = time.monotonic() + seconds
    left = [pid for pid in pids if is_alive(pid)]
    while left and time.monotonic() < deadline:
        time.sleep(ROUND_SECONDS)
        left = [pid for pid in left if is_alive(pid)]
    return left


def _is_tracker(pid: int) -> bool:
    try:
        return TRACKER in " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


def _reap() -> None:
    """Collect the exit status of every child that has ended, so that none stays a zombie."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
