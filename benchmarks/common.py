"""What benchmarks share: files written in one step, tables of text, the machine they ran on, seconds of a call."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from verl_memopt.distributed.device import leave_process_group, synchronize
from verl_memopt.observe.files import write_whole

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
NONE = "–"
"""A cell without a figure."""


def write_json(path: Path, record: Any) -> None:
    write_whole(path, json.dumps(record, indent=1) + "\n")


def text_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int] = (0,), gaps: Collection[int] = ()
) -> str:
    """Return a table as text, columns flush right but for those numbered in ``left``, a gap after rows numbered in ``gaps``.

    A line break in a head puts its words above each other.
    """
    above, below = [head.rpartition("\n")[0] for head in heads], [head.rpartition("\n")[2] for head in heads]
    lines = [line for line in (above, below) if any(line)]
    widths = [max(map(len, column)) for column in zip(*lines, *rows, strict=True)]

    def text(cells: Sequence[str]) -> str:
        placed = [str.ljust if at in left else str.rjust for at in range(len(heads))]
        return "  ".join(place(cell, size) for place, cell, size in zip(placed, cells, widths, strict=True)).rstrip()

    body = [text(row) + ("\n" if at in gaps else "") for at, row in enumerate(rows)]
    return "\n".join([*map(text, lines), "─" * (sum(widths) + 2 * len(widths) - 2), *body])


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def load() -> float:
    return round(os.getloadavg()[0], 1)


def commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@contextmanager
def fake_process_group(ranks: int = 1) -> Iterator[None]:
    """Be the first of some ranks in a process group whose collectives do nothing."""
    leave_process_group()
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        leave_process_group()


def seconds_of(call: Callable[[], Any], device: torch.device = CPU) -> float:
    """Return the seconds of a call, from an idle device until it is idle again."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start
