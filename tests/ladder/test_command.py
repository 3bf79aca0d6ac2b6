"""What a person sees while a ladder is measured, and what remains of one that does not end well."""

import contextlib
import io
import json
import logging
import os
import signal
from dataclasses import replace

import pytest
from rich.console import Console

from verl_memopt.errors import DeviceMemoryError, OutOfMemory
from verl_memopt.ladder import command
from verl_memopt.ladder.command import (
    LadderProgress,
    LadderRecord,
    draw_ladder,
    failures_table,
    ladder_table,
    ladder_tables,
    measure_ladder,
    savings_table,
)
from verl_memopt.ladder.measure import Row, Saving, UpdateSize

WORK = UpdateSize(rows=2, prompt=16, response=8, group=2)
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


# The tables and the chart.

SHORT = OutOfMemory("update_actor", asked_bytes=3 * 2**20, held_bytes=7 * 2**20, limit_bytes=8 * 2**20)
FAILED = Row("all off", (), {"old_log_prob": 2**20}, out_of_memory=SHORT)


def row(knob, activations):
    """Return a row that fits, with the peak in the update."""
    phases = {"old_log_prob": 2**20, "update_actor": 2**20 + activations}
    return Row(knob, (), phases, {"params": 2**20, "activations": activations}, 2**20 + activations, 2**19, 1.5, 0.1, 0.2)


def printed(*things):
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(*things, sep="\n")
    return console.export_text()


def cells(text, knob):
    return next(line.split() for line in text.splitlines() if line.startswith(knob))


def test_the_tables_say_each_rows_peak_and_share_and_put_savings_beside_the_formula():
    text = printed(*ladder_tables([row("all off", 3 * 2**20), row("chunked_logprob", 2**20)]))
    rows = [line.split() for line in text.splitlines() if "all off" in line or "chunked" in line]
    assert rows[-1][:3] == ["chunked_logprob", "2.0", "0.50"]
    assert "ran out" not in text
    text = printed(ladder_table([row("tiled_mlp", 3 * 2**20), row("param_offload", 2**20)]))  # no all off, no share of it
    assert [line.split()[2] for line in text.splitlines() if line.startswith(("tiled_mlp", "param_offload"))] == ["-", "-"]
    saving = Saving("update_actor", "logits", formula_bytes=4 * 2**20, measured_bytes=3 * 2**20)
    text = printed(savings_table([replace(row("chunked_logprob", 2**20), savings=(saving,), base="all off")]))
    assert cells(text, "chunked_logprob") == ["chunked_logprob", "all", "off", "update_actor", "logits", "4.0", "3.0", "0.750"]


def test_a_row_that_ran_out_shows_its_status_where_it_ran_out_and_no_savings():
    text = printed(*ladder_tables([FAILED, row("chunked_logprob", 2**20)]))
    assert cells(text, "all off") == ["all", "off", "-", "-", "1.0", *["-"] * 9, "out", "of", "memory"]
    assert cells(text, "chunked_logprob")[:3] == ["chunked_logprob", "2.0", "-"]
    assert cells(text, "chunked_logprob")[-1] == "ok"
    text = printed(failures_table([FAILED, row("chunked_logprob", 2**20)]))
    assert cells(text, "all off") == ["all", "off", "update_actor", "7.0", "3.0", "8.0"]
    assert "chunked_logprob" not in text
    saving = Saving("update_actor", "logits", formula_bytes=4 * 2**20, measured_bytes=None)
    text = printed(savings_table([FAILED, replace(row("chunked_logprob", 2**20), savings=(saving,), base="all off")]))
    assert " ".join(cells(text, "chunked_logprob")[5:]) == "4.0 - - not measurable: all off ran out of memory"


def drawn(rows, tmp_path, monkeypatch):
    """Return the axes of a chart."""
    figures = []
    monkeypatch.setattr(command, "save", lambda drawing, path: figures.append(drawing) or path)
    draw_ladder(rows, tmp_path / "ladder.png", "Ladder")
    return figures[0].axes[0]


def test_rows_that_save_nothing_are_named_below_the_chart_and_have_no_bar(tmp_path, monkeypatch):
    rows = [row("all off", 3 * 2**20), row("resharding", 3 * 2**20), row("lora", 2**20), row("weight_buckets", 2**20 + 1)]
    axes = drawn(rows, tmp_path, monkeypatch)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["all off", "+ lora"]
    assert "resharding, weight_buckets" in axes.get_xlabel()


def test_a_row_that_ran_out_has_words_in_the_chart_and_no_bar(tmp_path, monkeypatch):
    axes = drawn([FAILED, row("chunked_logprob", 2**20), row("lora", 2**19)], tmp_path, monkeypatch)
    assert {round(bar.get_y() + bar.get_height() / 2) for bar in axes.patches} == {1, 2}
    words = [text.get_text().strip() for text in axes.texts if round(text.get_position()[1]) == 0]
    assert words == ["out of memory in update_actor: held 7.0, asked for 3.0, limit 8.0 MiB"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["all off", "+ chunked_logprob", "+ lora"]
    axes = drawn([FAILED], tmp_path, monkeypatch)
    assert (len(axes.patches), len(axes.texts)) == (0, 1)
