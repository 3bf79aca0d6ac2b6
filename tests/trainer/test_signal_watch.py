"""Each test watches the signals of a process of its own, and sends it some."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.rewards.processes import all_gone
from verl_memopt.run.processes import descendants, kill

BUSY = "for _ in range(10**12): pass"
IN_C = "import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)"
ASLEEP = "import time; time.sleep(600)"
"""What the main thread does meanwhile: Python code, one call of C that lets other threads run, nothing."""

STEPS = """
import os, time
said = []
def say(moment):
    os.write(1, b'told\\n')
    said.append(moment)
watch.interrupts.begin_steps({deadline}, say)
"""
CODES = [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)]


@pytest.fixture
def watched():
    """Starts a process that watches its signals, runs some code and then says so; it is ended with the test."""
    started = []

    def begin(then, before="", starts="watch = SignalWatch()"):
        buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        code = f"{before}\nfrom verl_memopt.run.interrupts import SignalWatch\n{starts}\n{then}"
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen([sys.executable, "-c", code], **pipes, text=True, env=buffered)
        started.append(process)
        return process

    yield begin
    for process in started:
        kill([*descendants(process.pid), process.pid])
        process.communicate()


def ready(process, word="ready"):
    assert process.stdout.readline() == f"{word}\n"


def ended_by(process, name):
    """Sends a signal to a process that is ready, and gives its exit code, its output and its errors."""
    ready(process)
    process.send_signal(signal.Signals[name])
    output, errors = process.communicate(timeout=20)
    return process.returncode, output, errors


@pytest.mark.parametrize(
    ("name", "code", "work"), [(*code, work) for code, work in zip(CODES, (BUSY, IN_C, ASLEEP), strict=True)]
)
def test_before_the_first_step_a_signal_ends_the_process_at_once_whatever_it_does(watched, name, code, work):
    found = ended_by(watched(f"print('ready', flush=True)\n{work}"), name)
    assert found == (code, "", f"{name}: ended before the first step; there was nothing to save.\n")


def test_every_process_that_was_started_ends_with_it_and_what_was_printed_is_kept(watched):
    start = "import subprocess\nchild = subprocess.Popen(['sh', '-c', \"trap '' TERM; setsid sleep 600 & wait\"])\n"
    process = watched(f"{start}print('kept')\nimport os; os.write(1, b'ready\\x0a')\n{ASLEEP}")
    ready(process)
    deadline = time.monotonic() + 10
    while len(children := psutil.Process(process.pid).children(recursive=True)) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(children) == 2
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 143
    assert output == "kept\n"
    assert all_gone([child.pid for child in children])


@pytest.mark.parametrize(("name", "code"), CODES)
def test_in_the_steps_the_first_signal_asks_and_the_main_thread_decides_when_to_end(watched, name, code):
    loop = "print('ready', flush=True)\nwhile not (watch.interrupts.requested and said): time.sleep(0.01)\ntime.sleep(0.1)\n"
    steps = f"{STEPS.format(deadline=60)}{loop}print('saved', flush=True)\nraise SystemExit(watch.interrupts.exit_code)"
    said = f"{name}: stopping after this step, then saving; once more stops at once\n"
    assert ended_by(watched(steps), name) == (code, "told\nsaved\n", said)


def test_a_second_signal_ends_at_once_and_says_where_a_new_start_goes_on(watched):
    process = watched(
        f"{STEPS.format(deadline=60)}watch.interrupts.last_saved = 'Step 4 is saved'\nprint('ready', flush=True)\n{IN_C}"
    )
    ready(process)
    process.send_signal(signal.SIGTERM)
    ready(process, "told")
    time.sleep(0.6)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 143
    assert errors.splitlines()[1:] == ["SIGINT: the second signal; ended at once. Step 4 is saved."]


def test_a_signal_that_a_supervisor_sends_twice_is_one(watched):
    process = watched(f"{STEPS.format(deadline=60)}print('ready', flush=True)\n{ASLEEP}")
    ready(process)
    process.send_signal(signal.SIGTERM)
    ready(process, "told")
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)


def test_at_the_deadline_the_process_ends_with_the_code_of_the_signal_and_names_the_key(watched):
    code, _, errors = ended_by(watched(f"{STEPS.format(deadline=0.3)}print('ready', flush=True)\n{IN_C}"), "SIGHUP")
    assert code == 129
    message = "the stop was not finished within trainer.stop_deadline_seconds=0.3; ended at once. No checkpoint was saved."
    assert errors.splitlines()[1:] == [message]


def test_a_hangup_that_is_ignored_stays_ignored_as_under_nohup(watched):
    ignore = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    process = watched(f"print('ready', flush=True)\n{ASLEEP}", before=ignore)
    ready(process)
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)


def test_a_started_program_has_the_default_actions_and_a_forked_one_does_not_stop_its_parent(watched):
    fork = (
        "import os, signal, subprocess, time\n"
        "print(subprocess.run(['sh', '-c', 'kill -TERM $$; echo survived'], stdout=subprocess.PIPE).returncode, flush=True)\n"
        "pid = os.fork()\n"
        "if pid == 0: time.sleep(600)\n"
        "time.sleep(0.2)\n"
        "os.kill(pid, signal.SIGTERM)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)\n"
        "time.sleep(0.2)\n"
        "print(watch.interrupts.requested, flush=True)\n"
    )
    process = watched(fork)
    output, errors = process.communicate(timeout=30)
    assert output.split() == ["-15", "-15", "False"], errors
    assert process.returncode == 0


def test_a_signal_that_the_main_thread_blocks_is_seen_by_the_watch(watched):
    block = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})"
    assert ended_by(watched(f"{block}\nprint('ready', flush=True)\n{ASLEEP}"), "SIGTERM")[0] == 143


def test_the_watch_brings_no_package():
    code = """import sys; before = set(sys.modules)
