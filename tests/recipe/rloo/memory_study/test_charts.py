import dataclasses

import pytest
from matplotlib.figure import Figure

from recipe.rloo.memory_study.cells import EXPANSIONS, WHOLE_RUN_ARM, card_bytes, saving_arms
from recipe.rloo.memory_study.charts import draw_methods, draw_peaks, draw_savings, draw_timeline
from recipe.rloo.memory_study.results import (
    cause_table,
    check,
    findings,
    held_bytes,
    methods_table,
    rows_of,
    savings_table,
    summarize,
)
from tests.recipe.rloo.memory_study.hand_made import GIB, MIB, completed, out_of_memory, published

PNG = b"\x89PNG"
LIMIT = 32 * GIB


def study():
    """Return the results of a study in which the whole prompt has no room at k = 8."""
    results = []
    for prompt, tokens in (("full", 3115), ("truncated", 1124)):
        for expansion in EXPANSIONS:
            for k in (2, 4, 8):
                arm = published(expansion, prompt, k)
                held = k * 151_669 * 14 * tokens
                whole = completed(arm, held * 12 // 14, held, limit=None if held > LIMIT else LIMIT)
                results += [out_of_memory(arm), whole] if held > LIMIT else [whole]
            results.append(completed(published(expansion, prompt, 2, coupled=False), 10 * GIB, 12 * GIB, limit=LIMIT))
    results += [completed(arm, arm.k * 20 * MIB, limit=LIMIT) for k in (2, 8, 16) for arm in saving_arms([k])]
    return results


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were written, in order."""
    figures = []
    write = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *places, **how: (figures.append(self), write(self, *places, **how))[1])
    return figures


def words(axes):
    return [text.get_text() for text in axes.texts]


def test_a_run_without_room_is_a_word_and_never_a_bar(tmp_path, drawn):
    checked, controls = check(study())
    draw_peaks(summarize(checked, controls), tmp_path / "peaks.png")
    _published, full, cut, _fixed = drawn[0].axes
    bars = [patch.get_height() for patch in full.patches]
    assert len(bars) == 12
    assert [height == 0 for height in bars] == [False, False, True] * 4
    assert words(full).count("out of\nmemory") == 4
    assert words(cut).count("out of\nmemory") == 0


def test_a_bar_is_as_high_as_the_true_peak(tmp_path, drawn):
    result = completed(published(), 1, 10 * GIB)
    draw_peaks(summarize(*check([result])), tmp_path / "peaks.png")
    heights = [patch.get_height() for patch in drawn[0].axes[1].patches]
    assert max(heights) == pytest.approx((10 * GIB + 641 * MIB + 1109.9 * MIB) / GIB)


def test_a_study_of_nothing_still_draws(tmp_path):
    nothing = summarize(*check([out_of_memory(saving_arms([2])[0], None)]))
    for draw, study in ((draw_peaks, nothing), (draw_methods, nothing), (draw_savings, nothing), (draw_timeline, [])):
        assert draw(study, tmp_path / "chart.png").read_bytes().startswith(PNG)


SHARED = next(arm for arm in saving_arms([8]) if arm.update == "shared_prompt")


def summary_of(*results):
    return summarize(*check(results))


def cells_of(table, *words):
    (line,) = (line for line in table.splitlines() if all(word in line for word in words))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_tables_show_published_peaks_and_compare_a_cut_prompt_with_the_whole_one():
    table = methods_table(summary_of(completed(published(), 1, 10 * GIB)))
    assert cells_of(table, "whole", "Basic") == ["whole", "Basic", "14.38", "26.99", "23.87, out of memory", "11.71", "", ""]
    assert cells_of(table, "cut", "String-level")[2:5] == ["6.40", "11.01", "20.25"]
    assert cells_of(table, "whole", "String-level")[2:5] == ["", "", ""]
    results = [completed(published("token", prompt, 4), 1, held) for prompt, held in (("full", 24 * GIB), ("truncated", 9 * GIB))]
    table = cause_table(summary_of(*results))
    rest = (641 + 1109.9) / 1024
    assert cells_of(table, "cut")[-1] == f"{100 * (1 - (9 + rest) / (24 + rest)):.1f} %"
    assert cells_of(table, "whole")[-1] == ""


def test_a_run_without_room_is_a_status_with_its_need():
    arm = published(k=8)
    results = [out_of_memory(arm), completed(arm, 45 * GIB, 50 * GIB), completed(SHARED, 90 * MIB, limit=32 * GIB)]
    assert cells_of(methods_table(summary_of(*results)), "whole", "Basic")[-1] == "out of memory (51.71)"
    table = savings_table(summary_of(*results))
    assert cells_of(table, "published trainer") == ["published trainer", "out of memory (46,080)"]
    assert cells_of(table, "computed once")[-1] == "90"


ARM = published()


def test_a_row_has_the_median_over_repeats():
    results = [completed(ARM, live, 2 * live, repeat) for repeat, live in enumerate((300, 100, 104))]
    (row,) = rows_of(results)
    assert row["peak"] == {"median": 104, "min": 100, "max": 300}
    assert row["reserved_peak"]["median"] == 208
    assert (row["outcome"], row["repeats"], row["peak_phase"]) == ("completed", 3, "backward")
    assert (row["tokens_per_row"], row["dropped_tokens_per_row"]) == (3115, 0)
    assert row["seconds"]["median"] == 2.0


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


def test_an_arm_has_a_row_for_its_limit_and_one_failed_repeat_is_its_outcome():
    rows = rows_of([completed(ARM, 1, GIB), completed(published(k=4), 1, 2 * GIB, limit=32 * GIB)])
    assert [(row["k"], row["outcome"], row["limit_bytes"]) for row in rows] == [
        (2, "completed", None),
        (4, "completed", 32 * GIB),
    ]
    (row,) = rows_of([completed(ARM, 100), dataclasses.replace(out_of_memory(ARM, None), outcome="failed")])
    assert row["outcome"] == "failed"
    assert "peak" not in row


def test_the_formula_stands_beside_the_runs_of_the_published_coupling():
    held = 2 * 151_669 * (14 * 3115 + 8 * 100)
    rows = rows_of([completed(published(), 1, int(held * 1.01)), completed(published(coupled=False), 1, held)])
    (compared,) = findings(rows)["formula"]
    assert compared["formula_bytes"] == 641 * MIB + held
    assert compared["error"] == pytest.approx(0.01 * held / (641 * MIB + held), rel=1e-3)


def test_truncation_alone_gives_the_published_saving():
    """By hand from the reference: 14.26 against 6.38 GiB of the card at k = 2, 26.80 against 11.05 at k = 4."""
    results = []
    for k in (2, 4):
        for prompt, tokens in (("full", 3115), ("truncated", 1124)):
            held = k * 151_669 * (14 * tokens + 8 * 100)
            results.append(completed(published("string", prompt, k), 1, held))
    first, second = findings(rows_of(results))["truncation"]
    assert first["saving"] == pytest.approx(0.552, abs=5e-4)
    assert second["saving"] == pytest.approx(0.588, abs=5e-4)
    assert first["published_saving"] == pytest.approx(0.555, abs=5e-4)
    assert second["published_saving"] == pytest.approx(0.592, abs=5e-4)


def test_expansions_are_compared_with_the_same_prompts():
    results = [
        completed(published("token"), 1, 10 * GIB),
        completed(published("lazy"), 1, 10 * GIB + 12 * MIB),
        completed(published("string", "truncated"), 1, 4 * GIB),
    ]
    (compared,) = findings(rows_of(results))["expansion"]
    assert compared["apart"] == pytest.approx(12 * MIB / card_bytes(10 * GIB), rel=1e-6)
    assert compared["ids_equal"] is True
    assert compared["ids_bytes_saved_by_waiting"] == 3015 * 8


def test_a_saving_is_counted_against_the_published_trainer_even_where_that_has_no_room():
    (arm,) = (arm for arm in saving_arms([8]) if arm.update == "shared_prompt")
    base = published(k=8)
    rows = rows_of([out_of_memory(base), completed(base, 45 * GIB, 50 * GIB), completed(arm, 90 * MIB, limit=32 * GIB)])
    (saving,) = findings(rows)["savings"]
    assert saving["times_smaller"] == 512
    assert saving["saving"] == 1 - 1 / 512
    (alone,) = findings(rows_of([completed(arm, 90 * MIB)]))["savings"]
    assert alone["times_smaller"] is None


def test_a_whole_step_is_a_finding_of_its_own_and_no_saving():
    found = findings(rows_of([completed(published(k=8), GIB, GIB), completed(WHOLE_RUN_ARM, 300 * MIB)]))
    assert found["savings"] == []
    assert [(row["k"], row["peak"]["median"], row["peak_phase"]) for row in found["whole_run"]] == [(8, 300 * MIB, "backward")]
