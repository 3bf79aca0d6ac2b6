import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_memopt.errors import DataError, RewardError
from verl_memopt.rewards import rules
from verl_memopt.rewards.rules import (
    CODE_SOURCES,
    RULES,
    check_sources,
    exact_match,
    final_answer,
    final_answer_format,
    gsm8k,
    math_answer,
    score_batch_by_rule,
    score_by_rule,
    think_format,
)


@pytest.mark.parametrize(
    ("solution", "score"), [("85", 1.0), (" 85\n", 1.0), ("85.", 0.0), ("8 5", 0.0), ("", 0.0), ("185", 0.0)]
)
def test_exact_match_forgives_only_the_white_space_around_an_answer(solution, score):
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
def test_gsm8k_takes_the_last_number_after_four_hashes_and_nothing_else(solution, score):
    assert gsm8k(solution, "5") == score


@given(st.integers(-(10**9), 10**9))
def test_gsm8k_reads_a_number_with_and_without_thousands_separators(number):
    assert gsm8k(f"so\n#### {number:,}", str(number)) == 1.0
    assert gsm8k(f"so\n#### {number}", f"{number:,}") == 1.0
    assert final_answer(f"#### {number}") == str(number)


@pytest.mark.parametrize(
    ("solution", "score"),
    [("why\n#### 7", 1.0), ("why\n#### 7\n", 1.0), ("#### 7 apples", 0.0), ("#### 7\n#### 7", 0.0), ("7", 0.0)],
)
def test_the_final_answer_format_wants_one_answer_at_the_end_whatever_its_value(solution, score):
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
def test_the_think_format_wants_one_thought_then_one_answer(solution, score):
    assert think_format(solution, None) == score


@pytest.mark.parametrize(
    ("solution", "truth", "score"),
    [
        (r"so \boxed{\frac{2}{4}}", "0.5", 1.0),
        (r"so \boxed{\frac{2}{4}}", r"\frac{1}{2}", 1.0),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
        (r"\boxed{\{2,1\}}", r"\{1,2\}", 1.0),
        (r"first \boxed{3}, no, \boxed{4}", "4", 1.0),
        (r"first \boxed{4}, no, \boxed{3}", "4", 0.0),
        ("The answer is $7$.", "7", 1.0),
        ("it is 1,234", 1234, 1.0),
        (r"\boxed{3}", "4", 0.0),
        (r"\boxed{(1,2)}", "(2,1)", 0.0),
        ("no answer", "4", 0.0),
        ("", "4", 0.0),
    ],
)
def test_a_mathematical_answer_counts_by_its_value(solution, truth, score):
    pytest.importorskip("math_verify")
    assert math_answer(solution, truth) == score


def test_the_mathematical_rows_beside_verls_code_tasks_are_scored():
    pytest.importorskip("math_verify")
    for name in ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads"):
        assert score_by_rule(f"numina_{name}", r"so \boxed{\frac{1}{2}}", "0.5") == 1.0
        assert score_by_rule(f"numina_{name}", r"so \boxed{2}", "0.5") == 0.0


def test_an_answer_that_cannot_be_computed_in_time_scores_nothing(monkeypatch):
    pytest.importorskip("math_verify")
    monkeypatch.setattr(rules, "MATH_SECONDS", 1)
    assert math_answer(r"\boxed{9^{9^{9^{9}}}}", "4") == 0.0


def test_a_ground_truth_that_is_no_mathematics_is_an_error():
    pytest.importorskip("math_verify")
    with pytest.raises(RewardError, match="math-verify cannot read the ground truth ''"):
        math_answer(r"\boxed{4}", "")


def test_a_rule_whose_package_is_missing_is_refused_with_the_row(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(DataError, match=r"train.parquet:2: data_source 'math/answer' needs math-verify.*verl-memopt\[math\]"):
        check_sources([("openai/gsm8k", "train.parquet:1"), ("math/answer", "train.parquet:2")])


def test_the_data_source_chooses_the_rule():
    assert score_by_rule("toy/arithmetic", "5", "5") == 1.0
    assert score_by_rule("openai/gsm8k", "5", "5") == 0.0


def test_an_unknown_data_source_is_refused_with_its_row_and_the_known_ones():
    check_sources([(source, "a.parquet:1") for source, rule in RULES.items() if rule is not math_answer])
    with pytest.raises(DataError, match=r"a\.parquet:2: data_source 'openai/prm800k' has no rule.*openai/gsm8k"):
        check_sources([("openai/gsm8k", "a.parquet:1"), ("openai/prm800k", "a.parquet:2")])


@pytest.mark.parametrize("source", CODE_SOURCES)
def test_a_code_task_needs_a_sandbox_service(source):
    check_sources([(source, "a.parquet:1"), ("toy/arithmetic", "a.parquet:2")], sandbox=True)
    wrong = rf"data_source '{source}' is of code tasks.*Set reward_model\.sandbox_fusion\.url.*custom_reward_function\.path"
    with pytest.raises(DataError, match=rf"^a\.parquet:1: {wrong}"):
        check_sources([(source, "a.parquet:1")])
    with pytest.raises(RewardError, match=f"^cannot score this row: {wrong}"):
        score_by_rule(source, "```python\n1\n```", "{}")


def test_a_batch_is_scored_row_by_row():
    sources = ["toy/arithmetic", "openai/gsm8k"]
    assert score_batch_by_rule(sources, ["4", "so #### 5"], ["4", "6"], [{}, {}]) == [1.0, 0.0]
