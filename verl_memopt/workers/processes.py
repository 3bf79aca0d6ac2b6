"""The processes that one process has started, from /proc: found, and ended all at once.

Only the standard library is imported, so that this is ready before anything heavy is.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
"""Number of the prctl by which orphans become children of this process instead of children of init."""

ROUNDS = 50
ROUND_SECONDS = 0.05
"""Ending all processes takes as many rounds as new ones appear, and waits in each until those it killed are gone."""

TRACKER = b"multiprocessing.resource_tracker"
"""Python's own cleaner of shared memory. It ends by itself after the last process that used it, and cleans up then."""


def descendants(pid: int) -> list[int]:
    """Return the ids of the children of ``pid``, of their children and so on, without zombies, parents first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (parent := _parent(int(entry.name))) is not None:
            children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for known in found:
        found += children.get(known, [])
    return found[1:]


def is_alive(pid: int) -> bool:
    """Say whether a process exists and is no zombie."""
    return _parent(pid) is not None


def kill(pids: Iterable[int]) -> None:
    """Send SIGKILL to each process that still exists and belongs to this user."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def kill_descendants() -> list[int]:
    """Kill every process that descends from this one, and return those that are left.

    An orphan becomes a child of this process, so a process whose parent was killed first is found in the next round.
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
    """Wait until none of these processes runs, at most ``seconds``, and return those that do."""
    deadline = time.monotonic() + seconds
    left = [pid for pid in pids if is_alive(pid)]
    while left and time.monotonic() < deadline:
        time.sleep(ROUND_SECONDS)
        left = [pid for pid in left if is_alive(pid)]
    return left


def _parent(pid: int) -> int | None:
    """Return the parent's id; None for a process that is gone or a zombie."""
    try:
        # The name in parentheses may hold spaces and parentheses of its own.
        state, parent = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:2]
    except (OSError, ValueError):
        return None
    return None if state in (b"Z", b"X") else int(parent)


def _is_tracker(pid: int) -> bool:
    try:
        return TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _reap() -> None:
    """Take the exit status of every child that has ended, so that none stays as a zombie."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
