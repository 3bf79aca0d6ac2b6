"""Experts that a folder stores in MXFP4: decoded as transformers decodes them, or kept as a frozen base."""

import json
import logging
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.memory import activation_cases as act
from tests.memory.batching.test_shared_prompt import grouped, sharing
from tests.model import mxfp4
from tests.model.test_prefix_kv import PARTS, results
from verl_memopt.config.keys import replaced
from verl_memopt.config.schema import ActorRolloutRef, Model
from verl_memopt.errors import ConfigError
from verl_memopt.memory.lora_torch import merged_weights
from verl_memopt.memory.quantized_frozen_torch import mxfp4_decoded
from verl_memopt.memory.tiled_mlp import TiledMlp
from verl_memopt.model.export import export_folder
from verl_memopt.model.sizes import size_of
from verl_memopt.model.weights import WeightFolder, named_weights, refuse_stacked
from verl_memopt.observe.byte_tracker import DEVICE, ByteTracker
from verl_memopt.plan.held import Held

BATCH = sharing(grouped(20, [9, 5, 1, 12, 3, 7]))
CONFIG = {"override_config": {"sliding_window": 6}}
OWN = {"recompute_elementwise": True, **CONFIG}
LORA = {**act.LORA, **CONFIG}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return mxfp4.folders(tmp_path_factory.mktemp("mxfp4"))


def test_every_code_and_scale_is_decoded_to_the_bit_as_transformers_decodes_it():
    codes = torch.arange(256, dtype=torch.uint8).view(1, 16, 1, 16).expand(255, 16, 1, 16)
    scales = torch.arange(255, dtype=torch.uint8).view(255, 1, 1).expand(255, 16, 1)
    expected = convert_moe_packed_tensors(codes, scales, dtype=torch.bfloat16).transpose(1, 2)
    found = mxfp4_decoded(codes.flatten(2), scales, torch.bfloat16)
    assert torch.equal(found.view(torch.int16), expected.contiguous().view(torch.int16))


@pytest.mark.parametrize("region", [(slice(0, 8), slice(0, 64), slice(0, 64)), (slice(1, 3), slice(5, 40), slice(32, 64))])
def test_a_region_of_experts_is_read_decoded(folders, region):
    packed, plain = map(WeightFolder, folders)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert packed.shape(name) == plain.shape(name)
    assert torch.equal(packed.read(name, region).float(), plain.read(name, region))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"recompute_elementwise": True},
        {"recompute_elementwise": True, "recompute": True, "tiled_mlp": TiledMlp(True, 3)},
        {"recompute_elementwise": True, "block_tile_tokens": 16},
    ],
    ids=str,
)
def test_adapters_over_experts_in_mxfp4_give_the_numbers_of_adapters_over_decoded_ones(folders, one_rank, options):
    packed, plain = (act.build(folder, one_rank, **LORA, **options) for folder in folders)
    stored = [parameter for parameter in packed.model.parameters() if parameter.dtype == torch.uint8]
    assert len(stored) == 2 * mxfp4.SHAPE.num_layers
    assert act.largest_difference(*(results(policy, BATCH, PARTS, False) for policy in (packed, plain))) <= 2e-6


def test_an_engine_and_a_saved_model_get_the_decoded_experts(folders, one_rank, tmp_path):
    packed, plain = (act.build(folder, one_rank, **LORA).model for folder in folders)
    sent, expected = (dict(merged_weights(named_weights(model), model)) for model in (packed, plain))
    assert sent.keys() == expected.keys()
    assert all(torch.equal(sent[name].float(), expected[name].float()) for name in sent)
    export_folder(tmp_path / "out", packed.lm.config, folders[0], iter(sent.items()), True, torch.bfloat16)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == load_file(folders[1] / "model.safetensors").keys()


def test_all_weights_are_trained_decoded_and_the_log_says_so(folders, one_rank, caplog):
    with caplog.at_level(logging.INFO):
        packed, plain = (act.build(folder, one_rank, **OWN) for folder in folders)
    assert sum("experts are stored in MXFP4, and decoded to float32" in record.message for record in caplog.records) == 1
    assert act.largest_difference(*(results(policy, BATCH, PARTS, False) for policy in (packed, plain))) == 0


@pytest.mark.parametrize("dtype", ["fp32", "bfloat16"])
def test_the_bytes_of_the_base_are_those_of_the_plan_and_no_pass_holds_more_than_one_decoded_expert(tmp_path, one_rank, dtype):
    shape = replace(mxfp4.SHAPE, num_experts=16, hidden_size=128, expert_size=96)
    folder, decoded = mxfp4.folders(tmp_path, shape)
    options = {"dtype": dtype, "masters": dtype, "recompute_elementwise": True, **LORA}
    with ByteTracker() as tracker:
        policy = act.build(folder, one_rank, **options)
        loaded = tracker.peaks[DEVICE].bytes
    rests = sum(parameter.nbytes for parameter in policy.model.parameters())
    keys = {"model.lora_rank": 4, "actor.fsdp_config.dtype": dtype, "actor.fsdp_config.model_dtype": dtype}
    size = size_of(Model(path=str(folder)), "model")
    held = Held("policy", replaced(ActorRolloutRef(), keys), size, 1, "cpu", trained=True, packs_experts=True)
    adapters = sum(parameter.nbytes for parameter in policy.model.parameters() if parameter.requires_grad)
    assert rests - adapters == held.base
    assert loaded <= rests + 8192  # buffers
    whole = act.build(decoded, one_rank, **options)
    beside = act.peaks(whole, act.mini_batch(), steps=1)[0] - sum(parameter.nbytes for parameter in whole.model.parameters())
    one = (2.25 + (4 if dtype == "fp32" else 2)) * 2 * 96 * 128
    assert act.peaks(policy, act.mini_batch(), steps=1)[0] - rests <= beside + one


def test_what_cannot_be_done_is_refused_by_its_key(folders, one_rank, tmp_path):
    with pytest.raises(ConfigError, match=r"load_mode=mmap: the files .* store experts in MXFP4.*load_mode=stream"):
        refuse_stacked(WeightFolder(folders[0]))
    config = json.loads((folders[1] / "config.json").read_text())
    lying = tmp_path / "lying"
    lying.mkdir()
    (lying / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    (lying / "model.safetensors").write_bytes((folders[1] / "model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match=r"says that experts are stored in MXFP4.*Remove quantization_config"):
        act.build(lying, one_rank, **LORA)
