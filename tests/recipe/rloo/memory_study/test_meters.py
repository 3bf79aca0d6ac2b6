import csv
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from recipe.rloo.memory_study.meters import Phase, TrackerMeter, merged, requested_bytes
from recipe.rloo.memory_study.monitor import COLUMNS, MIB, MISSING, NoNvmlError, Reading, open_device, row, sample, sampling
from recipe.rloo.memory_study.records import OutOfMemory
from recipe.rloo.memory_study.timeline import TimelineTracker, thinned
from verl_memopt.observe.byte_tracker import ByteTracker


def test_a_phase_has_entry_peak_and_exit():
    with ByteTracker() as tracker:
        meter = TrackerMeter(tracker)
        first = torch.zeros(100)
        with meter.phase("forward", 3):
            second = torch.zeros(200)
            del second
            third = torch.zeros(50)
    (phase,) = meter.phases
    assert (phase.update, phase.name, phase.enter, phase.peak, phase.exit) == (3, "forward", 400, 1200, 600)
    assert phase.reserved_peak is None
    assert first.numel() + third.numel() == 150


def test_the_weights_of_a_model_count_once_the_meter_knows_them():
    model = torch.nn.Linear(10, 10, bias=False)
    with ByteTracker() as tracker:
        meter = TrackerMeter(tracker)
        meter.count_model(model)
        with meter.phase("rollout"):
            pass
    assert meter.phases[0].enter == 400


def test_running_out_of_memory_names_the_phase_and_the_bytes():
    def backward(meter):
        kept = torch.zeros(100)
        with meter.phase("backward"):
            return kept, torch.zeros(200)

    with ByteTracker(limit_bytes=1000) as tracker, pytest.raises(OutOfMemory) as error:
        backward(TrackerMeter(tracker))
    assert (error.value.phase, error.value.requested_bytes, error.value.held_bytes) == ("backward", 800, 400)


def test_phases_of_one_update_and_name_become_one():
    first = Phase(0, "forward", 1, 10, 2, 20, 0.5, ((0.1, 5, 20),))
    other = Phase(0, "backward", 2, 11, 3, 21, 0.5)
    second = Phase(0, "forward", 3, 30, 4, 15, 0.25, ((0.2, 6, 15),))
    together, left = merged([first, other, second])
    assert together == Phase(0, "forward", 1, 30, 4, 20, 0.75, ((0.1, 5, 20), (0.7, 6, 15)))
    assert left is other


@pytest.mark.parametrize(
    ("message", "size"),
    [
        ("CUDA out of memory. Tried to allocate 14.07 GiB. GPU 0 has", int(14.07 * 2**30)),
        ("CUDA out of memory. Tried to allocate 512.00 MiB. GPU", 512 * 2**20),
        ("CUDA out of memory. Tried to allocate 20 bytes", 20),
        ("CUDA error: out of memory", 0),
    ],
)
def test_the_size_is_read_from_the_message_of_the_gpu(message, size):
    assert requested_bytes(message) == size


def points_of(*levels):
    return [(float(place), live, None) for place, live in enumerate(levels)]


def test_every_step_of_a_stair_and_the_highest_level_stay():
    kept = thinned(points_of(0, 100, 100, 100, 400, 400, 1000, 1000, 0))
    assert [live for _, live, _ in kept] == [0, 100, 400, 1000, 0]
    kept = thinned(points_of(0, 1000, 1001, 1000, 999, 0))
    assert [live for _, live, _ in kept] == [0, 1000, 1001, 0]


def test_a_tracker_notes_every_level_in_order():
    with TimelineTracker() as tracker:
        first = torch.zeros(1000)
        second = torch.zeros(2000)
        del first
        third = torch.zeros(10)
    levels = [live for _, live in tracker.changes]
    assert levels == [4000, 12_000, 8040]
    moments = [moment for moment, _ in tracker.changes]
    assert moments == sorted(moments)
    assert tracker.peaks["device"].bytes == max(levels)
    assert second.numel() + third.numel() == 2010


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
