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
from benchmarks.update_pass.flops import floor
from benchmarks.update_pass.naive import Reference
from benchmarks.update_pass.report import draw, draw_growth, said, text
from benchmarks.update_pass.sides import Job
from benchmarks.update_pass.work import WORKLOADS, Workload, make_batch, shrunk
from verl_memopt.distributed.device import device_count, is_gpu, leave_process_group, local_device, memory_info, resolve_device
from verl_memopt.errors import ConfigError
from verl_memopt.observe.phase import GIB

DONE, WRONG, MISSING, BROKEN = 0, 4, 2, 5
TURNS, ALONE = "turns", "alone"
MOST_GIB = 10.0
"""Of logits, on a CPU; a GPU's limit is what it has."""
PACKAGES = ("torch", "transformers", "trl", "verl", "liger_kernel", "prefix-grouper")
GROWTH_SIDES = ("response_logits", "trl_grpo_trimmed", "verl_prefix_grouper", "trl_ppo", "verl_ppo", *OURS)
GROWTH = {"k": "k", "answer": "answer tokens", "groups": "groups"}
"""Fields of the workload that are doubled in turn, and what they are called."""


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
    report(record, asked.json, asked.png)
    return exit_code({row["status"] for row in record.get("rows", ())})


def exit_code(statuses: set[str]) -> int:
    """Gives the exit code of a table by what became of its rows."""
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
    parser.add_argument("--checkpointing", choices=("off", "on", "both"), default="both")
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
    parser.add_argument("--floor", action="store_true", help="print the FLOP floor of the workload and stop")
    parser.add_argument("--growth", action="store_true", help="double k, answers and groups in turn, in place of one size")
    parser.add_argument("--doublings", type=int, default=3, help="of each, with --growth (default: 3)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=None, help="write the record here")
    parser.add_argument("--png", type=Path, default=None, help="draw the record here")
    return parser.parse_args(argv)


def device_asked(asked: argparse.Namespace, work: Workload) -> str:
    return ("cuda" if work.gpu else "cpu") if asked.device == "auto" else asked.device


def workload(asked: argparse.Namespace) -> Workload:
    """Gives the workload with what was asked for in place of its own. Errors: ConfigError where it needs a GPU."""
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
    """Gives who runs. Errors: ConfigError for a name that is unknown, or one asked for that this environment cannot run."""
    on_gpu = device_asked(asked, WORKLOADS[asked.workload]) == "cuda"
    critic = WORKLOADS[asked.workload].critic
    default = [name for name, found in CONTESTANTS.items() if found.critic is critic and not (on_gpu and found.cpu_only)]
    other = [name for name in asked.contestants or () if name in CONTESTANTS and CONTESTANTS[name].critic is not critic]
    if other:
        raise ConfigError(
            f"--contestants {' '.join(other)}: workload {asked.workload} has {'a' if critic else 'no'} critic. "
            f"Use some of {', '.join(default)}."
        )
    names = asked.contestants or [name for name in default if not asked.growth or name in GROWTH_SIDES]
    unknown = [name for name in names if name not in CONTESTANTS]
    if unknown:
        raise ConfigError(f"--contestants {' '.join(unknown)}: unknown. Use some of {', '.join(CONTESTANTS)}.")
    there = [name for name in names if missing(name) is None]
    absent = [name for name in names if name not in there]
    if absent and asked.contestants:
        raise ConfigError(f"--contestants {' '.join(absent)}: their packages are missing. See benchmarks/update_pass/setup.sh.")
    return there if asked.growth else names


def measure(
    asked: argparse.Namespace, record: dict[str, Any], work: Workload, names: Sequence[str], device: torch.device, folder: Path
) -> dict[str, Any]:
    """Gives what was asked for: the floor, the growth, or the rows. Rows are written to the file as they are measured."""
    if asked.floor:
        return {"floors": floors(work, asked.seed)}
    if asked.growth:
        return {"growth": {what: list(points) for what, points in growth(asked, work, names, device, folder)}}
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
    """Yields the rows of each size and setting, as they are measured."""
    rounds = [(checkpointing, k) for checkpointing in settings(asked) for k in work.series(ours=True)]
    who = {k: [name for name in names if k in work.series(ours=name in OURS)] for _, k in rounds}
    alone = in_order(asked, device) == ALONE
    budget = TimeBudget(asked.seconds, sum(len(who[k]) for _, k in rounds) if alone else len(rounds))
    for checkpointing, k in rounds:
        job, expected = make_job(dataclasses.replace(work, k=k), folder / "model", checkpointing, device, asked.seed)
        yield from round_of(asked, who[k], job, expected, budget)


def round_of(asked: argparse.Namespace, who: Sequence[str], job: Job, expected: Reference, budget: TimeBudget) -> Iterator[Row]:
    """Yields the rows of one size."""
    limit = most_bytes(asked, job.device)
    if in_order(asked, job.device) == ALONE:
        return run_alone(who, job, expected, asked.repeats, limit, budget)
    return iter(run(who, job, expected, asked.repeats, limit, budget.take()))


def in_order(asked: argparse.Namespace, device: torch.device) -> str:
    """Gives whether contestants run in turns or one after another: all models at once would not fit on a GPU."""
    return asked.order or (ALONE if is_gpu(device) else TURNS)


def most_bytes(asked: argparse.Namespace, device: torch.device) -> float:
    """Gives the most bytes that logits may take: what was asked for, else what the device has."""
    if asked.most_gib is None and is_gpu(device):
        return memory_info(device)[1]
    return (asked.most_gib or MOST_GIB) * GIB


def settings(asked: argparse.Namespace) -> tuple[bool, ...]:
    """Gives whether to checkpoint, for each round."""
    return {"off": (False,), "on": (True,), "both": (False, True)}[asked.checkpointing]


def growth(
    asked: argparse.Namespace, work: Workload, names: Sequence[str], device: torch.device, folder: Path
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yields, for each size that is doubled, its values with their rows; the first setting of checkpointing asked for."""
    for field, what in GROWTH.items():
        points = []
        for doublings in range(asked.doublings + 1):
            size = getattr(work, field) << doublings
            grown = dataclasses.replace(work, **{field: size}, ks=(), more_ks=())
            job, expected = make_job(grown, folder / "model", settings(asked)[0], device, asked.seed)
            rows = list(round_of(asked, names, job, expected, TimeBudget(None, 1)))
            points.append({"size": size, "rows": [dataclasses.asdict(row) for row in rows]})
        yield what, points


def floors(work: Workload, seed: int) -> list[dict[str, int]]:
    """Gives the FLOP floor of each group size, without and with checkpointing."""
    found = []
    for k in work.series(ours=True):
        batch = make_batch(dataclasses.replace(work, k=k), seed)
        found.append(
            {"k": k, "off": floor(work.shape, batch, False, work.critic), "on": floor(work.shape, batch, True, work.critic)}
        )
    return found


def heading(asked: argparse.Namespace, work: Workload, device: torch.device) -> dict[str, Any]:
    """Gives what a record says about itself: the work, the machine and the versions."""
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


def report(record: dict[str, Any], json_file: Path | None, png_file: Path | None) -> None:
    print(text(record))
    if json_file is not None:
        write_json(json_file, record)
    if png_file is not None and "rows" in record:
        draw(record, png_file)
    if png_file is not None and "growth" in record:
        draw_growth(record, png_file)


if __name__ == "__main__":
    sys.exit(main())
