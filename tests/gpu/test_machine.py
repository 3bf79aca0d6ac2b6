"""The helpers' branches for a GPU, where stand-ins for functions of torch are called and put back what they change."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from tests.gpu import conftest, cumem, machine
from verl_memopt.config.schema import Memory

pytestmark = pytest.mark.rehearsed


class Device:
    """A GPU's counters and settings, in numbers. Its kernels are the CPU's."""

    def __init__(self):
        self.calls, self.mode, self.live, self.peak, self.fraction = Counter(), 0, 1000, 5000, 1.0

    def reset(self, _):
        self.peak = self.live

    def allocate(self, num_bytes):
        self.live += num_bytes
        self.peak = max(self.peak, self.live)

    def free(self, num_bytes):
        self.live -= num_bytes


@pytest.fixture
def gpu(monkeypatch):
    """Has the helpers believe in a GPU; afterwards they are as they were."""
    found, before = Device(), machine.kind()
    stands_in = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "set_device": lambda _: None,
        "synchronize": lambda *_: found.calls.update(["synchronize"]),
        "empty_cache": lambda: found.calls.update(["empty_cache"]),
        "reset_peak_memory_stats": found.reset,
        "memory_allocated": lambda _: found.live,
        "max_memory_allocated": lambda _: found.peak,
        "memory_reserved": lambda _: 8192,
        "mem_get_info": lambda *_: (70 * 2**30, 80 * 2**30),
        "get_device_properties": lambda _: SimpleNamespace(total_memory=80 * 2**30),
        "set_per_process_memory_fraction": lambda fraction, _: setattr(found, "fraction", fraction),
        "get_per_process_memory_fraction": lambda *_: found.fraction,
        "get_sync_debug_mode": lambda: found.mode,
        "set_sync_debug_mode": lambda mode: setattr(found, "mode", mode),
        "_sleep": lambda cycles: found.calls.update({"sleep": cycles}),
        "host_memory_stats": lambda: {"allocated_bytes.current": 77},
    }
    for name, function in stands_in.items():
        monkeypatch.setattr(torch.cuda, name, function, raising=False)
    machine.choose("cuda")
    yield found
    machine.choose(before)


def test_a_peak_counts_from_what_was_held_before(gpu):
    def body():
        gpu.allocate(300)
        gpu.free(200)
        return "given"

    assert machine.peak_bytes(body) == ("given", 300)
    assert gpu.calls["synchronize"] >= 2


def test_waiting_is_an_error_inside_the_body_alone(gpu):
    gpu.mode = 1
    with machine.nothing_waits():
        assert gpu.mode == "error"
    assert gpu.mode == 1
    assert machine.waited(RuntimeError("called a synchronizing CUDA operation"))
    assert not machine.waited(RuntimeError("out of memory"))


@pytest.mark.parametrize(("slow", "sleeps"), [("computation", 1), ("copies", 0), ("both", 1)])
def test_slow_kernels_sleep_before_they_run_and_copies_only_between_tiers(gpu, slow, sleeps):
    x = torch.ones(2, 2)
    with machine.Slowed(slow, cycles=5) as slowed:
        x @ x
        torch.empty(2, 2).copy_(x)  # from a device to itself
    assert gpu.calls["sleep"] == 5 * sleeps
    assert slowed.waits.total() == sleeps


def test_a_limit_is_set_inside_the_body(gpu):
    with machine.device_limit(Memory(device_limit_gb=8)):
        assert gpu.fraction == pytest.approx(0.1)
    assert gpu.calls["empty_cache"] >= 1


def test_figures_of_the_device_are_the_drivers_and_the_allocators(gpu):
    assert machine.used_bytes() == 10 * 2**30
    assert machine.held_by_allocator() == 8192
    assert machine.live_bytes() == 1000
    assert machine.pinned_by_torch() == 77
    assert machine.num_devices() == 1
    assert machine.missing() is None
    assert machine.device() == torch.device("cuda", 0)


def test_bytes_are_copied_between_addresses():
    source, target = torch.arange(16, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8)
    machine.copy_bytes(target.data_ptr(), source.data_ptr(), 16)
    assert torch.equal(source, target)


def test_a_library_that_is_loaded_is_found_by_its_name():
    assert "libtorch_cpu" in cumem._loaded_library("libtorch_cpu")
    assert cumem._loaded_library("libnothing") is None


@pytest.mark.parametrize(
    ("expression", "asks"),
    [("gpu", True), ("not slow and not gpu", False), ("gpu and not slow", True), ("slow", False), ("(gpu)", True), ("", False)],
)
def test_tests_run_on_a_gpu_where_the_expression_asks_for_them(expression, asks):
    assert conftest._asks_for_gpu(SimpleNamespace(option=SimpleNamespace(markexpr=expression))) is asks


def test_what_was_not_covered_is_said_in_one_line():
    def skipped(test, reason):
        return SimpleNamespace(nodeid=f"tests/{test}", longrepr=("file", 1, f"Skipped: {reason}"))

    lines = []
    reports = [skipped("gpu/a", "no vLLM"), skipped("gpu/b", "no vLLM"), skipped("gpu/c", "one device"), skipped("x/d", "other")]
    conftest.pytest_terminal_summary(SimpleNamespace(stats={"skipped": reports}, write_line=lines.append))
    assert lines == ["not covered here: no vLLM (2 tests); one device (1 test)"]
    conftest.pytest_terminal_summary(SimpleNamespace(stats={}, write_line=lines.append))
    assert len(lines) == 1
