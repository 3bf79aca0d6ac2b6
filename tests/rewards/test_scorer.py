"""What counts as a score, and what a reward process imports."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_memopt.errors import RewardError
from verl_memopt.rewards.scorer import read_score, score_row


@pytest.mark.parametrize(
    "value", [1, 1.0, True, np.float32(1), np.bool_(True), np.array([1]), torch.tensor(1.0), torch.ones(1, 1)]
)
def test_every_kind_of_number_is_a_score(value: Any) -> None:
    score, extra = read_score(value)
    assert type(score) is float
    assert (score, extra) == (1.0, {})


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_finite_score_is_kept_as_it_is(value: float) -> None:
    assert read_score(value)[0] == value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "nan, not a finite number"),
        (float("inf"), "inf, not a finite number"),
        (-float("inf"), "-inf, not a finite number"),
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

    score, extra, failure = score_row(broken, "source", "the response", "truth", {})
    assert (score, extra) == (0.0, {})
    assert failure is not None
    assert "Traceback" in failure
    assert "KeyError: 'the response'" in failure


def test_a_reward_process_imports_neither_torch_nor_an_engine() -> None:
    program = (
        "import sys, verl_memopt.rewards.scorer; print([n for n in ('torch', 'vllm', 'ray', 'transformers') if n in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
