"""Reductions over ragged rows against the same reductions of each row alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.recipe.rlt import naive
from verl_memopt.recipes.rlt.formula import REDUCTIONS, reduce_rows

VALUES = st.floats(-1e4, 1e4, width=32)
ROWS = st.lists(st.lists(VALUES, max_size=9), max_size=6)


def flat(rows):
    values = torch.tensor([value for row in rows for value in row], dtype=torch.float32)
    return values, torch.tensor([len(row) for row in rows], dtype=torch.int64)


@given(rows=ROWS)
def test_rows_are_reduced_one_by_one(rows):
    for name in REDUCTIONS:
        expected = torch.tensor([naive.reduced(name, row) if row else 0.0 for row in rows], dtype=torch.float64)
        torch.testing.assert_close(reduce_rows(name, *flat(rows)), expected, rtol=1e-12, atol=1e-9)


@given(rows=st.lists(st.lists(VALUES, min_size=1, max_size=9), min_size=1, max_size=4))
def test_order_statistics_are_those_of_torch(rows):
    for name, quantile in (("median", None), ("first_quartile", 0.25), ("last_quartile", 0.75)):
        doubles = [torch.tensor(row, dtype=torch.float64) for row in rows]
        expected = torch.stack([row.median() if quantile is None else row.quantile(quantile) for row in doubles])
        torch.testing.assert_close(reduce_rows(name, *flat(rows)), expected, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_rows_may_all_be_empty(name):
    assert reduce_rows(name, torch.zeros(0), torch.tensor([0, 0])).tolist() == [0.0, 0.0]
    assert reduce_rows(name, torch.zeros(0), torch.zeros(0, dtype=torch.int64)).tolist() == []


def test_four_values_by_hand():
    values, lengths = torch.tensor([4.0, 1.0, 3.0, 2.0]), torch.tensor([4])
    by_hand = {"mean": 2.5, "sum": 10, "min": 1, "max": 4, "median": 2, "first_quartile": 1.75, "last_quartile": 3.25}
    assert {name: reduce_rows(name, values, lengths).item() for name in REDUCTIONS} == by_hand
