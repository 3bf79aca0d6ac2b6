import dataclasses

import pytest

from recipe.rloo.memory_study.arms import saving_arms, whole_run_arms
from recipe.rloo.memory_study.findings import (
    differs,
    expansion_rows,
    findings,
    formula_rows,
    held_bytes,
    process_bytes,
    published_saving,
    rows_of,
    saving_rows,
    spread,
    truncation_rows,
)
from tests.recipe.rloo.memory_study.hand_made import GIB, MIB, completed, out_of_memory, published, record

ARM = published()


def test_a_row_has_the_median_over_repeats_of_the_peaks_of_the_runs():
    results = [completed(ARM, live, 2 * live, repeat) for repeat, live in enumerate((300, 100, 104))]
    (row,) = rows_of(results)
    assert row["peak"] == {"median": 104, "min": 100, "max": 300}
    assert row["reserved_peak"]["median"] == 208
    assert (row["outcome"], row["repeats"], row["peak_phase"]) == ("completed", 3, "backward")
    assert (row["tokens_per_row"], row["dropped_tokens_per_row"]) == (3115, 0)
    assert row["seconds"]["median"] == 2.0


def test_the_warm_up_enters_no_figure():
    records = [record(ARM, 900, update=-1), record(ARM, 100)]
    (row,) = rows_of([completed(ARM, 0, records=records)])
    assert row["peak"]["median"] == 100


def test_a_run_without_room_has_no_peak_and_says_what_it_would_need():
    limited = dataclasses.replace(out_of_memory(ARM))
    (row,) = rows_of([limited, completed(ARM, 40 * GIB, 50 * GIB)])
    assert row["outcome"] == "oom"
    assert "peak" not in row
    assert row["failure"]["phase"] == "backward"
    assert row["without_limit"]["reserved_peak"]["median"] == held_bytes(row) == 50 * GIB
    (alone,) = rows_of([limited])
    assert alone["without_limit"] is None
    assert held_bytes(alone) is None


def test_an_arm_without_a_limit_is_a_row_beside_one_with_a_limit():
    rows = rows_of([completed(ARM, 1, GIB), completed(published(k=4), 1, 2 * GIB, limit=32 * GIB)])
    assert [(row["k"], row["outcome"], row["limit_bytes"]) for row in rows] == [
        (2, "completed", None),
        (4, "completed", 32 * GIB),
    ]


def test_one_repeat_that_failed_is_the_outcome_of_the_row():
    (row,) = rows_of([completed(ARM, 100), dataclasses.replace(out_of_memory(ARM, None), outcome="failed")])
    assert row["outcome"] == "failed"
    assert "peak" not in row


def test_a_difference_counts_beyond_2_mib_and_three_times_the_scatter():
    assert not differs(spread([10 * MIB]), spread([12 * MIB]))
    assert differs(spread([10 * MIB]), spread([12 * MIB + 1]))
    assert not differs(spread([10 * MIB, 14 * MIB]), spread([20 * MIB]))
    assert differs(spread([10 * MIB, 14 * MIB]), spread([25 * MIB]))


def test_the_formula_stands_beside_the_runs_of_the_published_coupling():
    held = 2 * 151_669 * (14 * 3115 + 8 * 100)
    rows = rows_of([completed(published(), 1, int(held * 1.01)), completed(published(coupled=False), 1, held)])
    (compared,) = formula_rows(rows)
    assert compared["formula_bytes"] == 641 * MIB + held
    assert compared["error"] == pytest.approx(0.01 * held / (641 * MIB + held), rel=1e-3)


def test_truncation_alone_gives_the_published_saving():
    """By hand from the reference: 14.26 against 6.38 GiB of the card at k = 2, 26.80 against 11.05 at k = 4."""
    results = []
    for k in (2, 4):
        for prompt, tokens in (("full", 3115), ("truncated", 1124)):
            held = k * 151_669 * (14 * tokens + 8 * 100)
            results.append(completed(published("string", prompt, k), 1, held))
    first, second = truncation_rows(rows_of(results))
    assert first["saving"] == pytest.approx(0.552, abs=5e-4)
    assert second["saving"] == pytest.approx(0.588, abs=5e-4)
    assert first["published_saving"] == pytest.approx(0.555, abs=5e-4)
    assert second["published_saving"] == pytest.approx(0.592, abs=5e-4)
    assert published_saving(8) is None


def test_expansions_are_compared_with_the_same_prompts():
    results = [
        completed(published("token"), 1, 10 * GIB),
        completed(published("lazy"), 1, 10 * GIB + 12 * MIB),
        completed(published("string", "truncated"), 1, 4 * GIB),
    ]
    (compared,) = expansion_rows(rows_of(results))
    base = process_bytes(10 * GIB) + 1109.9 * MIB
    assert compared["apart"] == pytest.approx(12 * MIB / base, rel=1e-6)
    assert compared["ids_equal"] is True
    assert compared["ids_bytes_saved_by_waiting"] == 3015 * 8


def test_a_saving_is_counted_against_the_published_trainer_even_where_that_has_no_room():
    (arm,) = (arm for arm in saving_arms([8]) if arm.update == "shared_prompt")
    base = published(k=8)
    rows = rows_of([out_of_memory(base), completed(base, 45 * GIB, 50 * GIB), completed(arm, 90 * MIB, limit=32 * GIB)])
    (saving,) = saving_rows(rows)
    assert saving["times_smaller"] == 512
    assert saving["saving"] == 1 - 1 / 512
    (alone,) = saving_rows(rows_of([completed(arm, 90 * MIB)]))
    assert alone["times_smaller"] is None


def test_a_whole_step_is_a_finding_of_its_own_and_no_saving():
    (arm,) = whole_run_arms()
    found = findings(rows_of([completed(published(k=8), GIB, GIB), completed(arm, 300 * MIB)]))
    assert found["savings"] == []
    assert [(row["k"], row["peak"]["median"], row["peak_phase"]) for row in found["whole_run"]] == [(8, 300 * MIB, "backward")]
