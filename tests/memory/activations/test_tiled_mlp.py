import pytest
import torch
from torch import nn
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from tests.memory import activation_cases as act
from tests.memory.activation_cases import FP32, LAYERS, SELECTIVE, TILED, TOKENS, WIDTH, close
from tests.memory.activation_cases import MLP as MLP_WIDTH
from verl_memopt.errors import ConfigError
from verl_memopt.memory.lora_torch import apply_lora
from verl_memopt.memory.tiled_mlp_torch import check_mlps
from verl_memopt.model.block_options import BlockOptions
from verl_memopt.model.decoder import MLP
from verl_memopt.observe.byte_tracker import DEVICE, ByteTracker

SHARDS = TILED["tiled_mlp"].num_shards
INPUT, WIDE = TOKENS * WIDTH * FP32, TOKENS * MLP_WIDTH * FP32
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


# Numbers.


@pytest.mark.parametrize(("tokens", "num_shards"), [(1, 4), (3, 100), (37, 1), (37, 4)])
def test_outputs_and_gradients_are_those_of_the_whole_mlp(tokens, num_shards):
    x = torch.randn(tokens, 16, dtype=torch.float64)
    expected, found = (run(block(tiles).double(), x) for tiles in (None, num_shards))
    for one, other in zip((*found[:2], *found[2]), (*expected[:2], *expected[2]), strict=True):
        assert (one - other).norm() <= 1e-14 * other.norm()


@pytest.mark.parametrize("options", [{}, {"recompute": True}, SELECTIVE])
def test_the_first_gradients_of_a_policy_differ_by_rounding_only(untied_folder, one_rank, options):
    mini = act.mini_batch()
    found = [act.first_gradients(act.build(untied_folder, one_rank, **options, **more), mini) for more in ({}, TILED)]
    assert act.largest_difference(*found) <= BOUND


# Cost.


def test_adapters_learn_and_the_frozen_base_gets_no_gradient():
    x, found = torch.randn(32, 16, dtype=torch.float64), []
    for tiles in (None, SHARDS):
        model = block(tiles).double()
        apply_lora(model, 4, 8.0, "all-linear", None)
        for name, parameter in model.named_parameters():
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(name))) if "lora" in name else None
        run(model, x)
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in found[0].items():
        assert ("lora" in name) == (gradient is not None)
        assert found[1][name] is gradient or (found[1][name] - gradient).norm() <= 1e-13 * gradient.norm()


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

    with pytest.raises(ConfigError, match=r"enabled=true: Block computes Experts; tiles are known for .*=false"):
        check_mlps([Block(Experts())], trained=True)
    with pytest.raises(ConfigError, match="Linear has no mlp"):
        check_mlps([nn.Linear(2, 2)], trained=True)


def test_a_layer_that_is_not_linear_is_refused_by_name():
    model = Block(theirs())
    model.mlp.up_proj = nn.Bilinear(2, 2, 2)
    with pytest.raises(ConfigError, match="up_proj of LlamaMLP is Bilinear"):
        check_mlps([model], trained=True)
    check_mlps([model], trained=False)
