import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from tests.memory import activation_cases as act
from tests.memory.activation_cases import FP32, LAYERS, SELECTIVE, TILED, TOKENS, WIDTH, close
from tests.memory.activation_cases import MLP as MLP_WIDTH
from verl_memopt.errors import ConfigError
from verl_memopt.memory.activation_checkpointing_torch import checkpoint_blocks
from verl_memopt.memory.lora_torch import apply_lora
from verl_memopt.memory.quantized_frozen_torch import quantize_blocks, quantized_layers
from verl_memopt.memory.tiled_mlp_torch import KNOWN, check_mlps
from verl_memopt.model.decoder import MLP, BlockOptions, class_name
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.observe.byte_tracker import DEVICE, ByteTracker

SHARDS = TILED["tiled_mlp"].num_shards
INPUT, WIDE, WEIGHT = TOKENS * WIDTH * FP32, TOKENS * MLP_WIDTH * FP32, WIDTH * MLP_WIDTH * FP32
BOUND = 1e-6
"""Of the difference of a weight's gradient, relative to its norm, in fp32: sums of a few hundred terms in another order."""


class Block(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp
        self.norm = nn.Identity()

    def forward(self, x):
        return self.mlp(x[None], self.norm)[0]


def theirs(bias=True, width=16, wide=48):
    torch.manual_seed(1)
    sizes = {"hidden_size": width, "intermediate_size": wide, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaMLP(LlamaConfig(mlp_bias=bias, **sizes))


def block(tiles=None, **options):
    """Gives a block with an MLP that runs over so many tiles; None for the whole."""
    return Block(MLP(theirs(**options), BlockOptions(mlp_tiles=tiles)))


def run(block, x):
    x = x.clone().requires_grad_()
    out = block(x)
    out.square().sum().backward()
    return out.detach(), x.grad, [parameter.grad for parameter in block.parameters()]


def relative(found, expected):
    return float((found - expected).norm() / expected.norm())


# Numbers.


@pytest.mark.parametrize(
    ("tokens", "num_shards", "dtype", "bound"),
    [
        *((tokens, shards, torch.float32, BOUND) for tokens in (1, 3, 8, 37) for shards in (1, 4, 100)),
        (64, 7, torch.float64, 1e-15),
    ],
)
def test_outputs_and_gradients_are_those_of_the_whole_mlp(tokens, num_shards, dtype, bound):
    x = torch.randn(tokens, 16, dtype=dtype)
    expected, found = (run(block(tiles).to(dtype), x) for tiles in (None, num_shards))
    for one, other in zip((*found[:2], *found[2]), (*expected[:2], *expected[2]), strict=True):
        assert relative(one, other) <= bound


def test_bfloat16_gradients_are_as_far_from_the_truth_as_those_of_the_whole():
    x = torch.randn(256, 64, dtype=torch.bfloat16)
    truth = run(block(width=64, wide=128).bfloat16().double(), x.double())[2]
    whole, tiled = (block(tiles, width=64, wide=128).bfloat16() for tiles in (None, SHARDS))
    errors = [[relative(one.double(), two) for one, two in zip(run(mlp, x)[2], truth, strict=True)] for mlp in (whole, tiled)]
    # Each of the four sums is rounded to 8 bits once more than the whole's one.
    assert all(two <= one + SHARDS * 2**-9 for one, two in zip(*errors, strict=True))


@pytest.mark.parametrize("options", [{}, {"recompute": True}, SELECTIVE, {"recompute": True, "offload": (1, 2)}])
def test_three_steps_of_a_policy_are_those_without_tiles(untied_folder, one_rank, options):
    mini = act.mini_batch(response=12)
    expected = act.three_steps(act.build(untied_folder, one_rank), mini)
    policy = act.build(untied_folder, one_rank, **TILED, **options)
    policy = act.without_traffic(policy) if policy.trained.offload else policy
    # Adam makes steps of the learning rate out of the smallest gradients, so that rounding grows with every step.
    assert act.largest_difference(act.three_steps(policy, mini), expected) <= 2e-4


@pytest.mark.parametrize("options", [{}, {"recompute": True}, SELECTIVE])
def test_the_first_gradients_of_a_policy_differ_by_rounding_only(untied_folder, one_rank, options):
    mini = act.mini_batch()
    found = [act.first_gradients(act.build(untied_folder, one_rank, **options, **more), mini) for more in ({}, TILED)]
    assert act.largest_difference(*found) <= BOUND


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_every_known_model_is_tiled(tmp_path, one_rank, model_type):
    folder, mini = make_tiny_model(tmp_path / model_type, TinyShape(model_type=model_type), seed=3), act.mini_batch(response=12)
    whole, tiled = act.build(folder, one_rank), act.build(folder, one_rank, recompute=True, **TILED)
    scores = [policy.compute_log_probs(mini.batch, mini.micro_batches, 0.9, False).log_probs for policy in (whole, tiled)]
    assert relative(scores[1], scores[0]) <= BOUND
    norms = [policy.update([mini], 0.9)["actor/grad_norm"] for policy in (whole, tiled)]
    assert norms[1] == pytest.approx(norms[0], rel=BOUND)
    assert class_name(tiled.model.blocks()[0].mlp) in KNOWN
    assert {one.options.mlp_tiles for one in tiled.model.blocks()} == {SHARDS}


def test_adapters_learn_and_the_frozen_base_gets_no_gradient():
    x, found = torch.randn(32, 16), []
    for tiles in (None, SHARDS):
        model = block(tiles)
        apply_lora(model, 4, 8.0, "all-linear", None)
        for name, parameter in model.named_parameters():
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(name))) if "lora" in name else None
        run(model, x)
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in found[0].items():
        assert ("lora" in name) == (gradient is not None)
        assert found[1][name] is gradient if gradient is None else relative(found[1][name], gradient) <= BOUND


