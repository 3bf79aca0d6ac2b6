import os
import subprocess
import sys
import time

import psutil
import pytest

from tests.rewards.processes import all_gone
from verl_memopt.run import processes
from verl_memopt.run.processes import descendants, is_alive, kill, kill_processes


def started(code):
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


@pytest.fixture
def family():
    """A child with a child of its own whose name holds spaces and parentheses."""
    child = subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
    grandchild = int(child.stdout.readline())
    yield child.pid, grandchild
    kill([child.pid, grandchild])
    child.communicate()


def test_descendants_are_children_and_their_children_parents_first(family):
    found = descendants(os.getpid())
    assert [pid for pid in found if pid in family] == list(family)
    assert descendants(family[0]) == [family[1]]


def test_little_shared_memory_is_told_with_the_way_out_and_enough_or_none_is_not(tmp_path, monkeypatch):
    for least, folder in ((0, tmp_path), (2**62, tmp_path / "absent")):
        monkeypatch.setattr(processes, "LITTLE_SHARED_BYTES", least)
        monkeypatch.setattr(processes, "SHARED_MEMORY", folder)
        assert processes.full_shared_memory() == ""
    monkeypatch.setattr(processes, "SHARED_MEMORY", tmp_path)
    assert f"{tmp_path} of this machine has " in processes.full_shared_memory()
    assert "--shm-size" in processes.full_shared_memory()


def test_what_has_ended_is_not_alive_even_while_nobody_has_taken_its_exit_code():
    process = subprocess.Popen(["true"])
    deadline = time.monotonic() + 10
    while is_alive(process.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(process.pid)
    assert process.pid not in descendants(os.getpid())
    assert is_alive(os.getpid())
    process.wait()
    assert not is_alive(process.pid)


def test_a_process_name_with_spaces_and_parentheses_is_read():
    code = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'a) R 1 (b', 0, 0, 0); print(1, flush=True); time.sleep(60)"
    process = started(code)
    process.stdout.readline()
    assert process.pid in descendants(os.getpid())
    kill([process.pid])
    process.communicate()


def test_killing_processes_waits_for_them_spares_others_and_what_is_gone_is_no_error(family):
    ended = subprocess.Popen(["sleep", "60"])
    processes = [psutil.Process(pid) for pid in (ended.pid, family[0])]
    ended.kill()
    ended.wait()
    kill([ended.pid])
    assert kill_processes(processes)
    assert [is_alive(pid) for pid in family] == [False, True]
    assert kill_processes([psutil.Process(family[1])])
    assert not is_alive(family[1])


FORKS = """
import subprocess, sys, time
from multiprocessing import resource_tracker
from verl_memopt.run.processes import kill_descendants
resource_tracker.ensure_running()
# Each child starts one process in a session of its own and goes on starting others, so that killing races with it.
script = "setsid sleep 60 & i=0; while [ $i -lt 40 ]; do sleep 50 & i=$((i+1)); done; wait"
children = [subprocess.Popen(["sh", "-c", script]) for _ in range(3)]
time.sleep(0.3)
print(resource_tracker._resource_tracker._pid, flush=True)
print(kill_descendants(), flush=True)
time.sleep(60)
"""


def test_every_descendant_is_killed_also_those_whose_parent_went_first_and_pythons_tracker_stays():
    process = started(FORKS)
    tracker = int(process.stdout.readline())
    assert process.stdout.readline() == "True\n"
    children = psutil.Process(process.pid).children(recursive=True)
    assert [child.pid for child in children if child.status() != psutil.STATUS_ZOMBIE] == [tracker]
    process.kill()
    process.communicate()
    assert all_gone([tracker])
