"""Faults that were once lost, hidden or told by a traceback: each done again as a person would, to the command line."""

import json
import os
import shutil
import signal
import time

import pytest

from tests.end_to_end.runs import arguments, assert_equal_runs, metrics, wait_for_step
from tests.faults.conftest import QUIET, SHORT
from tests.faults.machine import left

LONGER = [*SHORT, "trainer.total_training_steps=6"]
LR = "actor_rollout_ref.actor.optim.lr"
SLOW = pytest.mark.slow
RAY = [*QUIET, "trainer.total_training_steps=100000", "trainer.save_freq=-1", "actor_rollout_ref.rollout.name=hf"]


def assert_refused(run, *said, code=2):
    """The run ended with one message: no traceback, and every text in it."""
    assert run.returncode == code, run.stdout[-3000:]
    assert "Traceback" not in run.stdout, run.stdout[-3000:]
    for text in said:
        assert text in run.stdout, (text, run.stdout[-3000:])


@pytest.fixture
def begun(machine, healthy, uninterrupted, run_dir):
    """A folder with a run of four steps, to go on from."""
    shutil.copytree(uninterrupted, run_dir)
    return run_dir


def test_5_what_changed_since_the_checkpoint_is_said_and_the_old_settings_are_kept(healthy, toy, begun):
    changed = {
        "actor_rollout_ref.rollout.n": 4,
        LR: 1e-4,
        "actor_rollout_ref.rollout.temperature": 0.9,
        "algorithm.adv_estimator": "grpo",
        "data.max_response_length": 6,
    }
    run = healthy.train(toy, begun, *LONGER, *(f"{key}={value}" for key, value in changed.items()))
    assert run.returncode == 0, run.stdout[-3000:]
    for key, value in changed.items():
        assert any(key in line and str(value) in line for line in run.stdout.splitlines()), (key, run.stdout[-3000:])
    assert list((begun / "config_history").glob("*.yaml"))


def test_6_with_every_checkpoint_unusable_nothing_is_started_over(healthy, toy, begun):
    for shard in begun.rglob("*.distcp"):
        shard.write_bytes(b"")
    before = {path: path.stat().st_mtime_ns for path in begun.rglob("global_step_*/**/*")}
    run = healthy.train(toy, begun, *LONGER)
    assert_refused(run, "global_step_4", "global_step_3", "trainer.resume_mode=disable", code=1)
    assert before == {path: path.stat().st_mtime_ns for path in begun.rglob("global_step_*/**/*")}


FORKS = """
import subprocess, sys

started = False

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    global started
    if not started:
        started = True
        for number in range(64):
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=bool(number % 2))
    return 1.0
"""


def test_9_what_a_reward_function_started_dies_with_the_run(healthy, toy, run_dir, tmp_path):
    (tmp_path / "forks.py").write_text(FORKS)
    reward = f"custom_reward_function.path={tmp_path}/forks.py"
    run = healthy.start(toy, run_dir, *SHORT, reward, "trainer.total_training_steps=100000")
    wait_for_step(run, run_dir, 0)
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    assert not left(run)


def test_11_hanging_up_saves(healthy, toy, run_dir):
    run = healthy.start(toy, run_dir, *SHORT, "trainer.save_freq=-1", "trainer.total_training_steps=100000")
    wait_for_step(run, run_dir, 1)
    os.kill(run.pid, signal.SIGHUP)
    assert run.wait().returncode == 129, run.stdout[-3000:]
    assert (run_dir / "latest_checkpointed_iteration.txt").read_text().strip() == str(max(metrics(run_dir)))


LOST = """
import os, sys
from verl_memopt.trainer.main_ppo import main

read, broken = os.pipe()
os.close(read)
for number in {numbers}:
    os.dup2(broken if {pipe} else os.open("/dev/full", os.O_WRONLY), number)
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("numbers", "pipe"), [pytest.param((1,), True, id="| head"), pytest.param((1, 2), False, id="a full log disk", marks=SLOW)]
)
def test_a_lost_console_ends_no_run(healthy, toy, run_dir, uninterrupted, numbers, pipe):
    run = healthy.fork(["-c", LOST.format(numbers=numbers, pipe=pipe), *arguments(toy, run_dir, *SHORT)[3:]]).wait()
    assert run.returncode == 0, run.stdout[-3000:]
    assert run.stdout.count("Standard output is lost") == (2 not in numbers)
    assert_equal_runs(run_dir, uninterrupted)


def test_a_folder_that_can_no_longer_be_written_in_the_middle_ends_the_run_with_its_name(healthy, toy, run_dir):
    run = healthy.start(toy, run_dir, *SHORT, "trainer.rollout_data_dir=" + str(run_dir / "dumps"))
    wait_for_step(run, run_dir, 0)
    # A step is logged before its samples are written, and they are written under another name first.
    while not list((run_dir / "dumps").glob("*.jsonl")) and run.poll() is None:
        time.sleep(0.01)
    shutil.rmtree(run_dir / "dumps")
    (run_dir / "dumps").write_text("a file in the way")
    assert_refused(run.wait(), str(run_dir / "dumps"), "start again to resume")


def test_12_a_special_token_in_a_users_text_is_text(healthy, toy, run_dir, tmp_path):
    row = {
        "data_source": "toy/arithmetic",
        "prompt": [{"role": "user", "content": "1+1=<|im_end|>"}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
    }
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(64)))
    run = healthy.train(toy, run_dir, *SHORT, f"data.train_files={tmp_path}/rows.jsonl", "data.max_prompt_length=64")
    assert run.returncode == 0, run.stdout[-3000:]
    assert "64 special tokens inside the messages of 64 prompts" in run.stdout
    assert "are encoded as plain text. Set data.allow_special_tokens=true" in run.stdout


def test_15_a_home_that_cannot_be_written_is_survived_or_named(healthy, toy, run_dir, uninterrupted):
    assert_equal_runs(healthy.trained(toy, run_dir, *SHORT, HOME="/proc", XDG_CACHE_HOME="/proc/cache"), uninterrupted)


def test_15_a_long_temporary_folder_is_survived_or_named(healthy, toy, run_dir, tmp_path):
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    run = healthy.train(toy, run_dir, *RAY, "trainer.total_training_steps=1", RAY_TMPDIR=str(folder), TMPDIR=str(folder))
    assert "Traceback" not in run.stdout, run.stdout[-3000:]
    assert run.returncode == 0 or "RAY_TMPDIR" in run.stdout
    assert not left(run)
