"""What vLLM's sleeping allocator is read for, on a simulated device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.observe.simulated_device import GIB, SimulatedDevice
from tests.rollout.sleeping import sleeping_allocator
from verl_memopt.config import schema
from verl_memopt.errors import ConfigError
from verl_memopt.observe.device_ledger import Asleep
from verl_memopt.rollout import vllm_memory
from verl_memopt.rollout.vllm_memory import asleep_in_vllm, bytes_to_wake, check_free_memory, check_no_other_sleeper


def test_books_of_another_shape_are_not_guessed_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's free memory is used then."""
    device = SimulatedDevice(total=4 * GIB)
    device.installed(monkeypatch)
    allocator, _ = sleeping_allocator(device, monkeypatch)
    assert asleep_in_vllm() == Asleep()
    allocator.pointer_to_data[0] = SimpleNamespace(handle=(0, GIB, 0, 0), tag="kv_cache")
    assert asleep_in_vllm() is None


def test_a_part_wakes_with_its_own_bytes_and_those_without_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimulatedDevice(total=4 * GIB)
    device.installed(monkeypatch)
    allocator, _ = sleeping_allocator(device, monkeypatch)
    for address, (tag, size, is_asleep) in enumerate(
        [("kv_cache", 5, True), ("kv_cache", 7, False), ("weights", 11, True), ("runtime", 13, True)]
    ):
        allocator.pointer_to_data[address] = SimpleNamespace(handle=(0, size, 0, 0), tag=tag, is_asleep=is_asleep)
    assert (bytes_to_wake("kv_cache"), bytes_to_wake("weights")) == (5 + 13, 11 + 13)
    allocator.pointer_to_data[0] = SimpleNamespace(handle=(0, GIB, 0, 0), tag="kv_cache")
    assert bytes_to_wake("kv_cache") == 0


def test_without_memory_of_another_engine_a_sleeper_may_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_memory, "sleeping_allocator", lambda: None)
    check_no_other_sleeper()


@pytest.mark.parametrize("free", [8 * 2**30, 8 * 2**30 - 1])
def test_a_device_with_just_the_engines_share_free_is_enough_and_one_byte_less_is_refused(
    monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    monkeypatch.setattr(vllm_memory, "memory_info", lambda device: (free, 32 * 2**30))
    monkeypatch.setattr(vllm_memory, "empty_cache", lambda device: None)
    rollout, device = schema.Rollout(name="vllm", gpu_memory_utilization=0.25), torch.device("cuda")
    if free == 8 * 2**30:
        check_free_memory(0.25, rollout, device)
        return
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization=0\.25: that is 8\.0 GiB of the device's 32\.0"):
        check_free_memory(0.25, rollout, device)
