"""The processes below one process, read from Linux's /proc: their memory, their processor time, and how to end them all."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")

_STOP_ROUNDS = 8
"""Scans that stop processes before they are killed, so that none starts another in between."""

_ROUND_SECONDS = 0.005


def descendants(root: int) -> dict[int, list[bytes]]:
    """Return every process below ``root`` with the fields of its /proc stat that follow its name (state first).

    The kernel gives a process whose parent has died to the nearest ancestor that adopts orphans (PR_SET_CHILD_SUBREAPER). If
    ``root`` adopts them, no process that it started is missed.
    """
    fields = dict(_stats())
    children: dict[int, list[int]] = {}
    for pid, values in fields.items():
        children.setdefault(int(values[1]), []).append(pid)
    below: dict[int, list[bytes]] = {}
    waiting = list(children.get(root, ()))
    while waiting:
        pid = waiting.pop()
        below[pid] = fields[pid]
        waiting += children.get(pid, ())
    return below


def _stats() -> Iterator[tuple[int, list[bytes]]]:
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            # The name in parentheses may itself hold spaces and parentheses.
            yield int(name), file.read().rpartition(b")")[2].split()


def cpu_seconds(tree: dict[int, list[bytes]]) -> float:
    """Return the processor time of the processes and of the children they have waited for."""
    return sum(sum(map(int, values[11:15])) for values in tree.values()) / _TICKS


def resident_bytes(tree: dict[int, list[bytes]]) -> int:
    """Return the total memory of the processes. A page that several of them share counts once for each."""
    return sum(int(values[21]) for values in tree.values()) * _PAGE


def proportional_bytes(pids: Iterable[int]) -> int:
    """Return the total memory of the processes. A shared page is divided among them. Slower."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            total += next((int(line.split()[1]) for line in file if line.startswith(b"Pss:")), 0) * 1024
    return total


def end_descendants(seconds: float) -> bool:
    """Kill every process below this one, wait until none is left, and return whether that took at most ``seconds``.

    This process must adopt orphans (PR_SET_CHILD_SUBREAPER). Then "no child" means "no descendant".
    """
    deadline = time.monotonic() + seconds
    while reap():
        if time.monotonic() > deadline:
            return False
        _kill_all()
        time.sleep(_ROUND_SECONDS)
    return True


def reap() -> bool:
    """Collect the children that have ended, and return whether any child is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _kill_all() -> None:
    stopped: set[int] = set()
    for _ in range(_STOP_ROUNDS):
        running = descendants(os.getpid()).keys() - stopped
        if not running:
            break
        _send(running, signal.SIGSTOP)
        stopped |= running
    _send(stopped, signal.SIGKILL)


def kill_marked(mark: str, seconds: float) -> list[int]:
    """Kill every process whose initial environment has the entry ``mark`` (``NAME=value``), and return their ids.

    This finds the processes of a supervisor that was killed. They are no longer below this process, but they inherited the
    supervisor's environment.
    """
    deadline, killed = time.monotonic() + seconds, set()
    while (alive := marked(mark)) and time.monotonic() < deadline:
        killed.update(alive)
        _send(alive, signal.SIGKILL)
        time.sleep(_ROUND_SECONDS)
    return sorted(killed)


def marked(mark: str) -> list[int]:
    """Return the ids of all processes but this one whose initial environment has the entry ``mark`` (``NAME=value``).

    Processes of other users are left out.
    """
    entry, pids = mark.encode(), []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if entry in file.read().split(b"\0"):
                    pids.append(int(name))
    return pids


def _send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
