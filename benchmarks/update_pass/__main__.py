"""``python -m benchmarks.update_pass --workload b``: one group update by all contestants, their gradients checked, in a table."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import commit, load, processor, version_of, write_json
from benchmarks.update_pass.contest import (
    CONTESTANTS,
    FAILED,
    OURS,
    WRONG_GRADIENT,
    Row,
    TimeBudget,
    WrongGradientError,
    make_job,
    missing,
    run,
    run_alone,
)
from benchmarks.update_pass.naive import Reference
from benchmarks.update_pass.report import said, text
from benchmarks.update_pass.sides import Job
from benchmarks.update_pass.work import WORKLOADS, Workload, make_batch, shrunk
from verl_memopt.distributed.device import device_count, is_gpu, leave_process_group, local_device, memory_info, resolve_device
from verl_memopt.errors import ConfigError
from verl_memopt.observe.phase import GIB

DONE, WRONG, MISSING, BROKEN = 0, 4, 2, 5
TURNS, ALONE = "turns", "alone"
CHECKPOINTING = {"off": (False,), "on": (True,), "both": (False, True)}
MOST_GIB = 10.0
"""Of logits, on a CPU; a GPU's limit is what it has."""
PACKAGES = ("torch", "transformers", "trl", "verl", "liger_kernel", "prefix-grouper")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark.

    Exit codes: 0 done, 2 a contestant or the device is missing, 4 a gradient is wrong, 5 a contestant failed. Memory that runs
    out and a package that is not installed are rows, and no failures.
    """
    asked = parse(argv)
    torch.set_num_threads(asked.threads)
    try:
        work, names = workload(asked), contestants(asked)
        device = local_device(resolve_device(device_asked(asked, work)), 0)
    except ConfigError as error:
        print(f"update_pass: {error}", file=sys.stderr)
        return MISSING
    try:
        with tempfile.TemporaryDirectory() as folder:
            record = heading(asked, work, device)
            record |= measure(asked, record, work, names, device, Path(folder))
            record["machine"]["load_after"] = load()
    except WrongGradientError as error:
        print(f"update_pass: {error}", file=sys.stderr)
        return WRONG
    finally:
        leave_process_group()
    print(text(record))
    if asked.json is not None:
        write_json(asked.json, record)
    statuses = {row["status"] for row in record["rows"]}
    return WRONG if WRONG_GRADIENT in statuses else BROKEN if FAILED in statuses else DONE


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.update_pass", description=__doc__)
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="b")
    parser.add_argument("--contestants", nargs="+", metavar="NAME", help=f"of {', '.join(CONTESTANTS)} (default: all there are)")
    parser.add_argument("--repeats", type=int, default=7, help="timed rounds (default: 7)")
    parser.add_argument(
        "--seconds", type=float, help="time budget of the whole run: fewer rounds where it is spent, at least one"
    )
    parser.add_argument("--order", choices=(TURNS, ALONE), help="time all in turns, or one after another (default on a GPU)")
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS", "2")), help="of torch")
    parser.add_argument("--checkpointing", choices=CHECKPOINTING, default="both")
    parser.add_argument("--k", type=int, nargs="+", help="group sizes in place of the workload's")
    parser.add_argument("--layers", type=int, help="in place of the model's")
    parser.add_argument("--shrink", type=int, default=1, help="divide lengths, widths and vocabulary by this")
    parser.add_argument("--rows", type=int, help="rows in a micro-batch of those who pad, a divisor of k (default: k)")
    parser.add_argument("--token-budget", type=int, help="tokens in a micro-batch of our contestants")
    parser.add_argument("--chunk-tokens", type=int, help="logprob_chunk_tokens of our contestants")
    parser.add_argument("--most-gib", type=float, help="do not run who needs more for logits alone (default: 10, a GPU's memory)")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU for workloads meant for one"
    )
    parser.add_argument("--cpu", action="store_const", const="cpu", dest="device", help="the same as --device cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=None, help="write the record here")
    return parser.parse_args(argv)


def device_asked(asked: argparse.Namespace, work: Workload) -> str:
    return ("cuda" if work.gpu else "cpu") if asked.device == "auto" else asked.device


def workload(asked: argparse.Namespace) -> Workload:
    work = WORKLOADS[asked.workload]
    if device_asked(asked, work) == "cuda" and not device_count("cuda"):
        raise ConfigError(
            f"--workload {asked.workload}: {work.what} needs a CUDA device, and none is visible to this process. "
            "Run it on a GPU, or try its code with --cpu --layers 1 --shrink 32."
        )
    if asked.layers or asked.shrink > 1:
        work = shrunk(work, asked.layers, asked.shrink)
    given = {"rows": asked.rows, "token_budget": asked.token_budget, "chunk_tokens": asked.chunk_tokens}
    if asked.k:
        given |= {"ks": tuple(asked.k), "more_ks": ()}
    return dataclasses.replace(work, **{name: value for name, value in given.items() if value is not None})


def contestants(asked: argparse.Namespace) -> list[str]:
    on_gpu = device_asked(asked, WORKLOADS[asked.workload]) == "cuda"
    default = [name for name, found in CONTESTANTS.items() if not (on_gpu and found.cpu_only)]
    names = asked.contestants or default
    unknown = [name for name in names if name not in CONTESTANTS]
    if unknown:
        raise ConfigError(f"--contestants {' '.join(unknown)}: unknown. Use some of {', '.join(CONTESTANTS)}.")
    absent = [name for name in names if missing(name) is not None]
    if absent and asked.contestants:
        raise ConfigError(f"--contestants {' '.join(absent)}: their packages are missing. See benchmarks/update_pass/setup.sh.")
    return names


def measure(
    asked: argparse.Namespace, record: dict[str, Any], work: Workload, names: Sequence[str], device: torch.device, folder: Path
) -> dict[str, Any]:
    places = {name: place for place, name in enumerate(CONTESTANTS)}
    record["rows"] = []
    for row in all_rows(asked, work, names, device, folder):
        record["rows"].append(dataclasses.asdict(row))
        print(said(row), file=sys.stderr, flush=True)
        if asked.json is not None:
            write_json(asked.json, {**record, "complete": False})
    rounds = {(row["checkpointing"], row["k"]): len(record["rows"]) for row in record["rows"]}
    order = list(rounds)
    rows = sorted(record["rows"], key=lambda row: (order.index((row["checkpointing"], row["k"])), places[row["contestant"]]))
    return {"rows": rows, "complete": True}


def all_rows(
    asked: argparse.Namespace, work: Workload, names: Sequence[str], device: torch.device, folder: Path
) -> Iterator[Row]:
    rounds = [(checkpointing, k) for checkpointing in CHECKPOINTING[asked.checkpointing] for k in work.series(ours=True)]
    who = {k: [name for name in names if k in work.series(ours=name in OURS)] for _, k in rounds}
    alone = in_order(asked, device) == ALONE
    budget = TimeBudget(asked.seconds, sum(len(who[k]) for _, k in rounds) if alone else len(rounds))
    for checkpointing, k in rounds:
        job, expected = make_job(dataclasses.replace(work, k=k), folder / "model", checkpointing, device, asked.seed)
        yield from round_of(asked, who[k], job, expected, budget)


def round_of(asked: argparse.Namespace, who: Sequence[str], job: Job, expected: Reference, budget: TimeBudget) -> Iterator[Row]:
    whole = asked.most_gib is None and is_gpu(job.device)
    limit = memory_info(job.device)[1] if whole else (asked.most_gib or MOST_GIB) * GIB
    if in_order(asked, job.device) == ALONE:
        return run_alone(who, job, expected, asked.repeats, limit, budget)
    return iter(run(who, job, expected, asked.repeats, limit, budget.take()))


def in_order(asked: argparse.Namespace, device: torch.device) -> str:
    return asked.order or (ALONE if is_gpu(device) else TURNS)


def heading(asked: argparse.Namespace, work: Workload, device: torch.device) -> dict[str, Any]:
    return {
        "schema": 1,
        "workload": asked.workload,
        "work": dataclasses.asdict(work),
        "ids": make_batch(work, asked.seed).hash(),
        "seed": asked.seed,
        "repeats": asked.repeats,
        "budget_seconds": asked.seconds,
        "order": in_order(asked, device),
        "date": datetime.date.today().isoformat(),
        "machine": {
            "device": torch.cuda.get_device_name(device) if is_gpu(device) else "cpu",
            "processor": processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "load_before": load(),
            "python": platform.python_version(),
        },
        "versions": {name: found for name in PACKAGES if (found := version_of(name))} | {"commit": commit()},
    }


if __name__ == "__main__":
    sys.exit(main())
