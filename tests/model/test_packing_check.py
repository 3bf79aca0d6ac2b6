import dataclasses
import json
import math
import re
import shutil

import pytest
import torch
from torch import nn
from transformers import AutoTokenizer

from tests.critics import critic_for
from tests.model.architectures import tiny_config, tiny_folder
from tests.ranks import run_ranks
from tests.tensors import whole_of
from tests.worker.test_reward_scores import classifier
from verl_memopt.config.schema import Actor, Fsdp, Model, ScoringModel
from verl_memopt.distributed.device import training_mesh
from verl_memopt.errors import ConfigError
from verl_memopt.memory.lora_torch import initialize_adapters
from verl_memopt.memory.shared_prompt import prompt_groups
from verl_memopt.memory.tiled_mlp import TiledMlp
from verl_memopt.model import packing_check
from verl_memopt.model.assembly import ModelUse, allocate, build_policy, materialize
from verl_memopt.model.attention import choose_attention
from verl_memopt.model.packed_model import PolicyModel, dtype_of
from verl_memopt.model.packing_check import (
    GROUPS,
    MIXING_BOUND,
    REWARD_KEY,
    check_architecture,
    check_packing,
    find_reward_model,
    frozen_value_model,
    packing_bound,
    row_differences,
)
from verl_memopt.model.tiny import build_tokenizer
from verl_memopt.model.value_model import ValueModel, stored_head
from verl_memopt.model.weights import empty_model, fill_from_folder, rebuild_buffers
from verl_memopt.observe.byte_tracker import ByteTracker

CPU = torch.device("cpu")
SHARED = Actor(use_prefix_grouper=True)

LFM2 = {"layer_types": ["conv", "full_attention", "conv", "full_attention"]}


def without_values(model_type, dtype=torch.float32, **more):
    config = tiny_config(model_type, **more).get_text_config()
    return empty_model(config, choose_attention("sdpa", CPU, torch.float32), dtype, False)


def unchecked(at, model_type, deviation=0.06, dtype=torch.float32, **more):
    """Gives a filled model of a type that its config alone would have refused."""
    folder, policy = (
        tiny_folder(at, model_type, deviation, **more),
        PolicyModel(without_values(model_type, dtype, **more), 0, False),
    )
    return filled(policy, folder)


def filled(model, folder, *critic):
    allocate(model, CPU)
    rebuild_buffers(model, CPU)
    fill_from_folder(model, folder, *critic)
    return model


def built(folder, mesh, dtype="fp32", trained=True, quantization="none", **settings):
    model, fsdp = Model(path=str(folder), **settings.pop("model", {})), Fsdp(dtype=dtype, **settings)
    use = ModelUse(recompute=True, trained=trained, quantization=quantization)
    policy = build_policy(model, fsdp, folder, mesh, CPU, use)
    if not trained:
        policy.requires_grad_(False)
    materialize(policy, folder, CPU)
    initialize_adapters(policy, 0)
    return policy


@pytest.mark.parametrize("shared", [True, False], ids=["shared prompts", "rows alone"])
@pytest.mark.parametrize(
    ("model_type", "layers", "more"),
    [
        ("lfm2", "layers of type conv", LFM2),
        ("bamba", "layers of type linear_attention", {}),
    ],
)
def test_layers_that_mix_rows_are_refused_by_name(tmp_path, model_type, layers, more, shared):
    policy = unchecked(tmp_path / "model", model_type, **more)
    with pytest.raises(ConfigError, match=rf"=folder: models of type {model_type} mix the tokens of different rows in {layers}"):
        check_packing(policy, CPU, torch.float32, Actor(use_prefix_grouper=shared), "folder")


