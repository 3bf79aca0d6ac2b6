import os
import signal
import subprocess
import sys
import time

import pytest

from tests.end_to_end.runs import ROOT
from verl_memopt.run.processes import MARK, Guardian, is_alive, kill, wait_until_gone

STARTER = """
import subprocess, sys, time
from verl_memopt.run.processes import Guardian

sleeper = ["sleep", "300"]
before = subprocess.Popen(sleeper)
guardian = Guardian()
child = subprocess.Popen(["sh", "-c", "sleep 300 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
grandchild = int(child.stdout.readline())
if sys.argv[1] == "all started":
    guardian.all_started()
    time.sleep(0.5)
    after = subprocess.Popen(sleeper).pid
else:
    time.sleep(0.5)
    after = 0
print(guardian.pid, before.pid, child.pid, grandchild, after, flush=True)
time.sleep(300)
"""


UNSEEN = """
import os, signal, subprocess, time
from verl_memopt.run.processes import Guardian

guardian = Guardian()
os.kill(guardian.pid, signal.SIGSTOP)
born = subprocess.run(["sh", "-c", "sleep 300 > /dev/null & echo $!"], stdout=subprocess.PIPE, text=True)
after = guardian.all_started() or subprocess.Popen(["sleep", "300"]).pid
print(guardian.pid, int(born.stdout), after, flush=True)
time.sleep(300)
"""
"""Starts a process whose parent is gone before the guardian looks."""


@pytest.fixture
def starter():
    """Starts one, and gives it with its guardian, a child from before, a child, the child's child, and a child from after."""
    made = []

    def start(moment, script=STARTER):
        process = subprocess.Popen([sys.executable, "-c", script, moment], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        pids = [int(pid) for pid in process.stdout.readline().split()]
        made.extend([process.pid, *filter(None, pids)])
        return process, *pids

    yield start
    kill(made)


@pytest.mark.parametrize("moment", ["starting", "all started"])
def test_what_a_killed_process_started_is_killed_and_nothing_else(starter, moment):
    process, guardian, before, child, grandchild, after = starter(moment)
    os.kill(guardian, signal.SIGTERM)  # it is of the job that a scheduler ends, and goes on
    process.kill()
    process.wait()
    assert wait_until_gone([guardian, child, grandchild], 20) == []
    assert is_alive(before)
    assert not after or is_alive(after)


def test_an_orphan_that_the_guardian_never_saw_is_killed_and_nothing_else(starter):
    process, guardian, orphan, after = starter("", UNSEEN)
    process.kill()
    process.wait()
    os.kill(guardian, signal.SIGCONT)
    assert wait_until_gone([guardian, orphan], 20) == []
    assert is_alive(after)


def test_a_guardian_that_is_dismissed_kills_nothing():
    guardian = Guardian()
    sleeper = subprocess.Popen(["sleep", "300"])
    guardian.all_started()
    guardian.dismiss()
    guardian.dismiss()
    assert not is_alive(guardian.pid)
    assert MARK not in os.environ
    time.sleep(0.3)
    assert is_alive(sleeper.pid)
    sleeper.kill()
    sleeper.wait()
