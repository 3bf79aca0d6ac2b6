import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from tests.algorithms.ragged import Ragged, ragged
from verl_memopt.algorithms.estimators import gae, gae_advantages

NAN = float("nan")


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


def test_gae_runs_on_fake_tensors():
    with FakeTensorMode():
        row, lengths = torch.zeros(6, dtype=torch.int64), torch.full((1,), 6)
        valid = torch.ones(1, dtype=torch.bool)
        assert gae_advantages(torch.zeros(6), torch.zeros(6), row, lengths, valid, 1.0, 0.9)[0].shape == (6,)
