import dataclasses

import pytest

from recipe.rloo.memory_study.controls import check, tolerance
from recipe.rloo.memory_study.records import CellResult, Failure
from tests.recipe.rloo.memory_study.stand_in import SAVING, STRING, TOKEN, cell, measure_cell


def result(*arguments, **changes):
    measured = cell(*arguments, **changes)
    return CellResult(measured, "completed", tuple(measure_cell(measured)))


def outcomes(results):
    return {checked.cell.name: checked.outcome for checked in check(results)[0]}


def with_records(result, **changes):
    return dataclasses.replace(result, records=tuple(dataclasses.replace(record, **changes) for record in result.records))


def test_arms_that_computed_the_same_pass():
    results = [result(), result(STRING), result(SAVING), result(TOKEN, 1)]
    checked, controls = check(results)
    assert checked == results
    assert (controls.ids_groups, controls.values_groups, controls.diverged) == (1, 1, {})
    assert 0 <= controls.loss_error < 1e-6
    assert 0 <= controls.grad_norm_error < 1e-6


def test_other_ids_diverge_and_the_reason_names_both_cells():
    checked, _ = check([result(), result(STRING, name="other_ids")])
    assert [each.outcome for each in checked] == ["completed", "diverged"]
    assert "ids" in checked[1].failure.message
    assert "token_full_legacy_k2_r0" in checked[1].failure.message


def test_the_published_token_arm_is_what_the_others_are_compared_with():
    assert outcomes([result(SAVING, name="other_ids"), result(STRING), result()]) == {
        "other_ids_k2_r0": "diverged",
        "string_full_legacy_k2_r0": "completed",
        "token_full_legacy_k2_r0": "completed",
    }


def test_another_loss_with_the_same_ids_diverges():
    checked, controls = check([result(), result(SAVING, name="other_loss")])
    assert [each.outcome for each in checked] == ["completed", "diverged"]
    assert controls.loss_error == pytest.approx(0.5, rel=1e-5)


def test_a_truncated_prompt_has_ids_of_its_own():
    cut = result(prompt="truncated", name="token_truncated_legacy")
    checked, controls = check([result(), cut])
    assert [each.outcome for each in checked] == ["completed", "completed"]
    assert controls.ids_groups == controls.values_groups == 2


def test_micro_batches_change_neither_ids_nor_values():
    checked, controls = check([result(k=4, micro_batch=4), result(k=4, micro_batch=1, name="one_row")])
    assert [each.outcome for each in checked] == ["completed", "completed"]
    assert controls.grad_norm_error < 1e-6


def test_values_of_another_program_are_not_compared():
    elsewhere = with_records(result(STRING), values_from="a smaller prompt", loss=100.0)
    assert check([result(), elsewhere])[1].diverged == {}


def test_values_of_the_same_run_in_float64_are_compared():
    wide, narrow = (f"{dtype}, real tensors, prompt of 48" for dtype in ("float64", "float32"))
    first = with_records(result(), values_from=wide)
    assert check([first, with_records(result(STRING), values_from=narrow)])[1].diverged == {}
    assert check([first, with_records(result(STRING), values_from=narrow, loss=100.0)])[1].diverged


def test_a_missing_loss_is_not_an_equal_loss():
    assert outcomes([result(), with_records(result(STRING), loss=None)])["string_full_legacy_k2_r0"] == "diverged"
    assert set(outcomes([with_records(each, loss=None, grad_norm=None) for each in (result(), result(STRING))]).values()) == {
        "completed"
    }


def test_a_repeat_with_other_bytes_diverges_unless_a_device_counted_them():
    first, second = result(), result(TOKEN, 1)
    more = with_records(second, allocated_peak=second.records[0].allocated_peak + 1)
    assert outcomes([first, more])["token_full_legacy_k2_r1"] == "diverged"
    device = [with_records(each, measured_by="device allocator") for each in (first, more)]
    assert set(outcomes(device).values()) == {"completed"}


def test_a_run_that_samples_its_answers_is_compared_with_none():
    sampled = with_records(result(SAVING), ids_sha256="", loss=None, grad_norm=None)
    checked, controls = check([result(), sampled])
    assert [each.outcome for each in checked] == ["completed", "completed"]
    assert controls.ids_groups == controls.values_groups == 1


def test_a_cell_that_did_not_complete_is_left_as_it_is():
    failed = CellResult(cell(name="raises"), "failed", (), Failure("ValueError", "no"))
    assert check([failed, result()])[0][0] is failed


def test_bf16_values_may_differ_more():
    fp32 = result().records[0]
    bf16 = dataclasses.replace(fp32, dtype="float32, autocast bfloat16")
    assert (tolerance(fp32, fp32), tolerance(fp32, bf16), tolerance(bf16, fp32)) == (1e-5, 1e-2, 1e-2)
    elsewhere = dataclasses.replace(bf16, values_from="float32, a short prompt")
    assert tolerance(elsewhere, fp32) == 1e-5
