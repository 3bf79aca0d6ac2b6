"""What all knobs of a block's activations leave as it is: numbers on two ranks, names and state, and bytes without values."""

import logging

import pytest
from torch import nn

from tests.memory import activation_cases as act
from tests.memory.activation_cases import ELEMENTWISE, EVERY_2, FULL, SELECTIVE, TILED
from tests.memory.activations.test_prune_last_block import BOUND, gradients
from tests.memory.batching.test_shared_prompt import grouped
from tests.ranks import run_ranks
from verl_memopt.distributed.device import training_mesh
from verl_memopt.memory.prune_last_block import can_prune
from verl_memopt.memory.recompute_elementwise_torch import can_recompute
from verl_memopt.model.decoder import class_name

OFFLOAD = {"offload": (1, 2)}
PRUNED = {**ELEMENTWISE, "prune_last_block": True}

SAME_BITS = [EVERY_2, SELECTIVE, {**FULL, **OFFLOAD}]
ROUNDED = [(ELEMENTWISE, 2e-6), ({**FULL, **ELEMENTWISE}, 2e-6), ({**FULL, **TILED}, 1e-6)]
"""With the most that a gradient may differ, relative to its norm."""


def two_ranks(rank, folder):
    """Asserts equality of what changes no bit, and gives how far the first gradients are from the plain ones of the others."""
    mesh, mini = training_mesh("cpu", 2, -1), act.mini_batch(rank, 2, response=12)
    expected = act.three_steps(act.build(folder, mesh, 2), mini)
    for options in SAME_BITS:
        policy = act.build(folder, mesh, 2, **options)
        policy = act.without_traffic(policy) if "offload" in options else policy
        act.assert_same_numbers(act.three_steps(policy, mini), expected)
    plain, *found = (
        act.first_gradients(act.build(folder, mesh, 2, **options), mini) for options in ({}, *(options for options, _ in ROUNDED))
    )
    batch, whole = grouped(20, [5, 1, 9], groups=1, seed=rank), {"prune_last_block": False}
    pairs = (
        [gradients(act.build(folder, mesh, 2, **options), batch, True) for options in pair]
        for pair in (
            *(({**own, **whole}, {**own, "prune_last_block": True}) for own in ({}, ELEMENTWISE, {**ELEMENTWISE, **FULL})),
            ({**ELEMENTWISE, **FULL}, {**ELEMENTWISE, **FULL, "block_tile_tokens": 4}),
        )
    )
    return [act.largest_difference(one, plain) for one in found] + [act.largest_difference(*pair) for pair in pairs]


def test_two_ranks_have_the_same_bits_or_differ_by_rounding(untied_folder):
    bounds = [*(bound for _, bound in ROUNDED), *[BOUND] * 4]
    for found in run_ranks(two_ranks, 2, untied_folder):
        assert [one <= bound for one, bound in zip(found, bounds, strict=True)] == [True] * len(bounds), found


@pytest.mark.parametrize("options", [FULL, ELEMENTWISE, PRUNED])
def test_names_classes_and_state_of_blocks_stay(untied_folder, one_rank, options):
    off = {"prune_last_block": False}
    plain, changed = (act.build(untied_folder, one_rank, **off | more).model for more in ({}, options))
    assert list(plain.state_dict()) == list(changed.state_dict())
    assert [class_name(block) for block in plain.blocks()] == [class_name(block) for block in changed.blocks()]


class Experts(nn.Module):
    """A block of no known model."""


def test_an_unknown_block_is_left_alone_and_a_warning_says_so(caplog):
    with caplog.at_level(logging.WARNING):
        assert not can_prune(Experts())
        assert not can_recompute([Experts()], trained=True)
    for knob in ("prune_last_block", "recompute_elementwise"):
        assert f"{knob}=true: Experts is not one of LlamaDecoderLayer" in caplog.text


@pytest.mark.parametrize("options", [SELECTIVE, {"offload": (4096, 2), **FULL}, ELEMENTWISE, PRUNED, {**FULL, **TILED}], ids=str)
def test_fake_tensors_give_the_bytes_of_real_ones(untied_folder, options):
    act.assert_fake_tensors_give_the_bytes_of_real_ones(untied_folder, **options)
