import json
from dataclasses import asdict
from pathlib import Path

from verl_memopt.knobs.example import Saved, example, example_of
from verl_memopt.knobs.knob import knobs

LADDER = Path(__file__).parents[2] / "docs/evidence/2026-11-21-ladder-cpu/ladder.json"


def test_the_example_is_that_of_the_committed_ladder():
    assert asdict(example_of(json.loads(LADDER.read_text()))) == asdict(example())


def test_the_example_names_knobs_alone():
    assert example().savings.keys() <= {knob.name for knob in knobs()}


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
