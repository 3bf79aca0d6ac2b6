import json

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from transformers import AutoModelForCausalLM

from tests.memory.activation_cases import ELEMENTWISE, FULL, LORA, TILED, build
from tests.memory.activations.test_prune_last_block import RAGGED, gradients
from tests.model.test_build import built
from verl_memopt.errors import ConfigError
from verl_memopt.memory.lora import Lora
from verl_memopt.memory.lora_torch import (
    ADAPTERS,
    adapters,
    adapters_off,
    apply_lora,
    as_reference,
    initialize_adapters,
    load_adapter,
    merged_weights,
    save_adapter,
    starting_adapter,
)
from verl_memopt.model.assembly import allocate, shard_model
from verl_memopt.model.packing import pack_rows
from verl_memopt.model.weights import fill_from_folder, named_weights, rebuild_buffers

CPU = torch.device("cpu")
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapted(folder, mesh=None, rank=4, targets="all-linear", exclude=None, seed=3):
    policy = built(folder)
    apply_lora(policy.lm, rank, 8 / rank, targets, exclude)
    if mesh is not None:
        shard_model(policy, policy.blocks(), mesh, MixedPrecisionPolicy(), OffloadPolicy(), True)
    allocate(policy, CPU)
    rebuild_buffers(policy, CPU)
    fill_from_folder(policy, folder)
    initialize_adapters(policy, seed)
    return policy


def shake(policy, seed=1):
    """Gives the adapters values, the same on any number of ranks."""
    from verl_memopt.memory.lora_torch import _copy_whole

    for number, layer in enumerate(adapters(policy).values()):
        generator = torch.Generator().manual_seed(seed + number)
        _copy_whole(layer.lora_B, torch.randn(layer.lora_B.shape, generator=generator) * 0.1)


def log_probs(policy):
    pack = pack_rows(torch.tensor([5, 6, 7, 8]), [3, 1], torch.tensor([11, 12, 13]), [2, 1])
    return policy(pack, 1.0, False)[0]


