import logging

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.memory import activation_cases as act
from tests.memory.activation_cases import KV, LAYERS, LORA, MLP, RESPONSES, SELECTIVE, TILED, TOKENS, WIDTH, close
from tests.memory.activation_cases import D as HEAD_SIZE
from tests.memory.activation_cases import H as HEADS
from verl_memopt.memory.recompute_elementwise_torch import can_recompute

ON, OFF = {"recompute_elementwise": True}, {"recompute_elementwise": False}
BOUND = 2e-6
"""Of the difference of a gradient, relative to its norm, in fp32."""

QUERIES, KEYS = HEADS * HEAD_SIZE, KV * HEAD_SIZE


# Numbers.


@pytest.mark.parametrize("options", [{}, {"recompute": True}, SELECTIVE, TILED, LORA], ids=str)
def test_gradients_differ_by_rounding_only(untied_folder, one_rank, options):
    mini = act.mini_batch()
    found = [act.first_gradients(act.build(untied_folder, one_rank, **options, **own), mini) for own in (OFF, ON)]
    assert act.largest_difference(*found) <= BOUND


def test_in_half_precision_gradients_are_as_near_to_the_truth(untied_folder, one_rank):
    pack, found = act.micros(act.mini_batch())[0].pack, []
    above = torch.randn(RESPONSES, generator=torch.Generator().manual_seed(3))
    for dtype, own in (("fp32", OFF), ("bfloat16", OFF), ("bfloat16", ON)):
        model = act.build(untied_folder, one_rank, dtype=dtype, **own).model
        (model(pack, 1.0, False)[0] * above).sum().backward()
        found.append(torch.cat([act.whole(parameter.grad).flatten() for parameter in model.parameters()]))
    errors = [act.largest_difference([one], [found[0]]) for one in found[1:]]
    assert errors[1] <= 1.01 * errors[0]  # both are made of thousands of roundings, of different ones


# Cost.


def flops(policy, mini):
    with FlopCounterMode(display=False) as counter:
        policy.accumulate(act.micros(mini)[:1], mini.counts, 0.9)
    return counter.get_total_flops()


@pytest.mark.parametrize("options", [{}, {"recompute": True}, SELECTIVE])
def test_no_product_is_computed_again(untied_folder, one_rank, options):
    mini = act.mini_batch()
    counted = [flops(act.build(untied_folder, one_rank, **options, **own), mini) for own in (OFF, ON)]
    assert counted[0] == counted[1]


# Bytes.


def block_bytes(compute, mlp=2 * MLP):
    """Gives what one block keeps: two inputs of norms, queries and keys before theirs, values, attention's output and its
    normalizers, gate and up."""
    return TOKENS * (compute * (2 * WIDTH + 2 * QUERIES + 2 * KEYS + mlp) + 4 * HEADS)


@pytest.mark.parametrize(("dtype", "compute"), [("fp32", 4), ("bfloat16", 2)])
def test_a_block_keeps_what_the_formula_says(deep_folder, dtype, compute):
    # The final norm keeps the rows that predict, and the head has them normed; rotary tables are of two halves.
    beside = TOKENS * 2 * HEAD_SIZE * compute + 2 * RESPONSES * WIDTH * compute
    with act.fake_ranks(2) as mesh:
        found, _ = act.kept(act.build(deep_folder, mesh, dtype=dtype, **ON))
        assert close(found, LAYERS * block_bytes(compute) + beside)
        # A tiled MLP keeps the norm's input alone, which is one of the two.
        found, _ = act.kept(act.build(deep_folder, mesh, dtype=dtype, **ON, **TILED))
        assert close(found, LAYERS * block_bytes(compute, mlp=0) + beside)


# What it leaves alone.


def theirs(**config):
    """Gives the blocks of a tiny Qwen3 as transformers makes them."""
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 4}
    return Qwen3ForCausalLM(Qwen3Config(num_attention_heads=2, num_key_value_heads=1, **sizes, **config)).model.layers


def test_a_block_that_is_not_known_whole_is_left_alone_with_a_warning(caplog):
    blocks = theirs()
    blocks[0].mlp.up_proj = nn.Bilinear(2, 2, 2)
    blocks[0].mlp.up_proj.in_features = 2
    with caplog.at_level(logging.WARNING):
        assert not can_recompute(blocks, trained=True)
        assert not can_recompute(theirs(hidden_act="gelu"), trained=True)
    assert can_recompute(blocks, trained=False)
    assert "has a layer of class Bilinear" in caplog.text
    assert "has the activation gelu, not silu" in caplog.text
