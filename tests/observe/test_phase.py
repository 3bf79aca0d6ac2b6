"""Phase figures on a CPU. Those of a GPU are held on a simulated device by test_device_ledger.py and test_allocators.py."""

import gc
import mmap
import weakref

import pytest
import torch

from tests.observe.simulated_device import SimulatedDevice
from verl_memopt.observe.byte_tracker import active_tracker
from verl_memopt.observe.phase import MIB, MemoryProbe, PhaseClock, PhaseMemory, Span, combine, host_rss_bytes

CPU = torch.device("cpu")


def memory(name="update_actor", **figures):
    values = {
        "seconds": 1.0, "peak_allocated_bytes": None, "allocated_bytes": None, "peak_reserved_bytes": None,
        "device_used_bytes": None, "host_rss_bytes": 0,
    }  # fmt: skip
    return PhaseMemory(name, **(values | figures))


def test_a_tracked_phase_counts_resident_tensors_and_what_is_born_inside():
    weight = torch.zeros(1000)
    probe = MemoryProbe(CPU, lambda: [("params", weight)])
    with probe.phase("old_log_prob", track=True) as measured:
        temporary = weight + 1
        del temporary
    phase = measured()
    assert (phase.name, phase.peak_allocated_bytes, phase.allocated_bytes) == ("old_log_prob", 8000, 4000)
    assert phase.kinds == {"params": 4000, "activations": 4000}


def test_a_tracked_phase_says_what_lived_when_it_began():
    weight, kept = torch.zeros(1000), []
    probe = MemoryProbe(CPU, lambda: [("params", weight), *(("params", tensor) for tensor in kept)])
    entered = []
    for _ in range(2):
        with probe.phase("update_actor", track=True) as measured:
            kept.append(torch.zeros(500))
        entered.append((measured().entered_bytes, measured().allocated_bytes))
    assert entered == [(4000, 6000), (6000, 8000)]


def test_an_untracked_phase_on_a_cpu_has_no_device_figure_rather_than_zero():
    with MemoryProbe(CPU, list).phase("gen", track=False) as measured:
        torch.zeros(1000)
        assert active_tracker() is None
    phase = measured()
    assert (phase.peak_allocated_bytes, phase.allocated_bytes, phase.peak_reserved_bytes, phase.device_used_bytes) == (None,) * 4
    assert phase.kinds == {}
    assert phase.host_rss_bytes > MIB


def test_the_probe_keeps_nothing_alive_that_the_phase_frees():
    held = [torch.zeros(1000)]
    death = weakref.ref(held[0])
    probe = MemoryProbe(CPU, lambda: (("params", tensor) for tensor in held))
    with probe.phase("sleep", track=True) as measured:
        held.clear()
        gc.collect()
        assert death() is None
    assert measured().allocated_bytes == 0


def test_a_phase_that_raises_leaves_no_tracker_and_no_figures():
    probe = MemoryProbe(CPU, list)
    with pytest.raises(ZeroDivisionError), probe.phase("gen", track=True) as measured:
        raise ZeroDivisionError
    assert active_tracker() is None
    with pytest.raises(IndexError):
        measured()


def test_over_processes_device_figures_take_the_largest_and_host_figures_the_sum():
    small = memory(peak_allocated_bytes=10, allocated_bytes=8, host_rss_bytes=100, seconds=2.0, kinds={"params": 10})
    large = memory(peak_allocated_bytes=30, allocated_bytes=5, host_rss_bytes=200, seconds=1.0, kinds={"params": 30})
    whole = combine([small, large], driver_rss_bytes=50)
    assert (whole.peak_allocated_bytes, whole.allocated_bytes, whole.host_rss_bytes, whole.seconds) == (30, 8, 350, 2.0)
    assert whole.kinds == {"params": 30}
    assert whole.peak_reserved_bytes is None
    assert (whole.mean_peak_bytes, whole.worst_rank) == (20, 1)
    alone = combine([large])
    assert (alone.mean_peak_bytes, alone.worst_rank) == (None, None)


def test_resident_memory_grows_with_what_the_process_touches():
    before = host_rss_bytes()
    # Fresh pages: a tensor may be made in a freed block that malloc kept, which is resident already.
    with mmap.mmap(-1, 64 * MIB) as pages:
        pages.write(b"1" * (64 * MIB))
        assert host_rss_bytes() - before > 32 * MIB


def test_a_phase_on_a_gpu_reports_its_own_peak_and_what_is_left(monkeypatch):
    device = SimulatedDevice(total=8 * 2**30)
    device.installed(monkeypatch)
    probe = MemoryProbe(torch.device("cuda", 0), list)
    device.empty(5 * 2**30)
    torch.cuda.empty_cache()
    with probe.phase("gen", track=False) as measured:
        kept, passing = device.empty(2**30), device.empty(2 * 2**30)
        del passing
    phase = measured()
    assert (phase.peak_allocated_bytes, phase.allocated_bytes, phase.peak_reserved_bytes) == (3 * 2**30, 2**30, 3 * 2**30)
    assert phase.device_used_bytes == 3 * 2**30 + device.driver.outside
    del kept


@pytest.mark.gpu
def test_on_a_gpu_the_peak_is_the_allocators_and_the_reserve_is_at_least_as_large():
    """Only a GPU has these counters."""
    device = torch.device("cuda", 0)
    with MemoryProbe(device, list).phase("gen", track=False) as measured:
        torch.zeros(MIB, device=device)
    phase = measured()
    assert phase.peak_allocated_bytes - phase.allocated_bytes == 4 * MIB
    assert phase.device_used_bytes >= phase.peak_reserved_bytes >= phase.peak_allocated_bytes


def test_phases_are_recorded_with_those_in_them_until_they_are_taken():
    clock = PhaseClock()
    with clock.phase("step"), clock.phase("gen"):
        pass
    with pytest.raises(ZeroDivisionError), clock.phase("ref"):
        raise ZeroDivisionError
    inner, outer = clock.take()
    assert (inner.name, outer.name) == ("gen", "step"), "one that raises is not recorded"
    assert outer.started <= inner.started
    assert outer.seconds >= inner.seconds
    assert clock.timings() == {}
    clock.spans = [Span("gen", 0.0, 1.5), Span("gen", 5.0, 2.0), Span("ref", 7.0, 1.0)]
    assert clock.timings() == {"timing_s/gen": 3.5, "timing_s/ref": 1.0}
