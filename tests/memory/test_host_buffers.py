import subprocess
from pathlib import Path

import pytest
import torch

from verl_memopt.errors import ConfigError
from verl_memopt.memory.host_buffers import GIB, HostAllocator, host_allocator, host_buffer, host_limits
from verl_memopt.observe.byte_tracker import HOST, ByteTracker

CPU = torch.device("cpu")
PACKAGE = Path(__file__).parents[2] / "verl_memopt"


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


def test_the_limit_is_an_error_that_names_key_kind_and_bytes():
    allocator = HostAllocator(limit_bytes=GIB)
    kept = allocator.empty(GIB // 2, CPU, "params")
    with pytest.raises(
        ConfigError, match=r"memory\.host_limit_gb=1: optimizer needs 0\.75 GiB.*0\.5 GiB are taken.*at least 1\.25"
    ):
        allocator.empty(3 * GIB // 4, CPU, "optimizer")
    assert allocator.held_bytes == kept.numel()


def test_limits_hold_inside_their_scope_only():
    with host_limits(10, None), pytest.raises(ConfigError):
        host_buffer(11, CPU, "params")
    assert host_allocator().limit_bytes is None
    assert host_buffer(11, CPU, "params").numel() == 11


def test_no_other_file_takes_host_memory_for_what_is_moved():
    found = subprocess.run(
        ["grep", "-rlE", r"pin_memory=|pin_memory\(|save_on_cpu|tier=HOST", str(PACKAGE), "--include=*.py"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert {Path(path).name for path in found.stdout.split()} == {"host_buffers.py"}
