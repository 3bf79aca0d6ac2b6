import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.algorithms.ragged import Ragged, ragged
from verl_memopt.algorithms.estimators import (
    discounted_returns,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    remax_advantages,
)
from verl_memopt.algorithms.rows import normalize_rows, whiten

NAN = float("nan")


def naive_returns(rows, gamma):
    return [sum(gamma ** (s - t) * row[s] for s in range(t, len(row))) for row in rows for t in range(len(row))]


def naive_whiten(values, valid):
    """From the two-pass formulas, over the valid tokens."""
    known = [value for value, counts in zip(values, valid, strict=True) if counts]
    if len(known) < 2 or max(known) == min(known):
        return [0.0] * len(values)
    mean = sum(known) / len(known)
    scale = (sum((value - mean) ** 2 for value in known) / (len(known) - 1) + 1e-8) ** 0.5
    return [(value - mean) / scale if counts else 0.0 for value, counts in zip(values, valid, strict=True)]


def close(ours, expected, tolerance=1e-6):
    torch.testing.assert_close(ours, torch.tensor(expected, dtype=torch.float32), rtol=tolerance, atol=tolerance)


@given(ragged(), st.sampled_from([0.5, 1.0]))
def test_reinforce_plus_plus_whitens_the_discounted_returns(sample, gamma):
    valid = sample.rows(1, (0.0, 1.0, 1.0)).bool()
    known = valid[sample.row]
    rewards = sample.tokens(0)
    advantages, returns = reinforce_plus_plus_advantages(rewards.where(known, NAN), sample.row, valid, gamma)
    expected = [
        value if counts else 0.0
        for value, counts in zip(naive_returns(sample.lists(rewards), gamma), known.tolist(), strict=True)
    ]
    close(returns, expected)
    close(advantages, naive_whiten(expected, known.tolist()))


@given(ragged())
def test_the_baseline_form_whitens_the_rewards_centred_in_their_groups(sample):
    rewards, groups, valid = sample.rows(0), sample.groups(1), sample.rows(2, (0.0, 1.0, 1.0)).bool()
    centred = []
    for i in range(len(sample.sizes)):
        members = [rewards[j].item() for j in range(len(sample.sizes)) if groups[j] == groups[i] and valid[j]]
        alone = valid[i] and int((groups == groups[i]).sum()) == 1
        baseline = 0.0 if alone else sum(members) / max(len(members), 1)
        centred.append(rewards[i].item() - baseline if alone or (valid[i] and len(set(members)) > 1) else 0.0)
    row = sample.row.tolist()
    expected = naive_whiten([centred[i] for i in row], [bool(valid[i]) for i in row])
    close(reinforce_plus_plus_baseline_advantages(rewards.float(), groups, valid, sample.row), expected)


def test_equal_rewards_teach_nothing_to_either_form():
    sample = Ragged((2, 3, 1), 0)
    rewards, valid = torch.full((3,), 0.1), torch.ones(3, dtype=torch.bool)
    assert torch.equal(
        reinforce_plus_plus_baseline_advantages(rewards, torch.zeros(3, dtype=torch.int64), valid, sample.row), torch.zeros(6)
    )
    last = torch.tensor([0, 0.1, 0, 0, 0.1, 0.1])
    assert torch.equal(reinforce_plus_plus_advantages(last, sample.row, valid, 1.0)[0], torch.zeros(6))


@given(ragged())
def test_remax_subtracts_the_greedy_score_from_the_rewards_that_follow(sample):
    rewards, baselines, valid = sample.tokens(0), sample.rows(1), sample.rows(2, (0.0, 1.0, 1.0)).bool()
    known = valid[sample.row]
    advantages, returns = remax_advantages(rewards.where(known, NAN), baselines.float(), sample.row, valid)
    following = naive_returns(sample.lists(rewards), 1.0)
    row = sample.row.tolist()
    close(returns, [value if valid[i] else 0.0 for value, i in zip(following, row, strict=True)])
    close(advantages, [value - baselines[i].item() if valid[i] else 0.0 for value, i in zip(following, row, strict=True)])


def test_a_row_without_a_greedy_score_learns_nothing():
    sample, valid = Ragged((2, 1), 0), torch.ones(2, dtype=torch.bool)
    advantages, _ = remax_advantages(torch.tensor([0.0, 1.0, 1.0]), torch.tensor([NAN, 0.25]), sample.row, valid)
    assert advantages.tolist() == [0.0, 0.0, 0.75]


def test_returns_of_rows_that_are_not_valid_are_zero():
    sample = Ragged((2, 1), 0)
    returns = discounted_returns(torch.tensor([NAN, NAN, 1.0]), sample.row, torch.tensor([False, True]), 0.5)
    assert returns.tolist() == [0.0, 0.0, 1.0]


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
