"""Kills, stops or signals processes of a run at boundaries of its phases, from inside the driver, so that the moments are exact.

``python -m tests.faults.kills ARGUMENTS`` trains as ``verl_memopt.trainer.main_ppo`` does, with the faults of the variable KILL.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager

import psutil

KILL = "FAULT_KILL"
"""Variable with the JSON of [file, [[how, who, phase, edge], ...]]: what happens to which process before or after a phase, one
after another from the second step of this start on. The file has a line for each that happened."""
HOWS = ("kill", "stop", "SIGTERM")
"""stop = a while, then it may go on."""
STOPPED_SECONDS = 1

PROCESSES = {
    "worker": lambda process: process.name().startswith("ray::Member"),
    "reward": lambda process: "verl_memopt.rewards" in " ".join(process.cmdline()),
    "raylet": lambda process: process.name() == "raylet",
    "gcs": lambda process: process.name() == "gcs_server",
    "agent": lambda process: "Agent" in process.name() or "agent.py" in " ".join(process.cmdline()),
    "guardian": lambda process: "import guard" in " ".join(process.cmdline()),
    "idle worker": lambda process: process.name().startswith("ray::IDLE"),
}
"""What a run is made of beside its driver."""
ENDS_A_RUN = ("worker", "raylet", "gcs")
"""Without these a run cannot go on."""
BOTH = "guardian, then driver"
"""The driver goes a while after the process that would have cleaned up behind it."""


def members(pid):
    """Return the processes of a run by role."""
    found = {who: [] for who in PROCESSES}
    for process in psutil.Process(pid).children(recursive=True):
        try:
            for who, is_one in PROCESSES.items():
                if is_one(process):
                    found[who].append(process)
        except psutil.NoSuchProcess:
            continue
    return {who: processes for who, processes in found.items() if processes}


def strike_at(moments, record):
    """Let this process strike the others of its run at the given moments."""
    from verl_memopt.observe.phase import PhaseClock

    waiting, entered = list(moments), Counter()
    plain = PhaseClock.phase

    def strike(name, edge):
        while waiting and entered[name] > 1 and waiting[0][2:] == [name, edge]:
            how, who = waiting[0][:2]
            there = {"driver": [psutil.Process()], **members(os.getpid())}
            targets = there.get("guardian" if who == BOTH else who, [])
            if not targets:  # the moment before has ended it, and it has no successor yet: the next step has this moment
                return
            with open(record, "a") as file:
                file.write(f"{waiting.pop(0)}\n")
            _strike(how, targets[0])
            if who == BOTH:
                waiting.clear()
                after = f"sleep {STOPPED_SECONDS}; kill -KILL {os.getpid()}"
                subprocess.Popen(["/bin/sh", "-c", after], start_new_session=True)

    @contextmanager
    def phase(self, name):
        entered[name] += 1
        strike(name, "before")
        with plain(self, name):
            yield
        strike(name, "after")

    PhaseClock.phase = phase


def _strike(how, process):
    while process.status() == psutil.STATUS_STOPPED:  # by the moment before this one
        time.sleep(0.05)
    if how == "stop":
        subprocess.Popen(["/bin/sh", "-c", f"sleep {STOPPED_SECONDS}; kill -CONT {process.pid}"], start_new_session=True)
    process.send_signal({"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "SIGTERM": signal.SIGTERM}[how])


if __name__ == "__main__":
    from verl_memopt.trainer.main_ppo import main

    file, moments = json.loads(os.environ[KILL])
    strike_at(moments, file)
    sys.exit(main())
