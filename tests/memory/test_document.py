from pathlib import Path

from tools.knobs_page import page


def test_the_page_in_the_documentation_is_this_one():
    committed = Path(__file__).parents[2] / "docs" / "memory.md"
    assert committed.read_text() == page(), "make docs writes it"
