import pytest
from matplotlib.figure import Figure

from recipe.rloo.memory_study.cells import EXPANSIONS, saving_arms
from recipe.rloo.memory_study.charts import draw_methods, draw_peaks, draw_savings, draw_timeline
from recipe.rloo.memory_study.results import cause_table, check, findings, methods_table, rows_of, savings_table, summarize
from tests.recipe.rloo.memory_study.hand_made import GIB, MIB, completed, out_of_memory, published

LIMIT = 32 * GIB
SHARED = next(arm for arm in saving_arms([8]) if arm.update == "shared_prompt")
ARM = published()


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


def summary_of(*results):
    return summarize(*check(results))


def test_a_bar_is_as_high_as_the_peak_and_a_run_without_room_is_a_word(tmp_path, monkeypatch):
    drawn, write = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *places, **how: (drawn.append(self), write(self, *places, **how))[1])
    draw_peaks(summary_of(*study()), tmp_path / "peaks.png")
    draw_peaks(summary_of(completed(ARM, 1, 10 * GIB)), tmp_path / "peak.png")
    _published, full, cut, _fixed = drawn[0].axes
    assert [patch.get_height() == 0 for patch in full.patches] == [False, False, True] * 4
    words = [[text.get_text() for text in axes.texts].count("out of\nmemory") for axes in (full, cut)]
    assert words == [4, 0]
    heights = [patch.get_height() for patch in drawn[1].axes[1].patches]
    assert max(heights) == pytest.approx((10 * GIB + 641 * MIB + 1109.9 * MIB) / GIB)


def test_the_label_of_a_bar_just_below_the_cards_line_lies_inside_the_bar(tmp_path, monkeypatch):
    drawn, write = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *places, **how: (drawn.append(self), write(self, *places, **how))[1])
    draw_peaks(summary_of(completed(ARM, 1, int(29.8 * GIB))), tmp_path / "peaks.png")
    (axes,) = [axes for axes in drawn[0].axes[1:] if any(patch.get_height() for patch in axes.patches)]
    (line,) = [line.get_ydata()[0] for line in axes.lines]
    drawn[0].canvas.draw()
    labels = [text for text in axes.texts if text.get_text() == "31.51"]
    spans = [text.get_window_extent().transformed(axes.transData.inverted()) for text in labels]
    assert [span.y1 < line for span in spans] == [True]


def test_a_study_of_nothing_still_draws(tmp_path):
    nothing = summary_of(out_of_memory(saving_arms([2])[0], None))
    for draw, study in ((draw_peaks, nothing), (draw_methods, nothing), (draw_savings, nothing), (draw_timeline, [])):
        assert draw(study, tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def cells_of(table, *words):
    (line,) = (line for line in table.splitlines() if all(word in line for word in words))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_tables_show_published_peaks_and_compare_a_cut_prompt_with_the_whole_one():
    table = methods_table(summary_of(completed(ARM, 1, 10 * GIB)))
    assert cells_of(table, "whole", "Basic") == ["whole", "Basic", "14.38", "26.99", "23.87, out of memory", "11.71", "", ""]
    assert cells_of(table, "cut", "String-level")[2:5] == ["6.40", "11.01", "20.25"]
    assert cells_of(table, "whole", "String-level")[2:5] == ["", "", ""]
    results = [completed(published("token", prompt, 4), 1, held) for prompt, held in (("full", 24 * GIB), ("truncated", 9 * GIB))]
    table = cause_table(summary_of(*results))
    rest = (641 + 1109.9) / 1024
    assert cells_of(table, "cut")[-1] == f"{100 * (1 - (9 + rest) / (24 + rest)):.1f} %"
    assert cells_of(table, "whole")[-1] == ""


def test_a_run_without_room_is_a_status_with_its_need_and_savings_are_counted_against_it():
    base = published(k=8)
    results = [out_of_memory(base), completed(base, 45 * GIB, 50 * GIB), completed(SHARED, 90 * MIB, limit=LIMIT)]
    assert cells_of(methods_table(summary_of(*results)), "whole", "Basic")[-1] == "out of memory (51.71)"
    table = savings_table(summary_of(*results))
    assert cells_of(table, "published trainer") == ["published trainer", "out of memory (46,080)"]
    assert cells_of(table, "computed once")[-1] == "90"
    (saving,) = findings(rows_of(results))["savings"]
    assert (saving["times_smaller"], saving["saving"]) == (512, 1 - 1 / 512)
    (alone,) = findings(rows_of([completed(SHARED, 90 * MIB)]))["savings"]
    assert alone["times_smaller"] is None


def test_a_row_has_the_median_over_repeats_and_an_arm_a_row_for_each_limit():
    results = [completed(ARM, live, 2 * live, repeat) for repeat, live in enumerate((300, 100, 104))]
    (row,) = rows_of(results)
    assert row["peak"] == {"median": 104, "min": 100, "max": 300}
    assert row["reserved_peak"]["median"] == 208
    assert (row["outcome"], row["repeats"], row["peak_phase"]) == ("completed", 3, "backward")
    assert (row["tokens_per_row"], row["dropped_tokens_per_row"]) == (3115, 0)
    assert row["seconds"]["median"] == 2.0
    rows = rows_of([completed(ARM, 1, GIB), completed(published(k=4), 1, 2 * GIB, limit=LIMIT)])
    assert [(row["k"], row["outcome"], row["limit_bytes"]) for row in rows] == [(2, "completed", None), (4, "completed", LIMIT)]


def test_truncation_alone_gives_the_published_saving():
    """By hand from the reference: 14.26 against 6.38 GiB of the card at k = 2, 26.80 against 11.05 at k = 4."""
    results = [
        completed(published("string", prompt, k), 1, k * 151_669 * (14 * tokens + 8 * 100))
        for k in (2, 4)
        for prompt, tokens in (("full", 3115), ("truncated", 1124))
    ]
    found = findings(rows_of(results))["truncation"]
    assert [each["saving"] for each in found] == pytest.approx([0.552, 0.588], abs=5e-4)
    assert [each["published_saving"] for each in found] == pytest.approx([0.555, 0.592], abs=5e-4)
