import csv
import sys
import time

import pytest

from recipe.rloo.memory_study.measure import requested_bytes
from recipe.rloo.memory_study.runner import SAMPLE_COLUMNS, NoNvmlError, Sampler, open_device


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


def test_a_machine_without_the_package_says_so_and_writes_nothing(nvml, tmp_path):
    nvml("raise ImportError('none here')\n")
    with pytest.raises(NoNvmlError, match=r"nvidia-ml-py is not installed \(pip install nvidia-ml-py\)"):
        open_device()
    Sampler(tmp_path / "samples.csv").close()
    assert not (tmp_path / "samples.csv").exists()
