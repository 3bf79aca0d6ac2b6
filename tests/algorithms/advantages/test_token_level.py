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
        centred.append(rewards[i].item() - sum(members) / len(members) if valid[i] and len(set(members)) > 1 else 0.0)
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
