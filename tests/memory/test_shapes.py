import dataclasses

import pytest

from verl_memopt.config.keys import replaced
from verl_memopt.config.schema import ActorRolloutRef
from verl_memopt.memory.formulas import Shapes, width
from verl_memopt.memory.tiled_mlp import TiledMlp

SHAPES = Shapes(
    settings=ActorRolloutRef(), layers=4, hidden=8, mlp=16, heads=4, kv_heads=2, head_dim=2, vocab=100, params=5000,
    block_params=1000, tied=True, tokens=10, responses=3,
)  # fmt: skip


def having(**model):
    actor = replaced(SHAPES.settings.actor, {"fsdp_config": replaced(SHAPES.settings.actor.fsdp_config, {"dtype": "fp32"})})
    base = {"enable_gradient_checkpointing": False, "recompute_elementwise": False, **model}
    settings = replaced(SHAPES.settings, {"actor": actor, "model": replaced(SHAPES.settings.model, base)})
    return dataclasses.replace(SHAPES, settings=settings)


@pytest.mark.parametrize(("dtype", "expected"), [("fp32", 4), ("float32", 4), ("bf16", 2), ("bfloat16", 2), ("fp16", 2)])
def test_the_width_of_every_spelling(dtype, expected):
    assert width(dtype) == expected


def test_a_block_keeps_three_numbers_a_norm_and_one_a_product():
    # 10 tokens; norms of 8, 8, 4 x 2 and 2 x 2; values, attention and four of the MLP's width.
    assert having().block_bytes == 10 * 4 * (3 * (8 + 8 + 8 + 4) + (4 + 8 + 4 * 16))


def test_activations_with_and_without_checkpointing_and_offload():
    block, given = having().block_bytes, 10 * 8 * 4
    passing = 2 * 10 * 16 * 4 + 2 * given
    assert having().activation_bytes == 4 * block + passing
    on = {"enable_gradient_checkpointing": True}
    assert having(**on).activation_bytes == 3 * given + block + passing
    moved = having(**on, enable_activation_offload=True, activation_offload_in_flight=1)
    assert moved.activation_bytes == given + block + passing


def test_moments_follow_the_masters_unless_they_have_a_dtype_of_their_own():
    def state(model_dtype, state_dtype):
        actor = SHAPES.settings.actor
        fsdp = replaced(actor.fsdp_config, {"model_dtype": model_dtype})
        optim = replaced(actor.optim, {"state_dtype": state_dtype})
        actor = replaced(actor, {"fsdp_config": fsdp, "optim": optim})
        return dataclasses.replace(SHAPES, settings=replaced(SHAPES.settings, {"actor": actor})).state_bytes

    assert state("fp32", None) == 8
    assert state("bfloat16", None) == 4
    assert state("bfloat16", "fp32") == 8
    assert state("fp32", "int8") == 2 * 260 / 256


def test_linear_layers_of_a_block_are_four_of_attention_and_three_of_the_mlp():
    assert SHAPES.linear_params == 4 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16)


def test_the_reference_is_the_policy_with_lora():
    assert having().reference_bytes == 5000 * 4
    assert having(lora_rank=4).reference_bytes == 0


def test_tiles_take_the_peak_down_to_that_of_attention_and_no_further():
    on = {"enable_gradient_checkpointing": True}
    tiled = having(**on, tiled_mlp=TiledMlp(enabled=True, num_shards=2))
    whole, attention = having(**on).activation_bytes, tiled.norm_backward_bytes
    # 10 tokens, the inputs of three other blocks, and two of the head's tensors of 3 responses.
    assert attention == 4 * (3 * 10 * 8 + 10 * (4 * 8 + 8 * 8 + 6 * 4 + 2 * 2) + 2 * 3 * 8)
    saved = 6 * 10 * 16 * 4 // 2 - 2 * 8 * 16 * 4 - 10 * 8 * 4 * 3 // 2
    assert tiled.activation_bytes == max(whole - saved, attention)
    many_heads = dataclasses.replace(tiled, heads=64)
    assert many_heads.activation_bytes == many_heads.norm_backward_bytes


def test_recomputed_norms_leave_a_block_their_inputs_and_those_of_products():
    on = {"recompute_elementwise": True}
    # 10 tokens: two inputs of 8, queries of 8 and keys of 4 twice (before their norms, attention's output and the values), and
    # gate and up of 16, which a tiled MLP does not keep.
    assert having(**on).block_bytes == 10 * 4 * (2 * 8 + 2 * 8 + 2 * 4 + 2 * 16)
    assert having(**on, tiled_mlp=TiledMlp(enabled=True)).block_bytes == 10 * 4 * (2 * 8 + 2 * 8 + 2 * 4)


