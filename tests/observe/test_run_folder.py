import time
from pathlib import Path

import pytest

from verl_memopt.errors import DataError, UserError
from verl_memopt.observe.files import append_text, read_rows
from verl_memopt.observe.own_files import MARK
from verl_memopt.observe.phase import PhaseClock, PhaseMemory, Span
from verl_memopt.observe.run_folder import (
    COLUMNS,
    RunFolder,
    append_timeline,
    keep_timeline,
    open_run_folder,
    read_timeline,
    timeline_rows,
)


def test_after_a_resume_the_files_equal_those_of_a_run_that_was_never_stopped(make_run, log_step):
    whole, stopped = make_run("whole", steps=4), make_run("stopped", steps=3)
    resumed = RunFolder(stopped.path)
    resumed.begin("trainer: {}\n", resumed_step=2)
    for step in (3, 4):
        log_step(resumed, step, resumed.began + 3 * (step - 3), validated=True)
    assert resumed.metrics.read_text() == whole.metrics.read_text()
    assert resumed.generations.read_text() == whole.generations.read_text()
    resumed_rows = [(row.step, row.phase, round(row.elapsed_seconds, 3)) for row in resumed.read_timeline()]
    assert resumed_rows == [(row.step, row.phase, round(row.elapsed_seconds, 3)) for row in whole.read_timeline()]


def test_a_fresh_run_in_a_used_folder_keeps_the_earlier_files_aside(make_run):
    folder = make_run(steps=2)
    folder.tensorboard.mkdir()
    for _ in range(2):
        RunFolder(folder.path).begin("new: true\n", resumed_step=None)
        assert not folder.metrics.exists()
        assert not folder.timeline.exists()
    folder.config.write_text("newest: true\n")
    RunFolder(folder.path).begin("new: true\n", resumed_step=None)
    assert len(read_rows(folder.path / "previous" / "1" / "metrics.jsonl")) == 3
    assert (folder.path / "previous" / "2" / "config.yaml").read_text() == "new: true\n"
    assert (folder.path / "previous" / "3" / "config.yaml").read_text() == "newest: true\n"
    assert folder.config.read_text() == "new: true\n"


LEFT = (
    "global_step_2/actor/w",
    "latest_checkpointed_iteration.txt",
    "model/w",
    "model_best/w",
    "inputs/old.jsonl",
    "wandb_id.txt",
)
OF_THE_USER = ("notes.md", "model_card/text", "mine.png", "global_step_2_copy/w")


def fill(folder, names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def files_of(folder, without="previous"):
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(str(path) for path in paths if path.parts[0] != without)


def test_all_that_a_run_left_moves_aside_as_one_and_what_is_the_users_stays(make_run):
    folder = make_run(steps=1)
    folder.config.write_text("data: [inputs/rows.jsonl, inputs/old.jsonl]\n")
    fill(folder.path, (*LEFT, "inputs/rows.jsonl"))
    whole = files_of(folder.path)
    fill(folder.path, (*OF_THE_USER, "inputs/new.jsonl"))
    aside = RunFolder(folder.path).begin("data: [inputs/rows.jsonl, inputs/new.jsonl]\n", resumed_step=None)
    assert aside == folder.path / "previous" / "1"
    assert files_of(aside) == whole
    assert files_of(folder.path) == sorted([MARK, "config.yaml", "inputs/rows.jsonl", "inputs/new.jsonl", *OF_THE_USER])


@pytest.mark.parametrize("moved", [1, 5])
def test_a_start_that_is_killed_while_it_moves_an_earlier_run_leaves_it_whole(make_run, monkeypatch, moved):
    folder = make_run(steps=1)
    fill(folder.path, (*LEFT, "inputs/rows.jsonl"))
    whole, rename, calls = files_of(folder.path), Path.rename, []

    def rename_some(path, target):
        calls.append(path)
        if len(calls) > moved:
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename_some)
        with pytest.raises(KeyboardInterrupt):
            folder.begin("data: inputs/rows.jsonl\n", resumed_step=None)
    RunFolder(folder.path).mend()
    assert files_of(folder.path) == whole
    assert not list(folder.path.glob("previous/*"))


def test_a_record_that_vanished_is_told_from_a_run_that_has_not_ended(make_run):
    folder = make_run(steps=2)
    folder.write_summary({"steps": 2, "ended": True})
    folder.seal()
    assert folder.faults() == []
    folder.record.unlink()
    (fault,) = folder.faults()
    assert fault.startswith("record.json is missing")
    RunFolder(folder.path).begin("trainer: {}\n", resumed_step=1)
    assert folder.faults() == []
    assert folder.read_summary()["steps"] == 2


