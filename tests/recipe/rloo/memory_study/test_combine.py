import csv
import dataclasses
import json

import pytest

from recipe.rloo.memory_study.cells import (
    ARMS,
    EXIT_CODES,
    Cell,
    CellResult,
    Failure,
    UpdateRecord,
    read_result,
    worst,
    write_result,
)
from recipe.rloo.memory_study.results import check, combine
from tests.recipe.rloo.memory_study.hand_made import GIB, MIB, completed, out_of_memory, published
from tests.recipe.rloo.memory_study.stand_in import SAVING, STRING, TOKEN, cell, measure_cell
from verl_memopt.errors import DataError


@pytest.fixture
def results(tmp_path):
    """A way to put results into a folder."""

    def write(*results):
        (tmp_path / "cells").mkdir(exist_ok=True)
        for result in results:
            write_result(tmp_path / "cells" / f"{result.cell.name}.json", result)
        return tmp_path

    return write


def rows_of(path):
    with (path / "combined.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_each_phase_is_a_row_and_a_run_without_room_one_without_a_peak(results):
    folder = results(completed(published(), 4 * MIB, 6 * MIB), out_of_memory(published(k=8)))
    combine(folder)
    forward, backward, failed = rows_of(folder)
    assert (forward["phase"], backward["phase"], backward["source"]) == ("forward", "backward", "phase")
    assert (backward["allocated_peak"], backward["reserved_peak"]) == (str(4 * MIB), str(6 * MIB))
    assert [backward[name] for name in ("k", "m", "b", "rloo_k", "method_rloo")] == ["2", "2", "1", "2", "token_2"]
    assert backward["gpu_memory_allocated_mb"] == backward["gpu_utilization_percent"] == backward["device_used"] == ""
    assert (failed["source"], failed["outcome"], failed["failed_phase"]) == ("outcome", "oom", "backward")
    assert (failed["requested_bytes"], failed["peak_before_failure"]) == (str(14 * GIB), str(24 * GIB))
    assert failed["failed_shape"] == "[8, 3115, 151669] float32"
    assert failed["allocated_peak"] == failed["reserved_peak"] == ""


def test_a_summary_counts_outcomes_takes_the_worst_and_leaves_out_what_a_simulation_would_need(results):
    summary = combine(results(completed(published(), 1, 2, limit=GIB), out_of_memory(published(k=8), GIB)))
    assert summary["outcomes"] == {"completed": 1, "oom": 1}
    assert summary["outcome"] == "oom"
    assert summary == json.loads(json.dumps(summary))
    summary = combine(results(completed(published(k=8), 40 * GIB, 50 * GIB)))
    assert summary["outcomes"] == {"completed": 1, "oom": 1}
    assert summary["rows"][-1]["without_limit"]["reserved_peak"]["median"] == 50 * GIB


def test_a_folder_without_results_says_how_to_make_some(tmp_path):
    with pytest.raises(DataError, match=r"no results\. Run the study first"):
        combine(tmp_path)


def result(*arguments, **changes):
    measured = cell(*arguments, **changes)
    return CellResult(measured, "completed", tuple(measure_cell(measured)))


def outcomes(results):
    return {checked.cell.name: checked.outcome for checked in check(results)[0]}


def with_records(result, **changes):
    return dataclasses.replace(result, records=tuple(dataclasses.replace(record, **changes) for record in result.records))


def test_arms_that_computed_the_same_pass_however_their_rows_are_cut():
    results = [result(), result(STRING), result(SAVING), result(TOKEN, 1)]
    checked, controls = check(results)
    assert checked == results
    assert (controls["ids_groups"], controls["values_groups"], controls["diverged"]) == (1, 1, {})
    assert 0 <= controls["loss_error"] < 1e-6
    assert 0 <= controls["grad_norm_error"] < 1e-6
    checked, controls = check([result(k=4, micro_batch=4), result(k=4, micro_batch=1, name="one_row")])
    assert [each.outcome for each in checked] == ["completed", "completed"]
    assert controls["grad_norm_error"] < 1e-6


def test_other_ids_or_another_loss_diverge_from_the_published_token_arm():
    checked, _ = check([result(SAVING, name="other_ids"), result(STRING), result()])
    assert [each.outcome for each in checked] == ["diverged", "completed", "completed"]
    assert "ids" in checked[0].failure.message
    assert "token_full_legacy_k2_r0" in checked[0].failure.message
    checked, controls = check([result(), result(SAVING, name="other_loss")])
    assert [each.outcome for each in checked] == ["completed", "diverged"]
    assert controls["loss_error"] == pytest.approx(0.5, rel=1e-5)


def test_a_truncated_prompt_and_sampled_answers_are_not_compared_with_the_others():
    cut = result(prompt="truncated", name="token_truncated_legacy")
    checked, controls = check([result(), cut])
    assert [each.outcome for each in checked] == ["completed", "completed"]
    assert controls["ids_groups"] == controls["values_groups"] == 2
    sampled = with_records(result(SAVING), ids_sha256="", loss=None, grad_norm=None)
    checked, controls = check([result(), sampled])
    assert [each.outcome for each in checked] == ["completed", "completed"]
    assert controls["ids_groups"] == controls["values_groups"] == 1


def test_a_repeat_with_other_bytes_diverges_unless_a_device_counted_them():
    first, second = result(), result(TOKEN, 1)
    more = with_records(second, allocated_peak=second.records[0].allocated_peak + 1)
    assert outcomes([first, more])["token_full_legacy_k2_r1"] == "diverged"
    device = [with_records(each, measured_by="device allocator") for each in (first, more)]
    assert set(outcomes(device).values()) == {"completed"}


RECORD = UpdateRecord(
    update=0, phase="backward", rows=2, prompt_len=3, response_len=4, total_tokens=14, dropped_tokens=1, vocab=5,
    dtype="float32", ids_sha256="ab", allocated_enter=1, allocated_peak=9, allocated_exit=2, reserved_peak=None, loss=0.5,
    grad_norm=1.5, seconds=0.25, measured_by="byte tracker", timeline=((0.0, 1, None), (0.1, 9, None)),
)  # fmt: skip
RESULT = CellResult(Cell(ARMS[0], 1, 7, "cpu", None), "completed", (RECORD,), None, 1.0, 2.0, 3, {"torch": "2"})


@pytest.mark.parametrize(
    "result",
    [RESULT, dataclasses.replace(RESULT, outcome="oom", failure=Failure("OutOfMemory", "no room", "forward", 5, 6, "[2]", 6))],
)
def test_a_result_comes_back_from_its_file_as_it_was(result, tmp_path):
    write_result(tmp_path / "cell.json", result)
    assert read_result(tmp_path / "cell.json") == result
    assert [path.name for path in tmp_path.iterdir()] == ["cell.json"]


def test_a_study_ends_with_its_worst_outcome():
    found = [worst(outcomes) for outcomes in ({"completed"}, {"completed", "oom"}, {"oom", "timeout", "diverged"})]
    assert [*found, worst(set(EXIT_CODES))] == ["completed", "oom", "diverged", "failed"]
