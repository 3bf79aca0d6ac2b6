import sys
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_memopt.errors import DataError, RewardError
from verl_memopt.rewards import math_answers
from verl_memopt.rewards.code_task import CODE_SOURCES
from verl_memopt.rewards.rules import (
    RULES,
    check_rows,
    exact_match,
    final_answer,
    final_answer_format,
    gsm8k,
    math_answer,
    score_batch_by_rule,
    score_by_rule,
    think_format,
    tolerant_gsm8k,
)
from verl_memopt.rewards.score import read_score
from verl_memopt.rewards.scorer import load_reward_function


def check(rows, **options):
    check_rows([(*row, "a prompt") for row in rows], **options)


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
        ("the answer is 5", 0.0),
        ("#### $5.", 1.0),
        ("#### 5.0", 0.0),
        ("", 0.0),
    ],
)
def test_the_tolerant_rule_takes_the_last_number_after_four_hashes_and_nothing_else(solution, score):
    assert tolerant_gsm8k(solution, "5") == score


@pytest.mark.parametrize(
    ("solution", "score"),
    [
        ("so\n#### 72", 1.0),
        ("#### 1\n#### 72 apples", 1.0),
        ("#### $72", 0.0),
        ("#### 72" + "." + "x" * 299, 0.0),
        ("#### 72 " + "x" * 292, 1.0),
        ("#### 72 " + "x" * 294, 0.0),
        ("72", 0.0),
    ],
)
def test_gsm8k_is_scored_as_in_verl(solution, score):
    assert score_by_rule("openai/gsm8k", solution, "72") == score
    assert score_by_rule("openai/gsm8k", "#### 1,072", "1072") == 1.0


@pytest.mark.parametrize(
    ("solution", "truth", "score"),
    [
        (r"so \boxed{\frac12}", r"\frac{1}{2}", 1.0),
        (r"\boxed{\frac{2}{4}}", r"\frac{1}{2}", 0.0),
        (r"\boxed{x = 7}", "7", 1.0),
        (r"\boxed{10\text{ cm}}", "10", 1.0),
        (r"$\boxed 7$.", "7", 1.0),
        (r"\boxed{3} no \boxed{4}", "4", 1.0),
        (r"\boxed{\frac}", r"\frac", 1.0),
        (r"\fbox{4}", "4", 0.0),
        ("the answer is 4", "4", 0.0),
        (r"\boxed{4", "4", 0.0),
    ],
)
def test_math_is_compared_as_a_text_in_one_form_as_in_verl(solution, truth, score):
    for source in ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"):
        assert score_by_rule(source, solution, truth) == score


@pytest.mark.parametrize(
    ("solution", "score", "read"),
    [
        ("so\nAnswer: 1,072", 1.0, "1072"),
        ("Answer: $x = 1072$", 1.0, "1072"),
        ("Answer: 7\n\\boxed{1072}", -1.0, "7"),
        (r"so \boxed{1072}", 1.0, "1072"),
        (r"so \boxed{1072}" + "x" * 100, -1.0, "[INVALID]"),
        ("1072", -1.0, "[INVALID]"),
    ],
)
def test_problems_of_dapo_score_1_or_minus_1_as_in_verl(solution, score, read):
    for source in ("math_dapo", "math", "math_dapo_reasoning", "aime_2024"):
        assert score_by_rule(source, solution, "1072") == {"score": score, "acc": score == 1.0, "pred": read}
    assert read_score(score_by_rule("math_dapo", solution, "1072"))[0] == score


def test_tolerant_rules_are_those_of_a_key_of_their_own():
    pytest.importorskip("math_verify")
    assert score_by_rule("openai/gsm8k", "#### $72.", "72", tolerant=True) == 1.0
    assert score_batch_by_rule(["lighteval/MATH"], [r"\boxed{\frac{2}{4}}"], ["0.5"], [{}], tolerant=True) == [1.0]
    assert score_batch_by_rule(["toy/arithmetic", "openai/gsm8k"], ["4", "so #### 5"], ["4", "6"], [{}, {}]) == [1.0, 0.0]
    scored = load_reward_function(None, "compute_score", {"tolerant": True}, False, None)
    assert scored("openai/gsm8k", "####72", "72", {}) == 1.0


@given(st.integers(-(10**9), 10**9))
def test_gsm8k_reads_a_number_with_and_without_thousands_separators(number):
    assert gsm8k(f"so\n#### {number:,}", str(number)) == 1.0
    assert tolerant_gsm8k(f"so\n#### {number}", f"{number:,}") == 1.0
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
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
        (r"\boxed{\{2,1\}}", r"\{1,2\}", 1.0),
        (r"first \boxed{3}, no, \boxed{4}", "4", 1.0),
        ("The answer is $7$.", "7", 1.0),
        ("it is 1,234", 1234, 1.0),
        (r"\boxed{(1,2)}", "(2,1)", 0.0),
        ("", "4", 0.0),
    ],
)
def test_a_mathematical_answer_counts_by_its_value(solution, truth, score):
    pytest.importorskip("math_verify")
    assert math_answer(solution, truth) == score_by_rule("numina_olympiads", solution, truth) == score


def test_an_answer_that_cannot_be_computed_in_time_scores_nothing(monkeypatch):
    pytest.importorskip("math_verify")
    monkeypatch.setattr(math_answers, "MATH_SECONDS", 1)
    assert math_answer(r"\boxed{9^{9^{9^{9}}}}", "4") == 0.0


def test_a_ground_truth_that_is_no_mathematics_is_an_error():
    pytest.importorskip("math_verify")
    with pytest.raises(RewardError, match="math-verify cannot read the ground truth ''"):
        math_answer(r"\boxed{4}", "")