def test_recomputed_norms_leave_the_last_block_four_moments_to_peak_at():
    few, tiles = having(recompute_elementwise=True), 6 * 2**16 * 4
    # At attention: 10 tokens of one segment each, the output's gradient and tables; queries (two heads of 2) and a key of 2
    # turned, and the gradients of both and of a value; of one call three of the heads, and one summed over them.
    attention = 10 * (2 * 8 + 3 * 8 + 2 * 4 + 2 * 2) + 10 * (2 * 4 + 3 * 2) + 10 * (3 * 4 + 2)
    assert few.attention_backward_bytes == 4 * attention
    # Answers that share a prompt have a call of their own: of 6 tokens, and the prompt's is of 4.
    assert dataclasses.replace(few, suffix_tokens=6).attention_backward_bytes == 4 * (attention - 4 * (3 * 4 + 2))
    assert dataclasses.replace(few, suffix_tokens=4).attention_backward_bytes == 4 * (attention - 4 * (3 * 4 + 2))
    many = dataclasses.replace(few, heads=40000, kv_heads=40000)
    assert many.activation_bytes == 3 * many.block_bytes + many.attention_backward_bytes
    # With one query head to a key head nothing is summed.
    assert many.attention_backward_bytes == 4 * 10 * (2 * 8 + 5 * 80000 + 2 * 2 + 2 * 2 + 3 * 2 + 3 * 2)
    # At the MLP's norm: two tensors of its width, the norm's output and the gradients of gate and up.
    assert few.activation_bytes == 4 * few.block_bytes + 4 * (3 * 10 * 8 + 2 * 8 * 16) + tiles
    # At the gate: one gradient, a tile's value and the gradient of down. 5,000 tokens are three tiles, of 1,667.
    long = dataclasses.replace(few, tokens=5000, mlp=64)
    assert long.activation_bytes == 4 * long.block_bytes + 4 * (5000 * 8 + 1667 * 64 + 8 * 64) + tiles
    # At the final norm: three tensors of the rows that are read.
    read = dataclasses.replace(few, responses=100)
    assert read.activation_bytes == 4 * read.block_bytes + 3 * 100 * 8 * 4 + tiles


@pytest.mark.parametrize("tiled", [False, True])
def test_a_block_that_is_computed_again_never_holds_its_gate_and_up(tiled):
    on = {"recompute_elementwise": True, "enable_gradient_checkpointing": True}
    shapes = having(**on, tiled_mlp=TiledMlp(enabled=tiled, num_shards=2))
    kept = 10 * 4 * (2 * 8 + 2 * 8 + 2 * 4)
    # A tile of all ten tokens or of five; sums of gradients are of all three weights where there are two tiles.
    rows, sums = (5, 3) if tiled else (10, 1)
    wide = dataclasses.replace(shapes, mlp=6400)
    at_gate = kept + 4 * (2 * 10 * 8 + sums * 8 * 6400 + rows * (8 + 3 * 6400)) + 6 * 2**16 * 4
    at_norm = kept + 4 * (2 * 10 * 8 + 3 * 8 * 6400 + rows * (8 + 2 * 6400)) + 6 * 2**16 * 4
    assert wide.recomputes_mlp
    assert wide.activation_bytes == 3 * 10 * 8 * 4 + max(at_gate, at_norm)


def test_in_half_precision_gradients_that_are_summed_over_tiles_are_wide():
    tiled = having(recompute_elementwise=True, tiled_mlp=TiledMlp(enabled=True, num_shards=2))
    half = replaced(tiled.settings.actor.fsdp_config, {"dtype": "bfloat16"})
    actor = replaced(tiled.settings.actor, {"fsdp_config": half})
    tiled = dataclasses.replace(tiled, settings=replaced(tiled.settings, {"actor": actor}))
    assert tiled.mlp_bytes(tiled.tokens) == 10 * 2 * 40 + 2 * 10 * 8 * 2 + 5 * 2 * (8 + 3 * 16) + 3 * 8 * 16 * 4 + 6 * 2**16 * 4


@pytest.mark.parametrize(
    ("model", "again"),
    [
        ({}, False),
        ({"enable_gradient_checkpointing": True}, True),
        ({"enable_gradient_checkpointing": True, "gradient_checkpointing_mode": "selective"}, False),
        ({"tiled_mlp": TiledMlp(enabled=True)}, True),
        ({"enable_gradient_checkpointing": True, "recompute_elementwise": False}, False),
    ],
)
def test_which_mlps_are_computed_again(model, again):
    assert having(**{"recompute_elementwise": True, **model}).recomputes_mlp is again
