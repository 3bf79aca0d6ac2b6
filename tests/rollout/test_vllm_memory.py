"""What vLLM's sleeping allocator is read for, on a simulated device."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.observe.simulated_device import GIB, MIB, SimulatedDevice
from tests.rollout.sleeping import sleeping_allocator
from verl_memopt.config import schema
from verl_memopt.errors import ConfigError
from verl_memopt.memory.rollout_memory import sampler_bytes
from verl_memopt.observe.device_ledger import Asleep
from verl_memopt.rollout import vllm_memory
from verl_memopt.rollout.vllm_memory import (
    asleep_in_vllm,
    bytes_to_wake,
    check_free_memory,
    check_no_other_sleeper,
    host_bytes_to_sleep,
)


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


def test_a_sleeping_engines_host_memory_is_rounded_up_to_powers_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_bytes_to_sleep(1) == 0
    allocator, _ = sleeping_allocator(SimulatedDevice(4 * GIB), monkeypatch)
    sizes = {"weights": 311 * MIB, "runtime": 130 * MIB, "cudagraph": 2 * MIB, "kv_cache": 900 * MIB, "workspace": 64 * MIB}
    for address, (tag, size) in enumerate(sizes.items()):
        allocator.pointer_to_data[address] = SimpleNamespace(handle=(0, size, 0, 0), tag=tag)
    assert host_bytes_to_sleep(2) == (256 + 2) * MIB
    assert host_bytes_to_sleep(1) == (512 + 256 + 2) * MIB
    allocator.pointer_to_data[9] = SimpleNamespace(tag="weights")
    assert host_bytes_to_sleep(1) == 0  # books of another shape


def test_the_sampler_of_a_gpu_has_the_bytes_of_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own classes, on a device without bytes."""
    from vllm.v1.worker.gpu import buffer_utils
    from vllm.v1.worker.gpu.sample import bad_words, logit_bias, penalties

    staged = {}

    class Staged:
        def __init__(self, size: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
            staged[len(staged)] = torch.empty(size, dtype=dtype, device=device)

    for module in (bad_words, logit_bias, penalties):
        monkeypatch.setattr(module, "UvaBackedTensor", lambda size, dtype: SimpleNamespace(np=np.zeros(size), copy_to_uva=list))
    for module in (bad_words, logit_bias):
        assert module.StagedWriteTensor is buffer_utils.StagedWriteTensor
        monkeypatch.setattr(module, "StagedWriteTensor", Staged)
    states = SimpleNamespace(max_num_reqs=6, vocab_size=1001, device=torch.device("meta"), prompt_len=SimpleNamespace(np=None))
    counts = penalties.PenaltiesState(None, states)
    for make in (logit_bias.LogitBiasState, bad_words.BadWordsState):
        make(None, states)
    tensors = [counts.output_bin_counts, counts.prompt_bin_mask, *staged.values()]
    assert sum(tensor.nbytes for tensor in tensors) == sampler_bytes(6, 1001)
    assert round(sampler_bytes(256, 151_936) / 1e6) == 165
