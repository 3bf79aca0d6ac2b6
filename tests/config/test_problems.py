import pytest

from verl_memopt.config.keys import Problem, problem, raise_together, shown
from verl_memopt.errors import ConfigError


def test_a_problem_opens_with_every_key_and_its_value_and_ends_with_the_way_out():
    found = problem({"a.b": 1, "c": None}, "they clash", "Remove c.")
    assert found == Problem(("a.b", "c"), "a.b=1, c=null: they clash. Remove c.")


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "null"), (True, "true"), (0.5, "0.5"), ("cpu", "cpu"), ("", "''"), (" ", "' '"), (["a", None, [1]], "[a,null,[1]]")],
)
def test_a_value_is_shown_as_it_would_be_written(value, text):
    assert shown(value) == text


def test_one_problem_is_its_own_message():
    with pytest.raises(ConfigError) as caught:
        raise_together([Problem(("a",), "a=1: wrong.")])
    assert str(caught.value) == "a=1: wrong."


def test_several_problems_are_told_together_and_each_once():
    with pytest.raises(ConfigError) as caught:
        raise_together([Problem(("a",), "a: wrong."), Problem(("b",), "b: wrong."), Problem(("a", "c"), "a: wrong.")])
    assert str(caught.value) == "2 problems in the settings:\na: wrong.\nb: wrong."
