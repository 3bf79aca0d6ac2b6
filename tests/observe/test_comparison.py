from verl_memopt.observe.charts import build_summary
from verl_memopt.observe.report import comparison_table, draw_comparison, run_names
from verl_memopt.observe.run_folder import RunFolder

MIB = 2**20


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
    """Gives the table's rows by their label."""
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


def test_figures_of_different_counters_are_not_set_against_each_other():
    rows = cells(comparison_table({"a": summary("tracker", gen=8), "b": summary("allocator", gen=6)}))
    assert rows["gen, peak MiB"] == ["8.0", "6.0"]


def test_a_phase_that_no_run_counted_has_no_row_of_peaks():
    assert "gen, peak MiB" not in cells(comparison_table({"a": summary(None, gen=None)}))


def test_both_charts_are_drawn_even_where_a_run_counted_nothing(make_run, tmp_path):
    runs = {name: make_run(name, counted=counted) for name, counted in (("one", True), ("two", False))}
    summaries = {name: build_summary(run.read_metrics(), run.read_timeline()) for name, run in runs.items()}
    paths = draw_comparison(runs, summaries, tmp_path / "out")
    assert [path.read_bytes()[:4] for path in paths] == [b"\x89PNG"] * 2
