"""The tables of cards: what they say is what ``verl-memopt fit`` says, and all of them say the same."""

import re

import pytest

from tests.docs.pages import DOCS
from tools.cards import FILES, MARKED, ROOT, profile_lines, row
from verl_memopt.memory.cards import CARDS

TABLES = {name: language for name, (kind, language) in FILES.items() if kind == "table"}


def between_markers(name):
    return MARKED.search((ROOT / name).read_text())[2]


@pytest.mark.parametrize("card", [pytest.param(card, marks=[] if card == "24g" else pytest.mark.slow) for card in CARDS])
def test_the_tables_say_of_a_card_what_fit_says(card):
    found, text = row(card), between_markers("README.md")
    assert found.line in text, "run: python -m tools.cards"
    if found.all.model != found.alone.model:
        assert f"- `model={found.all.model} memory={card} {found.all.command}`\n" in text
    assert between_markers(f"verl_memopt/config/yaml/memory/{card}.yaml") == profile_lines(card)


def test_all_tables_of_cards_are_one():
    for language in TABLES.values():
        assert len({between_markers(name) for name, of in TABLES.items() if of == language}) == 1
    rows = {tuple(re.findall(r"^(?:\| |- )`m.*", between_markers(name), re.MULTILINE)) for name in TABLES}
    assert len(rows) == 1, "the languages"
    assert len(TABLES) >= 4


def test_no_page_names_a_card_and_its_model_outside_of_the_table():
    """The models that a profile names are in its marked lines alone."""
    for card in CARDS:
        text = (ROOT / f"verl_memopt/config/yaml/memory/{card}.yaml").read_text()
        assert re.findall(r"model=\w+", MARKED.sub("", text)) == []
    assert "up to model=" not in (DOCS / "out_of_memory.md").read_text()
