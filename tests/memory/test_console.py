import io

import pytest
from rich.console import Console

from verl_memopt.memory.knob import knob_named, knobs
from verl_memopt.memory.list_knobs import print_knob, print_knobs


def printed(write, width=100):
    text = io.StringIO()
    write(Console(file=text, width=width))
    return text.getvalue()


@pytest.mark.parametrize("width", [80, 100, 200])
def test_the_table_has_a_line_for_every_knob_and_fits_the_terminal(width):
    lines = printed(print_knobs, width).splitlines()
    assert max(map(len, lines)) <= width
    starts = {line.split()[0] for line in lines if line.strip()}
    assert {knob.name for knob in knobs()} <= starts


def test_a_line_names_the_key_its_default_the_measured_saving_and_the_cost():
    (line,) = [line for line in printed(print_knobs, 200).splitlines() if line.strip().startswith("token_budget")]
    assert line.split() == [
        "token_budget",
        "actor.ppo_max_token_len_per_gpu",
        "16384",
        "254",
        "more,",
        "smaller",
        "micro-batches",
    ]


@pytest.mark.parametrize("knob", knobs(), ids=lambda knob: knob.name)
def test_one_knob_is_printed_in_full(knob):
    text = " ".join(printed(lambda console: print_knob(knob, console), 1000).split())
    assert text.startswith(f"{knob.name}: ")
    assert all(f"{key} = " in text or key in knob.shared_keys for key in knob.keys)
    assert all(refusal.because in text for refusal in knob.refuses)
    assert knob_named(knob.name) is knob
