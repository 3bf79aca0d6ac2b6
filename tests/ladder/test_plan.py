from itertools import pairwise

from verl_memopt.knobs.index import knob_named, knobs
from verl_memopt.ladder.plan import BRANCHES, CLIMB, Work, ladder_settings, steps

WORK = Work(rows=4, prompt=24, response=8, group=4)


def test_the_ladder_goes_from_all_off_to_all_on_one_knob_at_a_time():
    climbed = [step for step in steps(WORK) if step.knob not in BRANCHES]
    assert [step.knob for step in climbed] == ["all off", *CLIMB]
    assert [step.base for step in climbed] == ["", "all off", *CLIMB[:-1]]
    for below, step in pairwise(climbed):
        changed = {override.split("=")[0] for override in set(step.overrides) - set(below.overrides)}
        assert changed <= {override.split("=")[0] for override in knob_named(step.knob).row.on}


def test_a_branch_adds_its_knob_to_the_rung_it_names():
    found = {step.knob: step for step in steps(WORK)}
    for name, base in BRANCHES.items():
        assert set(found[name].overrides) - set(found[base].overrides) <= set(knob_named(name).row.on)


def test_every_knob_that_an_update_can_show_is_a_rung_or_a_branch():
    shown = {*CLIMB, *BRANCHES}
    assert {knob.name for knob in knobs()} - shown == {"limits", "profiles"}
    assert all(knob.row.on and knob.row.off for knob in knobs() if knob.name in shown)


def test_a_knob_that_is_on_is_not_off_as_well():
    for step in steps(WORK):
        keys = [override.split("=")[0] for override in step.overrides]
        assert len(keys) == len(set(keys))


def test_every_rung_is_a_valid_configuration(tiny_folder):
    for step in steps(WORK):
        assert ladder_settings(str(tiny_folder), WORK, step.overrides).trainer.worker_group == "local"


def test_the_ladder_keeps_its_order():
    """Committed ladders are compared row by row."""
    assert CLIMB[:3] == ("chunked_logprob", "shared_prompt", "bucketed_adamw")
    assert CLIMB[-3:] == ("precision", "stochastic_rounding", "optimizer_state_dtype")
    assert BRANCHES["load_mode"] == "param_offload"
