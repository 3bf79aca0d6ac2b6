import itertools
import logging
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.memory.page_locking import PAGE, install
from verl_memopt.distributed.device import local_device, lock_pages, synchronize
from verl_memopt.errors import ConfigError
from verl_memopt.memory import host_buffers
from verl_memopt.memory.host_buffers import GIB, HostAllocator, HostArena, host_allocator, host_buffer, host_limits
from verl_memopt.observe.byte_tracker import HOST, ByteTracker

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_a_buffer_counts_as_host_bytes_of_its_kind_until_it_is_gone():
    with ByteTracker() as tracker:
        buffer = host_buffer(1000, CPU, "activations")
        assert tracker.kinds(HOST) == {"activations": 1000}
        assert tracker.total() == 0
        view = buffer[:10].view(torch.float16)
        del buffer
        assert tracker.total(HOST) == 1000
        del view
        assert tracker.total(HOST) == 0


def test_a_buffer_born_before_a_tracker_is_of_the_host_tier_to_it():
    buffer = host_buffer(1000, CPU, "params")
    with ByteTracker() as tracker:
        tracker.mark("optimizer", [buffer[:10]])
        assert tracker.kinds(HOST) == {"optimizer": 1000}
        assert tracker.total() == 0


def test_the_allocator_counts_what_is_held_and_the_most_that_was():
    allocator = HostAllocator()
    one, two = allocator.empty(100, CPU, "params"), allocator.empty(50, CPU, "params")
    assert allocator.held_bytes == 150
    del one
    assert (allocator.held_bytes, allocator.peak_bytes) == (50, 150)
    del two
    assert allocator.held_bytes == 0