@pytest.mark.parametrize("size", ["intermediate_size", "hidden_size"])
def test_a_size_in_the_config_that_the_weights_have_not_is_refused_before_the_model_is_made(tmp_path, size):
    folder = tiny_folder(tmp_path / "model", "olmo2")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {size: 10**9}))
    refused = pytest.raises(ConfigError, match=r"weights and config disagree: .* has shape .*, the config says .*1000000000")
    with refused, ByteTracker(limit_bytes=10**6):  # the rotary frequencies of such a width alone are a gigabyte
        check_architecture(Model(path=str(folder)), folder, 64)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_weights_that_are_not_finite_are_named(tmp_path, value):
    policy = unchecked(tmp_path / "model", "olmo2")
    name, parameter = list(policy.named_parameters())[3]
    with torch.no_grad():
        parameter.view(-1)[0] = value
    with pytest.raises(ConfigError, match=rf"=folder: the weight {re.escape(name)} is not finite everywhere"):
        check_packing(policy, CPU, torch.float32, SHARED, "folder")


def test_mixing_is_seen_in_half_precision_at_the_smallest_usual_weights(tmp_path):
    policy = unchecked(tmp_path / "model", "lfm2", 0.02, torch.bfloat16, **LFM2)
    with pytest.raises(ConfigError, match="mix the tokens of different rows"):
        check_packing(policy, CPU, torch.bfloat16, SHARED, "folder")


def test_a_layer_without_a_name_in_the_config_is_refused_by_its_class(tmp_path, one_rank):
    class RunningMean(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Identity()

        def forward(self, hidden_states):
            counts = torch.arange(1, hidden_states.shape[1] + 1)[:, None]
            return self.inner(hidden_states.cumsum(1) / counts)

    policy = built(tiny_folder(tmp_path / "model", "olmo2"), one_rank)
    for block in policy.blocks():
        block.mlp = RunningMean()
    with pytest.raises(ConfigError, match=r"models of type olmo2 mix the tokens of different rows in blocks of .*RunningMean"):
        check_packing(policy, CPU, torch.float32, SHARED, "folder")


@pytest.mark.parametrize("model", [{}, {"recompute_elementwise": False, "prune_last_block": False}], ids=str)
def test_rows_at_wrong_positions_are_refused(untied_folder, one_rank, monkeypatch, model):
    policy = built(untied_folder, one_rank, model=model)
    tables = policy.decoder.rotary_emb.forward

    def counted_on(hidden, position_ids):
        return tables(hidden, torch.arange(position_ids.shape[1])[None])  # each row counts on from the one before

    monkeypatch.setattr(policy.decoder.rotary_emb, "forward", counted_on)
    with pytest.raises(ConfigError, match=r"give a row in a pack log-probs .* rounding in float32 explains [\d.e-]+\. They"):
        check_packing(policy, CPU, torch.float32, SHARED, "folder")


def test_a_model_whose_attention_gets_no_trees_is_refused_and_not_crashed(tmp_path):
    policy = unchecked(tmp_path / "model", "stablelm")
    with pytest.raises(ConfigError, match=r"models of type stablelm cannot compute packed rows"):
        check_packing(policy, CPU, torch.float32, SHARED, "folder")


KNOBS = [
    {},
    {"dtype": "bfloat16", "model_dtype": "bfloat16"},
    {"offload_policy": True},
    {"reshard_after_forward": False, "dtype": "bfloat16"},
    {"model": {"recompute_elementwise": False, "prune_last_block": False}},
    {"model": {"tiled_mlp": TiledMlp(enabled=True), "logprob_vocab_tile": 64}},
    {"model": {"lora_rank": 4, "recompute_elementwise": False}, "dtype": "bfloat16"},
    {"model": {"attn_implementation": "eager"}},
    {"trained": False, "quantization": "int8"},
    {"trained": False, "quantization": "nf4", "model": {"recompute_elementwise": False}},
]


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_a_right_model_passes_under_every_knob_and_other_rows_change_nothing(untied_folder, one_rank, knobs):
    policy = built(untied_folder, one_rank, **knobs)
    dtype = dtype_of(knobs.get("dtype", "fp32"), "dtype")
    for actor in (SHARED, Actor(use_prefix_grouper=False)):
        check_packing(policy, CPU, dtype, actor, "folder")
        found = row_differences(policy, CPU, prompt_groups(GROUPS, actor))
        assert found.mixing == 0
        assert found.packing < (1e-6 if dtype is torch.float32 else 1e-2)


@pytest.mark.parametrize("compute", ["fp32", "bfloat16"])
def test_a_critic_is_compared_by_values_although_its_own_head_is_0(untied_folder, one_rank, compute):
    model = critic_for(untied_folder, one_rank, fsdp={"dtype": compute}).model
    dtype = dtype_of(compute, "dtype")
    check_packing(model, CPU, dtype, SHARED, "folder")
    differences = row_differences(model, CPU, GROUPS)
    assert differences.mixing == 0
    assert 0 < differences.packing < (1e-5 if compute == "fp32" else 5e-2)
    assert not any(parameter.any() for parameter in map(whole_of, model.score.parameters()))


def test_a_critic_that_mixes_rows_is_refused_under_its_own_key(tmp_path):
    folder = tiny_folder(tmp_path / "model", "lfm2", 0.06, **LFM2)
    model = filled(ValueModel(without_values("lfm2", **LFM2)), folder, "critic.model", stored_head(folder))
    expected = r"critic\.model\.path=folder: models of type lfm2 mix the tokens .* change a row's values by"
    with pytest.raises(ConfigError, match=expected):
        check_packing(model, CPU, torch.float32, SHARED, "folder", "critic.model")


def test_the_check_leaves_the_models_and_the_processs_state_alone(untied_folder, one_rank):
    policy = built(untied_folder, one_rank, "bfloat16", model={"recompute_elementwise": False})
    policy.lm.get_output_embeddings().compiled = True
    before = torch.get_rng_state(), policy.lm.config._attn_implementation
    check_packing(policy, CPU, torch.bfloat16, SHARED, "folder")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert policy.lm.config._attn_implementation == before[1]
    assert policy.lm.get_output_embeddings().compiled
    assert all(parameter.grad is None for parameter in policy.parameters())
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}


