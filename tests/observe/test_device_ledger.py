"""The ledger over a simulated device: what it reports is what the device holds."""

from __future__ import annotations

import logging

import pytest
import torch

from tests.observe.simulated_device import GIB, MIB, Pool, SimulatedDevice
from verl_memopt.observe.device_ledger import TOLERANCE_BYTES, Asleep, ledger_of

GPU = torch.device("cuda", 0)


class Sleeper:
    """A pool whose memory can be taken away behind the allocator's back, as vLLM does."""

    def __init__(self, device):
        self._device = device
        self.pool: Pool = device.private_pool(self._take, lambda address: None)

    def _take(self, size):
        address = self._device.driver.reserve(size)
        assert self._device.driver.map(address)
        return address

    def empty(self, size):
        with self._device.using(self.pool):
            return self._device.empty(size)

    def sleep(self):
        for segment in self.pool.segments:
            self._device.driver.unmap(segment.address)
        self._device.empty_cache()

    def wake_up(self):
        for segment in self.pool.segments:
            if not self._device.driver.is_mapped(segment.address):
                self._device.driver.map(segment.address)

    def books(self):
        gone = [segment for segment in self.pool.segments if not self._device.driver.is_mapped(segment.address)]
        return Asleep(sum(segment.size for segment in gone), sum(segment.allocated for segment in gone))


@pytest.fixture
def device(monkeypatch):
    device = SimulatedDevice(total=16 * GIB)
    device.installed(monkeypatch)
    return device


@pytest.fixture
def sleeper(device):
    return Sleeper(device)


@pytest.fixture
def ledger(device):
    return ledger_of(GPU)


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_the_simulated_allocator_takes_segments_by_torchs_rules(device):
    small, other = device.empty(1), device.empty(MIB)
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == (512 + MIB, 2 * MIB)
    middle = device.empty(MIB + 1)
    assert torch.cuda.memory_reserved() == 22 * MIB
    beside = device.empty(9 * MIB)
    assert torch.cuda.memory_reserved() == 22 * MIB
    large = device.empty(10 * MIB + 1)
    assert torch.cuda.memory_reserved() == 34 * MIB
    del small, other, middle, beside, large
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == (0, 34 * MIB)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == device.held == 0


def test_with_nothing_asleep_the_figures_are_the_allocators(device, ledger):
    kept, passing = device.empty(3 * GIB), device.empty(2 * GIB)
    del passing
    assert (ledger.allocated(), ledger.peak_allocated()) == (3 * GIB, 5 * GIB)
    assert ledger.reserved() == ledger.peak_reserved() == 5 * GIB
    ledger.reset_peaks()
    assert (ledger.peak_allocated(), ledger.peak_reserved()) == (3 * GIB, 5 * GIB)
    del kept


def test_what_sleeps_is_in_no_figure(device, sleeper, ledger):
    weights, scratch = sleeper.empty(4 * GIB + 30), sleeper.empty(MIB + 1)
    own = device.empty(GIB)
    with ledger.changing(sleeper.books):
        sleeper.sleep()
    ledger.reset_peaks()
    assert ledger.allocated() == ledger.peak_allocated() == device.live == GIB
    assert ledger.reserved() == ledger.peak_reserved() == device.held == GIB
    assert torch.cuda.memory_reserved() > 5 * GIB
    del weights, scratch, own


@pytest.mark.parametrize("order", ["wakes, then computes", "computes, then wakes", "sleeps, then computes"])
def test_a_peak_is_that_of_its_own_moment(device, sleeper, ledger, order):
    weights, own = sleeper.empty(4 * GIB), device.empty(GIB)
    if order != "sleeps, then computes":
        with ledger.changing(sleeper.books):
            sleeper.sleep()
    ledger.reset_peaks()
    device.forget_peaks()
    if order.startswith("computes"):
        device.empty(2 * GIB)
        torch.cuda.empty_cache()
    with ledger.changing(sleeper.books):
        sleeper.sleep() if order.startswith("sleeps") else sleeper.wake_up()
    if order.endswith("computes"):
        device.empty(2 * GIB)
    expected = {"wakes, then computes": 7, "computes, then wakes": 5, "sleeps, then computes": 5}[order] * GIB
    assert ledger.peak_allocated() == device.peak_live == expected
    assert ledger.peak_reserved() == device.peak_held == expected
    del weights, own


