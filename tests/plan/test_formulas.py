import dataclasses

import pytest

from verl_memopt.config.keys import replaced
from verl_memopt.config.schema import ActorRolloutRef
from verl_memopt.memory.chunked_logprob import logit_bytes
from verl_memopt.memory.lora import adapter_params
from verl_memopt.memory.tiled_mlp import TiledMlp
from verl_memopt.model.attention_dense import ATTENTION_ELEMENTS, MASKED_PRODUCTS, key_heads_at_once
from verl_memopt.model.delta_rule import DeltaShape
from verl_memopt.model.sizes import ModelSize
from verl_memopt.plan.formulas import Pass, Shapes

SHAPES = Shapes(
    settings=ActorRolloutRef(), layers=4, hidden=8, mlp=16, heads=4, kv_heads=2, head_dim=2, vocab=100, params=5000,
    block_params=1000, tied=True, tokens=10, responses=3,
)  # fmt: skip


def with_keys(shapes, **keys):
    """Gives shapes under other settings; ``__`` in a name stands for a point."""
    keys = {key.replace("__", "."): value for key, value in keys.items()}
    return dataclasses.replace(shapes, settings=replaced(shapes.settings, keys))


def having(**model):
    base = {"enable_gradient_checkpointing": False, "recompute_elementwise": False, **model}
    return with_keys(SHAPES, actor__fsdp_config__dtype="fp32", **{f"model__{key}": value for key, value in base.items()})


def test_a_block_keeps_three_numbers_a_norm_and_one_a_product():
    # 10 tokens; norms of 8, 8, 4 x 2 and 2 x 2; values, attention and four of the MLP's width.
    assert having().block_bytes == 10 * 4 * (3 * (8 + 8 + 8 + 4) + (4 + 8 + 4 * 16))


def test_activations_with_and_without_checkpointing_and_offload():
    block, given = having().block_bytes, 10 * 8 * 4
    passing = 2 * 10 * 16 * 4 + 2 * given
    assert having().activation_bytes == 4 * block + passing
    on = {"enable_gradient_checkpointing": True}
    assert having(**on).activation_bytes == 3 * given + block + passing
    moves = {**on, "enable_activation_offload": True, "activation_offload_in_flight": 1}
    for kept in (0, 1):
        moved = having(**moves, activation_offload_device_gb=kept * given / 2**30)
        assert moved.activation_bytes == (1 + kept) * given + block + passing


def test_moments_follow_the_masters_unless_they_have_a_dtype_of_their_own():
    def state(masters, moments):
        return with_keys(SHAPES, actor__fsdp_config__model_dtype=masters, actor__optim__state_dtype=moments).state_bytes

    pairs = (("fp32", None), ("bfloat16", None), ("bfloat16", "fp32"), ("fp32", "int8"))
    assert [state(*pair) for pair in pairs] == [8, 4, 8, 2 * 260 / 256]


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


