import pytest
from matplotlib.figure import Figure

from recipe.rloo.memory_study.arms import EXPANSIONS, saving_arms
from recipe.rloo.memory_study.charts import draw_all, draw_peaks
from recipe.rloo.memory_study.charts_methods import draw_methods
from recipe.rloo.memory_study.charts_savings import draw_savings
from recipe.rloo.memory_study.charts_timeline import draw_timeline
from recipe.rloo.memory_study.combine import combine, summarize
from recipe.rloo.memory_study.controls import check
from recipe.rloo.memory_study.records import write_result
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


@pytest.mark.parametrize("draw", [draw_peaks, draw_methods, draw_savings])
def test_a_study_of_nothing_still_draws(draw, tmp_path):
    arm = saving_arms([2])[0]
    assert draw(summarize(*check([out_of_memory(arm, None)])), tmp_path / "chart.png").read_bytes().startswith(PNG)
    assert draw_timeline([], tmp_path / "timeline.png").read_bytes().startswith(PNG)