def test_without_values_nothing_is_compared(tmp_path):
    policy = PolicyModel(without_values("qwen3_5_text"), 0, False)
    check_packing(policy, CPU, torch.float32, SHARED, "folder")


def test_rows_that_differ_by_the_bound_pass_and_by_more_are_refused(untied_folder, one_rank, monkeypatch):
    policy = built(untied_folder, one_rank)
    found = row_differences(policy, CPU, GROUPS)
    roundings = packing_check.ROUNDINGS[torch.float32] * found.packing / packing_bound(torch.float32, len(list(policy.blocks())))
    monkeypatch.setitem(packing_check.ROUNDINGS, torch.float32, roundings * 1.001)
    check_packing(policy, CPU, torch.float32, SHARED, "folder")
    monkeypatch.setitem(packing_check.ROUNDINGS, torch.float32, roundings * 0.99)
    with pytest.raises(ConfigError, match="rounding in float32 explains"):
        check_packing(policy, CPU, torch.float32, SHARED, "folder")


@pytest.mark.parametrize("dtype", ["fp32", "bfloat16"])
def test_a_deep_model_rounds_less_than_its_bound(tmp_path, one_rank, dtype):
    policy = built(tiny_folder(tmp_path / "model", "qwen3", num_hidden_layers=24), one_rank, dtype)
    found = row_differences(policy, CPU, GROUPS)
    assert found.packing <= packing_bound(dtype_of(dtype, "dtype"), 24) / 10
    check_packing(policy, CPU, dtype_of(dtype, "dtype"), SHARED, "folder")


def test_the_check_computes_in_fp32_where_training_may_round_to_tf32(untied_folder, one_rank):
    policy, seen = built(untied_folder, one_rank), set()
    policy.decoder.register_forward_pre_hook(lambda *_: seen.add(torch.get_float32_matmul_precision()))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        check_packing(policy, CPU, torch.float32, SHARED, "folder")
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == {"highest"}


