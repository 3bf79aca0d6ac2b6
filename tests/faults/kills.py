"""Kills one process of a run at the boundary of a phase, from inside the driver, so that the moment is exact.

``python -m tests.faults.kills ARGUMENTS`` trains as ``verl_memopt.trainer.main_ppo`` does, with the kill of the variable KILL.
"""

import json
import os
import signal
import sys
from contextlib import contextmanager

import psutil

KILL = "FAULT_KILL"
"""Variable with the JSON of {who, edge, phase, time}: kill that process before or after a phase, the time-th time it comes."""

PROCESSES = {
    "worker": lambda process: process.name().startswith("ray::Member"),
    "reward": lambda process: "verl_memopt.rewards" in " ".join(process.cmdline()),
    "raylet": lambda process: process.name() == "raylet",
    "gcs": lambda process: process.name() == "gcs_server",
    "agent": lambda process: "Agent" in process.name() or "agent.py" in " ".join(process.cmdline()),
    "idle worker": lambda process: process.name().startswith("ray::IDLE"),
}
"""What a run is made of beside its driver."""


def members(pid):
    """Gives the processes of a run by what they are."""
    found = {who: [] for who in PROCESSES}
    for process in psutil.Process(pid).children(recursive=True):
        try:
            for who, is_one in PROCESSES.items():
                if is_one(process):
                    found[who].append(process)
        except psutil.NoSuchProcess:
            continue
    return {who: processes for who, processes in found.items() if processes}


def kill_at(moment):
    """Has this process kill one of its run when it comes to the moment."""
    from verl_memopt.observe.phase import PhaseClock

    entered = 0
    plain = PhaseClock.phase

    @contextmanager
    def phase(self, name):
        nonlocal entered
        mine = name == moment["phase"]
        entered += mine
        now = mine and entered == moment["time"]
        if now and moment["edge"] == "before":
            _kill(moment["who"])
        with plain(self, name):
            yield
        if now and moment["edge"] == "after":
            _kill(moment["who"])

    PhaseClock.phase = phase


def _kill(who):
    if who == "driver":
        os.kill(os.getpid(), signal.SIGKILL)
    for process in members(os.getpid())[who][:1]:
        process.kill()


if __name__ == "__main__":
    from verl_memopt.trainer.main_ppo import main

    kill_at(json.loads(os.environ[KILL]))
    sys.exit(main())
