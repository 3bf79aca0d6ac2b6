from pathlib import Path

import pytest

from verl_memopt.knobs.document import page
from verl_memopt.knobs.knob import knobs, text_of


@pytest.fixture(scope="module")
def sections():
    """The page cut at its headings: the text below each."""
    return dict(piece.split("\n", 1) for piece in page().split("\n## ")[1:])


def test_every_knob_has_a_section_in_the_order_of_the_index(sections):
    assert list(sections) == [knob.name for knob in knobs()]


@pytest.mark.parametrize("knob", knobs(), ids=lambda knob: knob.name)
def test_a_section_says_all_that_the_knob_says(sections, knob):
    text = sections[knob.name]
    assert all(f"| `{key}` |" in text for key in knob.keys)
    assert all(words in text for words in text_of(knob.name).values())
    assert all(refusal.because in text for refusal in knob.refuses)


def test_the_table_shows_what_was_measured(sections):
    head = page().split("\n## ")[0]
    assert "| [optimizer_offload](#optimizer_offload) | 1,667 MiB of optimizer | host memory, copies per step |" in head
    assert "In the example: 1,667 MiB of optimizer in `update_actor`." in sections["optimizer_offload"]


def test_defaults_are_written_as_yaml_writes_them(sections):
    text = "".join(sections.values())
    assert "| `None` |" not in text
    assert "| `True` |" not in text
    assert "| `actor_rollout_ref.model.enable_gradient_checkpointing` | `true` |" in text


def test_the_page_in_the_documentation_is_this_one():
    committed = Path(__file__).parents[2] / "docs" / "memory.md"
    assert committed.read_text() == page(), "make docs writes it"
