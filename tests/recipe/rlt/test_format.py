"""Tags and prefixes of both families."""

import pytest

from verl_memopt.recipes.rlt.dataset import FORMATS, R1, STRATOS, TagPair


@pytest.mark.parametrize("name", FORMATS)
def test_the_teachers_turn_is_the_solution_then_the_forced_prefix(name):
    chosen = FORMATS[name]
    solution, explanation = chosen.solution, chosen.explanation
    expected = f"{solution.begin}42{solution.end}\n\n{explanation.begin}\n\n"
    assert chosen.teacher_prefill("42") == expected
    assert expected.endswith(chosen.forced_prefix)


@pytest.mark.parametrize("name", FORMATS)
def test_the_students_turn_is_the_thought_then_the_solution(name):
    chosen = FORMATS[name]
    whole = chosen.student_opening + "why" + chosen.bridge + "42" + chosen.solution.end
    assert whole == f"{chosen.thought.begin}\n\nwhy{chosen.thought.end}\n\n{chosen.solution.wrap('42')}"


@pytest.mark.parametrize("name", FORMATS)
def test_the_six_tags_differ_and_none_contains_another(name):
    tags = FORMATS[name].tags
    assert len(tags) == 6
    assert not [(one, other) for one in tags for other in tags if one != other and one in other]


@pytest.mark.parametrize("chosen", [STRATOS, R1])
def test_system_prompts_spell_out_the_tags_of_both_sections(chosen):
    assert all(tag in chosen.teacher_system for pair in (chosen.solution, chosen.explanation) for tag in (pair.begin, pair.end))
    assert all(tag in chosen.student_system for pair in (chosen.solution, chosen.thought) for tag in (pair.begin, pair.end))
    assert chosen.explanation.begin not in chosen.student_system


def test_the_short_format_has_no_system_prompts():
    assert (FORMATS["short"].teacher_system, FORMATS["short"].student_system) == ("", "")
    assert FORMATS["short"].tags == R1.tags


@pytest.mark.parametrize(
    ("text", "expected"),
    [(" <a>x\n</a>\n", "x\n"), ("<a></a>", ""), ("<a>x", "<a>x"), ("x </a>", "x </a>"), (" x ", " x "), ("<a/a>", "<a/a>")],
)
def test_only_a_whole_pair_around_a_text_is_stripped(text, expected):
    assert TagPair("<a>", "</a>").unwrap(text) == expected


def test_tags_that_overlap_are_no_pair():
    assert TagPair("<<", "<<").unwrap("<<<") == "<<<"
