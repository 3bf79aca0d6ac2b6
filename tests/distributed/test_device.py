import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.observe.simulated_device import GIB, MIB, SimulatedDevice
from tests.ranks import run_ranks
from verl_memopt.distributed import device
from verl_memopt.distributed.device import join_process_group, leave_process_group, training_mesh
from verl_memopt.errors import ConfigError

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


def test_a_cpu_can_always_be_asked_for_and_auto_is_the_gpu_where_there_is_one():
    assert device.resolve_device("cpu") == "cpu"
    assert device.resolve_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="here there is a GPU")
def test_a_gpu_that_is_not_there_is_refused_with_a_way_out():
    with pytest.raises(ConfigError, match=r"trainer\.device=cuda: no CUDA device.*Use trainer\.device=cpu or auto"):
        device.resolve_device("cuda")


@pytest.mark.parametrize("name", ["gpu", "CPU", "cuda:0", ""])
def test_an_unknown_device_is_refused_with_the_known_ones(name):
    with pytest.raises(ConfigError, match=f"trainer.device={name}: unknown device. Use one of auto, cuda, cpu"):
        device.resolve_device(name)


def test_a_cpu_is_one_device_without_an_allocator_nccl_or_flash_kernels():
    assert (device.local_device("cpu", 3), device.device_count("cpu")) == (CPU, 1)
    assert (device.backend(CPU), device.backend(GPU)) == ("gloo", "cpu:gloo,cuda:nccl")
    assert (device.is_gpu(CPU), device.is_gpu(GPU)) == (False, True)
    assert not device.supports_flash(CPU, torch.bfloat16)
    assert not device.supports_flash(GPU, torch.float32)


@pytest.mark.parametrize("total", [32 * GIB, 24_146_608_128, 85_017_493_504, 25_757_220_864 + 1])
def test_a_cap_is_kept_to_the_byte(monkeypatch, total):
    """Torch cuts the product of fraction and total, so that a plain quotient loses a byte for some sizes."""
    simulated = SimulatedDevice(total)
    simulated.installed(monkeypatch)
    for size in (1, 3 * MIB, 7 * GIB - 1, 7 * GIB, 16 * GIB, 19 * GIB + 1, total - 1):
        device.cap_device_memory(GPU, size)
        assert int(simulated.fraction() * total + 0.5) == device.device_memory_cap(GPU) == size
    for whole in (total, 2 * total, None):
        device.cap_device_memory(GPU, whole)
        assert device.device_memory_cap(GPU) is None


def test_what_fits_the_cap_passes_and_one_segment_more_is_refused(monkeypatch):
    simulated = SimulatedDevice(85_017_493_504)
    simulated.installed(monkeypatch)
    for size in range(GIB, 40 * GIB, 3 * GIB):
        device.cap_device_memory(GPU, size)
        kept = simulated.empty(size)
        with pytest.raises(torch.OutOfMemoryError):
            simulated.empty(1)
        del kept


@pytest.fixture
def alone():
    leave_process_group()
    yield
    leave_process_group()


def test_a_world_of_one_needs_no_address(alone):
    join_process_group(CPU, 0, 1, "", 0, 60)
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
    tensor = torch.tensor([2.0])
    dist.all_reduce(tensor)
    assert tensor.item() == 2.0


def test_joining_again_keeps_the_group_there_is(alone):
    join_process_group(CPU, 0, 1, "", 0, 60)
    group = dist.group.WORLD
    join_process_group(CPU, 1, 7, "nowhere", 1, 1)
    assert dist.group.WORLD is group


def seconds_of_a_collective(rank):
    """Gives how long a group of all ranks and one that was made later wait."""
    return [group._get_backend(CPU).options._timeout.total_seconds() for group in (dist.group.WORLD, dist.new_group([0, 1]))]


def test_a_collective_of_some_ranks_waits_no_longer_than_one_of_all():
    assert run_ranks(seconds_of_a_collective, 2) == [[60, 60]] * 2


def test_a_group_can_be_left_twice_and_joined_after(alone):
    join_process_group(CPU, 0, 1, "", 0, 60)
    leave_process_group()
    leave_process_group()
    assert not dist.is_initialized()
    join_process_group(CPU, 0, 1, "", 0, 60)
    assert dist.is_initialized()


@pytest.mark.parametrize("size", [-1, 1])
def test_one_rank_has_a_flat_mesh(one_rank, size):
    mesh = training_mesh("cpu", 1, size)
    assert (tuple(mesh.shape), mesh.mesh_dim_names) == ((1,), ("shard",))


@pytest.mark.parametrize("rank", range(4))
def test_ranks_shard_together_and_groups_of_them_replicate(alone, rank):
    dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())

    def mates(size):
        """Gives the names of the mesh and the ranks that share this one's shards."""
        mesh = training_mesh("cpu", 4, size)
        return mesh.mesh_dim_names, dist.get_process_group_ranks(mesh.get_group("shard"))

    assert mates(-1) == mates(4) == (("shard",), [0, 1, 2, 3])
    assert mates(2) == (("replicate", "shard"), [0, 1] if rank < 2 else [2, 3])
    assert mates(1) == (("replicate", "shard"), [rank])
