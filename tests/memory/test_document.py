from pathlib import Path

import pytest
from verl_memopt.memory.document import page
from verl_memopt.memory.knobs import index

ENTRIES = index()


@pytest.fixture(scope="module")
def sections():
    """The page cut at its headings: the text below each."""
    pieces = page().split("\n## ")
    return dict(piece.split("\n", 1) for piece in pieces[1:])


def test_every_knob_has_a_section_in_the_order_of_the_index(sections):
    assert list(sections)[: len(ENTRIES)] == [entry.name for entry in ENTRIES]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_a_section_says_all_that_the_index_says(sections, entry):
    text = sections[entry.name]
    assert all(f"| `{key}` |" in text for key in entry.keys)
    assert all(said in text for said in (entry.title, entry.saves, entry.costs, entry.pairs))
    assert all(f"- Refuses `{refusal.setting}`: {refusal.reason}" in text for refusal in entry.refuses)


def test_defaults_are_written_as_yaml_writes_them(sections):
    text = "".join(sections.values())
    assert "| `None` |" not in text
    assert "| `True` |" not in text
    assert "| `actor_rollout_ref.model.enable_gradient_checkpointing` | `true` |" in text


def test_the_page_ends_with_the_three_kinds_of_running_out(sections):
    (last,) = list(sections)[len(ENTRIES) :]
    assert last.startswith("Troubleshooting")
    assert all(f"**{kind}" in sections[last] for kind in ("In training", "In rollout", "On the host"))


def test_the_page_in_the_documentation_is_this_one():
    committed = Path(__file__).parents[2] / "docs" / "memory.md"
    assert committed.read_text() == page(), "make docs writes it"
