"""The processes that this one has started: how to end all of them, and the guardian that ends them when this process is gone.

This file imports nothing heavy (psutil takes 15 ms), so that a command can watch for signals before anything else is imported.
psutil is imported at the top: a search runs while the process is being ended, and must not begin with an import.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from verl_memopt.errors import WorkerError
from verl_memopt.run import process_tree

logger = logging.getLogger(__name__)

PR_SET_CHILD_SUBREAPER = 36
"""The prctl option that makes orphans children of this process instead of children of init."""

KILL_SECONDS = 2.5
"""Longest time to kill the processes that this process has started, when a signal ends it."""

READY_SECONDS = 60.0
"""Longest time until the guardian must have started."""

TRACKER = "multiprocessing.resource_tracker"
"""Python's own process that cleans up shared memory. It ends by itself after the last process that used it."""


def descendants(pid: int) -> list[int]:
    # Zombies are left out: they have ended, but their parents have not waited for them yet.
    return [child.pid for child in process_tree.descendants(pid) if is_alive(child.pid)]


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False


def kill(pids: Iterable[int]) -> None:
    process_tree.send_signal(pids, signal.SIGKILL)


def kill_descendants() -> bool:
    """Kill every process that descends from this one, and return whether none is left.

    Orphans become children of this process. So if the parent of a process is killed first, the next search still finds it.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    return process_tree.kill_all(lambda: [pid for pid in descendants(os.getpid()) if not _is_tracker(pid)] or None, KILL_SECONDS)


def kill_processes(processes: Collection[psutil.Process]) -> bool:
    """Kill processes and wait until none of them runs; return whether that took at most ``END_SECONDS``.

    psutil compares start times, so another process that has got the same id is not killed.
    """
    return process_tree.kill_all(lambda: _running(processes) or None)


def _running(processes: Iterable[psutil.Process]) -> list[int]:
    return [process.pid for process in processes if process.is_running() and is_alive(process.pid)]


SHARED_MEMORY = Path("/dev/shm")

LITTLE_SHARED_BYTES = 64 * 2**20
"""If less shared memory is free, the error of a dead process says so. A container has 64 MiB of it by default."""


def segments_of(port: int | str) -> str:
    # The prefix of the names of shared memory. ``port``: the port at which the processes meet.
    return f"verl-memopt-{port}-"


def full_shared_memory() -> str:
    """Return a sentence that little shared memory is free on this machine; "" if there is enough, or no shared memory.

    If a process writes to shared memory for which there is no room, SIGBUS ends it without a message.
    """
    try:
        space = shutil.disk_usage(SHARED_MEMORY)
    except OSError:
        return ""
    if space.free >= LITTLE_SHARED_BYTES:
        return ""
    return (
        f"{SHARED_MEMORY} of this machine has {space.free >> 20} of {space.total >> 20} MiB left, and a process that needs more "
        "ends like this too: remove unused files there, or give a container more (docker run --shm-size=1g)."
    )


def remove_segments(port: int) -> None:
    """Remove the shared memory that killed processes have left behind. It would occupy memory for ever."""
    for path in SHARED_MEMORY.glob(f"{segments_of(port)}*"):
        with suppress(OSError):
            path.unlink()


def _is_tracker(pid: int) -> bool:
    try:
        return TRACKER in " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


# The guardian: a process that lives a moment longer than its starter, and kills the processes that the starter had started.
#
# If the driver is killed, most processes of Ray end too. But the two agents of Ray's node live for another minute, and so do
# processes that Ray was about to start. The guardian waits until a pipe closes that only the starter holds. It has its own
# session, so that Ctrl-C does not reach it. It imports nothing heavy.
#
# The guardian searches for new processes ten times per second. A process may start between two searches, and lose its parent when
# the driver is killed. Then it is no longer a descendant of the driver; Ray's agents may start in this way. So every process that
# starts before :meth:`Guardian.all_started` has an environment variable by which the guardian finds it.


LOOK_SECONDS = 0.1
"""Time between two searches for new processes, until all have started."""

READY, STARTED = b"ready\n", b"all have started\n"

MARK = "VERL_MEMOPT_GUARDED_BY"
"""Environment variable of the guarded processes. Each guardian has its own value."""


class Guardian:
    """Kills descendants of this process once this process is gone.

    It kills the processes that start between now and :meth:`all_started`, and their descendants. Until then this process has the
    environment variable ``VERL_MEMOPT_GUARDED_BY``, which these processes inherit. If a guardian is killed, a new one starts at
    once and watches the same processes.
    """

    def __init__(self) -> None:
        self._value = secrets.token_hex(16)
        self._changing, self._dismissed = threading.Lock(), False
        self._start()
        os.environ[MARK] = self._value
        # The guardian may be killed while the main thread waits for the start of Ray, so another thread replaces it.
        threading.Thread(target=self._follow, name="guardian", daemon=True).start()

    def _start(self) -> None:
        # -S (without site) makes the interpreter start twice as fast.
        path = process_tree.safe_path()
        program = f"import sys; sys.path[:] = {path!r}; from {__name__} import guard; guard({os.getpid()}, {self._value!r})"
        # The guardian inherits the mask, so a signal that arrives while it imports does not end it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, process_tree.STOP_SIGNALS)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", program],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self.pid = self._process.pid
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._pipe = self._process.stdin
        # Wait until the guardian says that it watches. A process that started earlier would count as one that existed before.
        if not select.select([self._process.stdout], [], [], READY_SECONDS)[0] or self._process.stdout.readline() != READY:
            self._end()
            raise WorkerError(
                f"the process that ends Ray's processes after a kill did not start ({sys.executable} exited with code "
                f"{self._process.returncode}). What it printed is above. Check that this Python starts, and start again."
            )

    def _follow(self) -> None:
        while True:
            self._process.wait()
            with self._changing:
                if self._dismissed:
                    return
                self._process.communicate()
                try:
                    self._start()
                except WorkerError as error:
                    logger.warning("a kill of this run may leave processes of Ray behind: %s", error)
                    return
                if MARK not in os.environ:
                    self._tell_all_started()

    def all_started(self) -> None:
        """Report that all processes to be guarded have started.

        Processes that they start later are guarded too. Other processes are not.
        """
        with self._changing:
            os.environ.pop(MARK, None)
            self._tell_all_started()

    def _tell_all_started(self) -> None:
        # If the guardian was killed meanwhile, its successor gets the message.
        with suppress(BrokenPipeError):
            os.write(self._pipe.fileno(), STARTED)

    def dismiss(self) -> None:
        """End the guardian without killing anything. May be called again."""
        with self._changing:
            self._dismissed = True
            os.environ.pop(MARK, None)
            self._end()

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate()


def guard(starter: int, value: str) -> None:
    """Watch the descendants of ``starter`` that start from now on, and kill them when standard input ends.

    Processes whose environment has ``VERL_MEMOPT_GUARDED_BY`` with this value are killed as well.
    """
    for number in process_tree.STOP_SIGNALS:  # the guardian must live longer than the process that it watches
        signal.signal(number, signal.SIG_IGN)
    # Processes are compared by id and start time, because an id may be used again.
    # Existing processes are not guarded: they belong to the program that starts Ray, or are the guardian itself. But if this
    # guardian replaces one that was killed, the guarded processes exist already. They have the mark.
    guarded = set(process_tree.marked(f"{MARK}={value}"))
    guarded = guarded.union(*(process_tree.descendants(process.pid) for process in guarded))
    others = set(process_tree.descendants(starter)) - guarded
    with suppress(BrokenPipeError):  # the starter is already gone, and the processes that it has started must be killed too
        os.write(1, READY)
    starting = True
    while True:
        ready, _, _ = select.select([0], [], [], LOOK_SECONDS if starting else None)
        if not ready:
            guarded |= set(process_tree.descendants(starter)) - others
        elif os.read(0, len(STARTED)):
            starting = False  # processes since the last search have the mark, and later processes are not guarded
        else:
            break

    def find() -> list[int] | None:
        below = [process_tree.descendants(process.pid) for process in guarded if process.is_running()]
        guarded.update(process_tree.marked(f"{MARK}={value}"), *below)
        return _running(guarded) or None

    process_tree.kill_all(find)


@contextmanager
def uncollected() -> Iterator[None]:
    # Pause the garbage collector while the body imports modules: it would scan all imported objects again and again.
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
