"""A knob stays in few files: its declaration, its mechanism, and where the two meet."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "verl_memopt"
MOST_FILES = 4

WORDS = {
    "shared_prompt": {"use_prefix_grouper", "shared_prompt", "shared_prompts"},
    "optimizer_offload": {"optimizer_offload", "StateLanes"},
    "activation_offload": {"enable_activation_offload", "activation_offload", "ActivationOffload"},
}
"""Knob -> names by which code knows it."""


def words_of_code(path):
    """Gives the names, modules and whole texts in a file's code. Docstrings and comments are not code."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg | ast.keyword) and node.arg:
            yield node.arg
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module or "").split(".")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            yield from node.value.replace("=", ".").split(".")


def files_of(words):
    files = sorted(PACKAGE.rglob("*.py"))
    return [path.relative_to(PACKAGE).as_posix() for path in files if not words.isdisjoint(words_of_code(path))]


@pytest.mark.parametrize("knob", WORDS)
def test_a_knob_is_known_to_few_files(knob):
    files = files_of(WORDS[knob])
    assert f"knobs/{knob}.py" in files
    assert len(files) <= MOST_FILES, files
