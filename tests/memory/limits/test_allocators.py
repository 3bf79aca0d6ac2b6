import subprocess
from pathlib import Path

import pytest
import torch

from tests.memory.life import GPU, Life
from tests.observe.simulated_device import GIB, MIB
from verl_memopt.config.schema import Memory
from verl_memopt.distributed.device import device_memory_cap
from verl_memopt.errors import ConfigError
from verl_memopt.memory.out_of_memory import DeviceCap, available_bytes, device_limit, memory_limits
from verl_memopt.observe.device_ledger import Asleep, ledger_of
from verl_memopt.rollout.vllm_process import engine_share
from verl_memopt.worker.worker import left_for_cache

CPU = torch.device("cpu")
LIMIT = 8 * GIB
STEPS = 5


@pytest.fixture
def lives(device, monkeypatch):
    """Builds lives on the device; each engine is shut down before the device is taken away."""
    made = []

    def build(limit=None, books=True):
        made.append(Life(device, monkeypatch, limit, books))
        return made[-1]

    yield build
    for life in made:
        life.engine.wake_up()
        life.engine.shutdown()


@pytest.mark.parametrize("books", [True, False], ids=["by vLLM's books", "by the driver"])
def test_in_every_phase_of_five_steps_the_bytes_held_are_the_devices_own(lives, books):
    life = lives(books=books)
    life.init()
    for _ in range(STEPS):
        life.step()
    assert len(life.figures) == 1 + 4 * STEPS
    if books:
        assert life.reported()[1:] == life.truths[1:]
    # Without books the tensors on a sleeping segment are not known, only the segment.
    assert [held for _, _, held in life.reported()][1:] == [held for _, _, held in life.truths][1:]
    assert life.figures[-1].device_used_bytes - life.device.driver.outside == life.device.held


def test_while_the_engine_starts_what_vllm_trims_counts_and_after_it_no_more(lives, device):
    life = lives()
    life.init()
    (peak, allocated, reserved), (live_peak, live, held_peak) = life.reported()[0], life.truths[0]
    assert (peak, allocated) == (live_peak, live)
    assert 0 <= reserved - held_peak <= 900 * MIB
    assert ledger_of(GPU).reserved() == device.held


@pytest.mark.parametrize("books", [True, False], ids=["by vLLM's books", "by the driver"])
def test_the_limit_stops_exactly_at_the_limit_in_every_phase_and_never_drifts(lives, device, books):
    life = lives(LIMIT, books)
    with device_limit(GPU, LIMIT):
        life.init()
        for _ in range(STEPS):
            life.step()
            assert life.room() == LIMIT
            life.wake("weights")
            assert life.room() == LIMIT
            life.wake("kv_cache")
            assert life.room() == LIMIT
            life.compute(100 * MIB)
            life.sleep()


def test_a_part_may_wake_up_to_the_limit_and_not_one_segment_beyond(lives, device):
    life = lives(LIMIT)
    with device_limit(GPU, LIMIT):
        life.init()
        life.wake("weights")
        cache = 6 * 512 * MIB
        filler = [device.empty(LIMIT - device.held - cache)]
        life.wake("kv_cache")
        assert device.held == LIMIT
        life.sleep()
        life.wake("weights")
        filler.append(device.empty(1))
        with pytest.raises(torch.OutOfMemoryError, match=f"holds {LIMIT + 2 * MIB} bytes of {LIMIT}"):
            life.wake("kv_cache")
        filler.clear()


def test_where_torch_cannot_express_the_cap_the_phase_that_passes_the_limit_ends_in_an_error(lives, device):
    """Torch caps at most the whole device and counts what sleeps: above 28 GiB of 32, with 4 asleep, it caps nothing."""
    limit = 30 * GIB
    life = lives(limit)
    with device_limit(GPU, limit):
        life.init()
        assert device_memory_cap(GPU) is None
        room = (limit - device.held) // (2 * MIB) * 2 * MIB
        with life.phase("update_actor"):
            filler = [device.empty(room)]
        assert device.held == limit
        with pytest.raises(torch.OutOfMemoryError, match=f"held {limit + 2 * MIB} bytes.*{limit}"), life.phase("update_actor"):
            filler.append(device.empty(1))
        filler.clear()


