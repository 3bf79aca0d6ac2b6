from dataclasses import replace

from rich.console import Console

from verl_memopt.memory.knobs import index
from verl_memopt.trainer.knob_report import draw_ladder, ladder_table, print_index, savings_table
from verl_memopt.trainer.ladder import Rung, Saving


def rung(knob, activations):
    phases = {"old_log_prob": 2**20, "update_actor": 2**20 + activations}
    return Rung(knob, (), phases, {"params": 2**20, "activations": activations}, 2**20 + activations, 2**19, 1.5, 0.1, 0.2)


def printed(thing):
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(thing)
    return console.export_text()


def test_the_table_says_each_rungs_peak_and_share():
    text = printed(ladder_table([rung("all off", 3 * 2**20), rung("chunked_logprob", 2**20)]))
    rows = [line.split() for line in text.splitlines() if "all off" in line or "chunked" in line]
    assert rows[-1][:3] == ["chunked_logprob", "2.0", "0.50"]


def test_without_all_off_there_is_no_share_of_it():
    text = printed(ladder_table([rung("tiled_mlp", 3 * 2**20), rung("param_offload", 2**20)]))
    assert [line.split()[2] for line in text.splitlines() if line.startswith(("tiled_mlp", "param_offload"))] == ["-", "-"]


def test_the_table_of_savings_puts_what_was_measured_beside_the_formula():
    saving = Saving("update_actor", "logits", formula_bytes=4 * 2**20, measured_bytes=3 * 2**20)
    text = printed(savings_table([replace(rung("chunked_logprob", 2**20), savings=(saving,), base="all off")]))
    row = next(line for line in text.splitlines() if line.startswith("chunked_logprob"))
    assert row.split() == ["chunked_logprob", "all", "off", "update_actor", "logits", "4.0", "3.0", "0.750"]


def test_the_index_names_every_knob_and_key():
    console = Console(width=400, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_index(index(), console)
    text = console.export_text()
    for entry in index():
        assert entry.name in text
        assert all(key in text for key in entry.keys)


def test_the_chart_is_a_picture(tmp_path):
    path = draw_ladder([rung("all off", 3 * 2**20), rung("chunked_logprob", 2**20)], tmp_path / "ladder.png", "Ladder")
    assert path.read_bytes().startswith(b"\x89PNG")
