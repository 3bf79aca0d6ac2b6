"""Adapters on a quantised base: the numbers of adapters on the decoded weights, and the bytes of the codes."""

import pytest
import torch

from tests.config.conftest import LEAST
from tests.memory.activation_cases import (
    ELEMENTWISE,
    FULL,
    LORA,
    SELECTIVE,
    TILED,
    build,
    largest_difference,
    mini_batch,
    model_folder,
    peaks,
)
from tests.memory.activations.test_prune_last_block import RAGGED, gradients
from verl_memopt.config.loader import settings_from_mapping
from verl_memopt.errors import ConfigError
from verl_memopt.memory.lora import Lora
from verl_memopt.memory.lora_torch import adapters, adapters_off, load_adapter, merged_weights, save_adapter
from verl_memopt.memory.quantized_frozen_torch import check_quantizable, quantized_layers
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.model.weights import named_weights
from verl_memopt.observe.byte_tracker import DEVICE, ByteTracker

KEY = "actor_rollout_ref.model.quantization"
BOUND = 2e-6
OPTIONS = {
    "plain": {}, "elementwise": ELEMENTWISE, "checkpoints": FULL, "selective": {**ELEMENTWISE, **SELECTIVE}, "tiled MLP": TILED,
    "pruned": {"prune_last_block": False}, "all": {**ELEMENTWISE, **TILED, **FULL}, "offload": {**FULL, "offload": (1, 2)},
    "tiled block": {**ELEMENTWISE, **FULL, "block_tile_tokens": 8}, "some layers": {**ELEMENTWISE, "target_modules": ["q_proj"]},
}  # fmt: skip


def shaken(policy):
    for number, layer in enumerate(adapters(policy.model).values()):
        torch.manual_seed(number)
        layer.lora_B.detach().copy_(torch.randn(layer.lora_B.shape) * 0.1)
    return policy


def decoded(policy, folder, mesh, **options):
    """Gives a policy whose base has the weights that the bytes of another stand for."""
    plain = build(folder, mesh, **LORA, **options)
    weights = dict(named_weights(plain.model))
    for name, layer in quantized_layers(policy.model).items():
        weights[f"{name}.weight"].detach().copy_(layer.packing.dequantize(layer.qweight, torch.float32))
    return plain


@pytest.mark.parametrize(("option", "kind"), [*((option, "nf4") for option in OPTIONS), ("plain", "int8"), ("all", "int8")])
def test_gradients_are_those_of_adapters_on_the_decoded_weights(untied_folder, one_rank, option, kind):
    policy = shaken(build(untied_folder, one_rank, quantization=kind, **LORA, **OPTIONS[option]))
    plain = shaken(decoded(policy, untied_folder, one_rank, **OPTIONS[option]))
    found = [gradients(each, RAGGED, option != "plain") for each in (policy, plain)]
    assert len(found[0]) == 2 + 2 * len(adapters(plain.model))
    assert largest_difference(*found) <= BOUND
    for each in (policy, plain):
        with adapters_off(each.model):
            found.append(each.compute_log_probs(RAGGED, [list(range(RAGGED.num_rows))], 0.9, False).log_probs)
    assert (found[2] - found[3]).abs().max() <= BOUND
    assert (found[2] - found[0][0]).abs().max() > 1e-3


def test_odd_widths_and_biases_are_quantised_too(tmp_path, one_rank):
    shape = TinyShape("qwen2", hidden_size=72, intermediate_size=100, num_heads=6, num_kv_heads=2, head_dim=12)
    folder = make_tiny_model(tmp_path / "odd", shape)
    policy = shaken(build(folder, one_rank, quantization="nf4", **LORA, **ELEMENTWISE, **FULL))
    plain = shaken(decoded(policy, folder, one_rank, **ELEMENTWISE, **FULL))
    assert largest_difference(*(gradients(each, RAGGED, True) for each in (policy, plain))) <= BOUND


def rests(policy):
    return sum(parameter.nbytes for parameter in policy.model.parameters())


