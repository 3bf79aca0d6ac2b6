"""What is known of the processes below one process, and how all of them are ended."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.rewards.processes import gone
from verl_memopt.run.process_tree import cpu_seconds, descendants, kill_marked, marked, proportional_bytes, resident_bytes

NESTED = "import os, subprocess, sys, time\nprint(os.getpid(), flush=True)\n"
SLEEP = NESTED + "time.sleep(60)"
PARENT = NESTED + f"subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).wait()"


def started(program, lines, **environment):
    """Starts a program, and gives it with the process ids that it and what it starts print."""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    return process, [int(process.stdout.readline()) for _ in range(lines)]


def ids(root):
    return {process.pid for process in descendants(root)}


def test_descendants_are_found_over_generations_and_their_root_is_not_one():
    process, (parent, child) = started(PARENT, 2)
    try:
        assert {parent, child} <= ids(os.getpid())
        assert ids(parent) == {child}
    finally:
        os.kill(child, 9)
        process.wait()
    assert ids(parent) == set()


def test_a_process_whose_name_looks_like_a_stat_line_is_read_right(tmp_path):
    odd = tmp_path / "a) S 1 (b"
    odd.symlink_to("/bin/sleep")
    with subprocess.Popen([str(odd), "60"]) as process:
        while b"S 1" not in Path(f"/proc/{process.pid}/comm").read_bytes():
            time.sleep(0.01)
        assert process.pid in ids(os.getpid())
        process.kill()


def test_processor_time_and_memory_of_a_tree_grow_with_what_its_processes_take():
    busy = NESTED + "held = b'x' * 2**26\nwhile time.process_time() < 0.5: pass\nprint(0, flush=True)\ntime.sleep(60)"
    process, (pid, _) = started(busy, 2)
    tree = [psutil.Process(pid)]
    try:
        assert 0.4 < cpu_seconds(tree) < 5
        assert 2**26 < resident_bytes(tree) < 2**28
    finally:
        process.kill()
        process.wait()
    assert cpu_seconds(tree) == resident_bytes(tree) == 0


def test_pages_that_processes_share_count_once_in_the_proportional_sum():
    forks = (
        NESTED
        + "held = b'x' * 2**26\nfor _ in range(4):\n    if not os.fork(): time.sleep(60)\nprint(0, flush=True)\ntime.sleep(60)"
    )
    process, (pid, _) = started(forks, 2)
    tree = [psutil.Process(pid), *descendants(pid)]
    try:
        assert resident_bytes(tree) > 5 * 2**26
        assert 2**26 < proportional_bytes(tree) < 2 * 2**26
    finally:
        for each in tree:
            each.kill()
        process.wait()


def test_processes_with_a_mark_are_killed_wherever_they_are_and_others_are_not():
    double_fork = NESTED + "if os.fork(): sys.exit()\nos.setsid()\nprint(os.getpid(), flush=True)\ntime.sleep(60)"
    marked, (_, second) = started(double_fork, 2, THE_MARK="one")
    marked.wait()
    other, _ = started(SLEEP, 1, THE_MARK="one more")
    try:
        assert kill_marked("THE_MARK=one") == [second]
        assert gone(second)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_process_is_marked_by_a_whole_entry_of_its_environment():
    one, more = (
        subprocess.Popen(["sleep", "60"], env={"BEFORE": "1", "THE_TEST": value, "AFTER": "1"}) for value in ("one", "one more")
    )
    try:
        assert [process.pid for process in marked("THE_TEST=one")] == [one.pid]
        assert marked("TEST=one") == []
    finally:
        for process in (one, more):
            process.kill()
            process.wait()


def test_ending_descendants_leaves_none_of_a_tree_that_goes_on_growing(tmp_path):
    """Each process starts another and dies, in a session of its own, as fast as it can."""
    program = (
        "import ctypes, os, time\n"
        "from verl_memopt.run.process_tree import end_descendants\n"
        "assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0\n"
        "last = time.monotonic() + 30\n"  # so that it ends by itself where this test is killed
        "for _ in range(3):\n"
        "    if not os.fork():\n"
        "        while time.monotonic() < last:\n"
        "            if os.fork(): os._exit(0)\n"
        "            os.setsid()\n"
        f"            open({str(tmp_path / 'alive')!r}, 'a').write('x')\n"
        "time.sleep(0.2)\n"
        "print(end_descendants(), flush=True)\n"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["True"]
    size = (tmp_path / "alive").stat().st_size
    assert size > 0
    time.sleep(0.1)
    assert (tmp_path / "alive").stat().st_size == size
