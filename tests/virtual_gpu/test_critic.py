"""A critic beside the policy on the virtual GPU, with every knob of a trained model alone and with rows of several."""

import pytest

from tests.end_to_end.covering import FOUR_RANKS, REFERENCE, all_off, covering_rows, options, pair_row
from tests.virtual_gpu.life import live, misplaced

OF_OTHERS = (*REFERENCE, "engine", "optimizer", "bucket", "logprob", "vocab")
"""How the factors begin that say nothing of a critic, or need a package."""
ALONE = [option for option in options() if pair_row(frozenset([option])) != all_off() and not option[0].startswith(OF_OTHERS)]
TOGETHER = covering_rows()[0][:4]


@pytest.mark.parametrize("option", ALONE, ids=" ".join)
def test_a_critic_with_one_knob_runs_and_rests_where_it_says(option, on_virtual_gpu, folder):
    row = pair_row(frozenset([option]))
    life = on_virtual_gpu(live, row, folder, 4 if option in FOUR_RANKS else 1, whole=False, critic=True)
    assert life.rests["update_critic"]["critic"] > 0 or row["actor offload_policy"] == "on"
    assert misplaced(row, life) == []


@pytest.mark.parametrize("number", range(len(TOGETHER)))
def test_a_critic_with_many_knobs_on_the_first_of_two_ranks_runs_and_rests_where_it_says(number, on_virtual_gpu, folder):
    life = on_virtual_gpu(live, TOGETHER[number], folder, 2, whole=False, critic=True)
    assert misplaced(TOGETHER[number], life) == []


def test_a_critic_at_rest_leaves_no_byte_on_the_device_outside_its_phases(on_virtual_gpu, folder):
    """Its peaks elsewhere are those of a run without a critic, but for three small tensors of 512 bytes each."""
    row = all_off() | {"actor param_offload": "on", "actor optimizer_offload": "on"}
    without, beside = (on_virtual_gpu(live, row, folder, critic=critic) for critic in (False, True))
    assert misplaced(row, beside) == []
    for phase in without.peaks:
        # Two tables of rotary frequencies, and the optimizer's count of its steps.
        assert beside.peaks[phase] - without.peaks[phase] == 3 * 512, phase
    for phase in ("gen", "released", "old_log_prob", "ref", "update_actor", "update_weights", "save_checkpoint"):
        assert (beside.rests[phase]["critic"], beside.rests[phase]["critic's optimizer"]) == (2 * 512, 512), phase
