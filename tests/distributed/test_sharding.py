import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tests.tensors import operations_named
from verl_memopt.config.schema import Fsdp, Model
from verl_memopt.memory.fused import joined
from verl_memopt.model.assembly import build_policy, materialize

CPU = torch.device("cpu")


def sharded(folder, mesh, **fsdp):
    policy = build_policy(Model(path=str(folder)), Fsdp(**fsdp), folder, mesh, CPU)
    materialize(policy, folder, CPU)
    return policy


def test_every_parameter_is_sharded_where_compute_casts(tiny_folder, one_rank):
    assert all(isinstance(parameter, DTensor) for parameter in sharded(tiny_folder, one_rank).parameters())


def test_one_device_without_a_cast_keeps_a_plain_model(tiny_folder, one_rank):
    plain = sharded(tiny_folder, one_rank, dtype="fp32")
    assert not any(isinstance(module, FSDPModule) for module in plain.modules())
    assert not any(isinstance(parameter, DTensor) for parameter in plain.parameters())
    for other in ({"dtype": "bfloat16"}, {"dtype": "fp32", "offload_policy": True}):
        assert isinstance(sharded(tiny_folder, one_rank, **other), FSDPModule)


def test_embedding_and_head_are_units_of_their_own_unless_tied(tiny_folder, untied_folder, one_rank):
    for folder, own in ((tiny_folder, False), (untied_folder, True)):
        policy = sharded(folder, one_rank)
        assert all(isinstance(block, FSDPModule) for block in policy.blocks())
        assert isinstance(policy.lm.get_input_embeddings(), FSDPModule) is own
        assert isinstance(policy.lm.get_output_embeddings(), FSDPModule) is own


def test_tied_weights_stay_one_tensor_after_sharding(tiny_folder, one_rank):
    policy = sharded(tiny_folder, one_rank)
    assert policy.tied
    assert "lm.lm_head.weight" not in dict(policy.named_parameters())


def test_a_unit_on_one_device_is_cast_in_one_operation_and_follows_its_masters(tiny_folder, one_rank):
    block = sharded(tiny_folder, one_rank, dtype="bfloat16").blocks()[0]
    for value in (1.7, -0.3):
        with torch.no_grad():
            masters = {name: one.to_local().add_(value).clone() for name, one in block.named_parameters()}
        watch, counts = operations_named(["_foreach_copy_", "_to_copy"])
        with torch.no_grad(), watch:
            block.unshard()
        assert counts == {"_foreach_copy_": 1}
        # Weights of one width lie one behind another, so that they can be multiplied in one product.
        attention, mlp = block.self_attn, block.mlp
        for layers in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
            assert joined([layer.weight for layer in layers], 0) is not None
        assert all(torch.equal(parameter, masters[name].bfloat16()) for name, parameter in block.named_parameters())
        block.reshard()
        assert all(torch.equal(parameter.to_local(), masters[name]) for name, parameter in block.named_parameters())


@pytest.mark.parametrize("dtype", ["fp32", "bfloat16"])
def test_masters_keep_their_dtype_whatever_the_compute_dtype(tiny_folder, one_rank, dtype):
    policy = sharded(tiny_folder, one_rank, dtype=dtype)
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
