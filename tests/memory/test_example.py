from verl_memopt.memory.list_knobs import Saved, example_of


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
