"""Rule rewards."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_memopt.errors import DataError
from verl_memopt.rewards.rules import (
    RULES,
    check_sources,
    exact_match,
    final_answer,
    final_answer_format,
    gsm8k,
    score_by_rule,
    think_format,
)


@pytest.mark.parametrize(
    ("solution", "score"), [("85", 1.0), (" 85\n", 1.0), ("85.", 0.0), ("8 5", 0.0), ("", 0.0), ("185", 0.0)]
)
def test_exact_match_forgives_only_the_white_space_around_an_answer(solution: str, score: float) -> None:
    assert exact_match(solution, "85") == score


@pytest.mark.parametrize(
    ("solution", "score"),
    [
        ("2 + 3 is 5\n#### 5", 1.0),
        ("#### 1,005", 0.0),
        ("#### 4\nno, wait\n#### 5", 1.0),
        ("#### 5\nno, wait\n#### 4", 0.0),
        ("the answer is 5", 0.0),
        ("#### five", 0.0),
        ("#### $5.", 1.0),
        ("#### 5.0", 0.0),
        ("### 5", 0.0),
        ("", 0.0),
    ],
)
def test_gsm8k_takes_the_last_number_after_four_hashes_and_nothing_else(solution: str, score: float) -> None:
    assert gsm8k(solution, "5") == score


@given(st.integers(-(10**9), 10**9))
def test_gsm8k_reads_a_number_with_and_without_thousands_separators(number: int) -> None:
    assert gsm8k(f"so\n#### {number:,}", str(number)) == 1.0
    assert gsm8k(f"so\n#### {number}", f"{number:,}") == 1.0
    assert final_answer(f"#### {number}") == str(number)


@pytest.mark.parametrize(
    ("solution", "score"),
    [("why\n#### 7", 1.0), ("why\n#### 7\n", 1.0), ("#### 7 apples", 0.0), ("#### 7\n#### 7", 0.0), ("7", 0.0)],
)
def test_the_final_answer_format_wants_one_answer_at_the_end_whatever_its_value(solution: str, score: float) -> None:
    assert final_answer_format(solution, "not looked at") == score


@pytest.mark.parametrize(
    ("solution", "score"),
    [
        ("<think>a\nb</think>\n<answer>5</answer>", 1.0),
        ("<think>a</think><answer>5</answer> bye", 0.0),
        ("<answer>5</answer><think>a</think>", 0.0),
        ("<think>a</think><think>b</think><answer>5</answer>", 0.0),
        ("<think>a<think>b</think><answer>5</answer>", 0.0),
        ("5", 0.0),
    ],
)
def test_the_think_format_wants_one_thought_then_one_answer(solution: str, score: float) -> None:
    assert think_format(solution, None) == score


def test_the_data_source_chooses_the_rule() -> None:
    assert score_by_rule("toy/arithmetic", "5", "5") == 1.0
    assert score_by_rule("openai/gsm8k", "5", "5") == 0.0


def test_an_unknown_data_source_is_refused_with_its_row_and_the_known_ones() -> None:
    check_sources([(source, "a.parquet:1") for source in RULES])
    with pytest.raises(DataError, match=r"a\.parquet:2: data_source 'lighteval/MATH' has no rule.*openai/gsm8k"):
        check_sources([("openai/gsm8k", "a.parquet:1"), ("lighteval/MATH", "a.parquet:2")])
