import dataclasses
import os

import pytest
import torch

from recipe.rloo.memory_study.cells import EXIT_CODES, Cell, OutOfMemory, main_arms, read_result, saving_arms
from recipe.rloo.memory_study.runner import How, failure_of, measured, outcome_of, run_cells, run_study, shuffled
from tests.recipe.rloo.memory_study.stand_in import SAVING, STRING, TOKEN, cell, measure_cell
from verl_memopt import errors
from verl_memopt.errors import ConfigError, DeviceMemoryError

STAND_IN = "tests.recipe.rloo.memory_study.stand_in:measure_cell"


@pytest.fixture
def how(tmp_path):
    return How(tmp_path, STAND_IN, time_limit=120, jobs=2)


def pid_cell(cell):
    """Measure as the stand-in does, with the id of the process that ran in place of its seconds."""
    return [dataclasses.replace(record, seconds=os.getpid()) for record in measure_cell(cell)]


def test_each_cell_runs_in_a_process_of_its_own_and_a_result_is_what_that_measured(how):
    how = dataclasses.replace(how, measure=f"{__name__}:pid_cell")
    results = list(run_cells([cell(), cell(repeat=1), cell(STRING)], how))
    assert [result.outcome for result in results] == ["completed"] * 3
    pids = {record.seconds for result in results for record in result.records}
    assert len(pids) == 3
    assert os.getpid() not in pids
    assert all(result == read_result(how.path(result.cell)) for result in results)
    first = next(result for result in results if result.cell == cell())
    assert [dataclasses.replace(record, seconds=0, timeline=()) for record in first.records] == [
        dataclasses.replace(record, seconds=0, timeline=()) for record in measure_cell(cell())
    ]
    assert first.host_rss > 2**20
    assert first.versions["torch"] == torch.__version__


def test_every_way_to_end_has_its_outcome_and_the_others_still_run(how):
    how = dataclasses.replace(how, time_limit=20)
    cells = [cell(), cell(name="raises"), cell(name="refuses"), cell(name="dies"), cell(limit_bytes=30_000)]
    results = {result.cell.arm.name + str(result.cell.limit_bytes or ""): result for result in run_cells(cells, how)}
    assert {name: result.outcome for name, result in results.items()} == {
        "token_full_legacy": "completed",
        "raises": "failed",
        "refuses": "refused",
        "dies": "failed",
        "token_full_legacy30000": "oom",
    }
    assert results["dies"].failure.message.startswith("killed by signal 9")
    assert results["raises"].failure.error == "ValueError"
    log = how.path(results["raises"].cell).with_suffix(".log").read_text()
    assert log.rstrip().endswith("ValueError: something is wrong")


def test_a_cell_that_hangs_is_ended_at_the_time_limit(how):
    (result,) = run_cells([cell(name="hangs")], dataclasses.replace(how, time_limit=1))
    assert result.outcome == "timeout"
    assert read_result(how.path(result.cell)) == result


def test_running_out_of_memory_keeps_phase_bytes_and_tensor():
    result = measured(cell(limit_bytes=40_000), measure_cell)
    assert (result.outcome, result.records) == ("oom", ())
    failure = result.failure
    assert (failure.phase, failure.error) == ("forward", "OutOfMemory")
    assert failure.held_bytes + failure.requested_bytes > 40_000 >= failure.held_bytes
    assert failure.shape.startswith("aten")
    failure = failure_of(DeviceMemoryError("no  room", errors.OutOfMemory("update_actor", 1, 2, 3)))
    assert (failure.phase, failure.requested_bytes, failure.held_bytes, failure.message) == ("update_actor", 1, 2, "no room")


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (OutOfMemory("forward", 1, 2), "oom"),
        (torch.OutOfMemoryError("no room"), "oom"),
        (DeviceMemoryError("no room", errors.OutOfMemory("update_actor", 1, 2, 3)), "oom"),
        (MemoryError(), "oom"),
        (ConfigError("no"), "refused"),
        (ValueError("no"), "failed"),
    ],
)
def test_an_error_says_the_outcome(error, outcome):
    assert outcome_of(error) == outcome
    assert outcome in EXIT_CODES


def test_the_seed_alone_decides_the_order():
    cells = [Cell(arm, 0, 0, "cpu", None) for arm in main_arms()]
    assert shuffled(cells, 1) == shuffled(cells, 1) != cells
    assert sorted(shuffled(cells, 1), key=cells.index) == cells


def study(arms, how, device="cpu", limit_bytes=None, repeats=1, more_ks=True, planned=()):
    def cells(arm):
        return [Cell(arm, repeat, 0, device, limit_bytes) for repeat in range(repeats)]

    return list(run_study(arms, cells, 0, how, more_ks, [] if planned == () else planned))


def test_a_study_goes_on_to_larger_groups_of_what_completed_until_one_has_no_room(how):
    arms = [*main_arms([8])[:1], *saving_arms([8])[:1], dataclasses.replace(TOKEN, name="raises", k=8)]
    planned = []
    results = study(arms, how, limit_bytes=500_000, planned=planned)
    assert len(planned) == len(results)
    assert sorted((result.cell.arm.name, result.cell.arm.k, result.outcome) for result in results) == [
        ("raises", 8, "failed"),
        *(("token_full_legacy", k, "completed") for k in (8, 16, 32)),
        ("token_full_no_retention", 8, "completed"),
        ("token_full_no_retention", 16, "oom"),
    ]


def test_a_simulated_cell_without_room_shows_what_it_would_need_and_another_limit_replaces_it(how):
    results = study([TOKEN, SAVING], how, "fake", 100_000, repeats=2, more_ks=False)
    outcomes = sorted((result.cell.arm.update, result.cell.limit_bytes or 0, result.outcome) for result in results)
    assert outcomes == [
        ("legacy", 0, "completed"),
        *[("legacy", 100_000, "oom")] * 2,
        *[("response_only", 100_000, "completed")] * 2,
    ]
    study([TOKEN, SAVING], how, "fake", None, repeats=2, more_ks=False)
    assert {read_result(path).cell.limit_bytes for path in (how.out / "cells").glob("*.json")} == {None}
