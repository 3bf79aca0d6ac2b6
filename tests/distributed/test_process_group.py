import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from verl_memopt.distributed.device import join_process_group, leave_process_group, training_mesh

CPU = torch.device("cpu")


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
