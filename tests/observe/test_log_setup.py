import io
import logging
import re
import sys

import pytest
from rich.console import Console
from rich.progress import Progress

from verl_memopt.errors import UserError
from verl_memopt.observe.log_setup import keep_console, lasting_console, setup_logging


@pytest.fixture(autouse=True)
def restored():
    root, own = logging.getLogger(), logging.getLogger("verl_memopt")
    before = (list(root.handlers), root.level, own.level)
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    own.setLevel(before[2])
    logging.captureWarnings(False)


def test_the_driver_and_rank_zero_say_what_others_keep_to_themselves(capsys):
    for rank in (None, 0, 1):
        setup_logging(rank)
        logging.getLogger("verl_memopt.memory").info("said")
        logging.getLogger("verl_memopt.memory").warning("warned")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == [
        "driver INFO verl_memopt.memory: said",
        "driver WARNING verl_memopt.memory: warned",
        "rank 0 INFO verl_memopt.memory: said",
        "rank 0 WARNING verl_memopt.memory: warned",
        "rank 1 WARNING verl_memopt.memory: warned",
    ]


def test_other_packages_are_heard_from_warnings_on(capsys):
    setup_logging()
    logging.getLogger("httpx").info("noise")
    logging.getLogger("some_library").info("noise")
    logging.getLogger("httpx").error("matters")
    assert [line.rsplit(" ", 1)[1] for line in capsys.readouterr().err.splitlines()] == ["matters"]


class Terminal(io.StringIO):
    """A terminal of 80 columns: it shows control sequences as movements."""

    def isatty(self):
        return True


def show_a_run_that_fails(log):
    sys.stderr.write("a warning before there is a folder\n")
    keep_console(log)
    console = Console(width=80)
    with Progress(console=console) as bar:
        task = bar.add_task("bar", total=3)
        for step in range(3):
            bar.update(task, completed=step, refresh=True)
            console.print(f"[bold]step[/bold] {step}")
        assert "step 2" in log.read_text(), "a kill here loses nothing"
        bar.update(task, visible=False)
    raise UserError("no room. Free some.")


def test_the_console_of_a_run_is_kept_from_its_beginning_to_its_error(tmp_path, monkeypatch):
    log = tmp_path / "console.log"
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, Terminal())
    with pytest.raises(UserError), lasting_console():
        show_a_run_that_fails(log)
    lines = log.read_text().splitlines()
    assert lines[0].startswith("--- 20")
    shown = [line for line in lines[1:] if line]
    assert shown == ["a warning before there is a folder", "step 0", "step 1", "step 2", "UserError: no room. Free some."]


def test_a_resumed_run_appends_to_its_console_and_a_full_disk_ends_no_run(tmp_path, monkeypatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.StringIO())
    for text in ("first", "second"):
        with lasting_console():
            keep_console(tmp_path / "console.log")
            sys.stdout.write(f"{text}\n")
    assert re.findall(r"first|second|---", (tmp_path / "console.log").read_text()) == ["---", "first", "---", "second"]
    with lasting_console():
        keep_console(tmp_path / "no folder" / "console.log")
        sys.stdout.write("third\n")
