import dataclasses

import pytest

from verl_memopt.config.keys import replaced
from verl_memopt.config.schema import ActorRolloutRef, TiledMlp
from verl_memopt.memory.shapes import Shapes, width

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
    # 10 tokens: two inputs of 8, queries of 8 and keys of 4 three times (before and after their norms, attention's output and
    # the values), and gate and up of 16; a tiled MLP keeps its input of 8 in their place.
    assert having(**on).block_bytes == 10 * 4 * (2 * 8 + 3 * 8 + 3 * 4 + 2 * 16)
    assert having(**on, tiled_mlp=TiledMlp(enabled=True)).block_bytes == 10 * 4 * (2 * 8 + 3 * 8 + 3 * 4 + 8)


def test_recomputed_norms_leave_the_last_block_three_moments_to_peak_at():
    few, tiles = having(recompute_elementwise=True), 6 * 2**16 * 4
    # At attention: 10 tokens of one segment each, its gradients and those of its parts; 3 of the head's tensors twice.
    assert few.attention_backward_bytes == 4 * (10 * (2 * 8 + 7 * 8 + 3 * 4 + 2 * 2) + 30 * 8 + 2 * 3 * 8)
    assert dataclasses.replace(few, branch_tokens=6).attention_backward_bytes == few.attention_backward_bytes - 4 * (10 + 6) * 8
    many = dataclasses.replace(few, heads=4000)
    assert many.activation_bytes == 3 * many.block_bytes + many.attention_backward_bytes
    # At the MLP: one gradient, a tile's value and the tiles of elementwise statements. 5,000 tokens are three tiles.
    assert few.activation_bytes == 4 * few.block_bytes + 10 * 8 * 4 + 10 * 16 * 4 + tiles
    long = dataclasses.replace(few, tokens=5000, mlp=64)
    assert long.activation_bytes == 4 * long.block_bytes + 5000 * 8 * 4 + round(5000 / 3 * 64 * 4) + tiles
    # At the final norm: three tensors of the rows that are read.
    read = dataclasses.replace(few, responses=100)
    assert read.activation_bytes == 4 * read.block_bytes + 3 * 100 * 8 * 4 + tiles


def test_recomputed_norms_beside_tiles_leave_the_tiles_of_one_backward():
    tiled = dataclasses.replace(having(recompute_elementwise=True, tiled_mlp=TiledMlp(enabled=True, num_shards=2)), mlp=64)
    passing = 6 * 10 * 64 * 4 // 2 + 2 * 8 * 64 * 4 + 10 * 8 * 4 * 5 // 2
    assert tiled.activation_bytes == 4 * tiled.block_bytes + passing
