import statistics

import pytest
import torch
from hypothesis import given

from tests.algorithms.ragged import ragged
from verl_memopt.algorithms.rows import normalize_rows, whiten

NAN = float("nan")


@given(ragged())
def test_valid_tokens_have_mean_zero_and_deviation_one_and_others_are_zero(sample):
    values, valid = sample.tokens(0, 3.0), sample.tokens(1) > -1
    known = values[valid].tolist()
    result = whiten(values.where(valid, NAN), valid)
    assert result[~valid].tolist() == [0.0] * int((~valid).sum())
    if len(known) < 2:
        assert result.abs().sum() == 0
        return
    scale = (statistics.variance(known) + 1e-8) ** 0.5
    expected = torch.tensor([(value - statistics.fmean(known)) / scale for value in known], dtype=torch.float64)
    torch.testing.assert_close(result[valid], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("standardize", [whiten, normalize_rows])
@pytest.mark.parametrize("values", [[], [5.0], [0.1] * 7])
def test_values_that_cannot_be_compared_are_exactly_zero(values, standardize):
    values = torch.tensor(values, dtype=torch.float64)
    assert torch.equal(standardize(values, torch.ones_like(values, dtype=torch.bool)), torch.zeros_like(values))


def test_equal_values_are_exactly_zero_beside_one_that_is_not_valid():
    values = torch.tensor([0.1, 0.1, 0.1, NAN], dtype=torch.float64)  # whose mean is not 0.1
    valid = torch.tensor([True, True, True, False])
    assert values[:3].sum() / 3 != 0.1
    assert torch.equal(whiten(values, valid), torch.zeros(4, dtype=torch.float64))
    assert torch.equal(whiten(values[:3], valid[:3]), torch.zeros(3, dtype=torch.float64))


@given(ragged())
def test_valid_rows_are_divided_by_their_deviation_and_what_trl_adds_to_it(sample):
    rows, valid = sample.rows(0), sample.rows(1, (0.0, 1.0, 1.0)).bool()
    known = rows[valid].tolist()
    expected = torch.zeros_like(rows)
    if len(set(known)) > 1:
        expected[valid] = (rows[valid] - statistics.fmean(known)) / (statistics.stdev(known) + 1e-4)
    torch.testing.assert_close(normalize_rows(rows.where(valid, NAN), valid), expected, rtol=1e-9, atol=1e-9)
