"""Memory that sleeps: what the driver says is free, and that weights come back.

Only a GPU has vLLM's allocator. Without vLLM its library and Python files are read from a folder; see ``tests/gpu/cumem.py``.
"""

import subprocess
import sys
import zipfile
from contextlib import nullcontext

import pytest
import torch

from tests.end_to_end.runs import ROOT, environment
from tests.gpu import cumem, machine

BLOCK = 2 * machine.MIB
"""The driver maps memory in steps of this."""


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
    from verl_memopt.memory.out_of_memory import DeviceCap, memory_limits
    from verl_memopt.rollout.vllm_process import asleep_in_vllm

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
