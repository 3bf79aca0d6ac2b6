"""Names are the field's: a home-made word that was replaced does not come back. And files stay short."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "verl_memopt"
FILES = sorted(PACKAGE.rglob("*.py"))
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])

NAMES = {
    "Trees": "PrefixLayout",
    "trunk": "prefix",
    "trunk_starts": "cu_seqlens_k",
    "CarriedPrompt": "PrefixKV",
    "carried_prompt": "prefix_kv",
    "discarded_values": "recomputation",
    "Maker": "recomputable",
    "turned": "apply_rotary",
    "turned_back": "rotary_backward",
    "Crew": "worker group",
    "Site": "environment",
    "survey": "resolve",
    "Job": "run context",
    "Stepper": "train_step",
    "Feed": "the prefetcher's next",
    "Scores": "LogProbs",
    "scorer_of": "build_policy",
    "climb": "ablation",
    "Rung": "Row",
    "rung": "row",
    "unread": "skipped",
    "branch_tokens": "suffix_tokens",
    "out_of_memory_told": "out_of_memory_report",
    "waking_told": "wake_report",
    "just_read": "in_buffer",
}
"""Word that no code uses as a name -> the field's."""

EMPTY_LOCALS = frozenset({"found", "given", "taken", "asks", "asked", "told", "seen", "some", "got", "came"})
"""Names of variables and arguments that say nothing about what they hold."""

ON_NO_PAGE = ("trunk", "rung", "rungs", "climb", "climbs", "crew", "stepper", "carried prompt", "carried prompts", "made again")
MOST_LINES, MOST_LINES_OF_CONFIG = 600, 300


def names(path):
    """Gives every name that a file defines or uses."""
    for node in ast.walk(ast.parse(path.read_text())):
        for field in ("id", "attr", "name", "arg", "asname"):
            if isinstance(value := getattr(node, field, None), str):
                yield value


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_no_name_is_one_that_was_replaced(path):
    assert NAMES.keys().isdisjoint(names(path))
    assert path.stem not in NAMES


def variables(path):
    """Gives the names of the variables and arguments that a file defines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_a_variable_says_what_it_holds(path):
    assert EMPTY_LOCALS.isdisjoint(variables(path))


def test_a_variable_in_a_loop_a_with_or_a_signature_is_seen(tmp_path):
    file = tmp_path / "file.py"
    file.write_text("def f(found, *, told): ...\nfor seen in []:\n    with a as got, b:\n        (some, x), y = z\n")
    assert EMPTY_LOCALS & set(variables(file)) == {"found", "told", "seen", "got", "some"}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_page_uses_a_home_made_word(path):
    words = re.findall(rf"\b(?:{'|'.join(ON_NO_PAGE)})\b", re.sub(r"`[^`]*`", "", path.read_text()), re.IGNORECASE)
    assert words == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_a_file_is_short_enough_to_be_read(path):
    most = MOST_LINES_OF_CONFIG if path.relative_to(PACKAGE).parts[0] in ("config", "knobs") else MOST_LINES
    assert len(path.read_text().splitlines()) <= most