import verl_memopt.run.interrupts, verl_memopt.trainer.main_ppo
print(*(set(sys.modules) - before))"""
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    foreign = {name.split(".")[0] for name in loaded} - set(sys.stdlib_module_names) - {"verl_memopt"}
    assert foreign == set()


RAYS_OWN = """
import signal, sys, time
from verl_memopt.run.interrupts import guarded
plain = SignalWatch._handle
def late(self, number):
    time.sleep(0.5)
    plain(self, number)
SignalWatch._handle = late
def command():
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
    print("ready", flush=True)
    time.sleep(600)
sys.exit(guarded(command, watched=True))
"""
"""A command that has a handler as Ray sets one while it starts, and a watch that comes later than this handler."""


def test_a_handler_that_ray_sets_for_a_moment_changes_no_exit_code(watched):
    found = ended_by(watched(RAYS_OWN, starts=""), "SIGTERM")
    assert found == (143, "", "SIGTERM: ended before the first step; there was nothing to save.\n")


ENDS = """
import atexit, sys, threading, time
from verl_memopt.run.interrupts import guarded
def late():
    time.sleep(0.3)
    print("thread")
def command():
    threading.Thread(target=late).start()
    atexit.register(print, "handler")
    print("command")
    return 3
sys.exit(guarded(command, watched=True))
"""


def test_a_command_that_is_done_waits_for_threads_and_exit_handlers_and_loses_no_output(watched):
    process = watched(ENDS, starts="")
    output, errors = process.communicate(timeout=20)
    assert (process.returncode, output, errors) == (3, "command\nthread\nhandler\n", "")


def test_output_that_cannot_be_written_is_still_an_error():
    code = (
        "import sys; from verl_memopt.run.interrupts import guarded; sys.exit(guarded(lambda: print('done') or 0, watched=True))"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode != 0
    assert "No space left on device" in done.stderr
