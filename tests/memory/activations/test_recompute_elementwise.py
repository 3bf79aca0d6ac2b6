import functools
import logging

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.memory import activation_cases as act
from tests.memory.activation_cases import EVERY_2, KV, LAYERS, LORA, MLP, RESPONSES, SELECTIVE, TILED, TOKENS, WIDTH, close
from tests.memory.activation_cases import D as HEAD_SIZE
from tests.memory.activation_cases import H as HEADS
from verl_memopt.memory.recompute_elementwise_torch import can_recompute
from verl_memopt.model.decoder import class_name
from verl_memopt.model.families import OWN_BLOCKS
from verl_memopt.model.packing import pack_groups
from verl_memopt.model.tiny import TinyShape, make_tiny_model

ON, OFF = {"recompute_elementwise": True}, {"recompute_elementwise": False}
BOUND = 2e-6
"""Of the difference of a gradient, relative to its norm, in fp32."""

QUERIES, KEYS = HEADS * HEAD_SIZE, KV * HEAD_SIZE


# Numbers.


@pytest.mark.parametrize(
    "options",
    [{}, {"recompute": True}, SELECTIVE, EVERY_2, {"offload": (1, 2)}, {"recompute": True, "offload": (1, 2)}, TILED, LORA],
    ids=["alone", "full", "selective", "every_n", "offload", "full and offload", "tiled", "lora"],
)
def test_gradients_differ_by_rounding_only(untied_folder, one_rank, options):
    mini = act.mini_batch()
    found = [act.first_gradients(act.build(untied_folder, one_rank, **options, **own), mini) for own in (OFF, ON)]
    assert act.largest_difference(*found) <= BOUND


@pytest.mark.parametrize("options", [{}, {"recompute": True}, LORA], ids=["alone", "full", "lora"])
def test_three_steps_of_a_policy_are_those_that_keep_everything(untied_folder, one_rank, options):
    mini = act.mini_batch(response=12)
    found = [act.three_steps(act.build(untied_folder, one_rank, **options, **own), mini) for own in (OFF, ON)]
    # Adam makes steps of the learning rate out of the smallest gradients, so that rounding grows with every step.
    assert act.largest_difference(*found) <= 2e-4


@pytest.mark.parametrize("options", [{"recompute": True}, SELECTIVE, EVERY_2, {"offload": (1, 2)}])
def test_checkpointing_and_offload_change_no_bit(untied_folder, one_rank, options):
    mini = act.mini_batch(response=12)
    policy = act.build(untied_folder, one_rank, **options, **ON)
    policy = act.without_traffic(policy) if policy.trained.offload else policy
    act.assert_same_numbers(act.three_steps(policy, mini), act.three_steps(act.build(untied_folder, one_rank, **ON), mini))


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_every_known_model_gives_what_its_own_forward_gives(tmp_path, one_rank, model_type):
    folder, mini = make_tiny_model(tmp_path / model_type, TinyShape(model_type=model_type), seed=3), act.mini_batch(response=12)
    policies = [act.build(folder, one_rank, **own) for own in (OFF, ON)]
    scores = [policy.compute_log_probs(mini.batch, mini.micro_batches, 0.9, False).log_probs for policy in policies]
    assert act.largest_difference([scores[1]], [scores[0]]) <= BOUND
    assert act.largest_difference(*(act.first_gradients(policy, mini) for policy in policies)) <= BOUND
    assert class_name(policies[1].model.blocks()[0]) in OWN_BLOCKS
    assert [policy.model.decoder.recompute for policy in policies] == [False, True]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_answers_that_share_a_prompt_give_what_they_gave(untied_folder, one_rank, attention):
    lengths = [5, 1, 9]
    ids = torch.randint(256, (3 * 20 + sum(lengths),), generator=torch.Generator().manual_seed(1))
    prompts = ids[:20].repeat(3)
    pack = pack_groups(prompts, [20] * 3, ids[60:], lengths, [0, 0, 0])
    found = []
    for own in (OFF, ON):
        model = act.build(untied_folder, one_rank, attn_implementation=attention, **own).model
        log_probs, _ = model(pack, 1.0, False)
        log_probs.sum().backward()
        found.append([log_probs.detach(), *(parameter.grad for parameter in model.parameters())])
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


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_quantised_blocks_without_gradients_are_computed_as_well(untied_folder, one_rank, kind):
    mini, found = act.mini_batch(), []
    for own in (OFF, ON):
        model = act.quantised(untied_folder, one_rank, kind, prune_last_block=False, **own)
        assert model.decoder.recompute is own["recompute_elementwise"]
        with torch.no_grad():
            found.append(model(act.micros(mini)[0].pack, 1.0, False)[0])
    assert act.largest_difference([found[1]], [found[0]]) <= BOUND


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


RESPONSE = 1024
"""Enough for blocks to be more than the tensors of units."""
ALL = act.ROWS * RESPONSE
INPUT, WEIGHT = ALL * WIDTH * 4, WIDTH * MLP * 4
KEPT = ALL * (2 * WIDTH + 2 * QUERIES + 2 * KEYS) * 4
"""By a block, but for gate and up."""
EACH = HEADS // KV * HEAD_SIZE
AT_ATTENTION = KEPT + ALL * (QUERIES + 2 * HEAD_SIZE + 2 * EACH + 3 * HEAD_SIZE + 3 * EACH + HEAD_SIZE) * 4
"""At the backward of attention: the output's gradient and rotary tables; queries and a key rotated, gradients of these and of a
value, and those of a call, one of them summed over heads."""


TILES = 6 * 2**16 * 4
"""Of elementwise statements."""


@pytest.fixture(scope="module")
def peak_of(deep_folder):
    @functools.cache
    def peak(elementwise, recompute=False):
        mini = act.mini_batch(micro_batches=1, response=RESPONSE)
        options = {"logprob_chunk_tokens": 256, "recompute_elementwise": elementwise, "recompute": recompute}
        with act.fake_ranks(2) as mesh:
            return act.step_peaks(deep_folder, mesh, mini, **options)[0]

    return peak


def at_peak():
    """Gives what the last block holds at its highest moment. At its MLP tiles are of 2,048 tokens, half of all."""
    after, wide = KEPT + 2 * ALL * MLP * 4, ALL * MLP * 4
    at_mlp = after + INPUT + wide // 2 + WEIGHT, after + 2 * INPUT + INPUT // 2 + 2 * WEIGHT
    return max(*at_mlp, after + 3 * INPUT, AT_ATTENTION)


def test_the_peak_of_a_step_falls_by_what_the_formula_says(peak_of):
    before = ALL * (3 * (2 * WIDTH + QUERIES + KEYS) + KEYS + QUERIES + 4 * MLP) * 4
    # At the backward of the MLP lay two wide tensors and two of a block's width beside the block.
    fallen = before + 2 * ALL * MLP * 4 + 2 * INPUT - at_peak()
    others = (LAYERS - 1) * (before - KEPT - 2 * ALL * MLP * 4)
    assert close(peak_of(False) - peak_of(True), others + fallen)


def test_with_checkpointing_the_last_block_never_holds_gate_and_up(peak_of):
    at_gate = KEPT + 2 * INPUT + ALL // 2 * (WIDTH + 3 * MLP) * 4 + 3 * WEIGHT + TILES
    fallen = at_peak() + TILES - max(at_gate, AT_ATTENTION)
    others = (LAYERS - 1) * (KEPT + 2 * ALL * MLP * 4 - INPUT)
    assert close(peak_of(True) - peak_of(True, recompute=True), others + fallen)


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
