import io
import json
from pathlib import Path

import pytest
from rich.console import Console

import verl_memopt.config
from tools.knobs_page import page
from verl_memopt.config.keys import leaf_types, value_at
from verl_memopt.config.schema import Settings
from verl_memopt.memory.knob import as_json, knob_named, knobs
from verl_memopt.memory.profiles import PROFILES
from verl_memopt.plan.list_knobs import Saved, example_of, print_knob, print_knobs

KEYS = set(leaf_types())
EACH = pytest.mark.parametrize("knob", knobs(), ids=lambda knob: knob.name)


@EACH
def test_every_key_that_a_knob_names_is_a_setting(knob):
    assert knob.keys or knob.besides
    named = {
        *knob.keys,
        *(unused.key for unused in knob.unused_keys),
        *(key for refusal in knob.refuses for key in refusal.keys),
        *(advice.key for advice in knob.advice),
    }
    if knob.row is not None:
        named |= {override.partition("=")[0] for override in (*knob.row.on, *knob.row.off)}
    assert named <= KEYS


@EACH
def test_a_default_is_that_of_the_settings(knob):
    assert all(value_at(Settings(), key) == default for key, default in knob.defaults().items())


def test_the_index_is_json():
    first = json.loads(json.dumps(as_json()))[0]
    parts = {"does", "use_it_when", "saves", "costs", "works_with"}
    assert first.keys() == {"name", *parts, "keys", "defaults", "besides", "refuses"}


def test_every_profile_that_can_be_chosen_is_in_the_index():
    folder = Path(verl_memopt.config.__file__).parent / "yaml" / "memory"
    assert {path.stem for path in folder.glob("*.yaml")} == {*PROFILES, "none"}
    assert knob_named("profiles").besides == tuple(f"memory={name}" for name in PROFILES)


def test_the_page_in_the_documentation_is_this_one():
    committed = Path(__file__).parents[2] / "docs" / "memory.md"
    assert committed.read_text() == page(), "make docs writes it"


def printed(write, width=100):
    text = io.StringIO()
    write(Console(file=text, width=width))
    return text.getvalue()


@pytest.mark.parametrize("width", [40, 80, 119, 120, 200])
def test_the_table_has_a_line_for_every_knob_and_breaks_no_key(width):
    lines = printed(print_knobs, width).splitlines()
    assert {knob.name for knob in knobs()} <= {line.split()[0] for line in lines if line.strip()}
    assert {knob.first_key.removeprefix("actor_rollout_ref.") for knob in knobs()} <= set(" ".join(lines).split())
    assert width < 80 or max(map(len, lines)) <= width


def test_a_line_names_the_key_its_default_the_measured_saving_and_the_cost():
    (line,) = [line for line in printed(print_knobs, 200).splitlines() if line.strip().startswith("token_budget")]
    assert " ".join(line.split()) == "token_budget actor.ppo_max_token_len_per_gpu 16384 254 more, smaller micro-batches"


@EACH
def test_one_knob_is_printed_in_full(knob):
    text = " ".join(printed(lambda console: print_knob(knob, console), 1000).split())
    assert text.startswith(f"{knob.name}: ")
    assert all(f"{key} = " in text or key in knob.shared_keys for key in knob.keys)
    assert all(refusal.because in text for refusal in knob.refuses)
    assert knob_named(knob.name) is knob


def test_the_largest_saving_is_taken_and_none_where_nothing_was_measured():
    def row(knob, *amounts):
        savings = [
            {"phase": "update_actor", "kind": str(place), "measured_bytes": amount} for place, amount in enumerate(amounts)
        ]
        return {"knob": knob, "savings": savings}

    ladder = {
        "model": "m",
        "work": {"rows": 1, "prompt": 2, "response": 3},
        "rungs": [row("all off"), row("a", 5, 7), row("b", 0, None)],
        "branches": [row("c", None)],
    }
    assert example_of(ladder).savings == {"a": Saved("update_actor", "1", 7), "b": Saved("update_actor", "0", 0)}
