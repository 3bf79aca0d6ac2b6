import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_memopt.config.reward_limits import LARGEST_SCORE
from verl_memopt.errors import RewardError
from verl_memopt.rewards.score import Limits, failure, outcome_of, outcomes_of_batch, read_score
from verl_memopt.rewards.scorer import score_row


@pytest.mark.parametrize(
    "value", [1, 1.0, True, np.float32(1), np.bool_(True), np.array([1]), torch.tensor(1.0), torch.ones(1, 1)]
)
def test_every_kind_of_number_is_a_score(value):
    score, extra = read_score(value)
    assert type(score) is float
    assert (score, extra) == (1.0, {})


LIMITS = Limits(memory_gb=3, cpu_seconds=60, open_files=64)


@given(st.floats(-LARGEST_SCORE, LARGEST_SCORE))
def test_a_finite_score_is_kept_as_it_is(value):
    assert read_score(value)[0] == value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "nan, not a finite number"),
        (-float("inf"), "-inf, not a finite number"),
        (3e38, "returned 3e\\+38, which is beyond 1e\\+12"),
        (-math.nextafter(LARGEST_SCORE, math.inf), "returned -1e\\+12, which is beyond 1e\\+12"),
        ("1.0", "'1.0' of type str"),
        ([1.0], "of type list"),
        (np.ones(2), "of type ndarray"),
        (torch.ones(2), "of type Tensor"),
        ({"accuracy": 1.0}, "a dict without 'score': it has accuracy"),
        ({"score": float("nan")}, "the score nan"),
        ({"score": 1.0, "model": object()}, "the entry 'model' of type object"),
    ],
)
def test_what_is_no_finite_score_is_refused(value, message):
    with pytest.raises(RewardError, match=message):
        read_score(value)


def test_other_entries_of_a_dict_come_back_as_plain_data():
    value = {"score": 1, "acc": np.float64(0.5), "steps": (1, torch.tensor(2)), "note": None, "parts": {1: "a"}}
    assert read_score(value) == (1.0, {"acc": 0.5, "steps": [1, 2], "note": None, "parts": {"1": "a"}})


def raised(problem):
    try:
        raise problem
    except BaseException as error:  # noqa: BLE001
        return error


def test_an_exception_becomes_its_traceback():
    index, score, extra, failed = failure(4, raised(KeyError("the response")), LIMITS, frames=0)
    assert (index, score, extra) == (4, 0.0, {})
    assert "Traceback" in failed
    assert "KeyError: 'the response'" in failed


@pytest.mark.parametrize("problem", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ...")])
def test_a_row_that_finds_no_memory_is_told_the_limit_it_may_have_met(problem):
    failed = failure(0, raised(problem), LIMITS)[3]
    assert failed.endswith(
        "\ncustom_reward_function.memory_gb=3 limits the memory of a reward process. Raise it if the function needs more."
    )


def test_an_error_of_this_package_is_told_without_a_traceback():
    assert failure(1, raised(RewardError("asked in vain")), LIMITS) == (1, 0.0, {}, "asked in vain")


def test_what_is_no_score_is_what_went_wrong_with_the_row():
    assert outcome_of(3, {"score": 2, "acc": True}) == (3, 2.0, {"acc": True}, None)
    assert outcome_of(3, "x") == (3, 0.0, {}, "returned 'x' of type str, not a number")


@pytest.mark.parametrize("values", [[1, {"score": 0.5, "acc": 0}], (1.0, {"score": 0.5, "acc": 0})])
def test_each_row_of_a_batch_has_its_own_outcome(values):
    assert outcomes_of_batch([7, 8], values) == [(7, 1.0, {}, None), (8, 0.5, {"acc": 0}, None)]
    assert outcomes_of_batch([7, 8], torch.tensor([1.0, 2.0])) == [(7, 1.0, {}, None), (8, 2.0, {}, None)]
    assert outcomes_of_batch([7, 8], [1, "x"])[1][3] == "returned 'x' of type str, not a number"


@pytest.mark.parametrize("value", [None, {"score": None, "acc": 1}])
def test_none_is_no_score_and_no_fault(value):
    index, score, extra, failure = outcome_of(3, value)
    assert (index, math.isnan(score), extra, failure) == (3, True, {"acc": 1} if value else {}, None)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0], "returned 1 scores for 2 rows"),
        (1.0, "returned 1.0 of type float, not a list of scores"),
        ("ab", "returned 'ab' of type str, not a list of scores"),
        ({"score": 1, "acc": 2}, "of type dict, not a list of scores"),
        ((number for number in (1, 2)), "of type generator, not a list of scores"),
    ],
)
def test_a_batch_without_a_score_for_each_row_fails_as_a_whole(values, message):
    outcomes = outcomes_of_batch([7, 8], values)
    assert [outcome[:3] for outcome in outcomes] == [(7, 0.0, {}), (8, 0.0, {})]
    assert all(message in str(outcome[3]) for outcome in outcomes)


def test_half_a_surrogate_pair_in_an_entry_is_replaced_so_that_it_can_be_written():
    extra = read_score({"score": 1, "note": "a\ud800b", "\udfff": ["\ud800"]})[1]
    assert extra == {"note": "a?b", "?": ["?"]}


def test_a_whole_number_that_no_float_holds_is_refused_and_the_largest_others_are_kept():
    assert read_score({"score": 1, "n": 10**300})[1] == {"n": 10**300}
    with pytest.raises(RewardError, match="whole number of 3322 bits"):
        read_score({"score": 1, "n": 10**1000})


def test_the_largest_scores_of_a_batch_have_finite_squares_in_fp32():
    advantages = torch.full((1 << 20,), 2 * LARGEST_SCORE, dtype=torch.float32)
    assert torch.isfinite(advantages.square().sum() * 2**26)


def test_a_row_is_scored_by_name():
    def seen(**row):
        return {"score": 1, **row}

    expected = {"data_source": "s", "solution_str": "a", "ground_truth": 3, "extra_info": {"index": 0}}
    assert score_row(seen, LIMITS, 5, ("s", "a", 3, {"index": 0})) == (5, 1.0, expected, None)


def test_a_traceback_begins_in_the_users_function():
    def broken(**row):
        raise KeyError(row["solution_str"])

    failed = score_row(broken, LIMITS, 0, ("source", "the response", "truth", {}))[3]
    assert "in broken" in failed
    assert "in score_row" not in failed
