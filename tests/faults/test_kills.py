"""Any process of a run may be killed at any moment: nothing is left behind, and a rerun ends as if nothing had happened."""

import json
import random
import signal
import time
from collections import Counter

import psutil
import pytest

from tests.end_to_end.runs import assert_equal_runs
from tests.faults.conftest import QUIET, SHORT
from tests.faults.kills import KILL, members
from tests.faults.machine import left

PHASES = ("gen", "reward", "adv", "update_actor", "update_weights", "step", "save_checkpoint")
EDGES = ("before", "after")
RAY = [*QUIET, "trainer.total_training_steps=4", "trainer.save_freq=1", "actor_rollout_ref.rollout.name=hf"]
ENDS_A_RUN = ("worker", "raylet", "gcs")


def moment(who, phase, edge, time=2):
    return {KILL: json.dumps({"who": who, "phase": phase, "edge": edge, "time": time})}


# The slow proof below has every process at every boundary.
@pytest.mark.parametrize(
    ("phase", "edge"), [pytest.param("update_actor", "after", marks=pytest.mark.slow), ("save_checkpoint", "before")]
)
def test_a_driver_that_is_killed_between_two_phases_is_not_missed(healthy, toy, run_dir, uninterrupted, phase, edge):
    run = healthy.train(toy, run_dir, *SHORT, **moment("driver", phase, edge))
    assert run.returncode == -signal.SIGKILL, run.stdout[-3000:]
    assert_equal_runs(healthy.trained(toy, run_dir, *SHORT), uninterrupted)


@pytest.fixture(scope="module")
def on_ray(machine, toy):
    """Four steps on Ray that nothing disturbed."""
    machine.fill_after(0)
    return machine.trained(toy, machine.disk / "ray" / "run", *RAY)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("who", ["driver", "worker", "reward", "raylet", "gcs", "agent"])
def test_every_process_may_be_killed_at_the_boundary_of_every_phase(healthy, toy, run_dir, on_ray, who, phase, edge):
    run = healthy.train(toy, run_dir, *RAY, **moment(who, phase, edge))
    assert not left(run)
    assert "Traceback" not in run.stdout.split("Its traceback")[0], run.stdout[-3000:]
    if who == "driver":
        assert run.returncode == -signal.SIGKILL
    elif who in ENDS_A_RUN:
        assert run.returncode == 1, run.stdout[-3000:]
        assert "WorkerError" in run.stdout, run.stdout[-3000:]
    else:
        assert run.returncode in (0, 1), run.stdout[-3000:]
    assert_equal_runs(healthy.trained(toy, run_dir, *RAY), on_ray)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_fifty_random_kills_lose_no_step_that_was_saved(healthy, toy, run_dir, request):
    """Ray and vLLM: a random process of the run, at a random moment from its start on."""
    settings = [*QUIET, "trainer.total_training_steps=300", "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=3"]
    reference = run_dir.with_name("reference")
    whole = healthy.start(toy, reference, *settings).wait(1800)
    assert whole.returncode == 0, whole.stdout[-3000:]
    random.seed(0)
    killed, folder, rounds = Counter(), run_dir, 0
    while killed.total() < 50:
        run = healthy.start(toy, folder, *settings)
        time.sleep(random.uniform(0.2, 25))
        who = kill_one(run)
        run.wait(1800)
        assert not left(run), who
        if who is None:
            assert run.returncode == 0, run.stdout[-3000:]
            assert_equal_runs(folder, reference)
            rounds += 1
            folder = run_dir.with_name(f"run-{rounds}")
            continue
        killed[who] += 1
        logged, saved = steps_of(folder)
        assert logged == sorted(set(logged)), who
        assert max(logged, default=0) - saved <= 1, who
    last = healthy.start(toy, folder, *settings).wait(1800)
    assert last.returncode == 0, last.stdout[-3000:]
    assert_equal_runs(folder, reference)
    request.config.get_terminal_writer().line(f"killed: {dict(killed)}; whole runs in between: {rounds}")


def kill_one(run):
    """Kills a random process of a run, and the run with it where it can do without; gives what it was, or None after the end."""
    try:
        driver = psutil.Process(run.pid)
        there = {"driver": [driver], **members(run.pid)}
        who = random.choice(list(there))
        random.choice(there[who]).kill()
        if who not in ENDS_A_RUN:
            time.sleep(2)
            driver.kill()
    except psutil.NoSuchProcess:
        return None if run.wait().returncode == 0 else who
    return who


def steps_of(run_dir):
    """Gives the steps that are logged, and the one saved last."""
    path, tracker = run_dir / "metrics.jsonl", run_dir / "latest_checkpointed_iteration.txt"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line)["step"] for line in lines], int(tracker.read_text()) if tracker.exists() else 0
