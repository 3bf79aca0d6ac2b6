"""Two long runs of the toy with Ray, vLLM, ``filter_groups`` and a critic: one left alone, one disturbed by random faults.

    python -m tests.faults.long_run FOLDER --steps 2000 --faults 50 --seed 0

Both have to log the same numbers in every step, bit for bit, and to hold the same memory, processes, threads and open files at
the end as at the beginning. The disturbed run is started again whenever a fault has ended it. ``FOLDER/report.txt`` tells what
was done and what was found; the exit code is 1 where something does not hold.
The parts may be calls of their own, with ``--part``, for two machines or for the same time.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil

from tests.end_to_end.runs import STARTED, learned, metrics
from tests.faults.kills import members
from tests.faults.machine import Machine, held, left
from verl_memopt.cli import main as command_line
from verl_memopt.observe.run_folder import read_timeline

SETTLED = 50
"""Steps after a start from which on nothing may grow."""
LOOK_EVERY = 100
"""Steps between two looks at what the processes hold."""
SAVE_EVERY = 10
PARTS = ("alone", "disturbed", "compare")
LOOK_SECONDS = 0.2
LONGEST_ROWS = 2**16
TRIES = 20
"""Times that a fault is tried again where what it should hit is not there."""
AR = "actor_rollout_ref"
SETTINGS = [
    "--config-dir", "recipe/ppo", "trainer.logger=[jsonl]", "trainer.test_freq=-1", "trainer.val_before_train=false",
    f"trainer.save_freq={SAVE_EVERY}", "trainer.max_actor_ckpt_to_keep=3", "trainer.track_memory_every_steps=25",
    "algorithm.filter_groups.enable=true", "data.train_batch_size=4", "data.gen_batch_size=12", f"{AR}.rollout.n=4",
    f"{AR}.actor.ppo_mini_batch_size=4", "critic.ppo_epochs=1",
    # So slow that groups still differ after thousands of steps.
    f"{AR}.actor.optim.lr=2e-6", "critic.optim.lr=1e-4",
]  # fmt: skip
KILLED = ("driver", "worker", "reward", "raylet", "gcs", "agent", "guardian", "idle worker")
STOPPED = ("driver", "worker", "reward", "raylet", "gcs")
TORN = ("shard cut", "shard flipped", "data.pt zeroed", "manifest gone", "tracker emptied", "half a row of metrics")
FAULTS = [
    *(("kill", who) for who in KILLED), *(("stop and go on", who) for who in STOPPED),
    *(("kill the driver, then", what) for what in TORN), ("signal", "SIGTERM"), ("signal", "SIGHUP"), ("signal", "SIGINT"),
]  # fmt: skip


class Report:
    """Lines for the reader, on the console and in a file, and whether every check passed."""

    def __init__(self, path):
        self.path, self.wrong, self.began = path, 0, time.monotonic()

    def say(self, text):
        line = f"{(time.monotonic() - self.began) / 60:6.1f} min  {text}"
        with self.path.open("a") as file:
            file.write(line + "\n")
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    def check(self, holds, text):
        self.wrong += not holds
        self.say(f"{'holds' if holds else 'DOES NOT HOLD'}: {text}")


def newest_of(run_dir):
    """Return the folder of the newest checkpoint, or None."""
    found = sorted(run_dir.glob("global_step_*[0-9]/"), key=lambda folder: int(folder.name.rpartition("_")[2]))
    return found[-1] if found else None


def tear(run_dir, what, chance):
    """Damage a file of an ended run as ``what`` says. Return its name."""
    newest = newest_of(run_dir)
    if what == "tracker emptied":
        (run_dir / "latest_checkpointed_iteration.txt").write_text("")
        return "latest_checkpointed_iteration.txt"
    if what == "half a row of metrics":
        with (run_dir / "metrics.jsonl").open("a") as file:
            file.write('{"step": 99')
        return "metrics.jsonl"
    if newest is None:
        return "nothing: there is no checkpoint yet"
    pattern = {"data.pt zeroed": "data.pt", "manifest gone": "meta.json"}.get(what, "*.distcp")
    target = chance.choice(sorted(newest.rglob(pattern)))
    data = bytearray(target.read_bytes())
    if what == "shard cut":
        os.truncate(target, chance.randrange(len(data)))
    elif what == "shard flipped":
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        target.write_bytes(data)
    elif what == "data.pt zeroed":
        target.write_bytes(bytes(len(data)))
    else:
        target.unlink()
    return str(target.relative_to(run_dir))


def strike(run, run_dir, fault, chance):
    """Inject one fault into a run. Return what was hit, or None if the run is just ending."""
    how, what = fault
    try:
        driver = psutil.Process(run.pid)
        if how == "signal":
            os.kill(run.pid, getattr(signal, what))
        elif how == "kill the driver, then":
            driver.kill()
            run.wait(60)
            return tear(run_dir, what, chance)
        else:
            process = driver if what == "driver" else chance.choice(members(run.pid)[what])
            if how == "kill":
                process.kill()
            else:
                process.suspend()
                time.sleep(chance.uniform(0.5, 4))
                process.resume()
    except (psutil.NoSuchProcess, ProcessLookupError, KeyError):
        return None
    return what


def left_by_ray(folder, report):
    """Describe what Ray has left in the temporary folder, apart from sessions of the last day, whose logs are kept."""
    folder = next(folder.glob("verl_memopt_*"), folder / "none")
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    sessions = len(list(folder.rglob("session_*_*")))
    size = sum(path.stat().st_size for path in files) / 2**20
    report.say(f"left in the temporary folder: {sessions} sessions of Ray, {len(files)} files, {size:.1f} MiB")


def last_step(run_dir):
    """Return the step that was logged last, reading only the end of the file."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LONGEST_ROWS))
        whole = file.read().split(b"\n")[:-1]
    return json.loads(whole[-1])["step"] if whole else 0