def test_the_limit_is_reached_and_beyond_it_is_an_error_that_names_key_kind_and_bytes():
    allocator = HostAllocator(limit_bytes=GIB)
    kept = allocator.empty(GIB // 2, CPU, "params")
    last = allocator.empty(GIB // 2, CPU, "optimizer")
    assert allocator.held_bytes == GIB
    del last
    expected = r"memory\.host_limit_gb=1: optimizer needs 0\.75 GiB.*0\.5 GiB are in use \(params 0\.5\).*at least 1\.25"
    with pytest.raises(ConfigError, match=expected):
        allocator.empty(3 * GIB // 4, CPU, "optimizer")
    with pytest.raises(ConfigError):
        allocator.empty(GIB // 2 + 1, CPU, "optimizer")
    assert allocator.held_bytes == kept.numel()


def test_limits_hold_inside_their_scope_only():
    with host_limits(10, None), pytest.raises(ConfigError):
        host_buffer(11, CPU, "params")
    assert host_allocator().limit_bytes is None
    assert host_buffer(11, CPU, "params").numel() == 11


# Page-locked memory, with a stand-in for the driver.


@pytest.fixture
def driver(monkeypatch):
    return install(monkeypatch)


def test_what_is_locked_is_whole_pages_and_counted_as_such(driver):
    allocator = HostAllocator()
    buffers = [allocator.empty(size, GPU, "params") for size in (1, PAGE, PAGE + 1, 1_000_000)]
    assert [buffer.numel() for buffer in buffers] == [1, PAGE, PAGE + 1, 1_000_000]
    assert driver.locked_bytes == (1 + 1 + 2 + 245) * PAGE
    assert allocator.held_bytes == allocator.pinned_bytes == driver.locked_bytes
    assert driver.taken_by_torch == 0
    assert all(driver.holds(buffer) for buffer in buffers)
    for number, buffer in enumerate(buffers):
        assert (buffer.fill_(number) == number).all()


def flags_of(address):
    """Gives what the kernel knows about the mapping at an address: its ``VmFlags``."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            start, stop = (int(each, 16) for each in first.split("-"))
            inside = start <= address < stop
        elif inside and first == "VmFlags:":
            return rest
    return []


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has no huge pages")
def test_what_is_locked_asks_for_huge_pages(driver):
    locked = HostAllocator().empty(2**23, GPU, "params")
    assert driver.holds(locked)
    assert "hg" in flags_of(locked.data_ptr())


def test_memory_is_unlocked_and_given_back_with_its_last_view(driver):
    allocator = HostAllocator()
    view = allocator.empty(10_000, GPU, "params")[5000:5010].view(torch.float16)
    assert driver.locked_bytes == allocator.held_bytes == 3 * PAGE
    del view
    assert (driver.locked, allocator.held_bytes, allocator.pinned_bytes) == ({}, 0, 0)


def test_the_pinned_limit_is_reached_and_not_passed_by_a_byte(driver):
    allocator = HostAllocator(pinned_limit_bytes=3 * PAGE)
    whole = allocator.empty(3 * PAGE, GPU, "params")
    assert driver.holds(whole)
    del whole
    beyond = allocator.empty(3 * PAGE + 1, GPU, "params")
    assert not driver.locked
    assert (allocator.held_bytes, allocator.pinned_bytes) == (beyond.numel(), 0)
    kept = allocator.empty(2 * PAGE, GPU, "params")
    ordinary = allocator.empty(PAGE + 1, GPU, "params")
    assert (driver.holds(kept), driver.holds(ordinary)) == (True, False)


def test_the_host_limit_counts_the_pages_that_are_locked(driver):
    allocator = HostAllocator(limit_bytes=2 * PAGE)
    kept = allocator.empty(PAGE + 1, GPU, "params")
    assert allocator.held_bytes == 2 * PAGE
    del kept
    allocator.limit_bytes -= 1
    with pytest.raises(ConfigError, match=r"memory\.host_limit_gb"):
        allocator.empty(PAGE + 1, GPU, "params")
    assert not driver.locked


def test_an_arena_of_locked_chunks_holds_what_its_chunks_hold(driver):
    held = host_allocator().held_bytes
    arena = HostArena(GPU, "activations", 4 * PAGE)
    slot = arena.take(9 * PAGE)
    assert driver.locked_bytes == arena.held_bytes == host_allocator().held_bytes - held == 12 * PAGE
    assert all(driver.holds(part) for part in slot.parts)
    arena.give_back(slot)
    arena.shrink()
    del slot
    assert (driver.locked, host_allocator().held_bytes) == ({}, held)


def test_where_the_driver_refuses_memory_is_ordinary_with_one_warning_and_no_error_later(driver, caplog):
    host_buffers._warn_once.cache_clear()
    driver.refuses = 801
    allocator = HostAllocator()
    with caplog.at_level(logging.WARNING):
        buffers = [allocator.empty(size, GPU, "params") for size in (10, PAGE)]
    assert (allocator.held_bytes, allocator.pinned_bytes) == (10 + PAGE, 0)
    (record,) = caplog.records
    assert "host memory cannot be page-locked (CUDA error: status 801)" in record.message
    assert driver.stale == 0  # or the next kernel launch would raise it
    del buffers


def test_fake_buffers_count_as_if_they_were_locked(driver):
    allocator = HostAllocator()
    with FakeTensorMode():
        buffer = allocator.empty(8 * GIB + 1, GPU, "params")
    assert buffer.numel() == 8 * GIB + 1
    assert allocator.held_bytes == allocator.pinned_bytes == 8 * GIB + PAGE
    assert (driver.locked, driver.taken_by_torch) == ({}, 0)


@pytest.mark.gpu
def test_on_a_gpu_locked_memory_is_pinned_to_torch_and_none_of_it_is_torchs_own():
    here, allocator = local_device("cuda", 0), HostAllocator()
    # Not a power of two, and neighbours in memory.
    buffers = [allocator.empty(size, here, "params") for size in (3 * PAGE + 1, 5, 100 * 2**20 + 3)]
    assert all(buffer.is_pinned() for buffer in buffers)
    assert allocator.held_bytes == allocator.pinned_bytes == 6 * PAGE + 100 * 2**20
    values = torch.randint(256, (buffers[2].numel(),), dtype=torch.uint8, device=here)
    buffers[2].copy_(values, non_blocking=True)
    synchronize(here)
    assert torch.equal(buffers[2], values.cpu())
    assert torch.equal(buffers[2].to(here, non_blocking=True), values)
    address = buffers[2].data_ptr()
    assert lock_pages(here, address, PAGE) is not None  # locked already; the refusal is not raised by what follows
    assert torch.zeros(2, device=here).sum() == 0
    buffers.clear()
    assert (allocator.held_bytes, allocator.pinned_bytes) == (0, 0)


CHUNK = 4096


def arena():
    return HostArena(CPU, "activations", CHUNK)


def test_what_is_written_to_a_slot_is_read_from_it_also_across_chunks():
    home = arena()
    values = [torch.randint(256, (size,), dtype=torch.uint8) for size in (100, 3 * CHUNK, 5000, 1)]
    slots = [home.take(value.numel()) for value in values]
    assert [len(slot.parts) for slot in slots] == [1, 4, 2, 1]
    for slot, value in zip(slots, values, strict=True):
        for part, piece in zip(slot.parts, value.split([part.numel() for part in slot.parts]), strict=True):
            part.copy_(piece)
    for slot, value in zip(slots, values, strict=True):
        assert torch.equal(torch.cat(slot.parts), value)


@given(st.lists(st.tuples(st.integers(1, 3 * CHUNK), st.booleans()), max_size=30))
def test_slots_in_use_never_overlap(actions):
    home, slots = arena(), []
    for size, returns_one in actions:
        slots.append(home.take(size))
        if returns_one:
            home.give_back(slots.pop(size % len(slots)))
        taken = sorted((slot.start, slot.stop) for slot in slots)
        assert all(one[1] <= two[0] for one, two in itertools.pairwise(taken))
        assert all(sum(part.numel() for part in slot.parts) <= slot.stop - slot.start for slot in slots)


def test_bytes_held_are_those_of_the_busiest_moment_rounded_up_to_a_chunk():
    home = arena()
    for sizes in ([1000, 3000, 9000], [9000, 3000], [13000], [512] * 25):
        slots = [home.take(size) for size in sizes]
        for slot in reversed(slots):
            home.give_back(slot)
        assert home.held_bytes == 4 * CHUNK  # 1,024 + 3,072 + 9,216 bytes
        assert home.used_bytes == 0


def test_shrinking_keeps_what_is_in_use():
    home = arena()
    first, second = home.take(CHUNK), home.take(2 * CHUNK)
    home.give_back(second)
    home.shrink()
    assert home.held_bytes == CHUNK
    home.give_back(first)
    home.shrink()
    assert home.held_bytes == 0