def test_the_limit_is_lifted_when_the_job_ends_and_a_second_job_has_its_own(lives, device):
    life = lives(LIMIT)
    with device_limit(GPU, LIMIT):
        life.init()
        life.step()
        life.policy.clear()
        with life.cap.changing(life.read):
            life.engine.wake_up()
        with life.cap.changing(life.read):
            life.engine.shutdown()
        assert ledger_of(GPU).asleep == Asleep()
    assert device_memory_cap(GPU) is None
    cached = device.empty(3 * LIMIT)
    del cached
    with memory_limits(Memory(device_limit_gb=4), GPU), pytest.raises(torch.OutOfMemoryError):
        device.empty(4 * GIB + 1)
    torch.cuda.empty_cache()
    with memory_limits(Memory(device_limit_gb=4), GPU):
        device.empty(4 * GIB)


def test_a_limit_inside_another_gives_the_outer_one_back_to_the_byte_also_after_an_error(device):
    with device_limit(GPU, 7 * GIB + 1):
        with device_limit(GPU, 3 * GIB):
            assert device_memory_cap(GPU) == 3 * GIB
        assert device_memory_cap(GPU) == 7 * GIB + 1
        with pytest.raises(ZeroDivisionError), device_limit(GPU, GIB):
            raise ZeroDivisionError
        assert device_memory_cap(GPU) == 7 * GIB + 1
    assert device_memory_cap(GPU) is None


@pytest.mark.parametrize("limit", [None, 5 * GIB])
def test_on_a_cpu_there_is_nothing_to_cap_and_a_process_has_what_its_limit_says(limit):
    with device_limit(CPU, 1), DeviceCap(CPU, 1).changing(Asleep):
        assert torch.ones(1024).sum() == 1024
    assert available_bytes(CPU, limit) == limit


def test_the_engines_share_is_of_the_limit_where_that_is_smaller():
    assert engine_share(0.5, 80 * GIB, 32 * GIB) == pytest.approx(0.2)
    assert engine_share(0.5, 80 * GIB, None) == engine_share(0.5, 24 * GIB, 32 * GIB) == 0.5


SCRIPT = Path(__file__).parents[3] / "examples" / "memory_optimization" / "allocator.sh"


def sourced(**variables):
    script = f'set -euo pipefail; . {SCRIPT}; echo "PRELOAD=${{LD_PRELOAD:-}}"; echo "CONF=${{PYTORCH_ALLOC_CONF:-}}"'
    environment = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", **variables}
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment)


def test_a_chosen_allocator_is_preloaded_and_none_without_a_choice(tmp_path):
    library = tmp_path / "libtcmalloc_minimal.so.4"
    library.write_text("")
    found = sourced(ALLOCATOR="tcmalloc", ALLOCATOR_DIRS=str(tmp_path), LD_PRELOAD="")
    assert f"PRELOAD={library}\n" in found.stdout
    assert "PRELOAD=\n" in sourced().stdout


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("jemalloc", ["ALLOCATOR=jemalloc: no libjemalloc.so found", "apt-get install libjemalloc2"]),
        ("mimalloc", ["Use tcmalloc or jemalloc"]),
    ],
)
def test_an_allocator_that_is_unknown_or_not_installed_is_an_error_with_the_way_out(tmp_path, name, says):
    found = sourced(ALLOCATOR=name, ALLOCATOR_DIRS=str(tmp_path))
    assert found.returncode == 2
    assert all(each in found.stderr for each in says)


def test_a_gpu_has_what_the_process_holds_and_what_is_free(device):
    tensor = device.empty(3 * GIB)
    device.driver.outside = 4 * GIB
    assert available_bytes(GPU, None) == 28 * GIB
    assert available_bytes(GPU, 30 * GIB) == 28 * GIB
    assert available_bytes(GPU, LIMIT) == LIMIT
    del tensor


def test_a_cache_gets_what_a_gpu_has_free_beside_what_will_be_on_it(device):
    device.driver.outside = 4 * GIB
    assert left_for_cache(GPU, None, 20 * GIB) == 8 * GIB
    assert left_for_cache(GPU, 24 * GIB, 20 * GIB) == 4 * GIB
    with pytest.raises(ConfigError, match=r"kv_cache_memory_gb=auto: 28\.00 GiB .* free, and 28\.00 may be needed"):
        left_for_cache(GPU, None, 28 * GIB)
