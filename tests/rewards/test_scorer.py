"""What counts as a score, and what a reward process imports."""

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_memopt.config.allowed import LARGEST_SCORE
from verl_memopt.errors import RewardError
from verl_memopt.rewards.limits import Limits
from verl_memopt.rewards.scorer import read_score, score_row


@pytest.mark.parametrize(
    "value", [1, 1.0, True, np.float32(1), np.bool_(True), np.array([1]), torch.tensor(1.0), torch.ones(1, 1)]
)
def test_every_kind_of_number_is_a_score(value: Any) -> None:
    score, extra = read_score(value)
    assert type(score) is float
    assert (score, extra) == (1.0, {})


LIMITS = Limits(memory_gb=3, cpu_seconds=60, open_files=64)


@given(st.floats(-LARGEST_SCORE, LARGEST_SCORE))
def test_a_finite_score_is_kept_as_it_is(value: float) -> None:
    assert read_score(value)[0] == value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "nan, not a finite number"),
        (float("inf"), "inf, not a finite number"),
        (-float("inf"), "-inf, not a finite number"),
        (3e38, "returned 3e\\+38, which is beyond 1e\\+12"),
        (-math.nextafter(LARGEST_SCORE, math.inf), "returned -1e\\+12, which is beyond 1e\\+12"),
        ({"score": 1e13}, "returned the score 1e\\+13, which is beyond"),
        (None, "None of type NoneType"),
        ("1.0", "'1.0' of type str"),
        ([1.0], "of type list"),
        (np.ones(2), "of type ndarray"),
        (torch.ones(2), "of type Tensor"),
        ({"accuracy": 1.0}, "a dict without 'score': it has accuracy"),
        ({}, "it has nothing"),
        ({"score": float("nan")}, "the score nan"),
        ({"score": 1.0, "model": object()}, "the entry 'model' of type object"),
    ],
)
def test_what_is_no_finite_score_is_refused(value: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        read_score(value)


def test_other_entries_of_a_dict_come_back_as_plain_data() -> None:
    value = {"score": 1, "acc": np.float64(0.5), "steps": (1, torch.tensor(2)), "note": None, "parts": {1: "a"}}
    assert read_score(value) == (1.0, {"acc": 0.5, "steps": [1, 2], "note": None, "parts": {"1": "a"}})


def test_an_exception_becomes_its_traceback() -> None:
    def broken(**row: Any) -> float:
        raise KeyError(row["solution_str"])

    score, extra, failure = score_row(broken, LIMITS, "source", "the response", "truth", {})
    assert (score, extra) == (0.0, {})
    assert failure is not None
    assert "Traceback" in failure
    assert "KeyError: 'the response'" in failure


@pytest.mark.parametrize("problem", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ...")])
def test_a_row_that_finds_no_memory_is_told_the_limit_it_may_have_met(problem: Exception) -> None:
    def greedy(**row: Any) -> float:
        raise problem

    failure = score_row(greedy, LIMITS, "source", "the response", "truth", {})[2]
    assert failure is not None
    assert failure.endswith(
        "\ncustom_reward_function.memory_gb=3 limits the memory of a reward process. Raise it if the function needs more."
    )


def test_half_a_surrogate_pair_in_an_entry_is_replaced_so_that_it_can_be_written() -> None:
    extra = read_score({"score": 1, "note": "a\ud800b", "\udfff": ["\ud800"]})[1]
    assert extra == {"note": "a?b", "?": ["?"]}


def test_the_largest_scores_of_a_batch_have_finite_squares_in_fp32() -> None:
    advantages = torch.full((1 << 20,), 2 * LARGEST_SCORE, dtype=torch.float32)
    assert torch.isfinite(advantages.square().sum() * 2**26)


def test_a_reward_process_imports_neither_torch_nor_an_engine() -> None:
    heavy = "('torch', 'vllm', 'ray', 'transformers')"
    program = f"import sys, verl_memopt.rewards.supervisor; print([name for name in {heavy} if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