def on_two_ranks(rank, folder):
    policy = built(folder, training_mesh("cpu", 2, -1), "bfloat16")
    check_packing(policy, CPU, torch.bfloat16, SHARED, "folder")
    differences = dataclasses.asdict(row_differences(policy, CPU, GROUPS))
    if rank == 0:
        policy.decoder.norm.weight._local_tensor[0] = math.nan
    with pytest.raises(ConfigError) as refusal:
        check_packing(policy, CPU, torch.bfloat16, SHARED, "folder")
    return differences, str(refusal.value)


def test_two_ranks_find_the_same_also_in_a_shard_that_one_of_them_holds(untied_folder):
    (one, refusal), other = run_ranks(on_two_ranks, 2, untied_folder)
    assert (one, refusal) == other
    assert one["mixing"] == 0 < MIXING_BOUND
    assert "the weight lm.model.norm.weight is not finite everywhere" in refusal


def test_a_window_that_the_config_hides_goes_on_from_the_shared_prompt(untied_folder, one_rank):
    policy = built(untied_folder, one_rank)
    for block in policy.blocks():
        block.self_attn.window = 12
    check_packing(policy, CPU, torch.float32, SHARED, "folder")


POLICY = Model(path="policy", lora_rank=4, lora_adapter_path="adapters", prune_last_block=False)


def found(folder, tokenizer, longest=64, **settings):
    return find_reward_model(ScoringModel(path=str(folder), **settings), POLICY, tokenizer, longest)


@pytest.fixture
def policys(tiny_folder):
    return AutoTokenizer.from_pretrained(tiny_folder)


@pytest.fixture
def folder(tiny_folder, tmp_path):
    return classifier(tmp_path / "rm", tiny_folder)[0]


def test_a_folder_with_a_head_is_found_with_its_own_tokenizer(folder, policys):
    reward = found(folder, policys)
    assert reward.folder == folder
    assert reward.tokenizer.get_vocab() == policys.get_vocab()


def test_a_model_that_shares_the_ids_has_no_tokenizer_of_its_own(folder, policys):
    assert found(folder, policys, input_tokenizer=None).tokenizer is None
    for path in folder.glob("*token*"):
        path.unlink()
    assert found(folder, policys, input_tokenizer=None).tokenizer is None


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda folder, tiny: shutil.copytree(tiny, folder, dirs_exist_ok=True),
            "is not of a reward model: it has no score.weight",
        ),
        (lambda folder, tiny: classifier(folder, tiny, labels=2), "its head score.weight has 2 outputs"),
        (lambda folder, tiny: (folder / "config.json").unlink(), "the folder has no config.json"),
        (lambda folder, tiny: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda folder, tiny: [path.unlink() for path in folder.glob("*token*")], "it has no tokenizer .*input_tokenizer=null"),
    ],
)
def test_a_wrong_folder_is_one_error_that_names_the_key(folder, tiny_folder, policys, spoil, message):
    spoil(folder, tiny_folder)
    with pytest.raises(ConfigError, match=rf"^reward_model\.model\.path={folder}: .*{message}"):
        found(folder, policys)


def test_ids_of_another_tokenizer_are_not_shared(folder, policys):
    with pytest.raises(ConfigError, match=rf"{REWARD_KEY}.input_tokenizer=null.* its tokenizer is not the policy's"):
        found(folder, build_tokenizer(280), input_tokenizer=None)
    policys.add_tokens([f"<{number}>" for number in range(200)])
    with pytest.raises(ConfigError, match=rf"^{REWARD_KEY}.path=.*its embedding has 320 rows"):
        found(folder, policys, input_tokenizer=None)


def test_the_policys_knobs_act_and_nothing_trains():
    settings = frozen_value_model(ScoringModel(path="rm", override_config={"a": 1}), POLICY)
    assert (settings.path, settings.override_config, settings.prune_last_block) == ("rm", {"a": 1}, False)
    assert (settings.lora_rank, settings.lora_adapter_path, settings.enable_gradient_checkpointing) == (0, None, False)
