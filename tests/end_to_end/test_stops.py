"""A run that is stopped in any way goes on as if it had not been."""

import contextlib
import json
import os
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
    train_here,
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


RAYS = {
    "gcs_server": r"Ray's head process \(gcs_server\) \(pid {pid}\) died",
    "raylet": r"Ray's node process \(raylet\) \(pid {pid}\) died",
    "ray::Member": r"worker 0 \(pid {pid} on .* died",
}
"""What a run on Ray cannot do without, by the beginning of the process's name, and what its loss is called."""


@pytest.mark.parametrize(
    "lost", [pytest.param(name, marks=() if name == "gcs_server" else pytest.mark.slow) for name in [*RAYS, None]]
)
def test_a_ray_run_that_loses_a_process_or_is_signalled_goes_on_without_ray_as_if_it_had_not_been(
    toy, tmp_path, uninterrupted, lost
):
    """A lost process is named. A signal goes to all processes, as a scheduler sends it, and the step is saved."""
    run_dir = tmp_path / "run"
    process = start(toy, run_dir, LONG, *ON_RAY)
    wait_for_step(process, run_dir, 2)
    if lost is None:
        ended(process, 143, signal_all(process, signal.SIGTERM))
        assert (run_dir / "latest_checkpointed_iteration.txt").read_text().strip() == str(max(metrics(run_dir)))
    else:
        relatives = family(process)
        (part,) = [relative for relative in relatives if relative.name().startswith(lost)]
        part.kill()
        output = ended(process, 1, relatives)
        said = rf"(?m)^WorkerError: {RAYS[lost].format(pid=part.pid)}.* The same command resumes"
        assert re.search(said, output), output[-3000:]
        assert "the record so far: " in output
    further = f"trainer.total_training_steps={max(*metrics(run_dir), 8)}"
    assert train_here(toy, run_dir, *LOCAL, *SAVED, further) == 0
    rows, whole = metrics(run_dir), metrics(uninterrupted)
    assert rows.keys() >= whole.keys()
    for step in whole:
        assert learned(rows[step]) == learned(whole[step]), step


def wait_until_signals_are_caught(process):
    """Waits until the program has taken over from the start of the interpreter, which a busy machine can make slow."""
    bit = 1 << (signal.SIGTERM - 1)
    for _ in range(6000):
        caught = re.search(r"SigCgt:\s*([0-9a-f]+)", Path(f"/proc/{process.pid}/status").read_text())
        if int(caught[1], 16) & bit:
            return
        time.sleep(0.005)
    raise AssertionError("the program catches no signal")


MOMENTS = [0.3, 2.0, *(pytest.param(0.25 * trial, marks=pytest.mark.slow) for trial in range(40) if trial != 8)]
"""Imports, the start of Ray and of the workers, and the first steps: the moments are where they fall on this machine."""


@pytest.mark.parametrize("seconds", MOMENTS)
def test_ctrl_c_while_a_run_starts_ends_it_at_once_without_traceback(toy, tmp_path, seconds):
    """At every other moment of the slow ones Ctrl-C comes twice."""
    process = start_command(toy, tmp_path / "run", *ON_RAY)
    wait_until_signals_are_caught(process)
    time.sleep(seconds)
    relatives = signal_all(process, signal.SIGINT)
    if seconds % 0.5 == 0.25:
        time.sleep(0.7)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
    output = ended(process, 130, relatives)
    assert "SIGINT: ended before the first step" in output or (tmp_path / "run" / "metrics.jsonl").exists()


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
