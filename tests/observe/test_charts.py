"""Charts, summary and report of every shape of run. What charts look like is for eyes; that they show the numbers is tested."""

import json
from dataclasses import replace
from io import StringIO

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from verl_memopt.errors import UserError
from verl_memopt.observe import charts
from verl_memopt.observe.chart_style import figure, save
from verl_memopt.observe.charts import (
    WHOLE_UP_TO,
    build_summary,
    comparison_table,
    draw_charts,
    draw_peaks,
    draw_reward,
    draw_timeline,
    environment,
    finish_summary,
    report,
    run_names,
    running_mean,
    validation_points,
)
from verl_memopt.observe.phase import MIB
from verl_memopt.observe.run_folder import RunFolder, TimelineRow

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    "run", [{"steps": 1}, {"steps": 3, "validated": False}, {"steps": 2, "counted": False}, {"steps": WHOLE_UP_TO}], ids=str
)
def test_every_shape_of_run_has_its_three_charts(make_run, run):
    folder = make_run(**run)
    paths = draw_charts(folder)
    assert [path.name for path in paths] == ["reward_and_validation.png", "peak_memory_by_phase.png", "memory_timeline.png"]
    assert all(path.read_bytes().startswith(PNG) for path in paths)
    assert not list(folder.path.glob(".*partial"))


def test_a_run_that_has_written_nothing_is_drawn_as_such(tmp_path):
    assert draw_reward([], tmp_path / "a.png").exists()
    assert draw_timeline([], tmp_path / "b.png").exists()
    assert draw_peaks({"phases": {}, "counter": None}, tmp_path / "c.png").exists()


