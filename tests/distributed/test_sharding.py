import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from verl_memopt.config.schema import Fsdp, Model
from verl_memopt.model.assembly import build_policy, materialize

CPU = torch.device("cpu")


def sharded(folder, mesh, **fsdp):
    policy = build_policy(Model(path=str(folder)), Fsdp(**fsdp), folder, mesh, CPU)
    materialize(policy, folder, CPU)
    return policy


def test_one_device_keeps_plain_parameters_unless_fsdp2_offloads_them(tiny_folder, one_rank):
    for dtype in ("fp32", "bfloat16"):
        plain = sharded(tiny_folder, one_rank, dtype=dtype)
        assert not any(isinstance(module, FSDPModule) for module in plain.modules())
        assert not any(isinstance(parameter, DTensor) for parameter in plain.parameters())
        offloaded = sharded(tiny_folder, one_rank, dtype=dtype, offload_policy=True)
        assert isinstance(offloaded, FSDPModule)
        assert all(isinstance(parameter, DTensor) for parameter in offloaded.parameters())


def test_embedding_and_head_are_units_of_their_own_unless_tied(tiny_folder, untied_folder, one_rank):
    for folder, own in ((tiny_folder, False), (untied_folder, True)):
        policy = sharded(folder, one_rank, offload_policy=True)
        assert all(isinstance(block, FSDPModule) for block in policy.blocks())
        assert isinstance(policy.lm.get_input_embeddings(), FSDPModule) is own
        assert isinstance(policy.lm.get_output_embeddings(), FSDPModule) is own


def test_tied_weights_stay_one_tensor_after_sharding(tiny_folder, one_rank):
    policy = sharded(tiny_folder, one_rank)
    assert policy.tied
    assert "lm.lm_head.weight" not in dict(policy.named_parameters())


@pytest.mark.parametrize("dtype", ["fp32", "bfloat16"])
def test_masters_keep_their_dtype_whatever_the_compute_dtype(tiny_folder, one_rank, dtype):
    policy = sharded(tiny_folder, one_rank, dtype=dtype)
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
