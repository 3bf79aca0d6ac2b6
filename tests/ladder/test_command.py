"""What a person sees while a ladder is measured, and what remains of one that does not end well."""

import contextlib
import io
import json
import logging
import os
import signal

import pytest
from rich.console import Console

from verl_memopt.errors import DeviceMemoryError, OutOfMemory
from verl_memopt.ladder import command
from verl_memopt.ladder.command import LadderProgress, LadderRecord, measure_ladder
from verl_memopt.ladder.measure import Row, Work

WORK = Work(rows=2, prompt=16, response=8, group=2)
ONLY = ("chunked_logprob",)
NO_ROOM = ("memory.device_limit_gb=0.0001",)
RAN_OUT = OutOfMemory("update_actor", asked_bytes=2**20, held_bytes=2**24, limit_bytes=2**24)


def record_in(folder):
    return LadderRecord("toy", WORK, folder / "ladder.json", folder / "ladder.txt", folder / "ladder.png")


def screen():
    return Console(file=io.StringIO(), width=200)


def test_each_row_is_in_the_files_as_soon_as_it_is_added(tmp_path):
    record = record_in(tmp_path)
    record.add(Row("all off", (), {}, out_of_memory=RAN_OUT))
    assert [row["status"] for row in json.loads((tmp_path / "ladder.json").read_text())["rungs"]] == ["out of memory"]
    record.add(Row("chunked_logprob", (), {"ref": 2**20}, {"params": 2**20}, 2**20, 0, 1.0, 0.1, 0.2))
    assert len(json.loads((tmp_path / "ladder.json").read_text())["rungs"]) == 2
    text = (tmp_path / "ladder.txt").read_text()
    assert text.index("all off") < text.index("chunked_logprob")
    assert "\x1b" not in text
    assert {path.name for path in tmp_path.iterdir()} == {"ladder.json", "ladder.txt"}


def test_progress_off_a_terminal_is_a_line_when_a_row_begins_and_one_when_it_ends(caplog):
    caplog.set_level(logging.INFO, "verl_memopt")
    with LadderProgress(2, Console(file=io.StringIO())) as progress:
        progress.begin("all off")
        progress.end(Row("all off", (), {}, out_of_memory=RAN_OUT))
        progress.begin("lora")
        progress.end(Row("lora", (), {}, {}, 2**21, 0, 1.5, 0.1, 0.2))
    assert [line.replace(", 0:00", "") for line in caplog.messages] == [
        "row 1 of 2: all off ...",
        "row 1 of 2: all off: out of memory in update_actor: held 16.0, asked for 1.0, limit 16.0 MiB",
        "row 2 of 2: lora ...",
        "row 2 of 2: lora: peak 2.0 MiB, 1.5 s",
    ]


def test_progress_on_a_terminal_is_a_bar_with_the_row_and_its_number():
    terminal = io.StringIO()
    with LadderProgress(24, Console(file=terminal, force_terminal=True, width=80)) as progress:
        progress.begin("all off")
        progress.end(Row("all off", (), {}, out_of_memory=RAN_OUT))
        progress.begin("chunked_logprob")
    assert "chunked_logprob" in terminal.getvalue()
    assert " 1/24" in terminal.getvalue()


def test_a_ladder_that_ends_has_its_tables_on_the_screen_a_picture_and_code_0(tiny_folder, tmp_path):
    console, record = screen(), record_in(tmp_path)
    assert measure_ladder(tiny_folder, WORK, (), ["all off"], record, console) == 0
    assert "all off" in console.file.getvalue()
    assert console.file.getvalue() == (tmp_path / "ladder.txt").read_text()
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")


def test_where_no_row_fits_each_says_so_and_the_command_ends_with_an_error(tiny_folder, tmp_path):
    console = screen()
    with pytest.raises(DeviceMemoryError, match="no row fits: all 2 ran out of device memory") as caught:
        measure_ladder(tiny_folder, WORK, NO_ROOM, ONLY, record_in(tmp_path), console)
    assert caught.value.exit_code == 1
    statuses = {row["status"] for row in json.loads((tmp_path / "ladder.json").read_text())["rungs"]}
    assert statuses == {"out of memory"}
    assert "Rows that ran out of memory:" in console.file.getvalue()
    assert (tmp_path / "ladder.png").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_keeps_and_prints_what_was_measured(tiny_folder, tmp_path, monkeypatch, number, code):
    """The signal comes while the second row is measured."""
    run_ablation = command.run_ablation

    def interrupted(model, work, extra, only, before):
        def begin(knob):
            before(knob)
            if knob == "chunked_logprob":
                os.kill(os.getpid(), number)

        return run_ablation(model, work, extra, only, begin)

    monkeypatch.setattr(command, "run_ablation", interrupted)
    console = screen()
    assert measure_ladder(tiny_folder, WORK, (), ONLY, record_in(tmp_path), console) == code
    assert [row["knob"] for row in json.loads((tmp_path / "ladder.json").read_text())["rungs"]] == ["all off"]
    assert console.file.getvalue() == (tmp_path / "ladder.txt").read_text()
    assert (tmp_path / "ladder.png").exists()


def test_a_signal_whose_exception_python_dropped_stops_before_the_next_row(tiny_folder, tmp_path):
    class Interrupting(LadderRecord):
        def add(self, row):
            super().add(row)
            with contextlib.suppress(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)

    record = Interrupting("toy", WORK, None, None, None)
    assert measure_ladder(tiny_folder, WORK, (), ONLY, record, screen()) == 130
    assert [row.knob for row in record.rows] == ["all off"]


def test_an_error_of_a_later_row_leaves_the_earlier_ones_written(tiny_folder, tmp_path, monkeypatch):
    run_ablation = command.run_ablation

    def failing(*arguments):
        yield next(run_ablation(*arguments))
        raise OSError("the disk of the model is gone")

    monkeypatch.setattr(command, "run_ablation", failing)
    console = screen()
    with pytest.raises(OSError, match="is gone"):
        measure_ladder(tiny_folder, WORK, (), ONLY, record_in(tmp_path), console)
    assert len(json.loads((tmp_path / "ladder.json").read_text())["rungs"]) == 1
    assert "all off" in console.file.getvalue()
