"""Every knob through the whole life of a worker on the virtual GPU, with a critic beside the policy."""

from itertools import combinations

import pytest

from tests.end_to_end.covering import FOUR_RANKS, REFERENCE, all_off, covering_rows, pair_row
from tests.virtual_gpu.life import SLACK_BYTES, STREAMS, compare_packed_rows, live, misplaced

EXACT, OTHERS = covering_rows()


def acting(row):
    """Return the options that a row tries out: with LoRA there is no reference of its own."""
    return {option for option in row.items() if row["lora"] == "off" or not option[0].startswith(REFERENCE)}


def rows_with_every_option(rows):
    """Return the fewest of the rows that between them try out what all of them do, but for what is off in the plain life."""
    asked = set().union(*map(acting, rows)) - acting(all_off())
    choices = (chosen for count in range(len(rows) + 1) for chosen in combinations(rows, count))
    return next(chosen for chosen in choices if asked <= set().union(*map(acting, chosen)))


LIVES = rows_with_every_option(OTHERS)
WITH_CRITIC, WHOLE = (0,), (0, len(LIVES) - 1)
"""Those that have a critic beside the policy, and those that also generate and save a checkpoint: engines that sleep at both
levels are among them."""


def test_with_every_knob_off_nothing_unknown_is_left_and_no_operation_of_an_update_waits(on_virtual_gpu, folder):
    plain = on_virtual_gpu(live, all_off(), folder)
    assert misplaced(all_off(), plain) == []
    # Metrics and log-probs come in one copy, whose event the host waits for after the last launch; probes wait around phases.
    assert [op for op in plain.waits if "synchronize" not in op] == []


@pytest.mark.parametrize("number", range(len(LIVES)))
def test_knobs_together_run_and_rest_where_they_say(number, on_virtual_gpu, folder):
    """All rows together have every option but those that need four ranks or a package."""
    critic = number in WITH_CRITIC
    life = on_virtual_gpu(live, LIVES[number], folder, whole=number in WHOLE, critic=critic)
    assert not critic or life.rests["update_critic"]["critic"] > 0 or LIVES[number]["actor offload_policy"] == "on"
    assert misplaced(LIVES[number], life) == []


def test_a_reference_that_streams_leaves_its_norm_alone_on_the_device(on_virtual_gpu, folder):
    stays, streams = (on_virtual_gpu(live, all_off(), folder, whole=False, more=more) for more in (None, STREAMS))
    assert misplaced(all_off(), streams) == []
    assert [op for op in streams.waits if "synchronize" not in op] == []
    assert {phase: kinds["reference"] for phase, kinds in streams.rests.items() if kinds["reference"] > SLACK_BYTES} == {}
    assert streams.peaks["ref"] < stays.peaks["ref"]


def test_weights_that_an_engine_shares_on_the_first_of_two_ranks_run_their_whole_life(on_virtual_gpu, folder):
    fsdp = "actor_rollout_ref.actor.fsdp_config"
    more = {"actor_rollout_ref.rollout.share_weights": True, "actor_rollout_ref.rollout.dtype": "bfloat16"}
    more |= {f"{fsdp}.split_master_weights": True, f"{fsdp}.model_dtype": "fp32", f"{fsdp}.dtype": "bfloat16"}
    more |= {f"{fsdp}.grad_offload": True}
    row = all_off() | {"actor optimizer_offload": "on"}
    life = on_virtual_gpu(live, row, folder, 2, more=more)
    assert misplaced(row, life) == []
    assert [op for op in life.waits if "synchronize" not in op] == []


def test_options_of_four_ranks_run_and_rest_where_they_say(on_virtual_gpu, folder):
    row = pair_row(frozenset(FOUR_RANKS))
    life = on_virtual_gpu(live, row, folder, 4, whole=False, critic=True)
    assert misplaced(row, life) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(EXACT)))
def test_knobs_together_on_the_first_of_two_ranks_run_and_rest_where_they_say(number, on_virtual_gpu, folder):
    life = on_virtual_gpu(live, EXACT[number], folder, 2, whole=False, critic=True)
    assert misplaced(EXACT[number], life) == []


def test_a_critic_at_rest_leaves_no_byte_on_the_device_outside_its_phases(on_virtual_gpu, folder):
    """Its peaks elsewhere are those of a run without a critic, but for three small tensors of 512 bytes each."""
    row = all_off() | {"actor param_offload": "on", "actor optimizer_offload": "on"}
    without, beside = (on_virtual_gpu(live, row, folder, whole=False, critic=critic) for critic in (False, True))
    assert misplaced(row, beside) == []
    for phase in without.peaks:
        # Two tables of rotary frequencies, and the optimizer's count of its steps.
        assert beside.peaks[phase] - without.peaks[phase] == 3 * 512, phase
    for phase in ("released", "old_log_prob", "ref", "update_actor", "update_weights"):
        assert (beside.rests[phase]["critic"], beside.rests[phase]["critic's optimizer"]) == (2 * 512, 512), phase


@pytest.mark.parametrize(("shared", "world_size"), [("off", 1), ("on", 2)])
def test_packed_rows_of_every_model_are_compared_on_the_device(shared, world_size, on_virtual_gpu, folder):
    """A worker leaves it out here, for fake tensors have no values to compare."""
    row = all_off() | {"shared prompt": shared, "batching": "tokens"}
    differences = on_virtual_gpu(compare_packed_rows, row, folder, world_size)
    assert [(each.mixing, each.packing) for each in differences] == [(0, 0)] * 3, "what is read of the device is 0"