def disturbed(machine, toy, run_dir, settings, faults, chance, report):
    """Take all steps with the ``faults``, (step, fault) in order. Return how often the run was started."""
    run, starts, ends = machine.start(toy, run_dir, *settings), 1, Counter()
    waiting, seen, tries = list(faults), [], 0
    while True:
        if waiting and last_step(run_dir) >= waiting[0][0]:
            step, fault = waiting[0]
            with suppress(psutil.NoSuchProcess):
                seen.append(held(run))
            time.sleep(chance.uniform(0, 0.6))
            hit, tries = strike(run, run_dir, fault, chance), tries + 1
            if hit or tries == TRIES:
                report.say(f"step {step}, logged {last_step(run_dir)}: {fault[0]} {fault[1]}: {hit or 'it was not there'}")
                waiting, tries = waiting[1:], 0
        if run.poll() is None:
            time.sleep(LOOK_SECONDS)
            continue
        over = left(run)
        if over:
            report.check(False, f"processes are left: {over}")
        ends[run.returncode] += 1
        if "Traceback" in run.stdout.split("Its traceback")[0]:
            report.check(False, f"a traceback: {run.stdout[-2000:]}")
        if run.returncode == 0:
            report.say(f"started {starts} times, ended with the codes {dict(ends)}; faults not reached: {len(waiting)}")
            for what in ("processes", "threads", "files"):
                report.say(f"{what} held just before each fault: {[each[what] for each in seen]}")
            return
        if starts > len(faults) + 5:
            report.check(False, f"started {starts} times and still not at its end: {run.stdout[-2000:]}")
            return
        run, starts = machine.start(toy, run_dir, *settings), starts + 1


def undisturbed(machine, toy, run_dir, settings, steps, report):
    """Take all steps, and assert that the processes' memory and files do not grow."""
    run, seen = machine.start(toy, run_dir, *settings), {}
    for step in [SETTLED, *range(LOOK_EVERY, steps, LOOK_EVERY)]:
        while last_step(run_dir) < step and run.poll() is None:
            time.sleep(LOOK_SECONDS)
        if run.poll() is None:
            seen[step] = held(run)
    run.wait(600)
    report.check(run.returncode == 0, f"the run left alone ends with code {run.returncode} at step {last_step(run_dir)}")
    for what in ("processes", "threads", "files"):
        found = [each[what] for each in seen.values()]
        # One that is just being replaced may be there twice.
        report.check(max(found) <= found[0] + 2, f"{what} held at the steps {list(seen)}: {found}")
    report.check(not left(run), "no process is left")


