"""A process that outlives its starter for a moment, and kills the processes that the starter had started.

Ray's own processes follow a killed driver, but the two agents of its node outlive it by a minute, and so do processes that Ray
was about to start when the driver died. The guardian waits for the end of a pipe that only the starter holds. It has its own
session, where no Ctrl-C reaches it. It imports nothing heavy.

It looks for new processes ten times a second. A process may start between two looks and lose its parent together with the driver.
It is then nobody's descendant any more, and Ray's agents start so if the driver is killed at that moment. So every process that
starts before :meth:`Guardian.all_started` has an environment variable by which the guardian finds it.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import subprocess
import sys
import time

import psutil

from verl_memopt.rewards.process_tree import descendants, marked
from verl_memopt.workers.processes import is_alive, kill

LOOK_SECONDS = 0.1
"""Time between two searches for new processes, until all have started."""

ROUNDS, ROUND_SECONDS = 20, 0.1
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
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._pipe = self._process.stdin
        # The guardian says that it watches. Before that, a process born now would count as one that existed already.
        self._process.stdout.readline()
        os.environ[MARK] = value

    @property
    def pid(self) -> int:
        """Process id of the guardian."""
        return self._process.pid

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
    # What exists already is not the guardian's: it belongs to the program that starts Ray.
    others, guarded = _below(starter), set[psutil.Process]()
    os.write(1, b"ready\n")
    starting = True
    while True:
        ready, _, _ = select.select([0], [], [], LOOK_SECONDS if starting else None)
        if ready and not os.read(0, len(STARTED)):
            break
        guarded |= _below(starter) - others
        starting = starting and not ready
    for _ in range(ROUNDS):
        guarded |= {*marked(f"{MARK}={value}")}.union(*(_below(process.pid) for process in guarded if process.is_running()))
        alive = [process.pid for process in guarded if process.is_running() and is_alive(process.pid)]
        if not alive:
            break
        kill(alive)
        time.sleep(ROUND_SECONDS)


def _below(pid: int) -> set[psutil.Process]:
    """Return the processes below another, without this process."""
    return {process for process in descendants(pid) if process.pid != os.getpid()}
