import pytest
import torch

from tests.distributed.test_sharding import sharded
from tests.ranks import run_ranks
from verl_memopt.distributed.device import training_mesh
from verl_memopt.memory.weight_buckets_torch import full_weights
from verl_memopt.model.weights import WeightFolder, named_weights

SETUPS = [("flat", 2, -1), ("hsdp", 2, 1)]


def gathered(rank, folder, dtype, bucket):
    found = {}
    for _, _, size in SETUPS:
        policy = sharded(folder, training_mesh("cpu", 2, size))
        stream = full_weights(named_weights(policy), dtype, bucket)
        found[size] = {name: tensor.float().numpy().copy() for name, tensor in stream}
    return found


def as_saved(folder, dtype):
    weights = WeightFolder(folder)
    return {name: weights.read(name, ()).to(dtype).float() for name in weights.names}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_rank_gives_every_tensor_as_saved(tiny_folder, one_rank, dtype):
    policy = sharded(tiny_folder, one_rank)
    found = {name: tensor.float() for name, tensor in full_weights(named_weights(policy), dtype, 1)}
    expected = as_saved(tiny_folder, dtype)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_two_ranks_gather_every_tensor_as_saved_whether_flat_or_replicated(untied_folder):
    expected = as_saved(untied_folder, torch.bfloat16)
    for answer in run_ranks(gathered, 2, untied_folder, torch.bfloat16, 1):
        for found in answer.values():
            assert found.keys() == expected.keys()
            assert all((found[name] == expected[name].numpy()).all() for name in expected)


def uneven(rank):
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = training_mesh("cpu", 2, -1)
    whole = {"odd": torch.arange(15.0).view(5, 3), "one": torch.arange(4.0).view(1, 4), "vector": torch.arange(7.0)}
    weights = ((name, distribute_tensor(tensor, mesh, [Shard(0)])) for name, tensor in whole.items())
    return {name: (tensor == whole[name]).all().item() for name, tensor in full_weights(weights, torch.float32, 1)}


def test_tensors_that_do_not_divide_by_the_ranks_come_back_whole():
    for answer in run_ranks(uneven, 2):
        assert answer == {"odd": True, "one": True, "vector": True}


def test_tensors_come_in_order_whatever_the_bucket(tiny_folder, one_rank):
    policy = sharded(tiny_folder, one_rank)
    names = [name for name, _ in named_weights(policy)]
    assert [name for name, _ in full_weights(named_weights(policy), torch.float32, 2048)] == names
