"""The processes below one process: their memory, their processor time, and how to end them all."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from psutil import Process

STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals that a terminal, Slurm, systemd or a container sends to every process of a run. Only the run decides how to react."""

END_SECONDS = 5.0
"""Longest time until killed processes must be gone."""

_STOP_ROUNDS = 8
"""Largest number of scans that stop processes before they are killed. A stopped process cannot start another one."""

_ROUND_SECONDS = 0.005

# psutil needs 1.7 MiB and is imported only inside functions. So a reward process, which is forked before, does not hold it.


def safe_path() -> list[str]:
    """Return the import path of this process with Python's own folders first, and then those of psutil and of this package.

    So a process that starts with this path cannot import a file of the working directory instead of a module that it needs.
    """
    psutil_spec = importlib.util.find_spec("psutil")
    assert psutil_spec is not None
    assert psutil_spec.origin is not None
    packages = [str(Path(psutil_spec.origin).parents[1]), str(Path(__file__).parents[2])]

    def rank(folder: str) -> int:
        if folder == sysconfig.get_path("stdlib") or Path(folder).name == "lib-dynload":
            return 0
        return 1 + packages.index(folder) if folder in packages else 3

    return sorted(dict.fromkeys([*sys.path, *packages]), key=rank)


def descendants(root: int) -> list[Process]:
    """Return every process below ``root``, parents first, including zombies.

    If the parent of a process dies, the nearest ancestor that adopts orphans (PR_SET_CHILD_SUBREAPER) becomes its parent. So if
    ``root`` adopts orphans, this finds every process that it started.
    """
    import psutil

    try:
        return psutil.Process(root).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def cpu_seconds(tree: Iterable[Process]) -> float:
    # The processor time of the processes and of the children that they have waited for.
    return sum(sum(times[:4]) for times in _each(tree, "cpu_times"))


def resident_bytes(tree: Iterable[Process]) -> int:
    # The total memory of the processes. A shared page is counted once for each process that uses it.
    return sum(memory.rss for memory in _each(tree, "memory_info"))


def proportional_bytes(tree: Iterable[Process]) -> int:
    # The total memory of the processes. A shared page is divided among them. Slower than ``resident_bytes``.
    return sum(memory.pss for memory in _each(tree, "memory_full_info"))


def _each(tree: Iterable[Process], method: str) -> list[Any]:
    import psutil

    answers = []
    for process in tree:
        with contextlib.suppress(psutil.Error):
            answers.append(getattr(process, method)())
    return answers


def kill_all(find: Callable[[], Collection[int] | None], seconds: float = END_SECONDS) -> bool:
    """Kill the processes that ``find`` returns until it returns None, and return whether that took at most ``seconds``.

    ``find`` is called repeatedly, because new processes may appear meanwhile. If it returns an empty collection, some processes
    are left, but it has not found them yet.
    """
    deadline = time.monotonic() + seconds
    while (found := find()) is not None:
        if time.monotonic() > deadline:
            return False
        stopped, running = set[int](), set(found)
        for _ in range(_STOP_ROUNDS):
            if not running:
                break
            send_signal(running, signal.SIGSTOP)
            stopped |= running
            running = set(find() or ()) - stopped
        send_signal(stopped, signal.SIGKILL)
        time.sleep(_ROUND_SECONDS)
    return True


def end_descendants() -> bool:
    """Kill every process below this one, wait until none is left, and return whether that took at most ``END_SECONDS``.

    This process must adopt orphans (PR_SET_CHILD_SUBREAPER). Then "no child" means "no descendant". A search alone cannot show
    this, because it misses a process that starts during the search.
    """
    return kill_all(lambda: [process.pid for process in descendants(os.getpid())] if _reap() else None)


def _reap() -> bool:
    # Collect the children that have ended, and return whether any child is left.
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def send_signal(pids: Iterable[int], number: int) -> None:
    # psutil's own methods first read the start time of the process, and in this time another process may be forked.
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_marked(mark: str) -> list[int]:
    """Kill every process whose initial environment has the entry ``mark`` (``NAME=value``), and return their ids.

    This finds the processes of a supervisor that was killed. They are no longer descendants of this process, but they have
    inherited the supervisor's environment.
    """
    killed = set[int]()

    def find() -> list[int] | None:
        found = [process.pid for process in marked(mark)]
        killed.update(found)
        return found or None

    kill_all(find)
    return sorted(killed)


def marked(mark: str) -> list[Process]:
    """Return all other processes whose initial environment has the entry ``mark`` (``NAME=value``).

    Processes of other users are left out.
    """
    import psutil

    (name, _, value), found = mark.partition("="), []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(name) == value:
                found.append(process)
    return found
