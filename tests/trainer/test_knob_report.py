from rich.console import Console

from verl_memopt.memory.knobs import index
from verl_memopt.trainer.knob_report import draw_ladder, ladder_table, print_index
from verl_memopt.trainer.ladder import Rung


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
