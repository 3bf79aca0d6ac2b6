"""``python -m benchmarks.whole_step``: whole GRPO steps of a real model, by TRL and by verl_memopt, seconds by phase.

    ./setup_env.sh                               # .venv, once
    benchmarks/update_pass/setup.sh              # .venv-peers with TRL, once
    .venv/bin/python -m benchmarks.whole_step    # [--rounds N] [--dtype bf16] [--contestants NAME ...] [--json FILE]

It makes SmolLM2-135M-Instruct (``recipe/real_model``), and each contestant trains it in a process of its own, in turns. All have
the same prompts (hashes of ids are compared), reward function, loss, precision, number of threads, torch, transformers and vLLM,
and answers of the same length. Sampled tokens differ, because each trainer draws with its own generators. Micro-batches differ:
TRL cuts by rows (--rows), verl_memopt by tokens.

Seconds are of the processor, all threads of the trainer's process, because other programs lengthen the wall clock's. The function
that scores answers runs in a process of its own with verl_memopt; it takes milliseconds. A table cell is the median over rounds.
The limit is the time that the matrix products of one phase take alone, at the rate of ``torch.mm`` measured at their shapes: the
products that verl_memopt needs, which computes a prompt once for all its answers.

TRL reports entropies in each update, verl_memopt does not. ``trimmed`` is explained in ``work.py``, and what makes TRL's vLLM run
on a CPU in ``trl_side.py``. Exit codes: 0 done, 1 a process failed, 2 TRL is missing, 4 the work was not the same.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from benchmarks.common import NONE, ROOT, load, processor, text_table, write_json
from benchmarks.toy_trl.__main__ import DIVERGED, FAILED, REFUSED, TRL_PYTHON, RunFailedError, call, source, versions
from benchmarks.toy_trl.report import VoidError
from benchmarks.toy_trl.work import store, stored
from benchmarks.whole_step.work import CONTESTANTS, PHASES, TRL, WARM_UP, WHOLE, Contestant, Plan, Record, Work
from recipe.real_model.make_model import make_model
from recipe.real_model.prepare_arithmetic import prepare_arithmetic

PROCESS_SECONDS = 3600
REST = "rest"
COLUMNS = (*PHASES, REST)
PASSES = {"rollout": 1, "reference": 1, "update": 3}
"""Phase -> how many forwards its matrix products amount to."""


@dataclass(frozen=True)
class Contest:
    folder: Path
    model: Path
    work: Work
    names: Sequence[str]
    rounds: int
    steps: int
    rows: int
    threads: int

    def run(self) -> dict[str, list[Record]]:
        prepare_arithmetic(self.folder / "task")
        records: dict[str, list[Record]] = {name: [] for name in self.names}
        for number in range(self.rounds):
            # Another one is first in each round.
            for name in [*self.names[number % len(self.names) :], *self.names[: number % len(self.names)]]:
                sys.stderr.write(f"round {number + 1}: {name} (load {load()})\n")
                records[name].append(self._one(CONTESTANTS[name], number))
                check_same_work([record for one in records.values() for record in one], self.work)
        return records

    def _one(self, contestant: Contestant, number: int) -> Record:
        folder = self.folder / f"round{number + 1}" / contestant.slug
        shutil.rmtree(folder, ignore_errors=True)  # nothing of an earlier run is to be read
        asked, found = folder / "plan.pickle", folder / "record.pickle"
        task, steps = str(self.folder / "task"), WARM_UP + self.steps
        store(Plan(contestant, self.work, str(self.model), task, str(folder), steps, number + 1, self.rows), asked)
        side = "trl_side" if contestant.trainer == TRL else "ours"
        call(
            [sys.executable, "-m", f"benchmarks.whole_step.{side}", str(asked), str(found)], folder / "log.txt", PROCESS_SECONDS,
            OMP_NUM_THREADS=str(self.threads), PEERS=str(peers()),
        )  # fmt: skip
        return stored(found)


def peers() -> Path:
    return TRL_PYTHON.parents[1] / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def check_same_work(records: Sequence[Record], work: Work) -> None:
    """Raises VoidError: Prompts differ, or an answer does not have all its tokens."""
    if len({tuple(record.prompt_ids) for record in records}) != 1:
        raise VoidError("the contestants did not get the same prompts")
    tokens = {number for record in records for number in record.response_tokens}
    if tokens != {work.rows * work.response_tokens}:
        raise VoidError(f"a step has {sorted(tokens)} response tokens in place of {work.rows * work.response_tokens}")


def seconds(records: Sequence[Record], clock: str = "processor") -> dict[str, float]:
    """Gives the medians over all timed steps, by phase, with ``WHOLE`` and ``REST``."""
    steps = [step for record in records for step in record.steps[WARM_UP:]]
    found = [{name: getattr(step[name], clock) if name in step else 0.0 for name in (WHOLE, *PHASES)} for step in steps]
    for step in found:
        step[REST] = step[WHOLE] - sum(step[name] for name in PHASES)
    return {name: median(step[name] for step in found) for name in (WHOLE, *COLUMNS)}


def limits(work: Work, prompt_tokens: int, model: Path, threads: int) -> dict[str, float]:
    """Gives the seconds of each phase's matrix products at the rate of ``torch.mm``, the prompt once for all its answers."""
    config = json.loads((model / "config.json").read_text())
    width, inner, layers = (config[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    head = config.get("head_dim") or width // config["num_attention_heads"]
    attention = 2 * width * head * (config["num_attention_heads"] + config["num_key_value_heads"])
    response = work.rows * work.response_tokens
    tokens = prompt_tokens + response
    torch.set_num_threads(threads)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[work.dtype]
    block = rate(tokens, width, inner, dtype)
    at_head = rate(512, width, config["vocab_size"], dtype)
    forward = 2 * layers * (attention + 3 * width * inner) * tokens / block
    forward += 2 * width * config["vocab_size"] * response / at_head
    return {name: passes * forward for name, passes in PASSES.items()}


def rate(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> float:
    """Gives the FLOP/s of the three products of a linear layer together, the best of five."""
    value, weight, gradient = (torch.randn(shape).to(dtype) for shape in ((rows, inputs), (outputs, inputs), (rows, outputs)))
    taken = []
    for _ in range(5):
        began = time.process_time()
        torch.mm(value, weight.t()), torch.mm(gradient, weight), torch.mm(gradient.t(), value)
        taken.append(time.process_time() - began)
    return 6 * rows * inputs * outputs / min(taken)


def text(result: dict[str, Any]) -> str:
    rows, best, limit = result["rows"], result["rows"][-1]["seconds"], result["limit_seconds"]
    names = (WHOLE, *COLUMNS)
    lines = [[row["contestant"], *(f"{row['seconds'][name]:.2f}" for name in names), f"{row['wall']:.2f}"] for row in rows]
    lines.append(
        ["limit", f"{sum(limit.values()):.2f}", *(f"{limit[name]:.2f}" if name in limit else NONE for name in COLUMNS), NONE]
    )
    lines += [
        [f"{row['contestant']} / {rows[-1]['contestant']}", *(ratio(row["seconds"], best, name) for name in names), NONE]
        for row in rows[:-1]
    ]
    head = ("seconds of the processor", "step", *COLUMNS, "step, wall clock")
    return f"{source(result)}\n{result['command']}\n\n{text_table(head, lines, gaps=(len(rows) - 1, len(rows)))}"


def ratio(row: dict[str, float], best: dict[str, float], name: str) -> str:
    return f"{row[name] / best[name]:.2f}" if best[name] > 0.05 else NONE  # of what is next to nothing there is no ratio


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(prog="python -m benchmarks.whole_step", description=(__doc__ or "").split("\n")[0])
    add = arguments.add_argument
    add("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS), metavar="NAME", help=", ".join(CONTESTANTS))
    add("--rounds", type=int, default=3, help="processes of each contestant (default: %(default)s)")
    add("--steps", type=int, default=1, help="timed steps of a process, after the warm-up (default: %(default)s)")
    add("--prompts", type=int, default=Work.prompts, help="prompts per step (default: %(default)s)")
    add("--dtype", choices=("fp32", "bf16"), default=Work.dtype)
    add("--rows", type=int, default=8, help="rows in a micro-batch of TRL (default: %(default)s)")
    add("--threads", type=int, default=1, help="of each process (default: %(default)s)")
    add("--model", type=Path, help="a model folder in place of SmolLM2-135M-Instruct")
    add("--folder", type=Path, default=ROOT / "runs" / "whole_step", help="where runs are kept (default: runs/whole_step)")
    add("--json", type=Path, help="write the result here")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    if any(CONTESTANTS[name].trainer == TRL for name in arguments.contestants) and not TRL_PYTHON.exists():
        sys.stderr.write(f"{TRL_PYTHON}: TRL's environment is missing. Run benchmarks/update_pass/setup.sh first.\n")
        return REFUSED
    folder, work = arguments.folder.resolve(), Work(prompts=arguments.prompts, dtype=arguments.dtype)
    model = (arguments.model or make_model(folder / "model")).resolve()
    names, before = arguments.contestants, load()
    try:
        records = Contest(folder, model, work, names, arguments.rounds, arguments.steps, arguments.rows, arguments.threads).run()
    except RunFailedError as error:
        sys.stderr.write(f"{error}\n")
        return FAILED
    except VoidError as error:
        sys.stderr.write(f"void: {error}\n")
        return DIVERGED
    prompt_tokens = round(mean(records[names[0]][0].prompt_tokens[WARM_UP:]))
    limit = limits(work, prompt_tokens, model, arguments.threads)
    result = {
        "date": datetime.date.today().isoformat(), "command": f"python -m benchmarks.whole_step {' '.join(argv or sys.argv[1:])}",
        "machine": machine(arguments.threads, before), "versions": versions(), "work": asdict(work),
        "prompt_tokens": prompt_tokens, "limit_seconds": limit, "rows": [row_of(name, records[name]) for name in names],
    }  # fmt: skip
    print(text(result))
    if arguments.json is not None:
        write_json(arguments.json, result)
    return 0


def machine(threads: int, load_before: float) -> dict[str, Any]:
    return {
        "cpu": processor(), "cores": os.cpu_count(), "threads_per_process": threads, "load_average": [load_before, load()],
    }  # fmt: skip


def row_of(name: str, records: Sequence[Record]) -> dict[str, Any]:
    wholes = [step[WHOLE].processor for record in records for step in record.steps[WARM_UP:]]
    return {
        "contestant": name, "seconds": seconds(records), "wall": seconds(records, "wall")[WHOLE], "least": min(wholes),
        "most": max(wholes), "rewards": [record.rewards for record in records],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
