"""The timeline file, there and back."""

import pytest

from verl_memopt.errors import DataError
from verl_memopt.observe.phase import PhaseMemory, Span
from verl_memopt.observe.timeline import COLUMNS, append_timeline, keep_timeline, read_timeline, timeline_rows

MEMORY = PhaseMemory("gen", 1.0, 100, 50, None, None, 7, {"params": 60, "kv": 40})


def test_rows_come_back_as_they_were_written(tmp_path):
    path = tmp_path / "memory_timeline.csv"
    rows = timeline_rows(3, [Span("reward", 12.0, 0.5), Span("gen", 10.0, 2.0)], {"gen": MEMORY})
    append_timeline(path, rows[:1])
    append_timeline(path, rows[1:])
    assert read_timeline(path) == rows
    assert [row.phase for row in rows] == ["gen", "reward"], "in the order they began"
    assert path.read_text().splitlines()[0] == ",".join(COLUMNS)


def test_bytes_nobody_counted_are_empty_cells_and_not_zero(tmp_path):
    path = tmp_path / "memory_timeline.csv"
    append_timeline(path, timeline_rows(1, [Span("reward", 0.0, 1.0)], {}))
    row = read_timeline(path)[0]
    assert (row.peak_allocated_bytes, row.host_rss_bytes, row.counter) == (None, None, "")
    assert ",0," not in path.read_text().splitlines()[1]


def test_the_counter_says_where_live_bytes_come_from():
    on_gpu = PhaseMemory("gen", 1.0, 100, 50, 200, 300, 7)
    uncounted = PhaseMemory("gen", 1.0, None, None, None, None, 7)
    found = [timeline_rows(1, [Span("gen", 0.0, 1.0)], {"gen": memory})[0].counter for memory in (MEMORY, on_gpu, uncounted)]
    assert found == ["tracker", "allocator", ""]


def test_the_step_itself_is_no_phase():
    assert timeline_rows(1, [Span("step", 0.0, 9.0)], {}) == []


def test_rows_beyond_a_step_are_dropped_and_a_torn_one_too(tmp_path):
    path = tmp_path / "memory_timeline.csv"
    for step in (1, 2, 3):
        append_timeline(path, timeline_rows(step, [Span("gen", float(step), 1.0)], {"gen": MEMORY}))
    uninterrupted = path.read_text()
    with path.open("a") as file:
        file.write("4.0,3.0,4,ge")
    keep_timeline(path, 3)
    assert path.read_text() == uninterrupted
    keep_timeline(path, 1)
    assert [row.step for row in read_timeline(path)] == [1]


def test_a_damaged_row_is_named_with_its_file_and_line(tmp_path):
    path = tmp_path / "memory_timeline.csv"
    append_timeline(path, timeline_rows(1, [Span("gen", 0.0, 1.0)], {}))
    with path.open("a") as file:
        file.write("x,y\n")
    with pytest.raises(DataError, match=r"memory_timeline\.csv:3: not a timeline row"):
        read_timeline(path)
