import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from verl_memopt.config.schema import Fsdp, Model, WrapPolicy
from verl_memopt.errors import ConfigError
from verl_memopt.memory.activation_checkpointing_torch import Checkpointed
from verl_memopt.memory.lora_torch import LoraLinear
from verl_memopt.memory.quantized_frozen_torch import QuantizedLinear
from verl_memopt.memory.tiled_mlp import TiledMlp
from verl_memopt.model.assembly import ModelUse, parallelize, wrapped_modules
from verl_memopt.model.attention import choose_attention
from verl_memopt.model.block_options import BlockOptions, block_options
from verl_memopt.model.families import POLICY_KEY
from verl_memopt.model.packed_model import PolicyModel
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.model.weights import empty_model, load_model_config

CPU = torch.device("cpu")
PLAIN = {"recompute_elementwise": False, "prune_last_block": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    shape = TinyShape(num_layers=4, tie_embeddings=False)
    return make_tiny_model(tmp_path_factory.mktemp("parallelize") / "model", shape, seed=3)


def options(folder, checkpoints=False, trained=True, wanted=None, **model):
    settings, fsdp = Model(path=str(folder), **model), Fsdp(wrap_policy=WrapPolicy(wanted))
    lm = empty_model(load_model_config(settings, folder), choose_attention("sdpa", CPU, torch.float32), torch.float32, False)
    return block_options(lm, settings, fsdp, POLICY_KEY, trained, checkpoints)


def built(folder, mesh, checkpoints=False, trained=True, quantization="none", wanted=None, on_host=False, **model):
    settings = Model(path=str(folder), **model)
    fsdp = Fsdp(wrap_policy=WrapPolicy(wanted), offload_policy=on_host)
    lm = empty_model(load_model_config(settings, folder), choose_attention("sdpa", CPU, torch.float32), torch.float32, False)
    policy = PolicyModel(lm, 8, False, 0, block_options(lm, settings, fsdp, POLICY_KEY, trained, checkpoints))
    dtypes = torch.float32, torch.float32, torch.float32
    keys = "actor_rollout_ref.model", "actor_rollout_ref.actor.fsdp_config"
    parallelize(policy, settings, fsdp, mesh, dtypes, ModelUse(*keys, checkpoints, trained, quantization))
    return policy


# Options.


def test_by_default_blocks_recompute_and_the_last_one_is_pruned_and_a_knob_that_is_off_leaves_no_option(folder):
    assert options(folder) == [BlockOptions(recompute=True)] * 3 + [BlockOptions(recompute=True, prune=True)]
    assert options(folder, **PLAIN) == [BlockOptions()] * 4


def test_a_recomputed_block_that_runs_again_keeps_no_gate_and_up(folder):
    again = BlockOptions(recompute=True, mlp_tiles=1, checkpoint="full")
    assert options(folder, True, prune_last_block=False) == [again] * 4
    every = {"gradient_checkpointing_mode": "every_n", "gradient_checkpointing_every": 2}
    whole = BlockOptions(recompute=True)
    assert options(folder, True, prune_last_block=False, **every) == [again, whole, again, whole]
    # Selective checkpoints keep their products.
    selective = {"gradient_checkpointing_mode": "selective", "prune_last_block": False}
    assert options(folder, True, **selective) == [BlockOptions(recompute=True, checkpoint="selective")] * 4


@pytest.mark.parametrize("recompute", [False, True])
def test_tiles_are_those_asked_for(folder, recompute):
    tiled = {"tiled_mlp": TiledMlp(True, 3), "recompute_elementwise": recompute, "prune_last_block": False}
    assert options(folder, True, **tiled) == [BlockOptions(recompute, mlp_tiles=3, checkpoint="full")] * 4


def test_blocks_that_are_no_units_are_not_checkpointed(folder):
    assert options(folder, True, wanted=["Qwen3MLP"], **PLAIN) == [BlockOptions()] * 4
    assert options(folder, True, wanted=["Qwen3DecoderLayer"], **PLAIN) == [BlockOptions(checkpoint="full")] * 4


# What wraps the model.


def test_units_go_by_the_classes_of_transformers(folder, one_rank):
    policy = built(folder, one_rank, wanted=["Qwen3DecoderLayer"], on_host=True)
    assert all(isinstance(block, FSDPModule) for block in policy.blocks())
    policy = built(folder, one_rank, True, wanted=["Qwen3MLP"], on_host=True, **PLAIN)
    for block in policy.blocks():
        assert not isinstance(block, FSDPModule)
        assert isinstance(block.mlp, FSDPModule)
        assert isinstance(block.mlp, Checkpointed)


def test_an_unknown_class_is_refused_with_the_models_own(folder, one_rank):
    policy = built(folder, one_rank)
    assert wrapped_modules(policy, policy.blocks(), Fsdp()) == policy.blocks()
    with pytest.raises(ConfigError, match=r"transformer_layer_cls_to_wrap=\['GPT2Block'\].*Qwen3DecoderLayer"):
        wrapped_modules(policy, policy.blocks(), Fsdp(wrap_policy=WrapPolicy(["GPT2Block"])))


def test_adapters_and_quantised_layers_take_the_places_of_linear_ones(folder, one_rank):
    adapted = built(folder, one_rank, lora_rank=2)
    assert isinstance(adapted.blocks()[0].self_attn.q_proj, LoraLinear)
    assert {name.rsplit(".", 1)[-1] for name, one in adapted.named_parameters() if one.requires_grad} == {"lora_A", "lora_B"}
    frozen = built(folder, one_rank, trained=False, quantization="int8")
    assert isinstance(frozen.blocks()[0].mlp.down_proj, QuantizedLinear)
