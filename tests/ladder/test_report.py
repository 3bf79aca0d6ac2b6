from dataclasses import replace

from rich.console import Console

from verl_memopt.errors import OutOfMemory
from verl_memopt.ladder import command
from verl_memopt.ladder.command import draw_ladder, failures_table, ladder_table, ladder_tables, savings_table
from verl_memopt.ladder.measure import Row, Saving

RAN_OUT = OutOfMemory("update_actor", asked_bytes=3 * 2**20, held_bytes=7 * 2**20, limit_bytes=8 * 2**20)
FAILED = Row("all off", (), {"old_log_prob": 2**20}, out_of_memory=RAN_OUT)


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


def test_the_table_says_each_rows_peak_and_share():
    text = printed(*ladder_tables([row("all off", 3 * 2**20), row("chunked_logprob", 2**20)]))
    rows = [line.split() for line in text.splitlines() if "all off" in line or "chunked" in line]
    assert rows[-1][:3] == ["chunked_logprob", "2.0", "0.50"]


def test_without_all_off_there_is_no_share_of_it():
    text = printed(ladder_table([row("tiled_mlp", 3 * 2**20), row("param_offload", 2**20)]))
    assert [line.split()[2] for line in text.splitlines() if line.startswith(("tiled_mlp", "param_offload"))] == ["-", "-"]


def test_the_table_of_savings_puts_what_was_measured_beside_the_formula():
    saving = Saving("update_actor", "logits", formula_bytes=4 * 2**20, measured_bytes=3 * 2**20)
    text = printed(savings_table([replace(row("chunked_logprob", 2**20), savings=(saving,), base="all off")]))
    assert cells(text, "chunked_logprob") == ["chunked_logprob", "all", "off", "update_actor", "logits", "4.0", "3.0", "0.750"]


def test_a_row_that_ran_out_shows_its_status_and_the_phases_that_ended():
    text = printed(*ladder_tables([FAILED, row("chunked_logprob", 2**20)]))
    assert cells(text, "all off") == ["all", "off", "-", "-", "1.0", *["-"] * 9, "out", "of", "memory"]
    assert cells(text, "chunked_logprob")[:3] == ["chunked_logprob", "2.0", "-"]
    assert cells(text, "chunked_logprob")[-1] == "ok"


def test_where_a_row_ran_out_is_a_table_of_its_own():
    text = printed(failures_table([FAILED, row("chunked_logprob", 2**20)]))
    assert cells(text, "all off") == ["all", "off", "update_actor", "7.0", "3.0", "8.0"]
    assert "chunked_logprob" not in text
    assert "ran out" not in printed(*ladder_tables([row("all off", 2**20)]))


def test_a_saving_that_cannot_be_measured_has_no_number_and_says_why():
    saving = Saving("update_actor", "logits", formula_bytes=4 * 2**20, measured_bytes=None)
    text = printed(savings_table([FAILED, replace(row("chunked_logprob", 2**20), savings=(saving,), base="all off")]))
    assert " ".join(cells(text, "chunked_logprob")[5:]) == "4.0 - - not measurable: all off ran out of memory"


def test_the_chart_is_a_picture(tmp_path):
    path = draw_ladder([row("all off", 3 * 2**20), row("chunked_logprob", 2**20)], tmp_path / "ladder.png", "Ladder")
    assert path.read_bytes().startswith(b"\x89PNG")


def drawn(rows, tmp_path, monkeypatch):
    """Return the axes of a chart."""
    figures = []
    monkeypatch.setattr(command, "save", lambda drawing, path: figures.append(drawing) or path)
    draw_ladder(rows, tmp_path / "ladder.png", "Ladder")
    return figures[0].axes[0]


def test_a_row_that_ran_out_has_words_in_the_chart_and_no_bar(tmp_path, monkeypatch):
    axes = drawn([FAILED, row("chunked_logprob", 2**20), row("lora", 2**20)], tmp_path, monkeypatch)
    assert {round(bar.get_y() + bar.get_height() / 2) for bar in axes.patches} == {1, 2}
    words = [text.get_text().strip() for text in axes.texts if round(text.get_position()[1]) == 0]
    assert words == ["out of memory in update_actor: held 7.0, asked for 3.0, limit 8.0 MiB"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["all off", "+ chunked_logprob", "+ lora"]


def test_a_chart_of_rows_that_all_ran_out_has_no_bar_at_all(tmp_path, monkeypatch):
    axes = drawn([FAILED], tmp_path, monkeypatch)
    assert not axes.patches
    assert len(axes.texts) == 1