def test_what_is_allocated_on_the_way_to_sleep_counts_beside_what_is_still_awake(device, sleeper, ledger):
    weights = sleeper.empty(4 * GIB)
    with ledger.changing(sleeper.books):
        device.empty(2 * GIB)
        sleeper.sleep()
    assert ledger.peak_allocated() == ledger.peak_reserved() == device.peak_held == 6 * GIB
    assert ledger.reserved() == 0
    del weights


def test_blocks_that_a_sleep_frees_do_not_count_as_asleep(device, sleeper, ledger):
    """By the driver's measure alone, which sees both go."""
    weights, own = sleeper.empty(4 * GIB), device.empty(GIB)
    device.empty(3 * GIB)
    with ledger.changing(lambda: None):
        sleeper.sleep()
    assert ledger.asleep == Asleep(4 * GIB, 4 * GIB)
    assert ledger.reserved() == device.held == GIB
    with ledger.changing(lambda: None):
        sleeper.wake_up()
    assert ledger.asleep == Asleep()
    del weights, own


def test_a_part_that_wakes_half_way_counts_by_half(device, sleeper, ledger):
    weights = [sleeper.empty(4 * GIB), sleeper.empty(3 * GIB)]
    with ledger.changing(sleeper.books):
        sleeper.sleep()

    def half():
        device.driver.map(sleeper.pool.segments[0].address)
        raise RuntimeError("no room")

    with pytest.raises(RuntimeError, match="no room"), ledger.changing(sleeper.books):
        half()
    assert ledger.reserved() == device.held == 4 * GIB
    del weights


def test_another_process_moves_no_figure_and_is_told_once(device, sleeper, ledger, caplog):
    weights = sleeper.empty(4 * GIB)
    for _ in range(2):
        with ledger.changing(sleeper.books):
            sleeper.sleep()
            device.driver.outside += TOLERANCE_BYTES + 1
        assert ledger.asleep == Asleep(4 * GIB, 4 * GIB)
        with ledger.changing(sleeper.books):
            sleeper.wake_up()
    (told,) = warnings(caplog)
    assert "says that 4.00 GiB of its memory are asleep; the driver's free memory says 3.00 GiB" in told
    del weights


def test_books_that_cannot_be_read_are_said_once(device, sleeper, ledger, caplog):
    weights = sleeper.empty(GIB)
    for _ in range(2):
        with ledger.changing(lambda: None):
            pass
    assert [words for words in warnings(caplog) if "cannot be read. The driver's free memory is used" in words] == warnings(
        caplog
    )
    assert len(warnings(caplog)) == 1
    del weights


@pytest.mark.parametrize("sign", [1, -1])
def test_the_driver_and_the_ledger_may_part_by_the_tolerance_and_no_byte_more(device, ledger, caplog, sign):
    device.driver.outside = 4 * GIB
    ledger.check("init")
    device.driver.outside += sign * TOLERANCE_BYTES
    ledger.check("gen")
    assert warnings(caplog) == []
    device.driver.outside += sign
    ledger.check("gen")
    ledger.check("update_actor")
    (told,) = warnings(caplog)
    assert told.startswith(f"gen: {4 + sign:.2f} GiB of the device are in use outside this process's allocator. At the start")


def test_memory_that_sleeps_unseen_is_told(device, sleeper, ledger, caplog):
    weights = sleeper.empty(4 * GIB)
    ledger.check("init")
    sleeper.sleep()
    ledger.check("update_actor")
    assert len(warnings(caplog)) == 1
    del weights
