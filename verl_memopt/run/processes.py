"""The processes that this one has started: how to end all of them, and the guardian that does so when this process is gone.

It imports nothing heavy (psutil takes 15 ms), so that a command can watch for signals before anything else is imported.
psutil is not first imported by a search, for that is done while the process is being ended, whatever its other threads do.
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
"""Longest time for killing what this process has started, when a signal ends it."""

READY_SECONDS = 60.0
"""Longest time in which the guardian must have started."""

TRACKER = "multiprocessing.resource_tracker"
"""Python's own process that cleans up shared memory. It ends by itself after the last process that used it."""


def descendants(pid: int) -> list[int]:
    # Zombies are left out: they have ended, and nobody has collected them.
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

    An orphan becomes a child of this process. So if the parent of a process was killed first, the next round finds it.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    return process_tree.kill_all(lambda: [pid for pid in descendants(os.getpid()) if not _is_tracker(pid)] or None, KILL_SECONDS)


def kill_processes(processes: Collection[psutil.Process]) -> bool:
    """Kill processes and wait until none of them runs; return whether that took at most ``END_SECONDS``.

    psutil compares start times, so a process with a reused id is spared.
    """
    return process_tree.kill_all(lambda: _running(processes) or None)


def _running(processes: Iterable[psutil.Process]) -> list[int]:
    return [process.pid for process in processes if process.is_running() and is_alive(process.pid)]


SHARED_MEMORY = Path("/dev/shm")

LITTLE_SHARED_BYTES = 64 * 2**20
"""So little free shared memory is named when a process has died. A container has 64 MiB of it unless it is told otherwise."""


def segments_of(port: int | str) -> str:
    """Return how the names begin of shared memory between processes that meet at a port."""
    return f"verl-memopt-{port}-"


def full_shared_memory() -> str:
    """Return, in a sentence, that little is left of this machine's shared memory; empty where there is enough or none.

    A process that writes to memory for which there is no room is ended by SIGBUS, without a word.
    """
    try:
        space = shutil.disk_usage(SHARED_MEMORY)
    except OSError:
        return ""
    if space.free >= LITTLE_SHARED_BYTES:
        return ""
    return (
        f"{SHARED_MEMORY} of this machine has {space.free >> 20} of {space.total >> 20} MiB left, and a process that needs more "
        "ends like this too: remove what is not used there, or give a container more (docker run --shm-size=1g)."
    )


def remove_segments(port: int) -> None:
    """Remove what processes that were killed before they could do so have left there. Else it would take memory for ever."""
    for path in SHARED_MEMORY.glob(f"{segments_of(port)}*"):
        with suppress(OSError):
            path.unlink()


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

READY, STARTED = b"ready\n", b"all have started\n"

MARK = "VERL_MEMOPT_GUARDED_BY"
"""Environment variable of the guarded processes. Its value is the guardian's own."""


class Guardian:
    """Kills descendants of this process once this process is gone.

    It kills those that start between now and :meth:`all_started`, and their descendants. Until then this process has the
    environment variable ``VERL_MEMOPT_GUARDED_BY``, which they inherit. If a guardian is killed, a new one starts at once and
    watches the same processes.
    """

    def __init__(self) -> None:
        self._value = secrets.token_hex(16)
        self._changing, self._dismissed = threading.Lock(), False
        self._start()
        os.environ[MARK] = self._value
        # A thread, because the driver may be killed next, while its main thread waits in the start of Ray.
        threading.Thread(target=self._follow, name="guardian", daemon=True).start()

    def _start(self) -> None:
        # Without site (-S) an interpreter starts twice as fast.
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
        # The guardian says that it watches. Before that, a process born now would count as one that existed already.
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
        # If it was killed meanwhile, its successor is told.
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
    for number in process_tree.STOP_SIGNALS:  # it must outlive the process that it watches
        signal.signal(number, signal.SIG_IGN)
    # Processes are equal if id and start time are. An id alone may be used again.
    # What exists already is not the guardian's: it belongs to the program that starts Ray, or is the guardian itself. But where
    # this one takes the place of a guardian that was killed, the guarded processes have the mark already.
    guarded = set(process_tree.marked(f"{MARK}={value}"))
    guarded = guarded.union(*(process_tree.descendants(process.pid) for process in guarded))
    others = set(process_tree.descendants(starter)) - guarded
    with suppress(BrokenPipeError):  # the starter is gone already, and what it has started has to go too
        os.write(1, READY)
    starting = True
    while True:
        ready, _, _ = select.select([0], [], [], LOOK_SECONDS if starting else None)
        if not ready:
            guarded |= set(process_tree.descendants(starter)) - others
        elif os.read(0, len(STARTED)):
            starting = False  # what was born since the last look has the mark, and what is born now is not guarded
        else:
            break

    def find() -> list[int] | None:
        below = [process_tree.descendants(process.pid) for process in guarded if process.is_running()]
        guarded.update(process_tree.marked(f"{MARK}={value}"), *below)
        return _running(guarded) or None

    process_tree.kill_all(find)


@contextmanager
def uncollected() -> Iterator[None]:
    # Pause the garbage collector while the body imports: it would look through everything that stays, again and again.
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