def test_few_tokens_on_a_cpu_hold_all_heads_and_a_mask_at_their_attention():
    few = having(recompute_elementwise=True)
    kept = 10 * (2 * 8 + 3 * 8 + 2 * 4 + 2 * 2)
    # Queries (four heads of 2) and keys rotated, and the gradient of queries; keys and values repeated for them, and the
    # gradients of both, one summed over two heads; a mask of 10 x 10.
    assert few.attention_backward_bytes == 4 * (kept + 10 * (2 * 8 + 4 + 4 * 8 + 4) + 10 * 10)
    # In half precision all these are in fp32 but the keys, and so are copies of the output and its gradient.
    half = with_keys(few, actor__fsdp_config__dtype="bfloat16")
    assert half.attention_backward_bytes == 2 * kept + 4 * (10 * (2 * 8 + 2 * 8 + 4 * 8 + 4) + 10 * 10)
    # 182 x 182 pairs of 8 elements are more than a call may have. One key head and one sequence are one call without a mask.
    assert 181**2 * 8 <= MASKED_PRODUCTS["cpu"] < 182**2 * 8
    more = dataclasses.replace(few, tokens=182)
    assert more.attention_backward_bytes == 4 * 182 * (kept // 10 + 2 * 4 + 3 * 2 + 3 * 4 + 2)
    alone = dataclasses.replace(few, heads=1, kv_heads=1)
    assert alone.attention_backward_bytes == 4 * 10 * (2 * 8 + 3 * 2 + 2 * 2 + 2 * 2 + 5 * 2 + 3 * 2)


def test_recomputed_norms_leave_the_last_block_four_moments_to_peak_at(monkeypatch):
    monkeypatch.setitem(MASKED_PRODUCTS, "cpu", 0)
    few = having(recompute_elementwise=True)
    # At attention: 10 tokens of one segment each, the output's gradient and tables; queries (two heads of 2) and a key of 2
    # turned, and the gradients of both and of a value; of one call three of the heads, and one summed over them.
    attention = 10 * (2 * 8 + 3 * 8 + 2 * 4 + 2 * 2) + 10 * (2 * 4 + 3 * 2) + 10 * (3 * 4 + 2)
    assert few.attention_backward_bytes == 4 * attention
    # Answers that share a prompt have a call of their own: of 6 tokens, and the prompt's is of 4.
    for answers in (4, 6):
        shared = dataclasses.replace(few, suffix_tokens=answers)
        assert shared.attention_backward_bytes == 4 * (attention - 4 * (3 * 4 + 2))
    many = dataclasses.replace(few, heads=40000, kv_heads=40000)
    assert many.activation_bytes == 3 * many.block_bytes + many.attention_backward_bytes
    # With one query head to a key head nothing is summed.
    assert many.attention_backward_bytes == 4 * 10 * (2 * 8 + 5 * 80000 + 2 * 2 + 2 * 2 + 3 * 2 + 3 * 2)
    # An elementwise statement holds three fp32 tensors of a tile, which has 2^17 elements at most.
    # At the MLP's norm: two tensors of its width, the norm's output and the gradients of gate and up.
    narrow = dataclasses.replace(few, mlp=2)
    assert narrow.activation_bytes == 4 * narrow.block_bytes + 4 * (3 * 10 * 8 + 2 * 8 * 2) + 12 * 10 * 8
    # At the gate: one gradient, a tile's value and the gradient of down. 5,000 tokens are three tiles, of 1,667.
    for mlp, elements in ((64, 1667 * 64), (640, 2**17)):
        long = dataclasses.replace(few, tokens=5000, mlp=mlp)
        assert long.activation_bytes == 4 * long.block_bytes + 4 * (5000 * 8 + 1667 * mlp + 8 * mlp) + 12 * elements
    # At the final norm: three tensors of the rows that are read.
    read = dataclasses.replace(few, responses=100)
    assert read.activation_bytes == 4 * read.block_bytes + 3 * 100 * 8 * 4 + 12 * 100 * 8


@pytest.mark.parametrize("tiled", [False, True])
def test_a_block_that_is_computed_again_never_holds_its_gate_and_up(tiled):
    on = {"recompute_elementwise": True, "enable_gradient_checkpointing": True}
    shapes = having(**on, tiled_mlp=TiledMlp(enabled=tiled, num_shards=2))
    kept = 10 * 4 * (2 * 8 + 2 * 8 + 2 * 4)
    # A tile of all ten tokens or of five; sums of gradients are of all three weights where there are two tiles.
    rows, sums = (5, 3) if tiled else (10, 1)
    wide = dataclasses.replace(shapes, mlp=6400)
    at_gate = kept + 4 * (2 * 10 * 8 + sums * 8 * 6400 + rows * (8 + 3 * 6400)) + 12 * rows * 6400
    at_norm = kept + 4 * (2 * 10 * 8 + 3 * 8 * 6400 + rows * (8 + 2 * 6400)) + 12 * rows * 8
    assert wide.recomputes_mlp
    assert wide.activation_bytes == 3 * 10 * 8 * 4 + max(at_gate, at_norm)


def test_in_half_precision_gradients_that_are_summed_over_tiles_are_wide():
    tiled = having(recompute_elementwise=True, tiled_mlp=TiledMlp(enabled=True, num_shards=2))
    tiled = with_keys(tiled, actor__fsdp_config__dtype="bfloat16")
    assert tiled.mlp_bytes(tiled.tokens) == 10 * 2 * 40 + 2 * 10 * 8 * 2 + 5 * 2 * (8 + 3 * 16) + 3 * 8 * 16 * 4 + 12 * 5 * 16


HYBRID = dataclasses.replace(SHAPES, gated=True, rule=DeltaShape(2, 4, 3, 5), linear_layers=3, tokens=700, segments=2)
"""Of its four blocks the last has attention. The others have 2 x 6 + 20 channels, and states of 4 x 3 x 5."""


def test_blocks_with_a_state_keep_the_inputs_of_their_rule_and_no_keys():
    on = {"recompute_elementwise": True}
    hybrid = dataclasses.replace(HYBRID, settings=having(**on).settings)
    # 700 tokens: two inputs of 8, queries of 8 with gates and attention's output, keys and values of 4, gate and up of 16.
    attention = 700 * 4 * (2 * 8 + 3 * 8 + 2 * 4 + 2 * 16)
    assert hybrid.block_bytes == attention
    # Channels of 12 + 20, z and the outputs of 20, b and a of 4. All chunks are one batch, so one state and its zeros exist.
    linear = 700 * 4 * (2 * 8 + 32 + 2 * 20 + 2 * 4 + 2 * 16) + 4 * 60 * 2
    assert hybrid.of_linear.block_bytes == linear
    assert hybrid.kept_of(4) == attention + 3 * linear
    # When backward is at a block with a state, the last block has freed its own.
    assert hybrid.activation_bytes == max(
        3 * linear + hybrid.attention_backward_bytes, 2 * linear + hybrid.of_linear.attention_backward_bytes
    )


def test_a_tiled_block_with_a_state_holds_one_tile_and_what_tiles_hand_on():
    few, many = (
        dataclasses.replace(HYBRID, settings=having(block_tile_tokens=100).settings, tokens=tokens).of_linear
        for tokens in (1000, 2000)
    )
    # Ten more borders: a state and three rows of 32 channels, both with a gradient. 1,000 more tokens: input, gradient, tables.
    more = 10 * 2 * 4 * (60 + 3 * 32) + 1000 * 4 * 2 * (8 + 2)
    assert many.tiled_block_bytes(100) - few.tiled_block_bytes(100) == more


def test_adapters_and_matrices_of_both_kinds_of_block_are_counted():
    hybrid = dataclasses.replace(HYBRID, settings=having(lora_rank=2).settings)
    # Queries with gates of 16, keys and values of 4, output; channels of 32, z of 20, b and a of 4, output; the MLP.
    assert hybrid.linear_params == 8 * (16 + 2 * 4 + 8) + 3 * 8 * (32 + 20 + 2 * 4 + 20) + 4 * 3 * 8 * 16
    attention = (8 + 16) + 2 * (8 + 4) + (8 + 8)
    linear = (8 + 32) + (8 + 20) + 2 * (8 + 4) + (20 + 8)
    assert adapter_params(hybrid) == 2 * (attention + 3 * linear + 4 * 3 * (8 + 16))


# On a GPU.

QWEN = dataclasses.replace(
    SHAPES, layers=28, hidden=1024, mlp=3072, heads=16, kv_heads=8, head_dim=128, tokens=2554, responses=1536,
    suffix_tokens=1530, skipped=1023, segments=7, device="cuda",
)  # fmt: skip
"""The largest micro-batch of the ladder of 2026-11-23 on an H100, of Qwen3-0.6B in fp32 (docs/evidence)."""


def on_gpu(compiled=False, dtype="fp32", shapes=QWEN, **model):
    shapes = dataclasses.replace(shapes, settings=having(**{"recompute_elementwise": True, **model}).settings)
    return with_keys(shapes, actor__use_torch_compile=compiled, actor__fsdp_config__dtype=dtype)


def test_uncompiled_on_a_gpu_the_tiles_of_elementwise_statements_are_those_that_an_h100_measured(monkeypatch):
    # It ran attention key head by key head then.
    monkeypatch.setitem(ATTENTION_ELEMENTS, "cuda", 0)
    measured = 4_225_345_236, 4_137_285_396, 2_405_050_132
    tiles = TiledMlp(enabled=True, num_shards=4)
    formula = [on_gpu(**knobs).activation_bytes for knobs in ({"prune_last_block": False}, {}, {"tiled_mlp": tiles})]
    assert formula[0] - formula[1] == pytest.approx(measured[0] - measured[1], rel=0.005)
    assert formula[1] - formula[2] == pytest.approx(measured[1] - measured[2], rel=0.005)
    assert formula == pytest.approx(measured, rel=0.005)


def test_memory_efficient_attention_holds_what_its_call_makes_for_the_key_heads_of_a_tile():
    few = dataclasses.replace(QWEN, heads=4, kv_heads=2, head_dim=64, tokens=100, suffix_tokens=0, skipped=0, segments=1)
    kept = 4 * 100 * (2 * 1024 + 2 * 256 + 2 * 128) + 4 * 100 * (256 + 2 * 64)  # and the output's gradient, and tables
    # Both key heads at once: queries and keys turned, keys and values for four heads, three gradients, and the kernel's own.
    assert on_gpu(shapes=few).attention_backward_bytes == kept + 4 * 100 * (256 + 128 + 2 * 256 + 3 * 256) + 4 * 100 * 256
    # Of so many tokens that one key head is more than a tile: columns of output and gradient, but no key repeated.
    many = dataclasses.replace(few, tokens=20_000)
    one = 4 * 20_000 * (128 + 64 + 2 * 128 + 3 * 128) + 4 * 20_000 * 128
    assert on_gpu(shapes=many).attention_backward_bytes == 200 * kept + one
    # 12,000 tokens of answers see 8,000 of prompts in a call of their own, beside the gradients of all: inputs and a gradient of
    # answers, and gradients of the prompts' keys and values for each query head. Seven of the longest would not be in a tile.
    shared = dataclasses.replace(many, suffix_tokens=12_000, segments=7)
    call = 12_000 * 4 * 128 + 8_000 * 2 * 128
    several = 4 * (20_000 * (128 + 64 + 128 + 2 * 64) + call) + 4 * ATTENTION_ELEMENTS["cuda"]
    assert on_gpu(shapes=shared).attention_backward_bytes == 200 * kept + several


@pytest.mark.parametrize(("elements", "found"), [(0, 1), (99, 1), (100, 1), (250, 2), (399, 2), (400, 4), (10**6, 8)])
def test_key_heads_at_once_are_a_divisor_of_them_that_a_tile_has_room_for(elements, found):
    assert key_heads_at_once(100, 8, elements) == found


def test_compiled_statements_hold_no_tiles():
    # Uncompiled the gate is the highest moment, with an activation and a product of its width; compiled it is the norm.
    rows, gate, norm = 2554, 2554 * 3072 + 1024 * 3072, 2 * 2554 * 1024 + 2 * 1024 * 3072
    assert on_gpu().mlp_bytes(rows) - on_gpu(compiled=True).mlp_bytes(rows) == 4 * (gate + 2 * rows * 3072 - norm)


def test_under_full_determinism_nothing_is_compiled_and_tiles_are_held():
    few = dataclasses.replace(QWEN, responses=1000)
    compiled = on_gpu(True, "bf16", few)
    exact, plain = with_keys(compiled, actor__fsdp_config__full_determinism=True), on_gpu(False, "bf16", few)
    assert exact.mlp_bytes(2554) == plain.mlp_bytes(2554) > compiled.mlp_bytes(2554)
    assert logit_bytes(exact, update=True) == logit_bytes(plain, update=True) != logit_bytes(compiled, update=True)


def test_a_window_cuts_rows_that_are_longer_and_may_share_a_prompt():
    size = ModelSize(8, 16, 4, 4, 2, 2, 100, True, window=50)
    for longest, shares, slides in ((50, "auto", False), (51, "auto", True), (None, True, True), (51, False, False)):
        roles = replaced(ActorRolloutRef(), {"actor.use_prefix_grouper": shares})
        assert Shapes.of(size, roles, Pass(100, 10, 3, 100, longest=longest), "cuda").slides is slides
    assert not Shapes.of(dataclasses.replace(size, window=None), ActorRolloutRef(), Pass(100, 10, 3, 100), "cuda").slides


def test_flash_attention_holds_a_wide_gradient_of_queries_and_keys_repeated_for_their_heads():
    few = dataclasses.replace(QWEN, heads=4, kv_heads=2, head_dim=40, tokens=100, suffix_tokens=0, skipped=0, segments=3)
    shapes = on_gpu(True, "bf16", few)
    query, key = 160, 80
    kept = 2 * 100 * (2 * 1024 + 2 * query + 2 * key)
    seen = 2 * 100 * (query + 2 * 40 + query + key + query + 2 * key)  # the output's gradient, tables, turned, gradients
    wide = 4 * (100 + 128 * 3) * 4 * (64 + 1)  # dq_accum, its head rounded up to 64, and softmax_d
    assert shapes.attention_backward_bytes == kept + seen + wide + 2 * 2 * 100 * query
    # Without fewer key heads nothing is repeated.
    alone = dataclasses.replace(shapes, kv_heads=4)
    assert alone.attention_backward_bytes == 2 * 100 * (2 * 1024 + 4 * query) + 2 * 100 * (6 * query + 2 * 40) + wide
    # 60 tokens of answers see 40 of prompts in a call of their own: inputs, gradients, and the kernel's, beside the first's.
    shared = dataclasses.replace(shapes, suffix_tokens=60)
    first = 2 * 100 * (query + 2 * 40 + query + key + query + 2 * key)
    second = 2 * (60 * 4 * query + 40 * 4 * key + 2 * 40 * query) + 4 * (60 + 128 * 3) * 4 * 65
    assert shared.attention_backward_bytes == kept + first + second
    # A window that cuts rows makes copies of keys and values, at most 200, and their gradients are summed in fp32.
    slid = dataclasses.replace(shapes, slides=True)
    copies = 2 * (100 * query + 4 * 200 * key + 2 * 200 * query) + 2 * 4 * 100 * key
    seen = 2 * 100 * (query + 2 * 40 + query + key)
    assert slid.attention_backward_bytes == kept + seen + copies + wide
    # Qwen3-0.6B in 8,192 tokens of one sequence: 135 MB of the kernel's own.
    long = [on_gpu(True, dtype, dataclasses.replace(QWEN, tokens=8192, suffix_tokens=0, skipped=0)) for dtype in ("bf16", "fp32")]
    assert [shapes.flash for shapes in long] == [True, False]
    own = 2 * 8192 * 2048 * 4 // 2 + 8192 * 2048 * 4
    others = 8192 * 2 * (2 * 1024 + 3 * 2048 + 2 * 1024 + 256 + 2048 + 1024 + 2048 + 2 * 1024)
    padding = 4 * (7 * 128 * 16 * 129 + 8192 * 16)
    assert long[0].attention_backward_bytes == own + others + padding
    assert not dataclasses.replace(long[0], device="cpu").flash
    # A block that recomputes nothing has the kernel's own beside what it kept before its MLP, and two gradients. With wide heads,
    # that is more than at its MLP.
    plain = dataclasses.replace(few, heads=64, kv_heads=64, mlp=512)
    plain = on_gpu(True, "bf16", plain, recompute_elementwise=False, enable_gradient_checkpointing=True)
    wide = 64 * 40
    kept = 100 * ((4 + 2 * 2) * (1024 + 2 * wide) + 2 * 2 * wide)
    held = kept + 100 * 2 * (1024 + wide) + 2 * 100 * 3 * wide + 4 * (100 + 128 * 3) * 64 * 65
    assert plain.activation_bytes == (plain.layers - 1) * plain.input_bytes + held > plain.backward_bytes
    assert not on_gpu(True, "bf16", attn_implementation="sdpa").flash
