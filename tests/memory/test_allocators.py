import subprocess
from pathlib import Path

import pytest
import torch

from verl_memopt.config.schema import Memory
from verl_memopt.memory.allocators import engine_share, memory_limits
from verl_memopt.memory.host_buffers import GIB, host_allocator, host_buffer
from verl_memopt.observe.byte_tracker import ByteTracker, DeviceLimitError, mark, scope
from verl_memopt.observe.phase import MemoryProbe

CPU = torch.device("cpu")


def test_host_limits_hold_inside_the_body_only():
    with memory_limits(Memory(host_limit_gb=1.5, pinned_limit_gb=0.5), CPU):
        assert (host_allocator().limit_bytes, host_allocator().pinned_limit_bytes) == (3 * GIB // 2, GIB // 2)
    assert (host_allocator().limit_bytes, host_allocator().pinned_limit_bytes) == (None, None)


def test_the_engines_share_is_of_the_limit_where_that_is_smaller():
    assert engine_share(0.5, 80 * GIB, 32 * GIB) == pytest.approx(0.2)
    assert engine_share(0.5, 80 * GIB, None) == engine_share(0.5, 24 * GIB, 32 * GIB) == 0.5


SCRIPT = Path(__file__).parents[2] / "examples" / "memory_optimization" / "allocator.sh"


def sourced(**variables):
    script = f'set -euo pipefail; . {SCRIPT}; echo "PRELOAD=${{LD_PRELOAD:-}}"; echo "CONF=${{PYTORCH_ALLOC_CONF:-}}"'
    environment = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", **variables}
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment)


def test_without_a_choice_nothing_is_preloaded():
    assert "PRELOAD=\n" in sourced().stdout


def test_a_chosen_allocator_is_preloaded_before_what_was_there(tmp_path):
    library = tmp_path / "libtcmalloc_minimal.so.4"
    library.write_text("")
    found = sourced(ALLOCATOR="tcmalloc", ALLOCATOR_DIRS=str(tmp_path), LD_PRELOAD="")
    assert f"PRELOAD={library}\n" in found.stdout


def test_an_allocator_that_is_not_installed_is_an_error_that_says_how_to_get_it(tmp_path):
    found = sourced(ALLOCATOR="jemalloc", ALLOCATOR_DIRS=str(tmp_path))
    assert found.returncode == 2
    assert "ALLOCATOR=jemalloc: no libjemalloc.so found" in found.stderr
    assert "apt-get install libjemalloc2" in found.stderr


def test_an_unknown_allocator_is_refused_with_the_known_ones():
    found = sourced(ALLOCATOR="mimalloc")
    assert found.returncode == 2
    assert "Use tcmalloc or jemalloc" in found.stderr
