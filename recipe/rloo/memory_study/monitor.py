"""The device sampler: a process of its own that reads one GPU through NVML every 20 ms into a CSV file.

Run ``python -m recipe.rloo.memory_study.monitor --out samples.csv``. It prints ``ready`` once it has read the idle device. It
takes process ids from standard input, one a line, and reads the memory of the last one too. It ends when standard input closes.
On a machine without NVML it says so, writes nothing, and ends with code 2: no column is made up.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

PUBLISHED_COLUMNS = (
    "timestamp", "datetime", "gpu_memory_allocated_mb", "gpu_memory_reserved_mb", "gpu_memory_free_mb", "gpu_memory_total_mb",
    "gpu_utilization_percent", "cpu_memory_used_mb", "cpu_memory_percent", "cpu_usage_percent",
)  # fmt: skip
"""Columns of the published CSV. ``gpu_memory_allocated_mb`` is the memory of the whole device in use, as it was there.
``gpu_memory_reserved_mb`` stays empty: NVML cannot tell live tensors from cached blocks. The published files have 0."""
COLUMNS = (*PUBLISHED_COLUMNS, "device_used", "process_used", "idle_used")
"""The published columns, and in bytes: the whole device, the measured process alone, the device before the cell began."""

PERIOD_SECONDS = 0.02
READY = "ready"
MISSING = 2
"""Exit code on a machine without NVML."""
MIB = 2**20


class NoNvmlError(Exception):
    """NVML is not to be had on this machine. The message says why."""


@dataclass(frozen=True)
class Reading:
    """One reading of a device, in bytes and percent."""

    used: int
    free: int
    total: int
    utilization: float
    process: int | None
    """Memory of the measured process. None = NVML does not know it."""


def open_device(index: int) -> Callable[[int | None], Reading]:
    """Return a function that reads a device. It takes the id of the process whose own memory is read too, or None.

    Args:
        index: Number of the device, as NVML counts.

    Raises:
        NoNvmlError: nvidia-ml-py is not installed, or it finds no driver or no such device.
    """
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError as error:
        raise NoNvmlError("nvidia-ml-py is not installed (pip install nvidia-ml-py)") from error
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        raise NoNvmlError(f"NVML: {error}") from error

    def read(pid: int | None) -> Reading:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle) if pid is not None else ()
        held = next((process.usedGpuMemory for process in processes if process.pid == pid), None)
        utilization = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
        return Reading(memory.used, memory.free, memory.total, utilization, held)

    return read


def row(reading: Reading, now: float, idle_used: int) -> dict[str, Any]:
    """Return a reading as a row of the CSV file.

    Args:
        reading: What the device said.
        now: Seconds since 1970.
        idle_used: Bytes of the device in use before the cell began.
    """
    host = psutil.virtual_memory()
    return {
        "timestamp": round(now, 6),
        "datetime": datetime.datetime.fromtimestamp(now, tz=datetime.UTC).isoformat(),
        "gpu_memory_allocated_mb": round(reading.used / MIB, 3),
        "gpu_memory_reserved_mb": "",
        "gpu_memory_free_mb": round(reading.free / MIB, 3),
        "gpu_memory_total_mb": round(reading.total / MIB, 3),
        "gpu_utilization_percent": reading.utilization,
        "cpu_memory_used_mb": round(host.used / MIB, 3),
        "cpu_memory_percent": host.percent,
        # Since the last call, so that it takes no time.
        "cpu_usage_percent": psutil.cpu_percent(interval=None),
        "device_used": reading.used,
        "process_used": "" if reading.process is None else reading.process,
        "idle_used": idle_used,
    }


def sample(read: Callable[[], Reading], path: Path, period: float, idle_used: int, ended: Callable[[float], bool]) -> int:
    """Write a row per period until the end, and return their number.

    A reading that takes longer than a period delays the next one. Its true time is in the row.

    Args:
        read: Reads the device.
        path: The CSV file to write.
        period: Seconds from one reading to the next.
        idle_used: Bytes of the device in use before the cell began.
        ended: Waits up to a number of seconds, and returns whether it is time to end.
    """
    rows = 0
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        due = time.monotonic()
        while not ended(max(0.0, due - time.monotonic())):
            writer.writerow(row(read(), time.time(), idle_used))
            rows += 1
            due = max(due + period, time.monotonic())
    return rows


class _Orders:
    """What comes in on standard input: process ids, and in the end its end."""

    def __init__(self) -> None:
        self.pid: int | None = None
        self._line = b""

    def ended(self, seconds: float) -> bool:
        """Wait up to a number of seconds for a line or the end, and return whether it was the end."""
        readable, _, _ = select.select([0], [], [], seconds)
        if not readable:
            return False
        text = os.read(0, 64)
        *lines, self._line = (self._line + text).split(b"\n")
        self.pid = int(lines[-1]) if lines else self.pid
        return not text


@contextmanager
def sampling(path: Path, period: float = PERIOD_SECONDS, device: int = 0) -> Iterator[Sampler]:
    """Sample the device while the body runs, in a process of its own.

    Yields:
        The sampler, once it has read the idle device. Its ``refusal`` says whether it samples at all.
    """
    command = [sys.executable, "-m", __name__, "--out", str(path), "--period", str(period), "--device", str(device)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            first = process.stdout.readline().strip()
            yield Sampler(process.stdin, "" if first == READY else first or "the sampler ended without a word")
        finally:
            with suppress(BrokenPipeError):
                process.stdin.close()


@dataclass(frozen=True)
class Sampler:
    """A sampler that runs."""

    orders: IO[str]
    """Its standard input."""
    refusal: str
    """Why nothing is sampled on this machine. Empty = it samples."""

    def watch(self, pid: int) -> None:
        """Read the memory of a process too, from now on."""
        if not self.refusal:
            self.orders.write(f"{pid}\n")
            self.orders.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Sample until standard input closes, and return the exit code: 0, or 2 on a machine without NVML."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the CSV file to write")
    parser.add_argument("--period", type=float, default=PERIOD_SECONDS, help="seconds between readings (default: %(default)s)")
    parser.add_argument("--device", type=int, default=0, help="number of the GPU (default: %(default)s)")
    options = parser.parse_args(argv)
    try:
        read = open_device(options.device)
    except NoNvmlError as error:
        sys.stdout.write(f"{error}\n")
        return MISSING
    orders = _Orders()
    psutil.cpu_percent(interval=None)
    idle_used = read(None).used
    sys.stdout.write(f"{READY}\n")
    sys.stdout.flush()
    sample(lambda: read(orders.pid), options.out, options.period, idle_used, orders.ended)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
