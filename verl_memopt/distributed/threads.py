"""The number of threads of a process on a CPU.

torch starts one thread per core, and the threads wait for the slowest thread in a busy loop. With only one thread more than free
cores, a step takes ten times as long.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

THREADS = "OMP_NUM_THREADS"
"""Environment variable with the number of threads of a process. If it is set, its value is used."""
CGROUP = Path("/sys/fs/cgroup")


def num_cores(cgroup: Path = CGROUP) -> int:
    """Return how many cores this process may use: those it is bound to, and at most a container's share of CPU time."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):
        share, period = (cgroup / "cpu.max").read_text().split()
        cores = min(cores, max(1, int(share) // int(period)))
    with suppress(OSError, ValueError):
        share, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        cores = min(cores, max(1, int(share) // int(period))) if int(share) > 0 else cores
    return cores


def threads_for(num_processes: int) -> int:
    """Return the number of threads for each of ``num_processes`` processes that compute at the same time.

    It is OMP_NUM_THREADS if this is set, and otherwise an equal share of the cores. One core stays free for the driver, the
    rewards and other programs.
    """
    wished = os.environ.get(THREADS, "")
    return int(wished) if wished.isdigit() and int(wished) else max(1, (num_cores() - 1) // num_processes)