def test_a_rule_whose_package_is_missing_is_refused_with_the_row(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(DataError, match=r"train.parquet:2: data_source 'math/answer' needs math-verify.*verl-memopt\[math\]"):
        check([("openai/gsm8k", "train.parquet:1", "1"), ("math/answer", "train.parquet:2", "1")])


def test_an_unknown_data_source_is_refused_with_its_row_and_the_known_ones():
    check([(source, "a.parquet:1", "1") for source, rule in RULES.items() if rule is not math_answer])
    with pytest.raises(DataError, match=r"a\.parquet:2: data_source 'openai/prm800k' has no rule.*openai/gsm8k"):
        check([("openai/gsm8k", "a.parquet:1", "1"), ("openai/prm800k", "a.parquet:2", "1")])


@pytest.mark.parametrize("source", CODE_SOURCES)
def test_a_code_task_needs_a_sandbox_service(source):
    check([(source, "a.parquet:1", "{}"), ("toy/arithmetic", "a.parquet:2", "1")], sandbox=True)
    wrong = rf"data_source '{source}' has code tasks.*Set reward_model\.sandbox_fusion\.url.*custom_reward_function\.path"
    with pytest.raises(DataError, match=rf"^a\.parquet:1: {wrong}"):
        check([(source, "a.parquet:1", "{}")])
    with pytest.raises(RewardError, match=f"^cannot score this row: {wrong}"):
        score_by_rule(source, "```python\n1\n```", "{}")


MATH_SOURCES = ("lighteval/MATH", "math_dapo", "math/answer")
NUMBERS = [65, 65.0, np.int64(65), np.float32(65), [65], ["65"], Decimal("65"), "65"]


@pytest.mark.parametrize("truth", NUMBERS, ids=lambda truth: f"{type(truth).__name__} {truth}")
@pytest.mark.parametrize("source", ["openai/gsm8k", "toy/arithmetic", *MATH_SOURCES])
@pytest.mark.parametrize("tolerant", [False, True])
def test_a_number_in_any_form_is_the_answer_that_a_response_gives(source, truth, tolerant):
    right = {"openai/gsm8k": "#### 65", "toy/arithmetic": "65", "math_dapo": "Answer: 65"}.get(source, r"\boxed{65}")
    check([(source, "a.parquet:1", truth)], tolerant=tolerant)
    score, wrong = (
        read_score(score_by_rule(source, response, truth, tolerant=tolerant))[0] for response in (right, right.replace("5", "6"))
    )
    assert (score, wrong <= 0) == (1.0, True)


NOTHING = [None, {"target": 65}, ["65", "66"], [], float("nan"), float("inf")]


@pytest.mark.parametrize("truth", NOTHING, ids=str)
def test_a_ground_truth_that_is_no_single_answer_is_refused_with_its_row(truth):
    for source in ("openai/gsm8k", "toy/arithmetic", *MATH_SOURCES):
        with pytest.raises(DataError, match=r"^a\.parquet:2: data_source .* is no single answer\. Give a text or a number"):
            check([(source, "a.parquet:1", "65"), (source, "a.parquet:2", truth)])
    check([("format/think", "a.parquet:1", truth)])


@pytest.mark.parametrize(
    ("source", "truth", "way_out"),
    [
        ("openai/gsm8k", "$65", "Write it as 65,"),
        ("openai/gsm8k", "1,065", "Write it as 1065,"),
        ("openai/gsm8k", "65%", "Write it as 65,"),
        ("openai/gsm8k", "She has 60 + 5 = 65.\n#### 65", "Write it as 65,"),
        ("openai/gsm8k", r"\frac{1}{2}", "Write the answer alone,"),
        ("lighteval/MATH", r"so \boxed{65}", "Write the answer alone,"),
        ("math_dapo", "one\ntwo", "Write the answer alone,"),
    ],
)
def test_a_ground_truth_that_no_answer_can_equal_is_refused_with_its_row_and_its_right_form(source, truth, way_out):
    with pytest.raises(DataError, match=rf"^a\.parquet:2: data_source '{source}': the ground .*every answer would.* {way_out}"):
        check([(source, "a.parquet:1", "65"), (source, "a.parquet:2", truth)])


@pytest.mark.parametrize("truth", ["$65", "1,065", "65.", "-65", "65.0"])
def test_the_tolerant_rule_of_gsm8k_takes_the_ground_truths_that_it_can_read(truth):
    check([("openai/gsm8k", "a.parquet:1", truth)], tolerant=True)
    with pytest.raises(DataError, match=r"a\.parquet:1: .*Write it as 65, or"):
        check([("openai/gsm8k", "a.parquet:1", "65%")], tolerant=True)


@pytest.mark.parametrize(("truth", "answer"), [("65.", "65"), ("$65", "65"), ("1,065", "1065"), (0.5, r"\frac{1}{2}")])
def test_a_mathematical_ground_truth_is_read_as_it_is_meant(truth, answer):
    assert score_by_rule("math/answer", rf"\boxed{{{answer}}}", truth) == 1.0


def test_a_thought_that_the_prompt_begins_is_refused_where_the_rule_wants_the_response_to_begin_it():
    check_rows([("format/think", "a.parquet:1", "", "so <think> of it"), ("openai/gsm8k", "a.parquet:1", "1", "<think>\n")])
    with pytest.raises(DataError, match=r"^a\.parquet:2: data_source 'format/think' needs .* begins with <think>.* template"):
        check_rows([("format/think", "a.parquet:2", "", "<|assistant|><think>\n")])