def test_what_mlflow_writes_after_the_end_is_no_damage(make_run):
    folder = make_run(steps=1)
    (folder.path / "mlflow.db").write_text("the run")
    folder.seal()
    (folder.path / "mlflow.db").write_text("the run, and what a page that shows it notes")
    assert folder.faults() == []


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir(), lambda path: path.write_text("x")])
def test_a_folder_that_holds_no_run_is_refused_by_name(tmp_path, make):
    make(tmp_path / "nowhere")
    with pytest.raises(UserError, match="nowhere"):
        open_run_folder(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_damaged_summary_is_refused_by_name(make_run, text):
    folder = make_run(steps=1)
    folder.summary.write_text(text)
    with pytest.raises(UserError, match=r"summary\.json"):
        folder.read_summary()


@pytest.mark.parametrize("row", ["{}", '{"step": "1"}', '{"step": 1, "actor/lr": "high"}'])
def test_a_row_of_metrics_without_a_step_or_a_number_is_refused_by_name(make_run, row):
    folder = make_run(steps=1)
    append_text(folder.metrics, row + "\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl: (a|in the) row"):
        folder.read_metrics()


def test_what_began_before_the_folder_was_ready_counts_as_running_time(tmp_path, log_step):
    folder = RunFolder(tmp_path / "run")
    folder.begin("a: 1\n", None)
    log_step(folder, 1, folder.began - 5)
    assert [round(row.elapsed_seconds, 3) for row in folder.read_timeline()] == [0.0, 2.0]


def test_a_clock_that_goes_back_changes_no_time_of_a_run(tmp_path, monkeypatch):
    folder, clock = RunFolder(tmp_path / "run"), PhaseClock()
    folder.begin("a: 1\n", None)
    for step, back in enumerate((0, 3600, 0), start=1):
        true = time.time
        monkeypatch.setattr(time, "time", lambda: true() - back)  # noqa: B023 - called in this round
        with clock.phase("gen"):
            pass
        folder.add_timeline(step, clock.take(), {})
        monkeypatch.setattr(time, "time", true)
    assert 0 <= max(row.elapsed_seconds for row in folder.read_timeline()) < 600


def test_warnings_are_kept_with_their_step_and_cut_back_on_resume(tmp_path):
    folder = RunFolder(tmp_path)
    folder.begin("a: 1\n", None)
    folder.add_warnings(1, [])
    assert not folder.warnings.exists()
    folder.add_warnings(2, ["low", "lower"])
    folder.add_warnings(3, ["lowest"])
    rows = [{"step": 2, "warning": "low"}, {"step": 2, "warning": "lower"}]
    assert folder.read_warnings() == [*rows, {"step": 3, "warning": "lowest"}]
    folder.begin("a: 1\n", 2)
    assert folder.read_warnings() == rows
    folder.begin("a: 1\n", None)
    assert folder.read_warnings() == []


def test_settings_that_a_resume_replaces_are_kept_under_the_step_they_ended_at(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.begin("lr: 1\n", None)
    folder.begin("lr: 1\n", resumed_step=2)
    assert not folder.config_history.exists()
    folder.begin("lr: 2\n", resumed_step=4)
    folder.begin("lr: 3\n", resumed_step=4)
    folder.begin("lr: 4\n", resumed_step=6)
    kept = {path.name: path.read_text() for path in folder.config_history.iterdir()}
    assert kept == {"until_step_4.yaml": "lr: 1\n", "until_step_4_2.yaml": "lr: 2\n", "until_step_6.yaml": "lr: 3\n"}
    assert folder.config.read_text() == "lr: 4\n"
    folder.begin("lr: 5\n", None)
    assert (folder.path / "previous" / "1" / "config_history" / "until_step_4.yaml").read_text() == "lr: 1\n"
    assert not folder.config_history.exists()


def test_a_folder_that_the_disk_will_not_change_is_named(make_run):
    folder = make_run(steps=2)
    folder.config_history.write_text("a file in the way")
    with pytest.raises(UserError, match=r"config\.yaml: cannot be written \(File exists"):
        RunFolder(folder.path).begin("new: true\n", resumed_step=2)


MEMORY = PhaseMemory("gen", 1.0, 100, 50, None, None, 7, {"params": 60, "kv": 40})


def test_rows_come_back_as_they_were_written(tmp_path):
    path = tmp_path / "memory_timeline.csv"
    rows = timeline_rows(3, [Span("reward", 12.0, 0.5), Span("gen", 10.0, 2.0)], {"gen": MEMORY})
    append_timeline(path, rows[:1])
    append_timeline(path, rows[1:])
    assert read_timeline(path) == rows
    assert [row.phase for row in rows] == ["gen", "reward"], "in the order they began"
    assert path.read_text().splitlines()[0] == ",".join(COLUMNS)


def test_bytes_nobody_counted_are_empty_cells_and_the_counter_says_where_others_come_from(tmp_path):
    path = tmp_path / "memory_timeline.csv"
    append_timeline(path, timeline_rows(1, [Span("reward", 0.0, 1.0), Span("step", 0.0, 9.0)], {}))
    (row,) = read_timeline(path)  # the step itself is no phase
    assert (row.peak_allocated_bytes, row.host_rss_bytes, row.counter) == (None, None, "")
    assert ",0," not in path.read_text().splitlines()[1]
    on_gpu = PhaseMemory("gen", 1.0, 100, 50, 200, 300, 7)
    uncounted = PhaseMemory("gen", 1.0, None, None, None, None, 7)
    found = [timeline_rows(1, [Span("gen", 0.0, 1.0)], {"gen": memory})[0].counter for memory in (MEMORY, on_gpu, uncounted)]
    assert found == ["tracker", "allocator", ""]


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
