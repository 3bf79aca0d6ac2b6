import csv
import sys
import time

import pytest
import torch

from recipe.rloo.memory_study.cells import Phase
from recipe.rloo.memory_study.measure import Meter, TrackerCounter, merged, requested_bytes, thinned
from recipe.rloo.memory_study.runner import SAMPLE_COLUMNS, NoNvmlError, Sampler, open_device


def test_a_phase_has_entry_peak_and_exit():
    with TrackerCounter() as tracker:
        meter = Meter(tracker)
        first = torch.zeros(100)
        with meter.phase("forward", 3):
            second = torch.zeros(200)
            del second
            third = torch.zeros(50)
    (phase,) = meter.phases
    assert (phase.update, phase.phase) == (3, "forward")
    assert (phase.allocated_enter, phase.allocated_peak, phase.allocated_exit) == (400, 1200, 600)
    assert phase.reserved_peak is None
    assert first.numel() + third.numel() == 150


def test_two_entries_of_a_phase_become_one():
    first = Phase(0, "forward", 1, 10, 2, 20, 0.5, ((0.1, 5, 20),))
    second = Phase(0, "forward", 3, 30, 4, 15, 0.25, ((0.2, 6, 15),))
    assert merged(first, second) == Phase(0, "forward", 1, 30, 4, 20, 0.75, ((0.1, 5, 20), (0.7, 6, 15)))


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


def test_every_step_of_a_stair_and_the_highest_level_stay():
    def kept(*levels):
        return [live for _, live, _ in thinned([(float(place), live, None) for place, live in enumerate(levels)])]

    assert kept(0, 100, 100, 100, 400, 400, 1000, 1000, 0) == [0, 100, 400, 1000, 0]
    assert kept(0, 1000, 1001, 1000, 999, 0) == [0, 1000, 1001, 0]


def test_a_tracker_notes_every_level_in_order():
    with TrackerCounter() as tracker:
        first = torch.zeros(1000)
        second = torch.zeros(2000)
        del first
        third = torch.zeros(10)
    levels = [live for _, live, _ in tracker.changes]
    assert levels == [4000, 12_000, 8040]
    moments = [moment for moment, _, _ in tracker.changes]
    assert moments == sorted(moments)
    assert tracker.peaks["device"].bytes == max(levels)
    assert second.numel() + third.numel() == 2010


MIB = 2**20
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
    """Put a module in the place of nvidia-ml-py."""

    def install(text):
        (tmp_path / "packages").mkdir()
        (tmp_path / "packages" / "pynvml.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path / "packages")
        monkeypatch.delitem(sys.modules, "pynvml", raising=False)

    yield install
    sys.modules.pop("pynvml", None)


def test_a_sampler_reads_a_device_from_before_its_process_until_it_is_closed(nvml, tmp_path):
    nvml(NVML)
    path = tmp_path / "samples.csv"
    sampler = Sampler(path, period=0.001)
    sampler.pid = 4242
    while not path.exists() or path.read_text().count(",7,") < 2:
        time.sleep(0.01)
    sampler.close()
    with path.open(newline="") as file:
        readings = list(csv.DictReader(file))
    assert tuple(readings[0]) == SAMPLE_COLUMNS
    assert {cells["idle_used"] for cells in readings} == {str(MIB)}
    # Every reading is a row, in the units of the columns.
    assert [float(cells["gpu_memory_allocated_mb"]) for cells in readings] == list(range(2, len(readings) + 2))
    assert [int(cells["device_used"]) for cells in readings[:2]] == [2 * MIB, 3 * MIB]
    last = readings[-1]
    assert (last["process_used"], last["gpu_memory_total_mb"], last["gpu_memory_reserved_mb"]) == ("7", "1024.0", "")
    assert 0 < float(last["cpu_memory_percent"]) <= 100
    assert last["datetime"].startswith("20")


def test_a_device_that_is_not_there_is_named(nvml):
    nvml(NVML)
    with pytest.raises(NoNvmlError, match="NVML: Invalid Argument"):
        open_device(3)


def test_a_machine_without_the_package_says_so_and_writes_nothing(nvml, tmp_path):
    nvml("raise ImportError('none here')\n")
    with pytest.raises(NoNvmlError, match=r"nvidia-ml-py is not installed \(pip install nvidia-ml-py\)"):
        open_device()
    Sampler(tmp_path / "samples.csv").close()
    assert not (tmp_path / "samples.csv").exists()
