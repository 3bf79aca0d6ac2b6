import pytest
from matplotlib.figure import Figure

from recipe.rloo.memory_study.arms import EXPANSIONS, saving_arms
from recipe.rloo.memory_study.charts import draw_all, draw_peaks
from recipe.rloo.memory_study.charts_methods import draw_methods
from recipe.rloo.memory_study.charts_savings import draw_savings
from recipe.rloo.memory_study.charts_timeline import draw_timeline, one_update, timeline_of
from recipe.rloo.memory_study.combine import combine, summarize
from recipe.rloo.memory_study.controls import check
from recipe.rloo.memory_study.records import write_result
from tests.recipe.rloo.memory_study.hand_made import GIB, MIB, completed, out_of_memory, published, record
from verl_memopt.errors import DataError

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


def test_a_study_has_its_four_charts(tmp_path):
    (tmp_path / "cells").mkdir()
    for result in study():
        write_result(tmp_path / "cells" / f"{result.cell.name}.json", result)
    combine(tmp_path)
    paths = draw_all(tmp_path)
    assert [path.name for path in paths] == [
        "peak_memory_comparison.png",
        "memory_usage_timeline.png",
        "method_performance_summary.png",
        "what_really_saves.png",
    ]
    assert all(path.read_bytes().startswith(PNG) for path in paths)


def test_charts_without_a_summary_say_what_comes_first(tmp_path):
    with pytest.raises(DataError, match="Combine the results first"):
        draw_all(tmp_path)


def test_a_run_without_room_is_a_word_and_never_a_bar(tmp_path, drawn):
    checked, controls = check(study())
    draw_peaks(summarize(checked, controls), tmp_path / "peaks.png")
    _published, full, cut, _fixed = drawn[0].axes
    bars = [patch.get_height() for patch in full.patches]
    assert len(bars) == 12
    assert [height == 0 for height in bars] == [False, False, True] * 4
    assert words(full).count("out of\nmemory") == 4
    assert words(cut).count("out of\nmemory") == 0


def test_bytes_per_token_are_those_of_runs_that_completed(tmp_path, drawn):
    checked, controls = check(study())
    draw_methods(summarize(checked, controls), tmp_path / "methods.png")
    cost = drawn[0].axes[1]
    assert cost.get_xlabel().startswith("k = 4;")
    assert len(cost.patches) == 8
    assert all(patch.get_height() > 0 for patch in cost.patches)


def test_a_bar_is_as_high_as_the_true_peak(tmp_path, drawn):
    result = completed(published(), 1, 10 * GIB)
    draw_peaks(summarize(*check([result])), tmp_path / "peaks.png")
    heights = [patch.get_height() for patch in drawn[0].axes[1].patches]
    assert max(heights) == pytest.approx((10 * GIB + 641 * MIB + 1109.9 * MIB) / GIB)


def test_every_axis_has_a_unit(tmp_path, drawn):
    checked, controls = check(study())
    summary = summarize(checked, controls)
    draw_peaks(summary, tmp_path / "a.png")
    draw_savings(summary, tmp_path / "b.png")
    draw_timeline(checked, tmp_path / "c.png")
    assert {axes.get_ylabel() for axes in drawn[0].axes} == {"peak of the whole card, GiB"}
    bars, growth = drawn[1].axes
    assert "MiB" in bars.get_xlabel()
    assert "MiB" in growth.get_ylabel()
    panels = [axes for axes in drawn[2].axes if axes.lines]
    assert len(panels) == 4
    assert all(axes.get_ylabel().endswith(("MiB", "GiB")) for axes in panels)
    assert [axes.get_xlabel() for axes in panels] == ["changes of the allocator's memory, in order"] * 2 + ["seconds"] * 2


def test_savings_are_counted_against_what_the_published_trainer_would_need(tmp_path, drawn):
    checked, controls = check(study())
    draw_savings(summarize(checked, controls), tmp_path / "savings.png")
    bars = words(drawn[0].axes[0])
    assert any(text.startswith("out of memory (would need") for text in bars)
    assert sum("times less" in text for text in bars) == 7


def test_the_line_over_time_has_the_true_peak(tmp_path, drawn):
    draw_timeline([completed(published(k=4), 3 * GIB, 4 * GIB)], tmp_path / "timeline.png")
    panel = drawn[0].axes[0]
    highest = {line.get_label(): max(line.get_ydata()) for line in panel.lines if not line.get_label().startswith("_")}
    assert highest == {"live tensors": 3.0, "reserved by the allocator": 4.0}


def test_phases_of_a_simulation_take_as_long_as_they_have_events():
    timeline = ((0.0, 5, 6), (0.1, 9, 9), (0.2, 2, 9), (0.3, 1, 9))
    arm = published()
    simulated = [record(arm, 9, 9, phase=phase, timeline=timeline, seconds=7.0) for phase in ("forward", "backward")]
    points, phases = one_update(completed(arm, 0, records=simulated))
    assert phases == [("forward", 0, 4), ("backward", 4, 8)]
    assert [x for x, _, _ in points] == list(range(8))


def test_phases_follow_one_another():
    arm = published()
    timeline = ((0.0, 5, 6), (0.5, 9, 9), (1.0, 2, 9))
    result = completed(
        arm, 0, records=[record(arm, 7, update=-1), record(arm, 8, phase="forward"), record(arm, 9, timeline=timeline)]
    )
    points, phases = one_update(result)
    assert phases == [("forward", 0.0, 1.0), ("backward", 1.0, 2.0)]
    assert points == [(0.0, 2, None), (0.5, 8, None), (1.0, 1, None), (1.0, 5, 6), (1.5, 9, 9), (2.0, 2, 9)]
    assert timeline_of(record(arm, 8)) == [(0.0, 2, None), (0.5, 8, None), (1.0, 1, None)]


@pytest.mark.parametrize("draw", [draw_peaks, draw_methods, draw_savings])
def test_a_study_of_nothing_still_draws(draw, tmp_path):
    arm = saving_arms([2])[0]
    assert draw(summarize(*check([out_of_memory(arm, None)])), tmp_path / "chart.png").read_bytes().startswith(PNG)
    assert draw_timeline([], tmp_path / "timeline.png").read_bytes().startswith(PNG)