def test_running_means_and_validation_points():
    assert running_mean([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]
    metrics = [{"step": 0, "val-core/toy/acc/mean@1": 0.1}, {"step": 1}, {"step": 2, "val-core/toy/acc/mean@1": 0.5}]
    assert validation_points(metrics) == ([0, 2], [0.1, 0.5])


def test_a_picture_that_the_disk_refuses_is_named(tmp_path):
    with pytest.raises(UserError, match=r"bars\.png: cannot be written \(No such file or directory"):
        save(figure(2, 2), tmp_path / "missing" / "bars.png")


@pytest.fixture
def console():
    return Console(file=StringIO(), width=80)


def test_a_report_makes_charts_and_summary_again_and_keeps_what_only_the_run_knew(make_run, console, tmp_path):
    folder = make_run(steps=2)
    folder.add_warnings(2, ["the reward fell"])
    finish_summary(folder, {"device": "cpu"})
    original, before = json.loads(folder.summary.read_text()), sorted(folder.path.iterdir())
    report([folder.path], out=tmp_path / "elsewhere", console=console)
    assert sorted(folder.path.iterdir()) == before
    assert json.loads((tmp_path / "elsewhere" / "summary.json").read_text())["steps"] == 2
    paths = report([folder.path], console=console)
    assert json.loads(folder.summary.read_text()) == original
    assert (original["device"], original["warnings"]) == ("cpu", [{"step": 2, "warning": "the reward fell"}])
    assert "WARNING, step 2: the reward fell" in console.file.getvalue()
    assert [path.name for path in paths][-1] == "summary.json"
    assert console.file.getvalue().splitlines()[-1] == str(folder.summary)


def test_runs_are_compared_against_the_first(make_run, console, tmp_path):
    short, long, uncounted = make_run("short", steps=1), make_run("long", steps=12), make_run("uncounted", counted=False)
    paths = report([short.path, long.path, uncounted.path], console=console)
    text = console.file.getvalue()
    assert "short" in text
    assert "22.0 (+100.0 %)" in text, "11 MiB at step 1, 22 at step 12"
    assert {path.parent for path in paths} == {tmp_path / "comparison"}
    assert all(path.stat().st_size > 1000 for path in paths)


def test_a_folder_that_is_missing_is_named(make_run, console, tmp_path):
    with pytest.raises(UserError, match="gone"):
        report([make_run().path, tmp_path / "gone"], console=console)


def test_a_summary_holds_the_whole_runs_seconds_scores_and_peaks(make_run):
    folder = make_run(steps=3)
    summary = build_summary(folder.read_metrics(), folder.read_timeline())
    assert (summary["steps"], round(summary["seconds"], 3)) == (3, 9.0)
    assert (summary["validation_before"], summary["validation_after"]) == (0.05, 0.3)
    assert summary["phases"]["update_actor"] == {
        "seconds": 3.0,
        "count": 3,
        "peak_allocated_bytes": 13 * MIB,
        "peak_reserved_bytes": None,
        "device_used_bytes": None,
        "host_rss_bytes": 100 * MIB,
        "kinds": {"params": 13 * MIB},
    }
    assert summary["phases"]["gen"]["peak_allocated_bytes"] is None
    assert list(summary["phases"]) == ["gen", "update_actor"]


def test_a_run_without_validation_or_without_anything_has_a_summary(make_run):
    folder = make_run(validated=False)
    summary = build_summary(folder.read_metrics(), folder.read_timeline())
    assert (summary["validation_before"], summary["validation_after"]) == (None, None)
    assert build_summary([], [])["steps"] == 0


def test_the_environment_names_device_command_and_installed_versions():
    found = environment("cpu", ["verl-memopt", "train"])
    assert (found["device"], found["command"]) == ("cpu", ["verl-memopt", "train"])
    assert "torch" in found["versions"]
    assert None not in found["versions"].values()


def test_skipped_updates_are_counted_over_the_whole_run():
    rows = [{"step": 0}, {"step": 1, "actor/skipped_updates": 2.0}, {"step": 2, "actor/skipped_updates": 0.0}]
    assert build_summary([*rows, {"step": 3, "actor/skipped_updates": 1.0}], [])["skipped_updates"] == 3
    assert build_summary([*rows, {"step": 3, "critic/skipped_updates": 4.0}], [])["skipped_updates"] == 6


def summary(counter="tracker", steps=3, **peaks):
    phases = {
        name: {"seconds": 2.0, "peak_allocated_bytes": None if peak is None else peak * MIB} for name, peak in peaks.items()
    }
    return {
        "steps": steps,
        "seconds": 9.0,
        "validation_before": None,
        "validation_after": 0.5,
        "counter": counter,
        "phases": phases,
    }


def cells(table):
    columns = [list(column.cells) for column in table.columns]
    return {label: [column[row] for column in columns[1:]] for row, label in enumerate(columns[0])}


def test_names_are_as_short_as_tells_the_runs_apart(tmp_path):
    def names(*paths):
        return run_names([RunFolder(tmp_path / path) for path in paths])

    assert names("a/one", "b/two") == ["one", "two"]
    assert names("a/run", "b/run") == ["a/run", "b/run"]
    assert names("a/run", "a/run") == ["run (1)", "run (2)"]


def test_peaks_stand_beside_their_change_against_the_first_run():
    rows = cells(comparison_table({"a": summary(gen=8, ref=2), "b": summary(gen=6)}))
    assert rows["gen, peak MiB"] == ["8.0", "6.0 (-25.0 %)"]
    assert rows["ref, peak MiB"] == ["2.0", "-"]
    assert rows["ref, s"] == ["2.0", "-"]
    assert rows["steps"] == ["3", "3"]
    assert rows["validation before"] == ["-", "-"]
    assert rows["validation after"] == ["0.500", "0.500"]


def test_figures_of_different_counters_are_not_set_against_each_other_and_none_have_no_row():
    rows = cells(comparison_table({"a": summary("tracker", gen=8), "b": summary("allocator", gen=6)}))
    assert rows["gen, peak MiB"] == ["8.0", "6.0"]
    assert "gen, peak MiB" not in cells(comparison_table({"a": summary(None, gen=None)}))


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

    def draw(rows, limit=None):
        path = draw_timeline(rows, tmp_path / "memory_timeline.png", limit)
        assert path.read_bytes().startswith(b"\x89PNG")
        return figures[-1]

    return draw


def titles(drawing):
    return [axes.get_title(loc="left") for axes in drawing.axes]


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_a_short_run_is_shown_whole_with_its_phases_named(drawn):
    drawing = drawn(rows_of(3, {1, 2, 3}))
    assert titles(drawing) == ["Memory over time, phase by phase", "Host, all processes"]
    assert texts(drawing.axes[0]) == ["gen", "update_actor"] * 3
    labels = [text.get_text() for text in drawing.axes[0].get_legend().get_texts()]
    assert labels == ["peak live", "live at end"]
    assert drawing.axes[0].get_ylabel() == "live tensor bytes (tracker), MiB"
    assert drawing.axes[1].get_xlim() == (0.0, 12.0)


def test_the_bytes_of_a_phase_are_stacked_by_kind(drawn):
    gen, update = rows_of(1, {1})
    axes = drawn([replace(gen, kinds={"kv": 7 * MIB, "params": 4 * MIB}), replace(update, kinds={"params": 11 * MIB})]).axes[0]
    bars = [(bar.get_x(), bar.get_y(), bar.get_height()) for bar in axes.patches]
    assert bars == [(0.0, 0.0, 4.0), (2.0, 0.0, 11.0), (0.0, 4.0, 7.0), (2.0, 11.0, 0.0)]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["peak live", "live at end", "params", "kv"]


@pytest.mark.parametrize("steps", [2, WHOLE_UP_TO])
def test_the_limit_of_the_device_is_a_line_and_where_it_is_far_above_a_word(drawn, steps):
    rows = rows_of(steps, {*range(1, steps + 1)})
    near, far = (drawn(rows, limit * MIB).axes[:-1] for limit in ((steps + 10) * 2, 24 * 1024))
    for axes in near:
        assert [line.get_ydata() for line in axes.lines if line.get_label() == "limit of the device"] == [[(steps + 10) * 2] * 2]
        assert axes.get_ylim()[1] > (steps + 10) * 2
    for axes in far:
        assert "limit of the device" not in [line.get_label() for line in axes.lines]
        assert axes.get_title(loc="right") == "limit of the device: 24.0 GiB, above this chart"


def test_a_report_draws_the_limit_that_the_summary_states(make_run, monkeypatch):
    drawings, write = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *places, **how: (drawings.append(self), write(self, *places, **how))[1])
    folder = make_run(steps=2)
    finish_summary(folder, {charts.DEVICE_LIMIT: 2**40})
    draw_charts(folder)
    assert [axes.get_title(loc="right") for axes in drawings[-1].axes] == ["limit of the device: 1,024 GiB, above this chart", ""]