def compare(one, other, report):
    """List the steps in which two runs logged different numbers."""
    first, second = metrics(one), metrics(other)
    differ = [step for step in first if step in second and learned(first[step]) != learned(second[step])]
    report.check(list(first) == list(second), f"both logged each step once: {len(first)} and {len(second)} rows")
    starts = len({row[STARTED] for row in second.values()})
    report.check(
        not differ, f"the same numbers bit for bit in {len(first)} steps, logged by {starts} starts; other in {differ[:10]}"
    )
    if differ:
        step = differ[0]
        names = {name for name in {*first[step], *second[step]} if first[step].get(name) != second[step].get(name)}
        wrong = {name: (first[step].get(name), second[step].get(name)) for name in names if name in learned(first[step])}
        report.say(f"step {step}: {wrong}")


def flat(run_dir, report):
    """Check that tracked bytes are equal at each tracked step without a save, and describe the host memory."""
    rows = {row.step: row for row in read_timeline(run_dir / "memory_timeline.csv") if row.allocated_bytes}
    tracked = [step for step in rows if step >= SETTLED and step % SAVE_EVERY]
    held_bytes = Counter(rows[step].allocated_bytes for step in tracked)
    report.check(len(held_bytes) == 1, f"live tensor bytes at the ends of {len(tracked)} tracked steps: {dict(held_bytes)}")
    host = [rows[step].host_rss_bytes / 2**20 for step in tracked]
    if host:
        tenth = max(1, len(host) // 10)
        early, late = sum(host[:tenth]) / tenth, sum(host[-tenth:]) / tenth
        report.say(f"host memory of the worker, MiB: first tenth {early:.0f}, last tenth {late:.0f}, most {max(host):.0f}")


def main(given=None):
    parser = argparse.ArgumentParser(prog="long_run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="an empty folder, for both runs and the report")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", choices=PARTS, action="append", help="do this part only, of a call in which others are done")
    asked = parser.parse_args(given)
    parts = asked.part or PARTS
    asked.folder.mkdir(parents=True, exist_ok=True)
    report, chance = Report(asked.folder / "report.txt"), random.Random(asked.seed)
    assert command_line(["toy", str(asked.folder / "toy"), "--seed", "0"]) == 0
    settings = [*SETTINGS, f"trainer.total_training_steps={asked.steps}"]
    kinds = [FAULTS[number % len(FAULTS)] for number in range(asked.faults)]
    chance.shuffle(kinds)
    faults = list(zip(sorted(chance.sample(range(1, asked.steps), asked.faults)), kinds, strict=True))
    alone, struck = asked.folder / "alone", asked.folder / "disturbed"
    with tempfile.TemporaryDirectory(prefix="lr") as temporary, Machine(temporary) as machine:
        machine.env["RAY_TMPDIR"] = temporary
        if "alone" in parts:
            report.say(f"{asked.steps} steps, left alone")
            undisturbed(machine, asked.folder / "toy", alone, settings, asked.steps, report)
        if "disturbed" in parts:
            report.say(f"{asked.steps} steps with {asked.faults} faults")
            disturbed(machine, asked.folder / "toy", struck, settings, faults, chance, report)
        if parts != ["compare"]:
            left_by_ray(Path(temporary), report)
    if "compare" in parts:
        compare(alone, struck, report)
        for name, run_dir in (("left alone", alone), ("disturbed", struck)):
            report.say(f"the run {name}:")
            flat(run_dir, report)
            code = command_line(["check", str(run_dir)])
            report.check(code == 0, f"verl-memopt check ends with code {code}")
    report.say(f"{report.wrong} things do not hold")
    return int(report.wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
