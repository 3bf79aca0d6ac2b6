from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.update_pass.flops import count
from tests.memory import activation_cases as act
from tests.memory.activation_cases import FULL, LORA, TILED
from tests.memory.activations.test_prune_last_block import (
    BOUND,
    PACKS,
    RAGGED,
    assert_near_for,
    assert_near_in_half_precision,
    gradients,
    shapes,
)
from tests.memory.batching.test_shared_prompt import counts_of, grouped
from tests.model.attention_cases import gpu_operators_on_a_cpu
from verl_memopt.errors import ConfigError
from verl_memopt.model import tiled_block
from verl_memopt.model.prefix_layout import PrefixLayout
from verl_memopt.model.tiled_block import tiles
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.worker.trained_model import micro_batch

WHOLE = {"recompute_elementwise": True, **FULL}
"""Options of a policy whose blocks keep their input alone, and compute all tokens at once."""
NOTHING = {"recompute": False, "recompute_elementwise": False}
"""Options that blocks over tiles do without: they keep their input alone all the same."""


def over(size, **more):
    return {**WHOLE, "block_tile_tokens": size, **more}


@pytest.mark.parametrize(
    ("options", "shared"),
    [
        ({}, False),
        ({"prune_last_block": True}, True),
        ({"prune_last_block": True, **LORA}, True),
        (TILED, True),
        ({"offload": (1, 2)}, True),
        (NOTHING, True),
    ],
    ids=["alone", "pruned", "pruned, LoRA", "tiled MLP", "offloaded", "nothing else"],
)
def test_log_probs_and_gradients_differ_by_rounding_only(untied_folder, one_rank, options, shared):
    expected = gradients(act.build(untied_folder, one_rank, **{"prune_last_block": False, **WHOLE, **options}), RAGGED, shared)
    found = gradients(act.build(untied_folder, one_rank, **{"prune_last_block": False, **over(7), **options}), RAGGED, shared)
    assert act.largest_difference(found, expected) <= BOUND


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PACKS, st.integers(1, 40))
def test_for_tiles_of_any_size_and_packs_of_any_groups(tiny_folder, one_rank, pack, size):
    assert_near_for(pack, *(act.build(tiny_folder, one_rank, **model) for model in (WHOLE, over(size))))


@given(st.lists(st.tuples(st.integers(0, 6), st.lists(st.integers(1, 5), max_size=3)), min_size=1, max_size=4), st.integers(1, 9))
def test_each_query_sees_its_keys_once(groups, size):
    groups = tuple((prefix, tuple(suffixes)) for prefix, suffixes in groups if prefix or suffixes)
    skipped = tuple(place % 3 for place in range(len(groups)))
    layout = PrefixLayout.of(groups, skipped)
    expected, key = [], 0
    for (prefix, suffixes), before in zip(groups, skipped, strict=True):
        for place in range(prefix):
            expected.append(set(range(key, key + before + place + 1)))
        start = key + before + prefix
        for length in suffixes:
            expected += [set(range(key, key + before + prefix)) | set(range(start, start + place + 1)) for place in range(length)]
            start += length
        key = start
    found = [[] for _ in expected]
    for tile in tiles(layout, size):
        assert tile.queries.stop - tile.queries.start <= size
        for call in tile.calls:
            for place in range(call.queries.start, call.queries.stop):
                seen = call.keys.start + place - call.queries.start + 1 if call.causal else call.keys.stop
                found[tile.queries.start + place] += range(call.keys.start, seen)
    assert [sorted(one) for one in found] == [sorted(one) for one in expected]


def test_in_half_precision_gradients_are_as_near_to_the_truth(untied_folder, one_rank):
    assert_near_in_half_precision(untied_folder, one_rank, WHOLE, over(8), 12)


@contextmanager
def kernels_of_a_gpu():
    """Tiles take the kernels of a GPU, written out by what torch documents of them."""
    half = (torch.float16, torch.bfloat16)
    with (
        gpu_operators_on_a_cpu(),
        patch.object(tiled_block, "is_gpu", lambda _: True),
        patch.object(tiled_block, "supports_flash", lambda _, dtype: dtype in half),
    ):
        yield


