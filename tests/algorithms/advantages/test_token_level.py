import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.algorithms.ragged import Ragged, ragged
from verl_memopt.algorithms.estimators import (
    gae,
    gae_advantages,
    optimal_token_baseline_advantages,
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


def naive_gae(rewards, values, gamma, lam):
    """The double sum of the paper, row by row: A[t] = sum over l of (gamma * lam)^l * delta[t + l]."""
    advantages = []
    for row_rewards, row_values in zip(rewards, values, strict=True):
        following = [*row_values[1:], 0.0]
        deltas = [r + gamma * after - v for r, v, after in zip(row_rewards, row_values, following, strict=False)]
        size = len(deltas)
        advantages += [sum((gamma * lam) ** (s - t) * deltas[s] for s in range(t, size)) for t in range(size)]
    return torch.tensor(advantages, dtype=torch.float64)


factors = st.sampled_from([0.0, 0.9, 0.99, 1.0])


@given(ragged(longest=20), factors, factors)
def test_raw_advantages_equal_the_double_sum_of_the_paper_and_returns_add_the_values(sample, gamma, lam):
    rewards, values = sample.tokens(0), sample.tokens(1)
    advantages, returns = gae(rewards, values, sample.row, sample.lengths, gamma, lam)
    expected = naive_gae(sample.lists(rewards), sample.lists(values), gamma, lam)
    torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(returns, expected + values, rtol=1e-12, atol=1e-12)


@given(ragged(longest=20), factors, factors)
def test_whitened_advantages_have_the_statistics_of_all_valid_tokens(sample, gamma, lam):
    valid = sample.rows(3, (0.0, 1.0, 1.0)).bool()
    rewards, values, known = sample.tokens(0).float(), sample.tokens(1).float(), valid[sample.row]
    given_rewards = rewards.where(known, NAN)
    advantages, returns = gae_advantages(given_rewards, values, sample.row, sample.lengths, valid, gamma, lam)
    raw = naive_gae(sample.lists(rewards), sample.lists(values), gamma, lam)
    assert torch.equal(advantages[~known], torch.zeros_like(advantages[~known]))
    assert torch.equal(returns[~known], values[~known])
    torch.testing.assert_close(returns[known], (raw + values)[known].float(), rtol=1e-6, atol=1e-6)
    if known.sum() > 1:
        expected = (raw[known] - raw[known].mean()) / (raw[known].var() + 1e-8).sqrt()
        torch.testing.assert_close(advantages[known], expected.float(), rtol=1e-6, atol=1e-6)


def test_equal_rewards_and_values_give_exactly_zero_advantages():
    sample = Ragged((1, 1, 1), 0)
    constant = torch.full((3,), 0.1)
    arguments = (sample.row, sample.lengths, torch.ones(3, dtype=torch.bool), 1.0, 0.95)
    assert torch.equal(gae_advantages(constant, constant, *arguments)[0], torch.zeros(3))


def test_a_long_row_in_fp32_keeps_six_digits():
    sample = Ragged((5000, 3), 1)
    rewards, values = sample.tokens(0).float(), sample.tokens(1).float()
    advantages, _ = gae(rewards, values, sample.row, sample.lengths, 1.0, 0.95)
    running, expected = 0.0, []
    own, gains = values[:5000].tolist(), rewards[:5000].tolist()
    for t in reversed(range(5000)):
        running = gains[t] + (own[t + 1] if t < 4999 else 0.0) - own[t] + 0.95 * running
        expected.append(running)
    torch.testing.assert_close(advantages[:5000], torch.tensor(expected[::-1], dtype=torch.float64), rtol=1e-9, atol=1e-9)


def naive_baseline(sample, rewards, groups, valid, log_probs, squares, weights):
    """Row by row and place by place, from lists: A = G - sum(G W) / sum(W) over the rows of the group that are as long."""
    count = len(sample.sizes)
    parts = zip(*(sample.lists(values) for values in (rewards, log_probs, squares, weights)), strict=True)
    gains, energies = [], []
    for row_rewards, row_log_probs, row_squares, row_weights in parts:
        gains.append([sum(row_rewards[t:]) for t in range(len(row_rewards))])
        terms = [(1 - 2 * math.exp(p) + s) * w**2 for p, s, w in zip(row_log_probs, row_squares, row_weights, strict=True)]
        energies.append([sum(terms[: t + 1]) for t in range(len(terms))])
    result = []
    for i in range(count):
        members = [j for j in range(count) if groups[j] == groups[i] and valid[j]]
        for t in range(sample.sizes[i]):
            here = [j for j in members if sample.sizes[j] > t]
            if not valid[i] or len(members) < 2:
                result.append(0.0)
            elif len({gains[j][t] for j in here}) == 1:
                result.append(gains[i][t] if len(here) == 1 else 0.0)
            else:
                total = sum(energies[j][t] for j in here)
                result.append(gains[i][t] - sum(gains[j][t] * energies[j][t] for j in here) / total)
    return torch.tensor(result, dtype=torch.float32)


@given(ragged(), st.booleans())
def test_the_baseline_equals_the_weighted_mean_of_each_group_at_each_place(sample, weighted):
    rewards, groups, valid = sample.tokens(0), sample.groups(1, 3), sample.rows(2, (0.0, 1.0, 1.0)).bool()
    log_probs = -sample.tokens(3).abs() - 0.1
    squares = log_probs.exp().square() + 0.1 * sample.tokens(4).abs()
    weights = sample.tokens(5).exp() if weighted else torch.ones_like(rewards)
    ours, _ = optimal_token_baseline_advantages(
        rewards.where(valid[sample.row], NAN), groups, valid, sample.row, log_probs, squares, weights if weighted else None,
    )  # fmt: skip
    expected = naive_baseline(sample, rewards, groups, valid, log_probs, squares, weights)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


def test_equal_rewards_and_groups_of_one_give_exactly_zero():
    sample = Ragged((2, 2, 3), 0)
    rewards = torch.tensor([0.0, 0.1, 0.0, 0.1, 0.0, 0.0, 0.7])
    advantages, returns = optimal_token_baseline_advantages(
        rewards, torch.tensor([0, 0, 1]), torch.ones(3, dtype=torch.bool), sample.row, torch.full((7,), -1.3),
        torch.full((7,), 0.4),
    )  # fmt: skip
    assert torch.equal(advantages, torch.zeros(7))
    torch.testing.assert_close(returns, torch.tensor([0.1, 0.1, 0.1, 0.1, 0.7, 0.7, 0.7]))


def test_a_tail_that_one_row_reaches_has_no_baseline():
    sample = Ragged((1, 3), 0)
    advantages, _ = optimal_token_baseline_advantages(
        torch.tensor([1.0, 0.0, 0.0, 0.5]), torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool), sample.row,
        torch.full((4,), -1.0), torch.full((4,), 0.5),
    )  # fmt: skip
    assert advantages.tolist() == [0.25, -0.25, 0.5, 0.5]


def test_a_place_of_certain_tokens_has_a_baseline_of_zero():
    sample = Ragged((1, 1), 0)  # p = 1 and a sum of squares of 1: no gradient, no weight
    advantages, _ = optimal_token_baseline_advantages(
        torch.tensor([1.0, 3.0]), torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool), sample.row,
        torch.zeros(2), torch.ones(2),
    )  # fmt: skip
    assert advantages.tolist() == [1.0, 3.0]


def test_equal_returns_give_exactly_zero_whatever_their_weights():
    sample = Ragged((1, 1, 1, 1), 0)
    advantages, _ = optimal_token_baseline_advantages(
        torch.full((4,), 0.1), torch.zeros(4, dtype=torch.int64), torch.tensor([True, True, True, False]), sample.row,
        torch.tensor([-0.3, -1.1, -2.7, -1.0]), torch.tensor([0.61, 0.37, 0.13, 0.5]),
    )  # fmt: skip
    assert torch.equal(advantages, torch.zeros(4))
