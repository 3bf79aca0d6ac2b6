"""``python -m benchmarks.update_pass --workload b``: one group update by all contestants, their gradients checked, in a table."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.update_pass.chart import draw, draw_growth
from benchmarks.update_pass.contest import CONTESTANTS, OURS, Row, WrongGradientError, available, make_job, run
from benchmarks.update_pass.table import ratios, render, row_from, to_json
from benchmarks.update_pass.work import WORKLOADS, Workload, make_batch, shrunk
from verl_memopt.distributed.device import device_count, local_device, resolve_device
from verl_memopt.distributed.process_group import leave_process_group
from verl_memopt.errors import ConfigError
from verl_memopt.observe.phase import GIB

DONE, WRONG, MISSING = 0, 4, 2
PACKAGES = ("torch", "transformers", "trl", "verl", "liger_kernel", "prefix-grouper")
GROWTH_SIDES = ("response_logits", "trl_grpo_trimmed", "verl_prefix_grouper", *OURS)
GROWTH = {"k": "k", "answer": "answer tokens", "groups": "groups"}
"""Fields of the workload that are doubled in turn, and what they are called."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark. Exit codes: 0 done, 2 a contestant or the device is missing, 4 a gradient is wrong."""
    asked = parse(argv)
    torch.set_num_threads(asked.threads)
    try:
        work, names = workload(asked), contestants(asked)
        device = local_device(resolve_device("cuda" if work.gpu and not asked.cpu else "cpu"), 0)
    except ConfigError as error:
        print(f"update_pass: {error}", file=sys.stderr)
        return MISSING
    try:
        with tempfile.TemporaryDirectory() as folder:
            record = heading(asked, work)
            record |= measure(asked, work, names, device, Path(folder))
            record["machine"]["load_after"] = round(os.getloadavg()[0], 1)
    except WrongGradientError as error:
        print(f"update_pass: {error}", file=sys.stderr)
        return WRONG
    finally:
        leave_process_group()
    report(record, asked.json, asked.png)
    return DONE


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Gives the options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.update_pass", description=__doc__)
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="b")
    parser.add_argument("--contestants", nargs="+", metavar="NAME", help=f"of {', '.join(CONTESTANTS)} (default: all there are)")
    parser.add_argument("--repeats", type=int, default=7, help="timed rounds (default: 7)")
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS", "2")), help="of torch")
    parser.add_argument("--checkpointing", choices=("off", "on", "both"), default="both")
    parser.add_argument("--k", type=int, nargs="+", help="group sizes in place of the workload's")
    parser.add_argument("--layers", type=int, help="in place of the model's")
    parser.add_argument("--shrink", type=int, default=1, help="divide lengths, widths and vocabulary by this")
    parser.add_argument("--rows", type=int, help="rows in a micro-batch of those who pad, a divisor of k (default: k)")
    parser.add_argument("--token-budget", type=int, help="tokens in a micro-batch of our contestants")
    parser.add_argument("--chunk-tokens", type=int, help="logprob_chunk_tokens of our contestants")
    parser.add_argument("--most-gib", type=float, default=10.0, help="do not run who needs more for logits alone (default: 10)")
    parser.add_argument("--cpu", action="store_true", help="run a GPU's workload on a CPU")
    parser.add_argument("--floor", action="store_true", help="print the FLOP floor of the workload and stop")
    parser.add_argument("--growth", action="store_true", help="double k, answers and groups in turn, in place of one size")
    parser.add_argument("--doublings", type=int, default=3, help="of each, with --growth (default: 3)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=None, help="write the record here")
    parser.add_argument("--png", type=Path, default=None, help="draw the record here")
    return parser.parse_args(argv)


def workload(asked: argparse.Namespace) -> Workload:
    """Gives the workload with what was asked for in place of its own. Errors: ConfigError where it needs a GPU."""
    work = WORKLOADS[asked.workload]
    if work.gpu and not asked.cpu and not device_count("cuda"):
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
    names = asked.contestants or [name for name in CONTESTANTS if not asked.growth or name in GROWTH_SIDES]
    unknown = [name for name in names if name not in CONTESTANTS]
    if unknown:
        raise ConfigError(f"--contestants {' '.join(unknown)}: unknown. Use some of {', '.join(CONTESTANTS)}.")
    there = [name for name in names if available(name)]
    missing = [name for name in names if name not in there]
    if missing and asked.contestants:
        raise ConfigError(f"--contestants {' '.join(missing)}: their packages are missing. See benchmarks/update_pass/setup.sh.")
    if missing:
        print(f"Not in this environment, and not run: {', '.join(missing)}", file=sys.stderr)
    return there


def measure(
    asked: argparse.Namespace, work: Workload, names: Sequence[str], device: torch.device, folder: Path
) -> dict[str, Any]:
    """Gives what was asked for: the floor, the growth, or the rows."""
    if asked.floor:
        return {"floors": floors(work, asked.seed)}
    if asked.growth:
        return {"growth": {what: list(points) for what, points in growth(asked, work, names, device, folder)}}
    rows = [
        to_json(row)
        for checkpointing in settings(asked)
        for k in work.series(ours=True)
        for row in round_of(asked, dataclasses.replace(work, k=k), work, names, device, folder, checkpointing)
    ]
    return {"rows": rows}


def round_of(
    asked: argparse.Namespace,
    work: Workload,
    whole: Workload,
    names: Sequence[str],
    device: torch.device,
    folder: Path,
    checkpointing: bool,
) -> list[Row]:
    """Gives the rows of one size, of those who run it: group sizes beyond the common ones are for our contestants alone."""
    who = [name for name in names if work.k in whole.series(ours=name in OURS)]
    job, expected = make_job(work, folder / "model", checkpointing, device, asked.seed)
    return run(who, job, expected, asked.repeats, asked.most_gib * GIB)


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
            rows = round_of(asked, grown, grown, names, device, folder, settings(asked)[0])
            points.append({"size": size, "rows": [to_json(row) for row in rows]})
        yield what, points


def floors(work: Workload, seed: int) -> list[dict[str, int]]:
    """Gives the FLOP floor of each group size, without and with checkpointing."""
    from benchmarks.update_pass.flops import floor

    found = []
    for k in work.series(ours=True):
        batch = make_batch(dataclasses.replace(work, k=k), seed)
        found.append({"k": k, "off": floor(work.shape, batch, False), "on": floor(work.shape, batch, True)})
    return found


def heading(asked: argparse.Namespace, work: Workload) -> dict[str, Any]:
    """Gives what a record says about itself: the work, the machine and the versions."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "schema": 1,
        "workload": asked.workload,
        "work": dataclasses.asdict(work),
        "ids": make_batch(work, asked.seed).hash(),
        "seed": asked.seed,
        "repeats": asked.repeats,
        "date": datetime.date.today().isoformat(),
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "load_before": round(os.getloadavg()[0], 1),
            "python": platform.python_version(),
        },
        "versions": {name: found for name in PACKAGES if (found := _version(name))} | {"commit": commit},
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def report(record: dict[str, Any], json_file: Path | None, png_file: Path | None) -> None:
    """Prints the record and writes the files that were asked for."""
    print(text(record))
    if json_file is not None:
        json_file.write_text(json.dumps(record, indent=1) + "\n")
    if png_file is not None and "rows" in record:
        draw([row_from(row) for row in record["rows"]], record["work"]["what"].capitalize(), source(record), png_file)
    if png_file is not None and "growth" in record:
        draw_growth(_series(record), source(record), png_file)


def text(record: dict[str, Any]) -> str:
    """Gives a record as it is printed."""
    head = [source(record), f"Workload {record['workload']}: {record['work']['what']}; ids {record['ids']}.", ""]
    if "floors" in record:
        lines = [
            f"k = {floor['k']}: {floor['off'] / 1e9:,.1f} GFLOP, with checkpointing {floor['on'] / 1e9:,.1f}"
            for floor in record["floors"]
        ]
        return "\n".join([*head, *lines])
    if "growth" in record:
        parts = [f"{what} = {size:,}\n{render(rows)}" for what, points in _series(record).items() for size, rows in points]
        return "\n\n".join(["\n".join(head).rstrip(), *parts])
    rows = [row_from(row) for row in record["rows"]]
    return "\n".join([*head, render(rows), "", *ratios(rows)])


def _series(record: dict[str, Any]) -> dict[str, list[tuple[int, list[Row]]]]:
    return {
        what: [(point["size"], [row_from(row) for row in point["rows"]]) for point in points]
        for what, points in record["growth"].items()
    }


def source(record: dict[str, Any]) -> str:
    """Gives a line on when, where and with what the figures were measured."""
    where = record["machine"]
    load = f"load {where['load_before']} to {where['load_after']}"
    packages = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    return (
        f"Measured {record['date']} on {where['processor']}, {where['cores']} cores ({load}), "
        f"{where['threads']} threads; {packages}."
    )


if __name__ == "__main__":
    sys.exit(main())
