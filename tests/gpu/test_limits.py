"""Limits of the device and of page-locked memory: within them a request passes, beyond them it is refused.

Only a GPU's allocator refuses for real, and only a GPU has page-locked memory.
"""

import gc

import pytest
import torch

from tests.gpu import machine
from verl_memopt.config.schema import Memory
from verl_memopt.memory.host_buffers import GIB, HostArena, host_allocator, host_buffer, host_limits
from verl_memopt.memory.residency import OffloadedParams

pytestmark = pytest.mark.rehearsed


def bytes_on(device, num_bytes):
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def limit():
    """Gives a limit in GiB that leaves room for what this process holds, and the bytes that it leaves."""
    held, room = machine.held_by_allocator(), 50 * machine.LARGE
    return (held + room) / GIB, room


def test_an_allocation_up_to_the_limit_passes(device):
    gigabytes, room = limit()
    with machine.device_limit(Memory(device_limit_gb=gigabytes)):
        assert bytes_on(device, room).numel() == room


def test_one_step_beyond_the_limit_is_refused_and_what_is_held_stays(device):
    gigabytes, room = limit()
    with machine.device_limit(Memory(device_limit_gb=gigabytes)):
        held = bytes_on(device, room - machine.LARGE)
        with pytest.raises(torch.OutOfMemoryError):
            bytes_on(device, 2 * machine.LARGE)
        assert bytes_on(device, machine.LARGE).numel() == machine.LARGE
        assert held.numel() == room - machine.LARGE


def test_page_locked_memory_takes_of_the_host_what_is_counted(device):
    """Torch's own page-locked memory is rounded up to a power of two: this size would take a third more."""
    count = machine.size(3 * 2**28, 3 * 2**20)
    before, torchs = machine.locked_bytes(), machine.pinned_by_torch()
    buffer = host_buffer(count, device, "optimizer")
    buffer.zero_()
    taken = max(machine.locked_bytes() - before, machine.pinned_by_torch() - torchs)
    assert taken <= 1.01 * count + 2**20


def test_past_the_pinned_limit_a_buffer_is_ordinary_and_copies_are_still_right(device):
    count = 2**16
    with host_limits(None, host_allocator().pinned_bytes):
        buffer = host_buffer(4 * count, device, "params").view(torch.float32)
    assert not buffer.is_pinned()
    values = torch.arange(count, dtype=torch.float32, device=device)
    buffer.copy_(values, non_blocking=True)
    machine.synchronize()
    assert torch.equal(buffer, values.cpu())


def test_slots_of_an_arena_hold_what_was_copied_to_them_across_chunks(device):
    arena, count = HostArena(device, "activations", chunk_bytes=4096), 10_000
    values = torch.randint(0, 256, (count,), dtype=torch.uint8, device=device)
    for _ in range(3):
        slot = arena.take(count)
        with machine.Slowed("copies"):
            for part, own in zip(slot.parts, values.split([part.numel() for part in slot.parts]), strict=True):
                part.copy_(own, non_blocking=True)
        machine.synchronize()
        assert torch.equal(torch.cat(slot.parts), values.cpu())
        arena.give_back(slot)


def test_parameters_at_rest_leave_the_device_and_come_back_to_the_bit(device):
    parameters = [torch.nn.Parameter(torch.randn(machine.size(2**22, 2**10), device=device)) for _ in range(3)]
    expected = [parameter.detach().clone() for parameter in parameters]
    gc.collect()  # what an earlier test left would be freed in the middle
    home = OffloadedParams("policy params", parameters, device)
    for _ in range(5):
        held = machine.live_bytes()
        with machine.Slowed("both"):
            assert home.to_host() == sum(parameter.nbytes for parameter in expected)
            assert machine.live_bytes() - held == machine.size(-home.num_bytes, 0)
            home.to_device()
        assert all(torch.equal(one, two) for one, two in zip(parameters, expected, strict=True))
