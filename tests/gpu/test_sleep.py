"""Memory that sleeps: what the driver says is free, and that weights come back.

Only a GPU has vLLM's allocator. Without vLLM its library and Python files are read from a folder; see ``tests/gpu/cumem.py``.
"""

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from tests.end_to_end.runs import ROOT, environment
from tests.gpu import cumem, machine

BLOCK = 2 * machine.MIB
"""The driver maps memory in steps of this."""

LIBRARY = """
mapped, calls = set(), []

def init_module(malloc, free):
    calls.append("init")

def python_create_and_map(device, size, address, handle):
    assert address not in mapped
    mapped.add(address)

def python_unmap_and_release(device, size, address, handle):
    mapped.remove(address)
"""
"""The library's interface, for a machine without a GPU."""


def vllms_files():
    spec = importlib.util.find_spec("vllm")
    return None if spec is None else Path(spec.submodule_search_locations[0]) / "device_allocator"


@pytest.fixture
def stand_in(tmp_path):
    """A folder as the script makes it, with a library that maps nothing."""
    if vllms_files() is None:
        pytest.skip("vLLM's allocator with a library that stands in: vLLM is not installed")
    shutil.copytree(vllms_files(), tmp_path / "device_allocator")
    (tmp_path / "cumem_allocator.py").write_text(LIBRARY)
    return tmp_path


@pytest.mark.rehearsed
def test_the_allocator_sleeps_and_wakes_with_files_from_a_folder(stand_in, monkeypatch):
    monkeypatch.setenv(cumem.VARIABLE, str(stand_in))
    if not machine.on_gpu():
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)  # torch refuses it where there is no accelerator
    with cumem.allocator_from(cumem.folder()) as allocator:
        library = sys.modules["vllm.cumem_allocator"]
        blocks = {}
        for tag in ("weights", "kv_cache"):
            handle, blocks[tag] = cumem.host_block(4096)
            allocator.current_tag = tag
            allocator._python_malloc_callback(handle)
            library.mapped.add(handle[2])
        blocks["weights"].fill_(7)
        allocator.sleep("weights")
        assert not library.mapped
        blocks["weights"].zero_()
        allocator.wake_up(["weights"])
        assert library.mapped == {blocks["weights"].data_ptr()}
        assert blocks["weights"].eq(7).all()
        allocator.wake_up()
        assert len(library.mapped) == 2
    assert cumem.NAME not in sys.modules or sys.modules[cumem.NAME].CuMemAllocator.instance is None


@pytest.mark.rehearsed
@pytest.mark.parametrize("has_library", [True, False])
def test_the_script_takes_the_files_out_of_a_wheel(tmp_path, has_library):
    wheel = tmp_path / "vllm-0.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("vllm/device_allocator/__init__.py", "vllm/device_allocator/cumem.py", "vllm/config.py"):
            archive.writestr(name, "")
        if has_library:
            archive.writestr("vllm/cumem_allocator.abi3.so", b"\x7fELF")
    command = ["bash", "benchmarks/gpu/cumem.sh", str(wheel), str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, env=environment(PYTHON=sys.executable), capture_output=True, text=True)
    if has_library:
        assert done.returncode == 0, done.stderr
        found = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
        assert found == {"cumem_allocator.abi3.so", "device_allocator/__init__.py", "device_allocator/cumem.py"}
    else:
        assert done.returncode != 0
        assert "Take a wheel of vllm for CUDA" in done.stderr


@pytest.fixture
def allocator():
    if not machine.on_gpu():
        pytest.skip("sleeping memory beside the driver's count: a CPU has none")
    if cumem.folder() is None:
        pytest.skip(
            f"sleeping memory beside the driver's count: {cumem.VARIABLE} names no folder (benchmarks/gpu/cumem.sh makes one)"
        )
    with cumem.allocator_from(cumem.folder()) as found:
        yield found


def filled(allocator, tag, num_bytes):
    with allocator.use_memory_pool(tag):
        return torch.full((num_bytes,), 7, dtype=torch.uint8, device=machine.device())


def test_weights_that_slept_come_back_and_the_driver_has_their_memory_meanwhile(device, allocator):
    weights, cache = filled(allocator, "weights", 64 * BLOCK), filled(allocator, "kv_cache", 128 * BLOCK)
    awake = machine.used_bytes()
    allocator.sleep("weights")
    assert awake - machine.used_bytes() >= 192 * BLOCK
    # Torch is not told, which is why the figures have to be corrected.
    assert machine.live_bytes() >= 192 * BLOCK
    allocator.wake_up(["weights"])
    assert weights.eq(7).all()
    allocator.wake_up()
    cache.zero_()
    assert abs(machine.used_bytes() - awake) <= BLOCK


@pytest.mark.parametrize("limit_gb", [None, 8.0])
def test_corrected_figures_are_what_the_driver_says_while_asleep(device, allocator, limit_gb):
    ledger_room = pytest.importorskip("verl_memopt.observe.device_ledger", reason="corrected figures: no ledger of the device")
    from verl_memopt.config.schema import Memory
    from verl_memopt.memory.limits_torch import DeviceCap, memory_limits
    from verl_memopt.rollout.vllm_memory import asleep_in_vllm

    limit = None if limit_gb is None else int(limit_gb * 2**30)
    with memory_limits(Memory(device_limit_gb=limit_gb), device) if limit_gb else nullcontext():
        weights, cache = filled(allocator, "weights", 64 * BLOCK), filled(allocator, "kv_cache", 128 * BLOCK)
        ledger, cap = ledger_room.ledger_of(device), DeviceCap(device, limit)
        outside = machine.used_bytes() - ledger.reserved()
        for _ in range(3):
            with cap.changing(asleep_in_vllm):
                allocator.sleep("weights")
            assert abs(machine.used_bytes() - outside - ledger.reserved()) <= BLOCK
            assert ledger.asleep.reserved_bytes >= 192 * BLOCK
            with cap.changing(asleep_in_vllm):
                allocator.wake_up(["weights"])
            assert abs(machine.used_bytes() - outside - ledger.reserved()) <= BLOCK
            with cap.changing(asleep_in_vllm):
                allocator.wake_up()
            assert ledger.asleep.reserved_bytes == 0
            assert abs(machine.used_bytes() - outside - ledger.reserved()) <= BLOCK
        assert weights.eq(7).all()
        assert cache.numel() == 128 * BLOCK
