import pytest
import torch

from verl_memopt.errors import ConfigError
from verl_memopt.models.tiny import TinyShape, make_tiny_model
from verl_memopt.trainer.ladder import as_json, climb, make_batch
from verl_memopt.trainer.ladder_plan import BRANCHES, CLIMB, Work

WORK = Work(rows=4, prompt=24, response=8, group=4)
WIDE_WORK = Work(rows=8, prompt=256, response=64, group=8)
SHAPE = TinyShape(vocab_size=8192, hidden_size=128, intermediate_size=384, num_layers=6, num_heads=4, num_kv_heads=2, head_dim=32)
SMALLER = (
    "actor_rollout_ref.model.activation_offload_min_bytes=1024", "actor_rollout_ref.actor.optim.bucket_megabytes=0.25",
)  # fmt: skip
"""Sizes that suit a tiny model: tensors worth moving, and buckets of the optimizer."""
SMALL = 2**15
"""Bytes in which a formula may be off where it says that nothing is saved, or next to nothing."""


def test_a_knob_that_is_not_on_the_ladder_is_refused_by_name(tiny_folder):
    with pytest.raises(ConfigError, match=r"--only tiled: not on the ladder. It has all off, chunked_logprob"):
        list(climb(str(tiny_folder), WORK, only=["tiled"]))


def test_the_batch_is_the_same_for_the_same_work():
    one, two = make_batch(WORK), make_batch(WORK)
    assert one.num_rows == 4
    assert one.prompts.sizes() == [24] * 4
    assert all(torch.equal(prompt, one.prompts.rows()[0]) for prompt in one.prompts.rows())
    assert one.responses.sizes() == [8] * 4
    assert (one.responses.flat == two.responses.flat).all()
    assert (one.advantages == two.advantages).all()


@pytest.fixture(scope="module")
def rungs(tmp_path_factory):
    folder = make_tiny_model(tmp_path_factory.mktemp("ladder") / "model", SHAPE)
    return {rung.knob: rung for rung in climb(str(folder), WIDE_WORK, SMALLER)}


def test_a_rung_reports_phases_kinds_and_bytes(rungs):
    off = rungs["all off"]
    assert off.phases.keys() == {"old_log_prob", "ref", "update_actor", "update_weights"}
    assert off.peak_device_bytes == max(off.phases.values()) == sum(off.kinds.values())
    assert all(rung.host_bytes == 0 for rung in list(rungs.values())[:5])
    assert rungs["optimizer_state_dtype"].host_bytes > 0


def test_exact_knobs_change_no_number(rungs):
    off = rungs["all off"]
    for name in (*CLIMB[: CLIMB.index("precision")], "optimizer_in_backward", "native_offload", "load_mode"):
        assert rungs[name].loss == pytest.approx(off.loss, rel=1e-5), name
        assert rungs[name].grad_norm == pytest.approx(off.grad_norm, rel=1e-5), name


@pytest.mark.parametrize("name", [*CLIMB, *BRANCHES])
def test_every_rung_saves_what_its_knobs_formula_says(rungs, name):
    for saving in rungs[name].savings:
        assert saving.measured_bytes == pytest.approx(saving.formula_bytes, rel=0.1, abs=SMALL), saving


def test_rungs_without_a_claim_hold_no_more_than_the_rung_below(rungs):
    for name in CLIMB:
        if not rungs[name].savings:
            below = rungs[rungs[name].base]
            assert rungs[name].peak_device_bytes <= below.peak_device_bytes * 1.001, name


def test_all_on_holds_a_fraction_of_all_off(rungs):
    assert rungs[CLIMB[-1]].peak_device_bytes <= rungs["all off"].peak_device_bytes / 8


def test_plain_values_name_model_work_rungs_and_branches(rungs):
    plain = as_json(list(rungs.values()), WIDE_WORK, "m")
    assert plain["work"]["prompt"] == WIDE_WORK.prompt
    assert [rung["knob"] for rung in plain["rungs"]] == ["all off", *CLIMB]
    assert {rung["knob"]: rung["base"] for rung in plain["branches"]} == BRANCHES
    assert {"knob", "phases", "kinds", "peak_device_bytes", "host_bytes", "seconds"} <= plain["rungs"][0].keys()
