"""Any process of a run may be killed at any moment: nothing is left behind, and a rerun ends as if nothing had happened."""

import itertools
import json
import random
import signal
import time
from collections import Counter

import psutil
import pytest

from tests.end_to_end.runs import assert_equal_runs
from tests.faults.conftest import QUIET, SHORT
from tests.faults.kills import BOTH, ENDS_A_RUN, HOWS, KILL, members
from tests.faults.machine import left
from verl_memopt.observe.run_folder import read_timeline

RAY = [
    *QUIET, "trainer.logger=[jsonl]",
    "trainer.total_training_steps=60", "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=3",
    "actor_rollout_ref.rollout.name=hf", "data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8",
]  # fmt: skip
WHO = ("driver", "worker", "reward", "raylet", "gcs", "agent", "guardian")
SURVIVED = [("kill", "guardian"), *(("SIGTERM", who) for who in WHO if who != "driver"), *(("stop", who) for who in WHO)]
"""Rows that end no run, so that one start serves them all."""
ROWS = [SURVIVED, *([row] for row in [("kill", BOTH), *itertools.product(HOWS, WHO)] if row not in SURVIVED)]
DRAWN = (
    ("kill", "driver", "save_checkpoint", "before"),
    ("stop", "reward", "gen", "after"),
    ("SIGTERM", "driver", "adv", "before"),
)
"""Cases that run without Ray, in every run of the tests. The slow table below has every process at every boundary."""


def boundaries_of(run_dir):
    """Gives where the phases of a run's second step begin, which is where those before them end, and the end of the step."""
    phases = dict.fromkeys(row.phase for row in read_timeline(run_dir / "memory_timeline.csv") if row.step == 2)
    return [*((phase, "before") for phase in phases), ("step", "after")]


def codes_of(how, who):
    """Gives the exit codes of a run that meets a case well. A run may go on or end without an agent or a reward process."""
    if (how, who) in SURVIVED:
        return (0,)
    if who in ("driver", BOTH):
        return (-signal.SIGKILL,) if how == "kill" else (128 + signal.SIGTERM,)
    return (1,) if how == "kill" and who in ENDS_A_RUN else (0, 1)


def attack(machine, toy, run_dir, settings, whole, cases):
    """Has a run meet cases one after another, started again whenever one has ended it. Gives what is wrong; {} for nothing."""
    wrong, record = {}, run_dir.with_name("met")
    while cases:
        record.write_text("")
        run = machine.train(toy, run_dir, *settings, **{KILL: json.dumps([str(record), cases])})
        met = len(record.read_text().splitlines())
        case, cases = cases[max(0, met - 1)], cases[max(1, met) :]
        if met == 0 or (run.returncode == 0 and cases):
            wrong[case] = f"code {run.returncode}, and {cases[met:][:1]} never came: {run.stdout[-1500:]}"
            break
        if over := left(run):
            wrong[case] = f"left behind: {over}"
        elif run.returncode not in codes_of(*case[:2]) or "Traceback" in run.stdout.split("Its traceback")[0]:
            wrong[case] = f"code {run.returncode}: {run.stdout[-1500:]}"
        elif run.returncode == 1 and "WorkerError" not in run.stdout:
            wrong[case] = f"no error of ours: {run.stdout[-1500:]}"
    if run.returncode:
        machine.trained(toy, run_dir, *settings)
    assert_equal_runs(run_dir, whole)
    return wrong


def test_processes_may_be_killed_stopped_and_signalled_between_two_phases(healthy, toy, run_dir, uninterrupted):
    run_dir.parent.mkdir()
    assert attack(healthy, toy, run_dir, SHORT, uninterrupted, DRAWN) == {}


@pytest.fixture(scope="module")
def on_ray(machine, toy):
    """Steps on Ray that nothing disturbed."""
    machine.fill_after(0)
    return machine.trained(toy, machine.disk / "ray" / "run", *RAY)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("rows", ROWS, ids=lambda rows: " ".join(rows[0]) if len(rows) == 1 else "survived")
def test_every_process_may_be_attacked_at_the_boundary_of_every_phase(healthy, toy, run_dir, on_ray, request, rows):
    began = time.monotonic()
    cases = [(*row, *boundary) for boundary in boundaries_of(on_ray) for row in rows]
    run_dir.parent.mkdir()
    wrong = attack(healthy, toy, run_dir, RAY, on_ray, cases)
    told = [f"{how} {who}: {sum(case[:2] == (how, who) for case in cases)} cases" for how, who in rows]
    told += [f"{len(cases) - len(wrong)} of {len(cases)} survived, {time.monotonic() - began:.0f} seconds"]
    request.config.get_terminal_writer().line("\n" + "\n".join(told))
    assert not wrong, "\n".join(f"{case}: {found}" for case, found in wrong.items())


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("settings", "longest"),
    [pytest.param(QUIET, 25, id="Ray and vLLM"), pytest.param([*SHORT, "trainer.logger=[jsonl]"], 6, id="one process")],
)
def test_fifty_kills_and_twenty_signals_at_random_moments_lose_no_step(healthy, toy, run_dir, request, settings, longest):
    """A random process of the run is killed, or the driver gets SIGTERM, from its start on."""
    settings = [*settings, "trainer.total_training_steps=300", "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=3"]
    reference = run_dir.with_name("reference")
    whole = healthy.start(toy, reference, *settings).wait(1800)
    assert whole.returncode == 0, whole.stdout[-3000:]
    chance = random.Random(0)
    strikes = chance.sample(["kill"] * 50 + ["SIGTERM"] * 20, 70)
    struck, folder, rounds = Counter(), run_dir, 0
    while strikes:
        before = steps_of(folder)
        run = healthy.start(toy, folder, *settings)
        time.sleep(chance.uniform(0.2, longest))
        who = strike_one(run, strikes[-1], chance)
        run.wait(1800)
        assert not left(run), who
        logged, saved = steps_of(folder)
        assert logged == sorted(set(logged)), who
        if who is None:
            assert run.returncode == 0, run.stdout[-3000:]
            assert_equal_runs(folder, reference)
            rounds += 1
            folder = run_dir.with_name(f"run-{rounds}")
            continue
        struck[who] += 1
        # A signal may find the run at its end, or before its first step.
        assert strikes.pop() == "kill" or run.returncode in (0, 128 + signal.SIGTERM), run.stdout[-3000:]
        # A kill loses the step that was not saved yet. A signal loses none, but one that comes before the first step of its run
        # finds what a kill has left.
        lost = max(logged, default=0) - saved
        assert lost <= 1, who
        assert lost == 0 or who != "SIGTERM" or (logged, saved) == before
    last = healthy.start(toy, folder, *settings).wait(1800)
    assert last.returncode == 0, last.stdout[-3000:]
    assert_equal_runs(folder, reference)
    request.config.get_terminal_writer().line(f"struck: {dict(struck)}; whole runs in between: {rounds}")


def strike_one(run, how, chance):
    """Kills a random process of a run, and the run with it where it can do without, or signals it. Gives what was struck, or None
    after the end."""
    who = how
    try:
        driver = psutil.Process(run.pid)
        if how == "SIGTERM":
            driver.terminate()
            return who
        there = {"driver": [driver], **members(run.pid)}
        who = chance.choice(list(there))
        chance.choice(there[who]).kill()
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
