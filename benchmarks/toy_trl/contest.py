"""Runs contestants, each in a process of its own, and gives their records."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.toy_trl import gate
from benchmarks.toy_trl.work import CONTESTANTS, TRACKED_STEP, TRL, WARM_UP, Contestant, Plan, Record

ROOT = Path(__file__).resolve().parents[2]
TRL_PYTHON = ROOT / ".venv-bench" / "bin" / "python"
TOY_SEED = 1
BYTE_RUNS = 2
"""Tracked runs of each contestant; their bytes must be equal."""
PROCESS_SECONDS = 300
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
        """Gives the folder of the toy task."""
        return self.folder / "toy"

    def prepare(self) -> None:
        """Makes the toy task, once."""
        self.folder.mkdir(parents=True, exist_ok=True)
        call([sys.executable, "-m", "verl_memopt", "toy", str(self.task), "--seed", str(TOY_SEED)], self.folder / "toy.log")

    def differences(self) -> list[gate.Difference]:
        """Gives how far the two loss paths are apart."""
        folder = self.folder / "gate"
        folder.mkdir(exist_ok=True)
        batch = gate.make_batch(vocabulary=320)
        batch.write(folder / "batch.json")
        for side in gate.TRL_SIDES:
            module = [str(TRL_PYTHON), "-m", "benchmarks.toy_trl.gate_trl"]
            call([*module, str(self.task), str(folder), side], folder / f"{side}.log")
        module = [sys.executable, "-m", "benchmarks.toy_trl.gate_ours"]
        call([*module, str(self.task), str(folder)], folder / f"{gate.OUR_SIDE}.log")
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
    folder.mkdir(parents=True)
    plan.write(folder / "plan.json")
    python, module = (TRL_PYTHON, "trl_run") if plan.contestant.trainer == TRL else (Path(sys.executable), "ours_run")
    files = [str(folder / "plan.json"), str(folder / "record.json")]
    call([str(python), "-m", f"benchmarks.toy_trl.{module}", *files], folder / "log.txt")
    return Record.read(folder / "record.json")


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
