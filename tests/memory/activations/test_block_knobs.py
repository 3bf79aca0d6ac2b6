"""What all knobs of a block's activations leave as it is: names and state, a frozen model's numbers, and bytes without values."""

import logging

import pytest
import torch
from torch import nn

from tests.memory import activation_cases as act
from tests.memory.activation_cases import ELEMENTWISE, FULL, SELECTIVE, TILED
from tests.memory.activations.test_prune_last_block import BOUND, RAGGED
from tests.memory.batching.test_shared_prompt import sharing
from verl_memopt.memory.prune_last_block import can_prune
from verl_memopt.memory.recompute_elementwise_torch import can_recompute
from verl_memopt.model.block_options import class_name
from verl_memopt.worker.trained_model import micro_batch

PRUNED = {**ELEMENTWISE, "prune_last_block": True}


@pytest.mark.parametrize("options", [FULL, ELEMENTWISE, PRUNED, TILED])
def test_names_classes_and_state_of_blocks_stay(untied_folder, one_rank, options):
    off = {"prune_last_block": False}
    plain, changed = (act.build(untied_folder, one_rank, **off | more).model for more in ({}, options))
    assert list(plain.state_dict()) == list(changed.state_dict())
    assert [class_name(block) for block in plain.blocks()] == [class_name(block) for block in changed.blocks()]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, options) for kind in ("int8", "nf4") for options in (ELEMENTWISE, TILED)),
        ("int8", PRUNED),
        ("int8", {"prune_last_block": True}),
        ("int8", {**ELEMENTWISE, "block_tile_tokens": 7}),
    ],
    ids=str,
)
def test_a_quantised_model_without_gradients_gives_what_it_gives_without_the_knob(untied_folder, one_rank, kind, options):
    pack, found = micro_batch(sharing(RAGGED), list(range(RAGGED.num_rows))).pack, []
    for more in ({}, options):
        model = act.quantised(
            untied_folder, one_rank, kind, **{"recompute_elementwise": False, "prune_last_block": False, **more}
        )
        assert model.decoder.recompute is ("recompute_elementwise" in more)
        with torch.no_grad():
            found.append(model(pack, 1.0, False)[0])
    assert act.largest_difference([found[1]], [found[0]]) <= BOUND


class Experts(nn.Module):
    """A block of no known model."""


def test_an_unknown_block_is_left_alone_and_a_warning_says_so(caplog):
    with caplog.at_level(logging.WARNING):
        assert not can_prune(Experts())
        assert not can_recompute([Experts()], trained=True)
    for knob in ("prune_last_block", "recompute_elementwise"):
        assert f"{knob}=true: Experts is not one of " in caplog.text


@pytest.mark.parametrize("options", [{"offload": (4096, 2), **SELECTIVE}, PRUNED, {**FULL, **TILED}], ids=str)
def test_fake_tensors_give_the_bytes_of_real_ones(untied_folder, options):
    act.assert_fake_tensors_give_the_bytes_of_real_ones(untied_folder, **options)
