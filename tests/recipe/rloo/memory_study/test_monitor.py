import csv
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipe.rloo.memory_study.monitor import COLUMNS, MIB, MISSING, NoNvmlError, Reading, open_device, row, sample, sampling

ROOT = Path(__file__).parents[4]
PUBLISHED = (
    "timestamp,datetime,gpu_memory_allocated_mb,gpu_memory_reserved_mb,gpu_memory_free_mb,gpu_memory_total_mb,"
    "gpu_utilization_percent,cpu_memory_used_mb,cpu_memory_percent,cpu_usage_percent"
)
NVML = """
import itertools
from types import SimpleNamespace

class NVMLError(Exception):
    pass

steps = itertools.count(1)

def nvmlInit():
    pass

def nvmlDeviceGetHandleByIndex(index):
    if index:
        raise NVMLError("Invalid Argument")
    return index

def nvmlDeviceGetMemoryInfo(handle):
    used = next(steps) * 2**20
    return SimpleNamespace(used=used, free=2**30 - used, total=2**30)

def nvmlDeviceGetComputeRunningProcesses(handle):
    return [SimpleNamespace(pid=4242, usedGpuMemory=7)]

def nvmlDeviceGetUtilizationRates(handle):
    return SimpleNamespace(gpu=50)
"""
"""A machine's NVML with one device of 1 GiB, of which every reading finds 1 MiB more in use."""


@pytest.fixture
def nvml(tmp_path, monkeypatch):
    """A machine with one device. It is on the path of the processes that start from here, too."""
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "pynvml.py").write_text(NVML)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ROOT}")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    yield
    sys.modules.pop("pynvml", None)


@pytest.fixture
def no_nvml(tmp_path, monkeypatch):
    """A machine on which nvidia-ml-py cannot be imported."""
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "pynvml.py").write_text("raise ImportError('none here')\n")
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ROOT}")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_row_has_the_units_of_its_columns():
    cells = row(Reading(3 * MIB, 5 * MIB, 8 * MIB, 40, None), 1.5, MIB)
    assert tuple(cells) == COLUMNS
    assert (cells["gpu_memory_allocated_mb"], cells["gpu_memory_free_mb"], cells["gpu_memory_total_mb"]) == (3, 5, 8)
    assert (cells["device_used"], cells["idle_used"], cells["datetime"]) == (3 * MIB, MIB, "1970-01-01T00:00:01.500000+00:00")
    assert cells["gpu_memory_reserved_mb"] == cells["process_used"] == ""
    assert 0 < cells["cpu_memory_percent"] <= 100


def test_every_reading_is_a_row_and_the_highest_one_stays(tmp_path):
    levels = iter([1, 9, 2])
    ends = iter([False, False, False, True])
    path = tmp_path / "samples.csv"
    rows = sample(lambda: Reading(next(levels) * MIB, 0, 10 * MIB, 0, None), path, 0.0, 0, lambda _: next(ends))
    assert rows == 3
    assert [float(cells["gpu_memory_allocated_mb"]) for cells in rows_of(path)] == [1, 9, 2]


def test_a_sampler_reads_a_device_from_before_its_process_until_after_it(nvml, tmp_path):
    path = tmp_path / "samples.csv"
    with sampling(path, period=0.001) as sampler:
        assert sampler.refusal == ""
        sampler.watch(4242)
        while not path.exists() or path.read_text().count(",7,") < 2:
            time.sleep(0.01)
    readings = rows_of(path)
    assert {cells["idle_used"] for cells in readings} == {str(MIB)}
    assert [float(cells["gpu_memory_allocated_mb"]) for cells in readings] == list(range(2, len(readings) + 2))
    assert readings[-1]["process_used"] == "7"


def test_a_machine_without_the_package_says_so_and_writes_nothing(no_nvml, tmp_path):
    path = tmp_path / "samples.csv"
    with sampling(path) as sampler:
        assert sampler.refusal == "nvidia-ml-py is not installed (pip install nvidia-ml-py)"
        sampler.watch(1)
    assert not path.exists()
    command = [sys.executable, "-m", "recipe.rloo.memory_study.monitor", "--out", str(path)]
    assert subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True).returncode == MISSING


def test_a_device_that_is_not_there_is_named(nvml):
    with pytest.raises(NoNvmlError, match="NVML: Invalid Argument"):
        open_device(3)
