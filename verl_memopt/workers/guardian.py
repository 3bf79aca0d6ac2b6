"""A process that outlives its starter for a moment, and kills what the starter had started.

Ray's own processes follow a killed driver, but its node's two agents outlive it by a minute, and so does what Ray was about to
start when the driver died. The guardian waits for the end of a pipe that only the starter holds. It has a session of its own,
where no Ctrl-C reaches it. It imports the standard library alone.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

if __name__ == "__main__":  # run as a file, for a package would bring its own imports
    sys.path.insert(0, str(Path(__file__).parent))
    from processes import descendants, kill
else:
    from verl_memopt.workers.processes import descendants, kill

LOOK_SECONDS = 0.1
"""How often it looks for new processes until it is told that all have started."""

ROUNDS, ROUND_SECONDS = 20, 0.1
"""Killing takes as many rounds as new processes appear."""

STARTED = b"all have started\n"

Born = tuple[int, int]
"""A process by its id and the time of its start, in clock ticks since boot: an id alone may come again."""


class Guardian:
    """Kills, once this process is gone, the descendants that it has from now on until :meth:`all_started`, and theirs."""

    def __init__(self) -> None:
        """Return once it watches."""
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", __file__, str(os.getpid())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._pipe = self._process.stdin
        self._process.stdout.readline()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def all_started(self) -> None:
        """Say that what is to be guarded has started. What these processes start is guarded too, what others start is not."""
        self._pipe.write(STARTED)
        self._pipe.flush()

    def dismiss(self) -> None:
        """End it; it kills nothing. May be called again."""
        self._process.kill()
        self._process.communicate()


def guard(starter: int) -> None:
    """Watch the descendants of ``starter`` that are born from now on, and kill them when standard input ends."""
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
        guarded |= _born([child for pid in _alive(guarded) for child in descendants(pid)])
        alive = _alive(guarded)
        if not alive:
            break
        kill(alive)
        time.sleep(ROUND_SECONDS)


def _alive(processes: set[Born]) -> list[int]:
    return [pid for pid, _ in processes & _born([pid for pid, _ in processes])]


def _born(pids: list[int]) -> set[Born]:
    """Return those processes that exist and are no zombies, but for this one, with the time at which each started."""
    found = set()
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue
        if pid != os.getpid() and fields[0] not in (b"Z", b"X"):
            found.add((pid, int(fields[19])))
    return found


if __name__ == "__main__":
    guard(int(sys.argv[1]))
