"""Reports made from files alone."""

import json
from io import StringIO

import pytest
from rich.console import Console

from verl_memopt.errors import UserError
from verl_memopt.observe.report import finish_summary, report


@pytest.fixture
def console():
    return Console(file=StringIO(), width=80)


def test_a_report_makes_charts_and_summary_again_and_keeps_what_only_the_run_knew(make_run, console):
    folder = make_run(steps=2)
    finish_summary(folder, {"device": "cpu"})
    original = json.loads(folder.summary.read_text())
    paths = report([folder.path], console=console)
    assert json.loads(folder.summary.read_text()) == original
    assert original["device"] == "cpu"
    assert [path.name for path in paths][-1] == "summary.json"
    assert console.file.getvalue().splitlines()[-1] == str(folder.summary)


def test_a_report_of_a_run_that_was_cut_short_builds_the_summary(make_run, console):
    folder = make_run(steps=2)
    report([folder.path], console=console)
    assert json.loads(folder.summary.read_text())["steps"] == 2


def test_a_report_elsewhere_leaves_the_run_folder_alone(make_run, console, tmp_path):
    folder = make_run(steps=1)
    before = sorted(folder.path.iterdir())
    report([folder.path], out=tmp_path / "elsewhere", console=console)
    assert sorted(folder.path.iterdir()) == before
    assert (tmp_path / "elsewhere" / "summary.json").exists()


def test_runs_are_compared_against_the_first(make_run, console, tmp_path):
    short, long = make_run("short", steps=1), make_run("long", steps=12)
    paths = report([short.path, long.path], console=console)
    text = console.file.getvalue()
    assert "short" in text
    assert "22.0 (+100.0 %)" in text, "11 MiB at step 1, 22 at step 12"
    assert {path.parent for path in paths} == {tmp_path / "comparison"}
    assert all(path.stat().st_size > 1000 for path in paths)


def test_a_folder_that_is_missing_is_named(make_run, console, tmp_path):
    with pytest.raises(UserError, match="gone"):
        report([make_run().path, tmp_path / "gone"], console=console)


def test_a_report_repeats_the_warnings_of_the_run(make_run):
    folder = make_run()
    folder.add_warnings(2, ["the reward fell"])
    assert finish_summary(folder)["warnings"] == [{"step": 2, "warning": "the reward fell"}]
    console = Console(file=StringIO(), width=80)
    report([folder.path], console=console)
    assert "WARNING, step 2: the reward fell" in console.file.getvalue()
    assert folder.read_summary()["warnings"] == [{"step": 2, "warning": "the reward fell"}]
