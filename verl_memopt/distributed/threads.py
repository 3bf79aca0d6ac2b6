"""Threads of a process on a CPU.

torch takes one for each core, and each waits for the slowest in a busy loop: with a thread more than there are free cores, a step
takes ten times as long.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

THREADS = "OMP_NUM_THREADS"
"""Environment variable that decides the threads of a process where somebody has set it."""
CGROUP = Path("/sys/fs/cgroup")


def num_cores(cgroup: Path = CGROUP) -> int:
    """Cores that this process may use: those it is bound to, and no more than a container's share of time."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):
        share, period = (cgroup / "cpu.max").read_text().split()
        cores = min(cores, max(1, int(share) // int(period)))
    with suppress(OSError, ValueError):
        share, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        cores = min(cores, max(1, int(share) // int(period))) if int(share) > 0 else cores
    return cores


def threads_for(num_processes: int) -> int:
    """Threads for each of ``num_processes`` that compute at the same time: the number asked for in the environment, else a share.

    One core stays free, for the driver, the rewards and the rest of the machine.
    """
    wished = os.environ.get(THREADS, "")
    return int(wished) if wished.isdigit() and int(wished) else max(1, (num_cores() - 1) // num_processes)
