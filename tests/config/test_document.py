import dataclasses
from pathlib import Path

from tools.settings_page import meanings, page
from verl_memopt.config.keys import walk

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_committed_page_is_the_one_the_schema_gives():
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m tools.settings_page > docs/configuration.md"


def test_every_field_of_the_schema_says_what_it_means():
    sections = [(section, kind) for section, kind in walk() if dataclasses.is_dataclass(kind)]
    silent = [(section, name) for section, kind in sections for name, meaning in meanings(kind).items() if not meaning]
    assert silent == []
