import dataclasses

from recipe.rloo.memory_study.arms import saving_arms, whole_run_arms
from recipe.rloo.memory_study.measure_cell import measure_cell
from recipe.rloo.memory_study.records import Cell
from recipe.rloo.memory_study.shapes import SMALL

SHARED = next(arm for arm in saving_arms([2]) if arm.update == "shared_prompt")


def test_a_cell_is_measured_at_its_shapes():
    records = measure_cell(Cell(SHARED, 0, 0, "cpu", None, shapes="small"))
    assert {(record.prompt_len, record.response_len, record.rows) for record in records} == {(SMALL.prompt, SMALL.response, 2)}
    assert {record.measured_by for record in records} == {"byte tracker"}
    assert records[0].loss is not None
    assert any(record.timeline for record in records)


def test_a_documents_file_is_the_prompt(tmp_path):
    path = tmp_path / "document.txt"
    path.write_text("word " * 200)
    cell = Cell(SHARED, 0, 0, "cpu", None, shapes="small")
    ids = {each.ids_sha256 for cell in (cell, dataclasses.replace(cell, documents=str(path))) for each in measure_cell(cell)}
    assert len(ids) == 2


def test_a_whole_step_has_its_phases_and_no_ids_to_compare():
    (arm,) = whole_run_arms()
    arm = dataclasses.replace(arm, k=2, micro_batch=2)
    records = measure_cell(Cell(arm, 0, 0, "cpu", None, shapes="small"))
    assert [record.phase for record in records] == ["gen", "old_log_prob", "ref", "update_actor", "update_weights"]
    assert all(record.allocated_peak > 0 for record in records)
    assert {record.ids_sha256 for record in records} == {""}
