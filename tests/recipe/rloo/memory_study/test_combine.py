import csv
import dataclasses
import json

import pytest

from recipe.rloo.memory_study.combine import combine, sample_rows
from recipe.rloo.memory_study.monitor import Reading, sample
from recipe.rloo.memory_study.records import write_result
from tests.recipe.rloo.memory_study.hand_made import GIB, MIB, completed, out_of_memory, published
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


def test_each_phase_is_a_row_and_what_nobody_measured_is_empty(results):
    folder = results(completed(published(), 4 * MIB, 6 * MIB))
    combine(folder)
    forward, backward = rows_of(folder)
    assert (forward["phase"], backward["phase"], backward["source"]) == ("forward", "backward", "phase")
    assert (backward["allocated_peak"], backward["reserved_peak"]) == (str(4 * MIB), str(6 * MIB))
    assert (backward["k"], backward["m"], backward["b"], backward["rloo_k"], backward["method_rloo"]) == (
        "2",
        "2",
        "1",
        "2",
        "token_2",
    )
    assert backward["gpu_memory_allocated_mb"] == backward["gpu_utilization_percent"] == backward["device_used"] == ""


def test_a_run_without_room_is_a_row_with_its_phase_and_tensor_and_no_peak(results):
    folder = results(out_of_memory(published(k=8)))
    combine(folder)
    (row,) = rows_of(folder)
    assert (row["source"], row["outcome"], row["failed_phase"]) == ("outcome", "oom", "backward")
    assert (row["requested_bytes"], row["peak_before_failure"]) == (str(14 * GIB), str(24 * GIB))
    assert row["failed_shape"] == "[8, 3115, 151669] float32"
    assert row["allocated_peak"] == row["reserved_peak"] == ""


def test_the_readings_of_a_device_are_rows_with_the_published_units(tmp_path):
    path = tmp_path / "samples.csv"
    ends = iter([False, False, True])
    levels = iter([1024, 3072])
    sample(lambda: Reading(next(levels) * MIB, 0, 4096 * MIB, 10, None), path, 0.0, MIB, lambda _: next(ends))
    first, second = sample_rows(completed(published(), 1), path)
    assert (first["gpu_memory_allocated_gb"], second["gpu_memory_allocated_gb"]) == (1.0, 3.0)
    assert (first["time_normalized"], second["time_normalized"]) == (0.0, 1.0)
    assert (first["source"], first["method"], first["gpu_memory_reserved_gb"]) == ("sample", "token", "")
    assert list(sample_rows(completed(published(), 1), tmp_path / "none.csv")) == []


def test_a_summary_counts_outcomes_and_takes_the_worst(results):
    summary = combine(results(completed(published(), 1, 2, limit=GIB), out_of_memory(published(k=8), GIB)))
    assert summary["outcomes"] == {"completed": 1, "oom": 1}
    assert summary["outcome"] == "oom"
    assert summary == json.loads(json.dumps(summary))


def test_what_a_simulation_would_need_is_no_outcome_of_the_study(results):
    arm = published(k=8)
    summary = combine(results(out_of_memory(arm), completed(arm, 40 * GIB, 50 * GIB)))
    assert summary["outcomes"] == {"oom": 1}
    assert summary["rows"][0]["without_limit"]["reserved_peak"]["median"] == 50 * GIB


def test_arms_that_differ_are_diverged_in_every_file(results):
    other = completed(published("string"), 1, 2)
    other = dataclasses.replace(other, records=tuple(dataclasses.replace(each, loss=9.0) for each in other.records))
    folder = results(completed(published(), 1, 2), other)
    summary = combine(folder)
    assert summary["outcome"] == "diverged"
    assert list(summary["controls"]["diverged"]) == ["string_full_legacy_coupled_k2_r0"]
    assert {(row["expansion"], row["outcome"]) for row in rows_of(folder)} == {("token", "completed"), ("string", "diverged")}


def test_a_folder_without_results_says_how_to_make_some(tmp_path):
    with pytest.raises(DataError, match=r"no results\. Run the study first"):
        combine(tmp_path)
