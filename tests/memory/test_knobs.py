import json

import pytest
from verl_memopt.memory.knobs import as_json, index, sections

from verl_memopt.config.reads import leaf_keys

ENTRIES = index()


def test_names_are_one_each():
    names = [entry.name for entry in ENTRIES]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_an_entry_says_what_it_saves_costs_and_pairs_with(entry):
    assert all(len(text) > 10 for text in (entry.title, entry.saves, entry.costs, entry.pairs))


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_every_key_of_an_entry_is_a_setting(entry):
    assert entry.keys or entry.besides
    assert set(entry.keys) <= set(leaf_keys())
    switched = {override.split("=")[0].lstrip("+") for override in (*entry.on, *entry.off)}
    assert switched <= set(leaf_keys())


def test_the_index_is_json():
    assert json.loads(json.dumps(as_json(ENTRIES)))[0].keys() >= {
        "name",
        "keys",
        "defaults",
        "saves",
        "costs",
        "pairs",
        "refuses",
    }


def test_sections_are_cut_at_their_heads_and_end_with_the_paragraph():
    text = "What it is.\n\nMore.\n\nSaves: a\n    b.\nCosts: c.\nPairs with: d.\n\nNot this."
    assert sections(text) == {"": "What it is.", "Saves": "a b.", "Costs": "c.", "Pairs with": "d."}
