import json
from dataclasses import replace

import pytest

from verl_memopt.errors import DeviceMemoryError
from verl_memopt.ladder.plan import Work
from verl_memopt.ladder.row import OutOfMemory, Rung, as_json, split, with_savings

WORK = Work(rows=4, prompt=24, response=8, group=4)
RAN_OUT = OutOfMemory("update_actor", asked_bytes=5, held_bytes=8, limit_bytes=10)


def rung(knob, logits):
    phase_kinds = {phase: {"logits": logits} for phase in ("update_actor", "old_log_prob")}
    return Rung(knob, (), {"update_actor": 100}, {"logits": logits}, 100, 0, 1.5, 0.1, 0.2, phase_kinds)


def test_the_figures_of_an_error_are_kept_and_the_error_is_not():
    error = DeviceMemoryError("gen: full", "gen", 3, 8, 10)
    assert OutOfMemory.of(error) == OutOfMemory("gen", 3, 8, 10)


def test_a_rung_says_whether_it_ran_out():
    assert rung("all off", 40).status == "ok"
    assert replace(rung("all off", 40), out_of_memory=RAN_OUT).status == "out of memory"


@pytest.mark.parametrize("failed", ["rung", "base"])
def test_a_saving_is_not_measured_where_either_side_ran_out(failed, shapes_pair):
    base, above = rung("all off", 40), rung("chunked_logprob", 10)
    assert {saving.measured_bytes for saving in with_savings(above, base, *shapes_pair).savings} == {30}
    if failed == "rung":
        above = Rung("chunked_logprob", (), {}, out_of_memory=RAN_OUT)
    else:
        base = Rung("all off", (), {}, out_of_memory=RAN_OUT)
    given = with_savings(above, base, *shapes_pair)
    assert {saving.measured_bytes for saving in given.savings} == {None}
    assert given.base == "all off"
    assert all(isinstance(saving.formula_bytes, int) for saving in given.savings)


@pytest.fixture
def shapes_pair(tiny_folder):
    """The symbols of the formulas without and with chunked log-probs."""
    from verl_memopt.ladder.measure import shapes
    from verl_memopt.ladder.plan import steps

    first, second = steps(WORK)[:2]
    return shapes(tiny_folder, WORK, first.overrides), shapes(tiny_folder, WORK, second.overrides)


def test_branches_are_apart_from_the_climb():
    climbed, branches = split([rung("all off", 1), rung("lora", 1), rung("chunked_logprob", 1)])
    assert [one.knob for one in climbed] == ["all off", "chunked_logprob"]
    assert [one.knob for one in branches] == ["lora"]


def test_plain_values_say_model_work_status_and_where_a_rung_ran_out():
    failed = Rung("all off", ("a=1",), {"ref": 7}, out_of_memory=RAN_OUT)
    plain = json.loads(json.dumps(as_json([failed, rung("chunked_logprob", 10), rung("lora", 1)], WORK, "m")))
    assert (plain["schema"], plain["model"], plain["work"]["prompt"]) == (3, "m", 24)
    first, second = plain["rungs"]
    assert (first["knob"], first["status"], first["peak_device_bytes"]) == ("all off", "out of memory", None)
    assert first["out_of_memory"] == {"phase": "update_actor", "asked_bytes": 5, "held_bytes": 8, "limit_bytes": 10}
    assert (second["status"], second["out_of_memory"], second["peak_device_bytes"]) == ("ok", None, 100)
    assert [one["knob"] for one in plain["branches"]] == ["lora"]