def test_the_highest_points_of_a_run_are_below_the_edge_and_its_start_is_left_out(drawn):
    rows = rows_of(WHOLE_UP_TO, {1, 2, 10, 11})
    start = TimelineRow(0.0, 0.0, 0, "init", 6.0)
    overview, _, host = drawn([start, *(replace(row, elapsed_seconds=row.elapsed_seconds + 6.0) for row in rows)]).axes
    assert overview.get_ylim()[1] > 1.1 * 21.0
    assert overview.get_xlim()[0] == host.get_xlim()[0] == 6.0


def test_a_long_run_has_an_overview_and_its_last_counted_steps(drawn):
    steps = WHOLE_UP_TO
    drawing = drawn(rows_of(steps, {1, 2, 10, 11}))
    assert titles(drawing) == ["Highest peak of each step", "Steps 10 to 11, phase by phase", "Host, all processes"]
    (line,) = drawing.axes[0].lines
    assert list(line.get_ydata()) == [11.0, 12.0, 20.0, 21.0]


def test_what_was_not_counted_is_said_and_not_drawn_as_nothing(drawn):
    overview, phases, _ = drawn(rows_of(WHOLE_UP_TO, set())).axes
    assert texts(overview) == ["No phase of this run counted its bytes."]
    assert texts(phases)[-1] == "bytes were not counted here"
    assert phases.get_title(loc="left").endswith("(bytes counted in 0 of 1 steps)")