@pytest.mark.parametrize(("kind", "bits", "group"), [("int8", 8, 128), ("nf4", 4, 64)])
def test_the_base_is_loaded_as_bytes_and_no_pass_holds_more_than_one_layer_of_it_decoded(tmp_path, one_rank, kind, bits, group):
    folder = model_folder(tmp_path)
    with ByteTracker() as tracker:
        policy = build(folder, one_rank, quantization=kind, **LORA, **ELEMENTWISE)
        loaded = tracker.peaks[DEVICE].bytes
    linears = quantized_layers(policy.model).values()
    sizes = [layer.in_features * layer.out_features for layer in linears]
    groups = sum(layer.out_features * -(-layer.in_features // group) for layer in linears)  # the last of a row is filled up
    assert sum(layer.qweight.nbytes for layer in linears) == groups * (group * bits // 8 + 4)
    # Beside all that rests: values of one tensor in fp32, the same in shares of the scale, rounded, and its codes.
    assert loaded <= rests(policy) + 17 * max(sizes)
    plain = build(folder, one_rank, **LORA, **ELEMENTWISE)
    packed, whole = (peaks(each, mini_batch(), steps=1)[0] - rests(each) for each in (policy, plain))
    # Without checkpoints the graph of a forward lasts to its backward, and would keep a decoded weight of each layer.
    assert packed <= whole + 7 * max(sizes)
    assert packed - whole < 4 * sum(sizes) / 4


def test_an_engine_gets_the_decoded_weights_and_a_saved_model_has_the_unquantised_ones(untied_folder, one_rank):
    policy = shaken(build(untied_folder, one_rank, quantization="nf4", **LORA))
    plain = build(untied_folder, one_rank, **LORA)
    weights = dict(named_weights(plain.model))
    exact = dict(merged_weights(named_weights(policy.model), policy.model, lambda name: weights[name].detach()))
    expected = dict(merged_weights(named_weights(shaken(plain).model), plain.model))
    assert exact.keys() == expected.keys()
    assert all(torch.equal(exact[name], expected[name]) for name in exact)
    sent = dict(merged_weights(named_weights(policy.model), policy.model))
    plain = shaken(decoded(policy, untied_folder, one_rank))
    expected = dict(merged_weights(named_weights(plain.model), plain.model))
    assert sent.keys() == expected.keys()
    assert all(torch.equal(sent[name], expected[name]) for name in sent)


def test_an_adapter_of_the_same_base_is_taken_up_and_one_of_another_base_is_refused(untied_folder, tmp_path, one_rank):
    policy = shaken(build(untied_folder, one_rank, quantization="nf4", **LORA))
    save_adapter(tmp_path / "own", policy.model, "base", Lora(lora_rank=4, lora_alpha=8), writes=True)
    again = build(untied_folder, one_rank, quantization="nf4", **LORA)
    load_adapter(tmp_path / "own", again.model)
    for name, layer in adapters(again.model).items():
        assert torch.equal(layer.lora_A, adapters(policy.model)[name].lora_A)
        assert torch.equal(layer.lora_B, adapters(policy.model)[name].lora_B)
    wider = make_tiny_model(tmp_path / "wider", TinyShape(hidden_size=96, tie_embeddings=False))
    save_adapter(tmp_path / "other", build(wider, one_rank, **LORA).model, "base", Lora(lora_rank=4, lora_alpha=8), writes=True)
    with pytest.raises(ConfigError, match=r"lora_adapter_path=.*does not fit .*_proj.lora_A.weight has shape \(4, 96\), "):
        load_adapter(tmp_path / "other", again.model)


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.down = torch.nn.Linear(4, 2), torch.nn.Parameter(torch.zeros(2, 4, 4))


def test_blocks_with_experts_or_two_layers_of_one_weight_are_refused():
    with pytest.raises(ConfigError, match=rf"{KEY}=nf4: .* down is the weight of no linear layer .*Set it to none"):
        check_quantizable([Experts()], f"{KEY}=nf4")
    tied = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    check_quantizable([tied], f"{KEY}=nf4")
    tied[1].weight = tied[0].weight
    with pytest.raises(ConfigError, match="two linear layers share a weight"):
        check_quantizable([tied], f"{KEY}=nf4")


REFUSED = {
    "no adapters": ({"actor_rollout_ref.model.lora_rank": 0}, "actor_rollout_ref.model.lora_rank=0"),
    "several devices with a copy each": (
        {"trainer.n_gpus_per_node": 2, "actor_rollout_ref.rollout.share_weights": False}, "trainer.n_gpus_per_node=2"
    ),
    "several devices whose engines do not share": (
        {"trainer.n_gpus_per_node": 2, "actor_rollout_ref.rollout.share_weights": False}, "trainer.n_gpus_per_node=2"
    ),
    "several devices without an engine": (
        {"trainer.n_gpus_per_node": 2, "algorithm.adv_estimator": "sft", "actor_rollout_ref.rollout.n": 1},
        "trainer.n_gpus_per_node=2",
    ),
    "on the host": (
        {"actor_rollout_ref.actor.fsdp_config.offload_policy": True}, "actor_rollout_ref.actor.fsdp_config.offload_policy=true"
    ),
    "an engine that loads": ({"actor_rollout_ref.rollout.load_format": "auto"}, "actor_rollout_ref.rollout.load_format=auto"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_quantised_base_cannot_stand_with_is_one_error(case):
    least = LEAST | {"actor_rollout_ref.rollout.name": "vllm", "actor_rollout_ref.model.lora_rank": 4, KEY: "nf4"}
    settings, named = REFUSED[case]
    assert settings_from_mapping(least).actor_rollout_ref.model.quantization == "nf4"
    with pytest.raises(ConfigError) as error:
        settings_from_mapping(least | settings)
    assert f"{KEY}=nf4" in str(error.value)
    assert named in str(error.value)
    assert "Set " in str(error.value) or "or set" in str(error.value)