def test_only_adapters_are_trained_and_all_of_them(tiny_folder):
    policy = adapted(tiny_folder)
    log_probs(policy).sum().backward()
    trained = {name for name, parameter in policy.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert {name.rsplit(".", 1)[-1] for name in trained} == {"lora_A", "lora_B"}
    assert len(trained) == 2 * 2 * len(LINEARS)


def test_the_model_starts_as_its_base_and_is_the_reference_with_its_adapters_off(tiny_folder):
    policy = adapted(tiny_folder)
    base = log_probs(policy)
    with adapters_off(policy):
        assert torch.equal(log_probs(policy), base)
    shake(policy)
    moved = log_probs(policy)
    assert (moved - base).abs().max() > 1e-3
    with adapters_off(policy):
        assert torch.equal(log_probs(policy), base)
    assert torch.equal(log_probs(policy), moved)


def test_merged_weights_in_transformers_give_the_adapted_log_probs(tiny_folder):
    policy = adapted(tiny_folder)
    shake(policy)
    plain = AutoModelForCausalLM.from_pretrained(tiny_folder)
    merged = dict(merged_weights(named_weights(policy), policy))
    assert merged.keys() == dict(plain.named_parameters()).keys()
    plain.load_state_dict(merged, strict=False)
    plain.tie_weights()
    logits = plain(torch.tensor([[5, 6, 7, 11, 12]])).logits[0].log_softmax(-1)
    expected = torch.stack([logits[2, 11], logits[3, 12]])
    torch.testing.assert_close(log_probs(policy)[:2], expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("targets", "exclude", "expected"),
    [
        (["q_proj", "v_proj"], None, {"q_proj", "v_proj"}),
        ("all-linear", ["down_proj"], set(LINEARS) - {"down_proj"}),
        (r".*\.mlp\..*", None, {"gate_proj", "up_proj", "down_proj"}),
    ],
)
def test_layers_are_chosen_by_ending_or_expression(tiny_folder, targets, exclude, expected):
    chosen = adapters(adapted(tiny_folder, targets=targets, exclude=exclude))
    assert {name.rsplit(".", 1)[-1] for name in chosen} == expected


def test_a_choice_of_nothing_is_refused_with_the_layers_there_are(tiny_folder):
    with pytest.raises(ConfigError, match=r"target_modules=c_attn: .*q_proj"):
        adapted(tiny_folder, targets="c_attn")


@pytest.mark.parametrize(
    ("targets", "exclude", "complaint"),
    [
        (["q_proj", "v_porj"], None, "target_modules: no layer is named v_porj (near: v_proj"),
        (["q_proj", "lm_head"], None, "target_modules: lm_head is the head"),
        (["q_proj", "embed_tokens"], None, "target_modules: embed_tokens is the embedding"),
        (["q_proj", "mlp"], None, "target_modules: mlp is no linear layer, but"),
        (["all-liner"], None, "no layer is named all-liner (near: all-linear)"),
        ("all-linear", ["down_porj"], "exclude_modules: no part of the model is named down_porj (near: down_proj"),
        ("all-linear", r".*visual.*", "exclude_modules: no part of the model is named .*visual.*"),
    ],
)
def test_a_name_that_fits_no_layer_is_refused_with_the_nearest_names(tiny_folder, targets, exclude, complaint):
    with pytest.raises(ConfigError) as error:
        adapted(tiny_folder, targets=targets, exclude=exclude)
    assert str(error.value).startswith("actor_rollout_ref.model.")
    assert complaint in str(error.value)
    assert "The linear layers end in down_proj, gate_proj" in str(error.value)


def test_the_head_may_be_excluded_though_it_has_no_adapter(tiny_folder):
    assert len(adapters(adapted(tiny_folder, exclude=["lm_head"]))) == 2 * len(LINEARS)


def test_the_reference_is_what_training_started_from_and_the_trained_adapters_stay(tiny_folder, tmp_path):
    policy = adapted(tiny_folder)
    shake(policy)
    started = log_probs(policy).detach()
    save_adapter(tmp_path, policy, str(tiny_folder), Lora(lora_rank=4, lora_alpha=8), True)
    start = starting_adapter(tmp_path, policy, torch.float32, CPU)
    shake(policy, seed=7)
    moved = log_probs(policy).detach()
    with as_reference(policy, start, CPU):
        assert torch.equal(log_probs(policy), started)
    with as_reference(policy, None, CPU), adapters_off(policy):
        base = log_probs(policy).detach()
    with as_reference(policy, None, CPU):
        assert torch.equal(log_probs(policy), base)
    assert torch.equal(log_probs(policy), moved)
    assert not torch.allclose(started, base, atol=1e-3)


@pytest.mark.parametrize(
    "options",
    [{}, ELEMENTWISE, FULL, TILED, {**ELEMENTWISE, **TILED, **FULL}, {**ELEMENTWISE, **FULL, "block_tile_tokens": 7}],
    ids=["plain", "elementwise", "checkpoints", "tiled MLP", "all", "tiled block"],
)
def test_on_one_device_the_base_rests_as_it_computes_and_fp32_adapters_compute_as_bfloat16_ones(tiny_folder, one_rank, options):
    found = {}
    for masters in ("fp32", "bfloat16"):
        policy = build(tiny_folder, one_rank, dtype="bfloat16", masters=masters, **LORA, **options)
        for layer in adapters(policy.model).values():
            torch.manual_seed(1)
            for each in (layer.lora_A, layer.lora_B):  # values that both dtypes have
                each.detach().copy_(torch.randn(each.shape).bfloat16() * 0.1)
        dtypes = {name.rsplit(".", 1)[-1] in ADAPTERS: each.dtype for name, each in named_weights(policy.model)}
        assert dtypes == {True: getattr(torch, masters.replace("fp32", "float32")), False: torch.bfloat16}
        found[masters] = gradients(policy, RAGGED, True)
    assert len(found["fp32"]) == 2 + 2 * 2 * len(LINEARS)
    for one, other in zip(found["fp32"], found["bfloat16"], strict=True):
        assert torch.equal(one.to(other.dtype), other)


def test_adapters_are_saved_alone_and_come_back(tiny_folder, tmp_path):
    policy = adapted(tiny_folder)
    shake(policy)
    expected = log_probs(policy)
    save_adapter(tmp_path, policy, str(tiny_folder), Lora(lora_rank=4, lora_alpha=8), True)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], sorted(config["target_modules"])) == (4, 8, sorted(LINEARS))
    other = adapted(tiny_folder, seed=9)
    load_adapter(tmp_path, other)
    assert torch.equal(log_probs(other), expected)
    with pytest.raises(ConfigError, match=r"lora_adapter_path.*shape"):
        load_adapter(tmp_path, adapted(tiny_folder, rank=2))
    with pytest.raises(ConfigError, match="no adapter_model"):
        load_adapter(tmp_path / "nowhere", other)
