"""A run that is stopped in any way goes on as if it had not been."""

import contextlib
import json
import os
import random
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.runs import (
    LOCAL,
    assert_equal_runs,
    family,
    learned,
    metrics,
    start,
    start_command,
    succeeded,
    survivors,
    train,
    wait_for_step,
)

AR = "actor_rollout_ref"
SMALL = ["data.train_batch_size=16", f"{AR}.actor.ppo_mini_batch_size=16", f"{AR}.rollout.n=4", "data.val_max_samples=16"]
SAVED = [*SMALL, "trainer.save_freq=2", "trainer.test_freq=4", "trainer.max_actor_ckpt_to_keep=2"]
SHORT = ["trainer.total_training_steps=8", *SAVED]


@pytest.fixture(scope="module")
def uninterrupted(toy, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    succeeded(train(toy, run_dir, *LOCAL, *SHORT))
    return run_dir


def test_after_ctrl_c_and_kill_9_the_rerun_ends_with_the_metrics_of_an_uninterrupted_run(toy, tmp_path, uninterrupted):
    """Ctrl-C finishes the step, saves, and exits 130; kill -9 of the run that goes on loses the steps since the last save."""
    run_dir = tmp_path / "run"
    process = start(toy, run_dir, *LOCAL, *SHORT)
    wait_for_step(process, run_dir, 2)
    relatives = family(process)
    os.killpg(process.pid, signal.SIGINT)
    output = ended(process, 130, relatives)
    last = max(metrics(run_dir))
    assert last < 7
    assert (run_dir / "latest_checkpointed_iteration.txt").read_text().strip() == str(last)
    assert output.rstrip().splitlines()[-1] == str(run_dir)
    process = start(toy, run_dir, *LOCAL, *SHORT)
    wait_for_step(process, run_dir, last + 1)
    relatives = family(process)
    process.kill()
    process.wait()
    assert not survivors(relatives)
    rerun = succeeded(train(toy, run_dir, *LOCAL, *SHORT))
    assert "resumed from" in rerun.stdout
    assert_equal_runs(run_dir, uninterrupted)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == 8


def test_a_finished_run_that_is_started_again_changes_nothing(toy, tmp_path, uninterrupted):
    before = metrics(uninterrupted)
    succeeded(train(toy, uninterrupted, *LOCAL, *SHORT))
    assert metrics(uninterrupted) == before


DEADLINE = 60
"""Seconds; longer than the default, for machines that run other tests at the same time."""

ON_RAY = [f"{AR}.rollout.name=hf", *SAVED, f"trainer.stop_deadline_seconds={DEADLINE}"]
LONG = "trainer.total_training_steps=100000"


def signal_all(process, number):
    """Sends a signal to a run and to everything that descends from it, as a scheduler does, and gives these processes."""
    everyone = [psutil.Process(process.pid), *family(process)]
    for one in everyone:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.send_signal(number)
    return everyone[1:]


def ended(process, code, relatives):
    """Gives the output of a run that was stopped: with this exit code, in time, without traceback, with nobody left."""
    output, _ = process.communicate(timeout=DEADLINE + 5)
    assert process.returncode == code, output[-3000:]
    assert "Traceback" not in output, output[-3000:]
    assert not survivors(relatives), output[-1000:]
    return output


def lose(process, is_part):
    """Kills one process of a run on Ray, and gives its id and the error with which the run has ended, without traceback."""
    relatives = family(process)
    (lost,) = [relative for relative in relatives if is_part(relative.name())]
    lost.send_signal(signal.SIGKILL)
    output = ended(process, 1, relatives)
    (message,) = [line for line in output.splitlines() if line.startswith("WorkerError: ")]
    assert "the record so far: " in output
    return lost.pid, message


def test_a_ray_run_goes_on_after_a_signal_to_all_its_processes_and_ends_when_its_head_is_lost(toy, tmp_path, uninterrupted):
    """The uninterrupted run is one without Ray, whose numbers are the same to the bit."""
    run_dir = tmp_path / "run"
    process = start(toy, run_dir, "trainer.total_training_steps=8", *ON_RAY)
    wait_for_step(process, run_dir, 2)
    ended(process, 143, signal_all(process, signal.SIGTERM))
    last = max(metrics(run_dir))
    assert last < 8
    assert (run_dir / "latest_checkpointed_iteration.txt").read_text().strip() == str(last)
    process = start(toy, run_dir, LONG, *ON_RAY)
    wait_for_step(process, run_dir, last + 1)
    pid, message = lose(process, lambda name: name == "gcs_server")
    assert message.startswith(f"WorkerError: Ray's head process (gcs_server) (pid {pid}) died")
    assert "The same command resumes from the last checkpoint." in message
    rows, whole = metrics(run_dir), metrics(uninterrupted)
    assert last + 1 in rows.keys() & whole.keys()
    for step in rows.keys() & whole.keys():
        assert learned(rows[step]) == learned(whole[step]), step


@pytest.mark.slow  # above a run loses Ray's head, and tests/worker/test_ray_group.py kills a worker, in every run of the tests
@pytest.mark.parametrize(
    ("part", "named"),
    [
        ("raylet", "WorkerError: Ray's node process (raylet) (pid {pid}) died"),
        ("ray::Member", "WorkerError: worker 0 (pid {pid} on "),
    ],
)
def test_a_lost_process_of_a_ray_run_is_named(toy, tmp_path, part, named):
    process = start(toy, tmp_path / "run", LONG, *ON_RAY)
    wait_for_step(process, tmp_path / "run", 1)
    pid, message = lose(process, lambda name: name.startswith(part))
    assert message.startswith(named.format(pid=pid))
    assert " died" in message
    assert 1 in metrics(tmp_path / "run")


def wait_until_signals_are_caught(process):
    """Waits until the program has taken over from the start of the interpreter, which a busy machine can make slow."""
    bit = 1 << (signal.SIGTERM - 1)
    for _ in range(600):
        caught = re.search(r"SigCgt:\s*([0-9a-f]+)", Path(f"/proc/{process.pid}/status").read_text())
        if int(caught[1], 16) & bit:
            return
        time.sleep(0.05)
    raise AssertionError("the program catches no signal")


@pytest.mark.parametrize("seconds", [0.3, 2.0])
def test_a_signal_while_a_run_starts_ends_it_at_once_without_traceback(toy, tmp_path, seconds):
    """Imports, the start of Ray and of the workers: the moments are where they fall on this machine."""
    process = start_command(toy, tmp_path / "run", *ON_RAY)
    wait_until_signals_are_caught(process)
    time.sleep(seconds)
    output = ended(process, 130, signal_all(process, signal.SIGINT))
    assert "SIGINT: ended before the first step" in output


HANGS = """
import time
from pathlib import Path

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0 if len(open({path!r}, "a").write("x") * " ") and len(open({path!r}).read()) < {rows} else 600)
    return 0.5
"""


def test_a_reward_function_at_work_is_ended_in_time_and_the_step_before_is_saved(toy, tmp_path):
    calls = tmp_path / "calls"
    calls.touch()
    (tmp_path / "hangs.py").write_text(HANGS.format(path=str(calls), rows=16 * 4 + 20))
    reward = [f"custom_reward_function.path={tmp_path}/hangs.py", "custom_reward_function.timeout_seconds=500"]
    run_dir = tmp_path / "run"
    quick = ["trainer.val_before_train=false", "trainer.stop_deadline_seconds=3", "trainer.test_freq=-1"]
    process = start(toy, run_dir, *LOCAL, *SHORT, *quick, *reward)
    wait_for_step(process, run_dir, 0)
    time.sleep(1)
    relatives = family(process)
    process.send_signal(signal.SIGTERM)
    output = ended(process, 143, relatives)
    assert "was abandoned for lack of time" in output
    last = max(metrics(run_dir))
    assert (run_dir / "latest_checkpointed_iteration.txt").read_text().strip() == str(last)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_twenty_random_stops_of_the_default_run_are_all_saved_in_time(toy, tmp_path):
    """The default run: Ray and vLLM. SIGTERM goes to every process, at any moment after the first step."""
    overrides = [
        "trainer.total_training_steps=60",
        "trainer.save_freq=5",
        "trainer.test_freq=20",
        "trainer.max_actor_ckpt_to_keep=2",
    ]
    whole, run_dir = tmp_path / "whole", tmp_path / "stopped"
    succeeded(train(toy, whole, *overrides))
    generator = random.Random(20261122)
    seconds = []
    for stop in range(20):
        process = start(toy, run_dir, *overrides, f"trainer.stop_deadline_seconds={DEADLINE}")
        done = max(metrics(run_dir), default=0) if stop else 0
        wait_for_step(process, run_dir, done + 1)
        time.sleep(generator.uniform(0, 0.6))
        began = time.monotonic()
        ended(process, 143, signal_all(process, signal.SIGTERM))
        seconds.append(time.monotonic() - began)
        last = max(metrics(run_dir))
        assert (run_dir / "latest_checkpointed_iteration.txt").read_text().strip() == str(last), stop
    print(f"20 stops, seconds to the end: {sorted(round(second, 1) for second in seconds)}")  # noqa: T201
    succeeded(train(toy, run_dir, *overrides))
    assert_equal_runs(run_dir, whole)


def handles(pid, number):
    """Gives whether a process has a handler of its own for a signal."""
    lines = dict(line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    return bool(int(lines["SigCgt"], 16) >> (number - 1) & 1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ctrl_c_at_many_moments_of_the_start_ends_it_each_time(toy, tmp_path):
    """Forty moments from when the command watches signals to the first steps; half of them a second Ctrl-C too.

    Before it does, the interpreter starts, and Ctrl-C is Python's own.
    """
    codes = []
    for trial in range(40):
        process = start_command(toy, tmp_path / f"run{trial}", *ON_RAY)
        while not handles(process.pid, signal.SIGTERM):
            time.sleep(0.005)
        time.sleep(0.25 * trial)
        relatives = family(process)
        os.killpg(process.pid, signal.SIGINT)
        if trial % 2:
            time.sleep(0.7)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
        ended(process, 130, relatives)
        codes.append(process.returncode)
    assert codes == [130] * 40
