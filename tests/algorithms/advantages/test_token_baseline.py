import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.algorithms.ragged import Ragged, ragged
from verl_memopt.algorithms.estimators import optimal_token_baseline_advantages

NAN = float("nan")


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
