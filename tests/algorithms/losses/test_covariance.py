import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.algorithms.ragged import ragged
from verl_memopt.algorithms.losses import LossTokens, clip_cov_loss, kl_cov_loss, select_clip_cov, select_kl_cov, token_covariance
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.config.schema import Actor, PolicyLoss

SETTINGS = Actor(clip_ratio_low=0.2, clip_ratio_high=0.3, policy_loss=PolicyLoss(ppo_kl_coef=0.5))


def between(ratio, lower, upper):
    return PolicyLoss(clip_cov_ratio=ratio, clip_cov_lb=lower, clip_cov_ub=upper)


def naive_covariance(log_probs, advantages):
    mean_log_prob, mean_advantage = sum(log_probs) / len(log_probs), sum(advantages) / len(advantages)
    return [(p - mean_log_prob) * (a - mean_advantage) for p, a in zip(log_probs, advantages, strict=True)]


@given(ragged(shortest=1), st.sampled_from([0.01, 0.3, 1.0]))
def test_kl_cov_selects_the_tokens_with_the_largest_covariance(sample, ratio):
    log_probs, advantages = sample.tokens(0), sample.tokens(1)
    covariance = naive_covariance(log_probs.tolist(), advantages.tolist())
    torch.testing.assert_close(token_covariance(log_probs, advantages), torch.tensor(covariance, dtype=torch.float64))
    number = max(int(ratio * len(covariance)), 1)
    expected = sorted(range(len(covariance)), key=lambda i: -covariance[i])[:number]
    selected = select_kl_cov(log_probs, advantages, PolicyLoss(kl_cov_ratio=ratio), torch.Generator())
    if len(set(covariance)) == len(covariance):
        assert set(selected.nonzero().flatten().tolist()) == set(expected)
    assert selected.sum() == number
    assert selected.dtype == torch.bool


@given(ragged(shortest=1), st.sampled_from([0.01, 0.5, 1.0]))
def test_clip_cov_selects_at_random_among_covariances_between_the_bounds(sample, ratio):
    log_probs, advantages = sample.tokens(0), sample.tokens(1)
    covariance = naive_covariance(log_probs.tolist(), advantages.tolist())
    candidates = {i for i, value in enumerate(covariance) if 0.1 < value < 2.0}

    def choose(seed):
        chosen = select_clip_cov(log_probs, advantages, between(ratio, 0.1, 2.0), torch.Generator().manual_seed(seed))
        return set(chosen.nonzero().flatten().tolist())

    assert select_clip_cov(log_probs, advantages, between(ratio, 0.1, 2.0), torch.Generator()).dtype == torch.bool
    assert choose(0) == choose(0) <= candidates
    assert len(choose(0)) == min(max(int(ratio * len(covariance)), 1), len(candidates))


def test_another_seed_chooses_other_tokens():
    generator = torch.Generator().manual_seed(0)
    log_probs, advantages = (torch.randn(400, generator=generator) for _ in range(2))
    first, second = (
        select_clip_cov(log_probs, advantages, between(0.05, 0.1, 5.0), torch.Generator().manual_seed(seed)) for seed in (1, 2)
    )
    assert first.sum() == second.sum() == 20
    assert not torch.equal(first, second)


def test_equal_advantages_give_no_covariance_to_clip():
    log_probs = torch.tensor([-1.0, -2.0, -3.0])
    assert not select_clip_cov(log_probs, torch.ones(3), between(1.0, 0.1, 5.0), torch.Generator()).any()


def tokens(new, selected):
    new = torch.tensor(new, requires_grad=True)
    row, lengths = torch.zeros(len(new), dtype=torch.int64), torch.tensor([len(new)])
    counts, ones = GlobalCounts(len(new), 1), torch.ones(len(new))
    return LossTokens(new, torch.zeros(len(new)), ones, row, lengths, counts, selected=torch.tensor(selected))


def test_clip_cov_removes_loss_and_gradient_of_selected_tokens_that_are_not_clipped():
    given = tokens([0.1, 0.1, 1.0], [True, False, True])
    loss, metrics = clip_cov_loss(given, SETTINGS)
    loss.backward()
    ratio = torch.tensor(0.1).exp().item()
    assert loss.item() == pytest.approx(-(ratio + 1.3) / 3)
    assert given.log_probs.grad.tolist() == pytest.approx([0.0, -ratio / 3, 0.0])
    assert metrics["pg_clipfrac"].item() == pytest.approx(1 / 3)


def test_kl_cov_adds_the_absolute_log_ratio_to_selected_tokens():
    given = tokens([0.2, 0.2, -0.4], [True, False, True])
    loss, metrics = kl_cov_loss(given, SETTINGS)
    loss.backward()
    up, down = torch.tensor([0.2, -0.4]).exp().tolist()
    assert loss.item() == pytest.approx((-2 * up - down + 0.5 * 0.2 + 0.5 * 0.4) / 3)
    assert given.log_probs.grad.tolist() == pytest.approx([(-up + 0.5) / 3, -up / 3, (-down - 0.5) / 3])
    assert metrics["ppo_kl_abs"].item() == pytest.approx(0.8 / 3)


def test_the_penalty_of_kl_cov_has_no_gradient_where_every_ratio_is_one():
    old, advantages = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([1.0, -1.0, 2.0])
    gradients = []
    for selected in (torch.zeros(3, dtype=torch.bool), torch.ones(3, dtype=torch.bool)):
        log_probs = old.clone().requires_grad_()
        row, lengths = torch.zeros(3, dtype=torch.int64), torch.tensor([3])
        tokens = LossTokens(log_probs, old, advantages, row, lengths, GlobalCounts(3.0, 1.0), selected=selected)
        kl_cov_loss(tokens, SETTINGS)[0].backward()
        gradients.append(log_probs.grad)
    assert torch.equal(*gradients)


def test_a_mode_selects_by_its_settings():
    generator = torch.Generator().manual_seed(0)
    log_probs, advantages = (torch.randn(400, generator=generator) for _ in range(2))
    loss = PolicyLoss(clip_cov_ratio=0.05, clip_cov_lb=0.1, clip_cov_ub=2.0, kl_cov_ratio=0.1)
    assert select_clip_cov(log_probs, advantages, loss, generator).sum() == 20
    assert select_kl_cov(log_probs, advantages, loss, generator).sum() == 40


def test_a_covariance_at_a_bound_of_clip_cov_is_no_candidate():
    log_probs, advantages = torch.tensor([-1.0, -3.0]), torch.tensor([1.0, -1.0])  # both covariances are 1
    for bounds, chosen in (((1.0, 2.0), 0), ((0.5, 1.0), 0), ((0.5, 1.5), 2)):
        assert select_clip_cov(log_probs, advantages, between(1.0, *bounds), torch.Generator()).sum() == chosen
