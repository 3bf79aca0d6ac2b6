import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from tests.end_to_end.runs import ROOT
from tests.rewards.processes import all_gone
from verl_memopt.errors import WorkerError
from verl_memopt.run.processes import MARK, Guardian, is_alive, kill

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
    assert all_gone([guardian, child, grandchild])
    assert is_alive(before)
    assert not after or is_alive(after)


def test_an_orphan_that_the_guardian_never_saw_is_killed_and_nothing_else(starter):
    process, guardian, orphan, after = starter("", UNSEEN)
    process.kill()
    process.wait()
    os.kill(guardian, signal.SIGCONT)
    assert all_gone([guardian, orphan])
    assert is_alive(after)


RENEWED = """
import os, signal, subprocess, sys, time
from verl_memopt.run.processes import Guardian

before = subprocess.Popen(["sleep", "300"])
guardian = Guardian()
child = subprocess.Popen(["sleep", "300"])
parent = subprocess.Popen(["sh", "-c", "env -i sleep 300 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
grandchild = int(parent.stdout.readline())
if sys.argv[1] == "all started":
    guardian.all_started()
killed = guardian.pid
os.kill(killed, signal.SIGKILL)
if sys.argv[1] == "starting":
    guardian.all_started()
while guardian.pid == killed:
    time.sleep(0.01)
with guardian._changing:  # until the successor watches and knows that all have started
    parent.kill()
parent.wait()
after = subprocess.Popen(["sleep", "300"])
time.sleep(0.5)  # several looks of one that does not know it
print(guardian.pid, before.pid, child.pid, grandchild, after.pid, flush=True)
time.sleep(300)
"""
"""The grandchild is found by neither its environment nor its parent, which ends once the successor watches."""


@pytest.mark.parametrize("moment", ["starting", "all started"])
def test_the_guardian_that_takes_the_place_of_a_killed_one_kills_the_same_processes(starter, moment):
    process, guardian, before, child, grandchild, after = starter(moment, RENEWED)
    process.kill()
    process.wait()
    assert all_gone([guardian, child, grandchild])
    assert is_alive(before)
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


PLANTED = """
import importlib, os, sys

with open(os.path.join(os.path.dirname(__file__), "log"), "a") as log:
    log.write(f"{os.getpid()}\\n")
path = list(sys.path)
sys.path[:] = [folder for folder in path if folder not in ("", os.path.dirname(__file__))]
del sys.modules[__name__]
importlib.import_module(__name__)
sys.path[:] = path
"""
"""Takes the place of a module in the working directory, notes which process ran it, and is that module otherwise."""

STARTS_BOTH = """
import os
from verl_memopt.config.schema import CustomReward
from verl_memopt.rewards.runner import RewardRow, RewardRunner
from verl_memopt.run.processes import Guardian

guardian = Guardian()
with RewardRunner(CustomReward(path="reward.py"), num_workers=1) as runner:
    (result,) = runner.score([RewardRow("", "", "", {}, "row 1")])
    print(os.getpid(), guardian.pid, *runner.pids(), result.score)
guardian.dismiss()
"""


def test_no_process_that_is_started_runs_what_lies_in_the_working_directory_but_the_users_own(tmp_path):
    for name in ("secrets", "select", "struct", "resource", "statistics", "psutil", "numbers"):
        (tmp_path / f"{name}.py").write_text(PLANTED)
    (tmp_path / "mine.py").write_text("SCORE = 0.25")
    (tmp_path / "reward.py").write_text("import mine\ndef compute_score(*args, **kwargs): return mine.SCORE")
    command = [sys.executable, "-c", STARTS_BOTH]
    run = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    driver, guardian, supervisor, score = run.stdout.split()
    assert score == "0.25"
    ran = set((tmp_path / "log").read_text().split())
    assert driver in ran  # Python itself puts the working directory first there
    assert not ran & {guardian, supervisor}


def test_a_guardian_that_does_not_start_is_an_error(monkeypatch):
    before = psutil.Process().children()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(WorkerError, match="/bin/false exited with code 1"):
        Guardian()
    assert psutil.Process().children() == before


def test_a_signal_while_a_guardian_imports_leaves_it_watching(capfd):
    """A scheduler signals every process of a job, and the guardian takes a tenth of a second to start."""
    own, stopped = psutil.Process(), threading.Event()
    before = set(own.children())

    def interrupt():
        while not stopped.is_set():
            for child in set(own.children()) - before:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.send_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        guardian = Guardian()
    finally:
        stopped.set()
        thread.join()
    assert is_alive(guardian.pid)
    guardian.dismiss()
    assert "Traceback" not in capfd.readouterr().err
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])
