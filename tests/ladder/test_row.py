import json
import pickle
from dataclasses import replace

import pytest

from verl_memopt.errors import DeviceMemoryError, OutOfMemory
from verl_memopt.ladder.measure import Row, Work, as_json, split, with_savings

WORK = Work(rows=4, prompt=24, response=8, group=4)
RAN_OUT = OutOfMemory("update_actor", asked_bytes=5, held_bytes=8, limit_bytes=10)


def row(knob, logits):
    """Return a row that fits, with so many bytes of logits."""
    phase_kinds = {phase: {"logits": logits} for phase in ("update_actor", "old_log_prob")}
    return Row(knob, (), {"update_actor": 100}, {"logits": logits}, 100, 0, 1.5, 0.1, 0.2, phase_kinds)


def test_the_figures_of_an_error_come_with_it_from_another_process():
    error = pickle.loads(pickle.dumps(DeviceMemoryError("gen: full", OutOfMemory("gen", 3, 8, 10))))
    assert (str(error), error.figures) == ("gen: full", OutOfMemory("gen", 3, 8, 10))


def test_a_row_says_whether_it_ran_out():
    assert row("all off", 40).status == "ok"
    assert replace(row("all off", 40), out_of_memory=RAN_OUT).status == "out of memory"


@pytest.mark.parametrize("failed", ["row", "base"])
def test_a_saving_is_not_measured_where_either_side_ran_out(failed, shapes_pair):
    base, compared_row = row("all off", 40), row("chunked_logprob", 10)
    assert {saving.measured_bytes for saving in with_savings(compared_row, base, *shapes_pair).savings} == {30}
    if failed == "row":
        compared_row = Row("chunked_logprob", (), {}, out_of_memory=RAN_OUT)
    else:
        base = Row("all off", (), {}, out_of_memory=RAN_OUT)
    compared = with_savings(compared_row, base, *shapes_pair)
    assert {saving.measured_bytes for saving in compared.savings} == {None}
    assert compared.base == "all off"
    assert all(isinstance(saving.formula_bytes, int) for saving in compared.savings)


@pytest.fixture
def shapes_pair(tiny_folder):
    """Return the sizes that the formulas read, without and with chunked log-probs."""
    from verl_memopt.ladder.measure import plan_rows, shapes

    first, second = plan_rows(WORK)[:2]
    return shapes(tiny_folder, WORK, first.overrides), shapes(tiny_folder, WORK, second.overrides)


def test_alternatives_are_apart_from_the_ablation():
    ablation, alternatives = split([row("all off", 1), row("lora", 1), row("chunked_logprob", 1)])
    assert [one.knob for one in ablation] == ["all off", "chunked_logprob"]
    assert [one.knob for one in alternatives] == ["lora"]


def test_plain_values_say_model_work_status_and_where_a_row_ran_out():
    failed = Row("all off", ("a=1",), {"ref": 7}, out_of_memory=RAN_OUT)
    plain = json.loads(json.dumps(as_json([failed, row("chunked_logprob", 10), row("lora", 1)], WORK, "m")))
    assert (plain["schema"], plain["model"], plain["work"]["prompt"]) == (3, "m", 24)
    first, second = plain["rungs"]
    assert (first["knob"], first["status"], first["peak_device_bytes"]) == ("all off", "out of memory", None)
    assert first["out_of_memory"] == {"phase": "update_actor", "asked_bytes": 5, "held_bytes": 8, "limit_bytes": 10}
    assert (second["status"], second["out_of_memory"], second["peak_device_bytes"]) == ("ok", None, 100)
    assert [one["knob"] for one in plain["branches"]] == ["lora"]