def test_flash_kernels_of_a_gpu_give_gradients_as_near_to_the_truth(untied_folder, one_rank):
    with kernels_of_a_gpu():
        assert_near_in_half_precision(untied_folder, one_rank, WHOLE, over(8), 12)


@pytest.mark.parametrize("shared", [True, False])
def test_memory_efficient_kernels_of_a_gpu_differ_by_rounding_only(untied_folder, one_rank, shared):
    expected = gradients(act.build(untied_folder, one_rank, **WHOLE), RAGGED, shared)
    with kernels_of_a_gpu():
        found = gradients(act.build(untied_folder, one_rank, **over(7)), RAGGED, shared)
    assert act.largest_difference(found, expected) <= BOUND


# Cost.


def peak_and_formula(folder, tokens, tile, **more):
    """Gives the activations of an update of one row, in bytes of the tracker and of the formula."""
    batch, model = grouped(1, [tokens]), over(tile, **more)
    with act.fake_ranks(2) as mesh:
        policy = act.build(folder, mesh, offload=(1, 1), **model)
        tracker = act.tracked_step(policy, [micro_batch(batch, [0])], counts_of(batch), steps=1)
    knobs = {name: value for name, value in model.items() if name != "recompute"}
    formula = shapes(batch, enable_activation_offload=True, activation_offload_in_flight=1, **knobs)
    return tracker.peaks[act.DEVICE].kinds["activations"], formula


@pytest.mark.parametrize(("tokens", "tile"), [(2048, 256), (2048, 512)])
def test_a_long_row_holds_what_the_formula_says(deep_folder, tokens, tile):
    found, formula = peak_and_formula(deep_folder, tokens, tile)
    assert act.close(found, formula.activation_bytes)


def test_of_all_tokens_a_block_holds_no_more_than_input_output_queries_keys_and_values(deep_folder):
    (short, _), (long, shapes) = (peak_and_formula(deep_folder, tokens, 256) for tokens in (1024, 2048))
    tables, kept = 2 * act.D, act.WIDTH  # what all blocks share, and the checkpoint that is on its way
    of_a_token = (long - short) / 1024 / act.FP32 - tables - kept
    assert of_a_token <= 1.1 * (2 * act.WIDTH + act.H * act.D + 2 * act.KV * act.D)
    assert shapes.tokens == 2048


def test_products_are_those_of_checkpointed_blocks_and_keys_once_more(tmp_path, one_rank):
    folder, counted, tokens = make_tiny_model(tmp_path / "model", act.SHAPE, seed=3), [], 256
    batch = grouped(1, [tokens])
    for model in (WHOLE, over(64)):
        policy = act.build(folder, one_rank, **model)
        micro = [micro_batch(batch, [0])]
        counted.append(count(lambda policy=policy, micro=micro: policy.accumulate(micro, counts_of(batch), 0.9)))
    keys = 2 * tokens * act.LAYERS * act.WIDTH * act.KV * act.D
    assert counted[1] - counted[0] == keys


def test_a_model_whose_blocks_are_not_known_is_refused_by_name(tmp_path, one_rank, caplog):
    folder = make_tiny_model(tmp_path / "model", TinyShape(model_type="llama"), seed=3)
    with pytest.raises(ConfigError, match=r"block_tile_tokens: tiles .* activation gelu.* Set .*block_tile_tokens=null"):
        act.build(folder, one_rank, **over(4, recompute_elementwise=False, override_config={"hidden_act": "gelu"}))
    assert not caplog.messages


def test_heads_of_a_size_that_no_kernel_of_a_gpu_takes_are_refused(tmp_path, one_rank):
    folder = make_tiny_model(tmp_path / "model", TinyShape(head_dim=20), seed=3)
    with pytest.raises(ConfigError, match=r"block_tile_tokens: .*heads have a size of 20.*Set .*block_tile_tokens=null"):
        act.build(folder, one_rank, **over(4))