def test_names_and_state_of_an_mlp_stay():
    before, tiled = theirs(), block(SHARDS).mlp
    assert list(before.state_dict()) == list(tiled.state_dict())
    assert all(torch.equal(one, other) for one, other in zip(before.parameters(), tiled.parameters(), strict=True))
    assert class_name(tiled) == "LlamaMLP"


# Cost.


def test_inside_a_checkpointed_block_the_mlp_is_computed_twice_not_three_times():
    x, counted = torch.randn(32, 16), {}
    for name, tiles, recomputed in (("plain", None, False), ("checkpointed", None, True), ("both", SHARDS, True)):
        model = block(tiles, bias=False)
        if recomputed:
            checkpoint_blocks([model])
        with FlopCounterMode(display=False) as counter:
            run(model, x)
        counted[name] = counter.get_total_flops() / (2 * x.shape[0] * 16 * 48 * 3)
    # In forwards of an MLP: one and two for backward; checkpointing computes all again but the last product (a third of it),
    # whose output no one needs.
    assert counted == pytest.approx({"plain": 3, "checkpointed": 3 + 2 / 3, "both": 4})


# Bytes.


@pytest.mark.parametrize("grads", [True, False])
def test_one_mlp_holds_the_wide_tensors_of_one_tile(grads):
    tokens, width, wide = 512, 16, 64
    x, peaks = torch.randn(tokens, width), {}
    for tiles in (None, SHARDS):
        model = block(tiles, bias=False, width=width, wide=wide)
        with torch.set_grad_enabled(grads), ByteTracker() as tracker:
            tracker.mark("params", [*model.parameters(), x])
            run(model, x) if grads else model(x)
        peaks[tiles] = tracker.peaks[DEVICE].bytes
    wide_bytes, input_bytes, weight_bytes = tokens * wide * FP32, tokens * width * FP32, width * wide * FP32
    in_backward = 6 * wide_bytes * (1 - 1 / SHARDS) - 2 * weight_bytes - input_bytes * (1 + 1 / SHARDS)
    # Without gradients the whole output lies beside one tile's wide tensors.
    saved = in_backward if grads else 3 * wide_bytes * (1 - 1 / SHARDS) - input_bytes
    assert close(peaks[None] - peaks[SHARDS], saved)


def test_the_peak_of_a_step_falls_by_what_the_formula_says(deep_folder):
    at_backward = 6 * WIDE * (1 - 1 / SHARDS) - 2 * WEIGHT - INPUT * (1 + 1 / SHARDS)
    for recompute, saved in ((True, at_backward), (False, at_backward + (LAYERS - 1) * 4 * WIDE)):
        with act.fake_ranks(2) as mesh:
            whole, tiled = (act.step_peaks(deep_folder, mesh, recompute=recompute, **more)[0] for more in ({}, TILED))
        assert close(whole - tiled, saved)


def test_a_block_keeps_none_of_the_four_wide_tensors(deep_folder):
    with act.fake_ranks(2) as mesh:
        kept = [act.kept(act.build(deep_folder, mesh, **options))[0] for options in ({}, TILED)]
        assert close(kept[0] - kept[1], LAYERS * 4 * WIDE)
        # Selective checkpointing keeps the products of gate, up and down otherwise.
        kept = [act.kept(act.build(deep_folder, mesh, **SELECTIVE, **options))[0] for options in ({}, TILED)]
        assert close(kept[0] - kept[1], LAYERS * (2 * WIDE + INPUT))


# Refusals.


def test_an_unknown_mlp_is_refused_by_name():
    class Experts(nn.Module):
        pass

    with pytest.raises(ConfigError, match=r"enabled=true: Block computes Experts; tiles are known for LlamaMLP.*=false"):
        check_mlps([Block(Experts())], trained=True)
    with pytest.raises(ConfigError, match="Linear has no mlp"):
        check_mlps([nn.Linear(2, 2)], trained=True)


def test_a_layer_that_is_not_linear_is_refused_by_name():
    model = Block(theirs())
    model.mlp.up_proj = nn.Bilinear(2, 2, 2)
    with pytest.raises(ConfigError, match="up_proj of LlamaMLP is Bilinear"):
        check_mlps([model], trained=True)
    check_mlps([model], trained=False)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_quantised_reference_is_tiled_as_well(kind):
    x, found = torch.randn(9, 64), []
    for tiles in (None, SHARDS):
        model = block(tiles, bias=False, width=64, wide=128)
        weights = dict(model.named_parameters())
        quantize_blocks([model], kind)
        for name, layer in quantized_layers(model).items():
            layer.qweight.copy_(layer.packing.quantize(weights[f"{name}.weight"].detach()))
        with torch.no_grad():
            found.append(model(x))
    assert relative(found[1], found[0]) <= BOUND
