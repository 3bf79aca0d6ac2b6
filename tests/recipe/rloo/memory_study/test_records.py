import dataclasses

import pytest

from recipe.rloo.memory_study.arms import ARMS
from recipe.rloo.memory_study.records import (
    EXIT_CODES,
    Cell,
    CellResult,
    Failure,
    OutOfMemory,
    UpdateRecord,
    read_result,
    worst,
    write_result,
)

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
    assert worst({"completed"}) == "completed"
    assert worst({"completed", "oom"}) == "oom"
    assert worst({"oom", "timeout", "diverged"}) == "diverged"
    assert worst(set(EXIT_CODES)) == "failed"


def test_a_cell_with_a_limit_has_a_file_of_its_own():
    cell = RESULT.cell
    assert cell.name != dataclasses.replace(cell, limit_bytes=1).name != dataclasses.replace(cell, repeat=2).name


def test_running_out_of_memory_names_phase_tensor_and_bytes():
    error = OutOfMemory("forward", 1000, 2000, "[2, 5] float32")
    assert str(error) == "forward: no room for 1,000 bytes [2, 5] float32 beside the 2,000 that are held"
    assert (error.phase, error.peak_bytes) == ("forward", 2000)
    assert OutOfMemory("forward", 1, 2, peak_bytes=3).peak_bytes == 3
