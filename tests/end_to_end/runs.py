"""Runs the command line as a person would, in a process of its own, and reads what the run left."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.forked import PYTHON, shared_server
from tests.trainer.conftest import ready
from verl_memopt.cli import main
from verl_memopt.config.loader import load_settings
from verl_memopt.data.toy import make_toy

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipe" / "rloo"
LOCAL = ["trainer.worker_group=local", "actor_rollout_ref.rollout.name=hf", "trainer.track_memory_every_steps=0"]
"""The quickest way through the whole loop: no Ray, no vLLM, no count of bytes, the same trainer."""


def environment(**more):
    # Packages may lie in folders that PYTHONPATH names, as on a GPU machine without internet.
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_DEDUP_LOGS": "0", "PYTHONPATH": path}
    return {**os.environ, **quiet, **more}


def script_environment(**more):
    """Return the environment of a script whose ``$PYTHON`` forks from a process that has imported torch."""
    return environment(**{"PYTHON": PYTHON, **shared_server().variables(), **more})


def settings_of(toy, run_dir):
    """Return the settings that all toy runs share."""
    return [
        f"data.train_files={toy}/train.parquet",
        f"data.val_files={toy}/val.parquet",
        f"actor_rollout_ref.model.path={toy}/model",
        f"trainer.default_local_dir={run_dir}",
        "trainer.logger=[console,jsonl]",
    ]


def arguments(toy, run_dir, *overrides):
    """Return the training command for the toy task with ``overrides`` on top."""
    entry = [sys.executable, "-m", "verl_memopt.trainer.main_ppo", "--config-dir", "recipe/rloo", "--config-name", "toy"]
    return [*entry, *settings_of(toy, run_dir), *overrides]


def train_here(toy, run_dir, *overrides):
    """Return the exit code of a training run in this process."""
    entry = ["train", "--config-dir", str(RECIPES), "--config-name", "toy"]
    return main([*entry, *settings_of(toy, run_dir), *overrides])


def steps_here(toy, run_dir, *overrides, config=("toy", RECIPES)):
    """Take the steps of a training run in this process, without its end (summary and charts). Return the logged rows."""
    name, folder = config
    quick = ["trainer.worker_group=local", "trainer.track_memory_every_steps=0", "trainer.save_freq=-1"]
    with ready(
        load_settings(name, [*settings_of(toy, run_dir)[:-1], "trainer.logger=[jsonl]", *quick, *overrides], folder)
    ) as trainer:
        trainer.run()
    return metrics(run_dir)


def train(toy, run_dir, *overrides, timeout=240):
    """Train in a process forked from one that has imported torch, and return it when it has ended."""
    return shared_server().fork(arguments(toy, run_dir, *overrides)[1:], apart=True).wait(timeout)


def succeeded(process):
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    return process


def lines_of(path):
    """Return the records of a JSONL file."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def metrics(run_dir):
    """Return the logged rows by step."""
    return {row["step"]: row for row in lines_of(Path(run_dir) / "metrics.jsonl")}


MEASURED = ("timing_s/", "timing_per_token_ms/", "perf/", "memory/")
"""Beginnings of names of what is measured of a step."""
STARTED = "run_id"
"""Names the start of a run that logged a row; a resumed run has another."""


def learned(row):
    """Return the results of a step, without measurements and the number of its start."""
    return {name: value for name, value in row.items() if not name.startswith((*MEASURED, STARTED))}


def assert_equal_runs(run_dir, other):
    """Assert that two runs computed equal values in equal steps."""
    one, two = metrics(run_dir), metrics(other)
    assert list(one) == list(two)
    for step in one:
        assert learned(one[step]) == learned(two[step]), step


def start(toy, run_dir, *overrides):
    """Start a training run at the head of a process group of its own, forked from a process that has imported torch."""
    return shared_server().fork(arguments(toy, run_dir, *overrides)[1:])


def start_command(toy, run_dir, *overrides):
    """Start a training run as a shell does, imports included, at the head of a process group of its own."""
    return subprocess.Popen(
        arguments(toy, run_dir, *overrides),
        cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def wait_for_step(process, run_dir, step, timeout=240):
    """Wait until a run has logged a step. If the run ends first, the test fails with its output."""
    deadline = time.monotonic() + timeout
    path = Path(run_dir) / "metrics.jsonl"
    while not (path.exists() and len(path.read_text().splitlines()) > step):
        assert process.poll() is None, process.communicate()[0][-3000:]
        assert time.monotonic() < deadline, f"step {step} was not reached in {timeout} s"
        time.sleep(0.01)


def family(process):
    """Return all processes that descend from a run."""
    return psutil.Process(process.pid).children(recursive=True)


def survivors(processes, seconds=20):
    """Return the processes that are still alive after a while."""
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return alive


def assert_nine_of_ten_seeds_learn(tmp_path, run):
    """Run the toy task with ten seeds: other held-out sums, other first weights, another data order and other samples.

    ``run(toy, run_dir, *overrides)`` runs one of them to its end.
    """
    outcomes = {}
    for seed in range(10):
        toy, run_dir = make_toy(tmp_path / f"toy{seed}", seed=seed), tmp_path / f"run{seed}"
        run(toy, run_dir, f"data.seed={seed}", "trainer.total_training_steps=15", "trainer.test_freq=15")
        summary = json.loads((run_dir / "summary.json").read_text())
        outcomes[seed] = (summary["validation_before"], summary["validation_after"])
    print(outcomes)  # noqa: T201 - the figures are the point of this proof
    assert all(before <= 0.5 for before, _ in outcomes.values()), outcomes
    assert sum(after >= 0.9 for _, after in outcomes.values()) >= 9, outcomes
