"""A process that outlives its starter for a moment, and kills the processes that the starter had started.

Ray's own processes follow a killed driver, but the two agents of its node outlive it by a minute, and so do processes that Ray
was about to start when the driver died. The guardian waits for the end of a pipe that only the starter holds. It has its own
session, where no Ctrl-C reaches it. It needs nothing beyond the standard library.

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
from pathlib import Path

from verl_memopt.rewards.process_tree import marked
from verl_memopt.workers.processes import descendants, kill

LOOK_SECONDS = 0.1
"""Time between two searches for new processes, until all have started."""

ROUNDS, ROUND_SECONDS = 20, 0.1
"""Largest number of killing rounds, each for the processes that appeared since the last one."""

STARTED = b"all have started\n"

MARK = "VERL_MEMOPT_GUARDED_BY"
"""Environment variable of the guarded processes. Its value is the guardian's own."""

Born = tuple[int, int]
"""A process id and its start time in clock ticks since boot. An id alone may be used again."""


class Guardian:
    """Kills descendants of this process once this process is gone.

    It kills those that are born from now on until :meth:`all_started`, and their descendants. Until then this process has the
    environment variable ``VERL_MEMOPT_GUARDED_BY``, which they inherit.
    """

    def __init__(self) -> None:
        """Start the guardian, and return once it watches."""
        value = secrets.token_hex(16)
        package = str(Path(__file__).parents[2])
        program = f"import sys; sys.path.append({package!r}); from {__name__} import guard; guard({os.getpid()}, {value!r})"
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", program],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._pipe = self._process.stdin
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
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    others, guarded = _born(descendants(starter)), set[Born]()
    os.write(1, b"ready\n")
    starting = True
    while True:
        ready, _, _ = select.select([0], [], [], LOOK_SECONDS if starting else None)
        if ready and not os.read(0, len(STARTED)):
            break
        guarded |= _born(descendants(starter)) - others
        starting = starting and not ready
    for _ in range(ROUNDS):
        guarded |= _born(marked(f"{MARK}={value}")) | _born([child for pid in _alive(guarded) for child in descendants(pid)])
        alive = _alive(guarded)
        if not alive:
            break
        kill(alive)
        time.sleep(ROUND_SECONDS)


def _alive(processes: set[Born]) -> list[int]:
    return [pid for pid, _ in processes & _born([pid for pid, _ in processes])]


def _born(pids: list[int]) -> set[Born]:
    """Return (pid, start time) of the processes that exist and are not zombies, without this process."""
    born = set()
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue
        if pid != os.getpid() and fields[0] not in (b"Z", b"X"):
            born.add((pid, int(fields[19])))
    return born
