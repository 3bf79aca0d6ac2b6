from itertools import pairwise

from verl_memopt.ladder.plan import BRANCHES, CLIMB, Work, ladder_settings, steps
from verl_memopt.memory.knobs import index, knob_named

WORK = Work(rows=4, prompt=24, response=8, group=4)


def test_the_ladder_goes_from_all_off_to_all_on_one_knob_at_a_time():
    climbed = [step for step in steps(WORK) if step.knob not in BRANCHES]
    assert [step.knob for step in climbed] == ["all off", *CLIMB]
    assert [step.base for step in climbed] == ["", "all off", *CLIMB[:-1]]
    for below, step in pairwise(climbed):
        changed = {override.split("=")[0] for override in set(step.overrides) - set(below.overrides)}
        assert changed <= {override.split("=")[0] for override in knob_named(step.knob).on}


def test_a_branch_adds_its_knob_to_the_rung_it_names():
    found = {step.knob: step for step in steps(WORK)}
    for name, base in BRANCHES.items():
        assert set(found[name].overrides) - set(found[base].overrides) <= set(knob_named(name).on)


def test_every_knob_that_an_update_can_show_is_a_rung_or_a_branch():
    shown = {*CLIMB, *BRANCHES}
    assert {entry.name for entry in index()} - shown == {"limits", "profiles"}
    assert all(entry.on and entry.off for entry in index() if entry.name in shown)


def test_a_knob_that_is_on_is_not_off_as_well():
    for step in steps(WORK):
        keys = [override.split("=")[0] for override in step.overrides]
        assert len(keys) == len(set(keys))


def test_every_rung_is_a_valid_configuration(tiny_folder):
    for step in steps(WORK):
        assert ladder_settings(str(tiny_folder), WORK, step.overrides).trainer.worker_group == "local"
