"""Tests lie where their source lies: file for file, in both directions."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path.relative_to(ROOT / "verl_memopt") for path in (ROOT / "verl_memopt").rglob("*.py"))
TESTS = sorted(path.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py"))
ROOMS_OF_THEIR_OWN = {"architecture", "benchmarks", "docs", "end_to_end", "faults", "gpu", "recipe", "virtual_gpu"}
"""Folders of tests that look at the whole rather than at a file."""

NO_TEST = {
    "__main__.py": "two lines, run by test_cli.py",
    "knobs/knob.py": "test_index.py, test_critic_rules.py and test_toy_knob.py read what it holds",
    "knobs/values.py": "tests/config/test_allowed.py tries each range at its bounds; rules ask its questions",
    "rewards/rlt/status.py": "numbers and their names alone",
    "rewards/rows.py": "records alone",
    "workers/plan.py": "records alone",
    "workers/reply.py": "a record alone",
}
NO_SOURCE = {
    "config/test_bad_input.py": "odd values of every key, through all files of the room",
    "config/test_profiles.py": "the profiles are YAML",
    "config/test_presets.py": "the presets are YAML",
    "knobs/test_critic_rules.py": "rules of the critic, from knobs/knob.py",
    "knobs/test_index.py": "the list of the knobs, from knobs/knob.py",
    "knobs/test_toy_knob.py": "a knob that is not there",
    "rollout/test_ranks.py": "both engines over several processes",
}


SCHEMA = "values alone; tests/config holds that each is allowed, documented, linked and read"
DECLARATION = "tests/knobs/test_index.py holds every declaration; the tests of the mechanism show that the bytes fall"


def without_test(source):
    """Says why a source file has no test file of its own, or gives None."""
    if source.parent.as_posix() == "config/schema":
        return SCHEMA
    if source.parent.as_posix() == "knobs" and "\nKNOB = Knob(" in (ROOT / "verl_memopt" / source).read_text():
        return DECLARATION
    return NO_TEST.get(str(source))


def mirror_of(source):
    return source.with_name(f"test_{source.name}")


def source_of(test):
    return test.with_name(test.name.removeprefix("test_"))


@pytest.mark.parametrize("source", [path for path in SOURCES if path.name != "__init__.py"], ids=str)
def test_a_source_file_has_its_test_file(source):
    assert (mirror_of(source) in TESTS) != (without_test(source) is not None)


@pytest.mark.parametrize("test", [path for path in TESTS if path.parts[0] not in ROOMS_OF_THEIR_OWN], ids=str)
def test_a_test_file_has_its_source_file(test):
    assert (source_of(test) in SOURCES) != (str(test) in NO_SOURCE)


def test_every_exception_is_a_file_that_exists():
    assert NO_TEST.keys() <= set(map(str, SOURCES))
    assert NO_SOURCE.keys() <= set(map(str, TESTS))
