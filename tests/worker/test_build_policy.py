import pytest
import torch
from safetensors.torch import load_file

from tests.tensors import whole_of
from tests.worker.test_policy import CPU
from verl_memopt.config.schema import Fsdp, Model, WrapPolicy
from verl_memopt.errors import ConfigError
from verl_memopt.model.assembly import ModelUse, build_policy, materialize
from verl_memopt.model.weights import named_weights


def built(folder, mesh, dtype="fp32", quantization="none"):
    model = Model(path=str(folder))
    policy_model = build_policy(model, Fsdp(dtype=dtype), folder, mesh, CPU, ModelUse(quantization=quantization))
    materialize(policy_model, folder, CPU)
    return policy_model


@pytest.fixture
def model(tiny_folder, one_rank):
    return built(tiny_folder, one_rank)


def test_the_model_holds_the_folders_weights(model, tiny_folder):
    expected = load_file(tiny_folder / "model.safetensors")
    found = {name: whole_of(parameter) for name, parameter in named_weights(model)}
    assert found.keys() == expected.keys() - {"lm_head.weight"}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_a_unit_inside_a_block_is_refused_where_a_block_reads_its_weights_itself(tiny_folder, one_rank):
    def build(**model):
        fsdp = Fsdp(wrap_policy=WrapPolicy(["Qwen3MLP"]))
        use = ModelUse(fsdp_key="critic.fsdp_config")
        return build_policy(Model(path=str(tiny_folder), **model), fsdp, tiny_folder, one_rank, CPU, use)

    expected = r"critic.fsdp_config.wrap_policy.*\['Qwen3MLP'\]: Qwen3MLP lies inside .*DecoderLayer.*set both to false"
    neither = {"recompute_elementwise": False, "prune_last_block": False}
    for one in ({"recompute_elementwise": True}, {"prune_last_block": True}, {"block_tile_tokens": 8}):
        with pytest.raises(ConfigError, match=expected):
            build(**{**neither, **one})
    build(**neither)
