import pytest

from verl_memopt.observe import charts
from verl_memopt.observe.charts import WHOLE_UP_TO, draw_timeline
from verl_memopt.observe.run_folder import TimelineRow

MIB = 2**20


def rows_of(steps, counted, phases=("gen", "update_actor")):
    """Gives two seconds of each phase in each step; peaks only in the counted steps."""
    rows = []
    for step in range(1, steps + 1):
        for phase in phases:
            figures = {"peak_allocated_bytes": (10 + step) * MIB, "allocated_bytes": MIB, "counter": "tracker"}
            began = 2.0 * len(rows)
            rows.append(
                TimelineRow(began, began, step, phase, 2.0, host_rss_bytes=50 * MIB, **(figures if step in counted else {}))
            )
    return rows


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Draws rows, checks the file, and gives the figure as it was saved."""
    figures = []
    save = charts.save

    def keep(drawing, path):
        figures.append(drawing)
        return save(drawing, path)

    monkeypatch.setattr(charts, "save", keep)

    def draw(rows):
        path = draw_timeline(rows, tmp_path / "memory_timeline.png")
        assert path.read_bytes().startswith(b"\x89PNG")
        return figures[-1]

    return draw


def titles(drawing):
    return [axes.get_title(loc="left") for axes in drawing.axes]


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_a_short_run_is_shown_whole_with_its_phases_shaded(drawn):
    drawing = drawn(rows_of(3, {1, 2, 3}))
    assert titles(drawing) == ["Memory over time, phase by phase", "Host, all processes"]
    labels = [text.get_text() for text in drawing.axes[0].get_legend().get_texts()]
    assert {"gen", "update_actor", "peak live", "live at end"} <= set(labels)
    assert drawing.axes[0].get_ylabel() == "live tensor bytes (tracker), MiB"
    assert drawing.axes[1].get_xlim() == (0.0, 12.0)


def test_a_long_run_has_an_overview_and_its_last_counted_steps(drawn):
    steps = WHOLE_UP_TO
    drawing = drawn(rows_of(steps, {1, 2, 10, 11}))
    assert titles(drawing) == ["Highest peak of each step", "Steps 10 to 11, phase by phase", "Host, all processes"]
    (line,) = drawing.axes[0].lines
    assert list(line.get_ydata()) == [11.0, 12.0, 20.0, 21.0]


def test_what_was_not_counted_is_said_and_not_drawn_as_nothing(drawn):
    overview, phases, _ = drawn(rows_of(WHOLE_UP_TO, set())).axes
    assert texts(overview) == ["No phase of this run counted its bytes."]
    assert texts(phases) == ["bytes were not counted here"]
    assert phases.get_title(loc="left").endswith("(bytes counted in 0 of 1 steps)")
