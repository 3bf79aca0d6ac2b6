import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.algorithms.ragged import ragged
from verl_memopt.algorithms.losses import (
    LossTokens,
    cispo_loss,
    clip_cov_loss,
    geo_mean_loss,
    gspo_loss,
    kl_cov_loss,
    sapo_loss,
    select_clip_cov,
    select_kl_cov,
    sequence_loss,
    token_covariance,
    vanilla_loss,
)
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.config.schema import Actor, PolicyLoss

SETTINGS = Actor(clip_ratio_low=0.2, clip_ratio_high=0.3, loss_agg_mode="seq-mean-token-mean")


def test_gspo_gives_each_token_the_gradient_of_its_own_advantage():
    # ratio of the row: exp((0.1 - 0.1) / 2) = 1, so that the gradient of a token is -its advantage / tokens / rows
    leaf = torch.tensor([0.1, -0.1], dtype=torch.float64, requires_grad=True)
    row, lengths = torch.tensor([0, 0]), torch.tensor([2])
    advantages = torch.tensor([1.0, 3.0], dtype=torch.float64)
    loss, _ = gspo_loss(LossTokens(leaf, leaf.detach() * 0, advantages, row, lengths, GlobalCounts(2, 1)), SETTINGS)
    loss.backward()
    assert leaf.grad.tolist() == pytest.approx([-0.5, -1.5])


def test_the_importance_weight_of_a_geometric_mean_is_a_geometric_mean():
    tokens = LossTokens(
        torch.zeros(2), torch.zeros(2), torch.ones(2), torch.zeros(2, dtype=torch.int64), torch.tensor([2]), GlobalCounts(2, 1),
        weights=torch.tensor([0.5, 8.0]),
    )  # fmt: skip
    assert geo_mean_loss(tokens, SETTINGS)[0].item() == pytest.approx(-2)
    assert sequence_loss(tokens, SETTINGS)[0].item() == pytest.approx(-4.25)


def test_geo_mean_counts_no_token_of_an_advantage_of_zero_and_small_ones_by_their_sign():
    new, advantages = torch.tensor([0.5, 0.6, 0.7, -0.5, 0.1]), torch.tensor([0.5, 0.5, 0.0, -0.5, -0.5])
    tokens = LossTokens(
        new, torch.zeros(5), advantages, torch.tensor([0, 0, 1, 2, 2]), torch.tensor([2, 1, 2]), GlobalCounts(5, 3)
    )
    _, metrics = geo_mean_loss(tokens, SETTINGS)
    assert (metrics["pg_clipfrac"].item(), metrics["pg_clipfrac_lower"].item()) == pytest.approx((0.4, 0.2))


def one(loss_of, log_prob, old, advantage):
    """Gives the loss and its gradient of a mini-batch of one token, and the metrics."""
    leaf, zero = torch.tensor([log_prob], requires_grad=True), torch.tensor([0])
    tokens = LossTokens(leaf, torch.tensor([old]), torch.tensor([advantage]), zero, zero + 1, GlobalCounts(1, 1))
    loss, metrics = loss_of(tokens, SETTINGS)
    loss.backward()
    return loss.item(), leaf.grad.item(), {name: value.item() for name, value in metrics.items()}


@pytest.mark.parametrize(("log_ratio", "factor"), [(math.log(2), 1.3), (math.log(0.5), 0.8), (0.0, 1.0)])
def test_cispo_keeps_the_gradient_of_a_clipped_token_and_clips_its_weight(log_ratio, factor):
    loss, gradient, metrics = one(cispo_loss, -1.0, -1.0 - log_ratio, 2.0)
    assert loss == pytest.approx(2 * factor)
    assert gradient == pytest.approx(-2 * factor)
    assert metrics == {"pg_clipfrac": factor != 1.0, "pg_clipfrac_lower": 0.0, "ratio_clamped": 0.0}


GATE = Actor(clip_ratio_low=0.2, clip_ratio_high=0.3, tau_pos=1.5, tau_neg=4.0)


def test_at_a_ratio_of_one_the_gradient_is_ppos():
    row, lengths = torch.tensor([0, 0, 1]), torch.tensor([2, 1])
    advantages, gradients = torch.tensor([1.0, -2.0, 0.5]), []
    for loss_of in (sapo_loss, vanilla_loss):
        leaf = torch.full((3,), -1.0, requires_grad=True)
        settings = replace(GATE, loss_agg_mode="seq-mean-token-mean")
        loss_of(LossTokens(leaf, leaf.detach(), advantages, row, lengths, GlobalCounts(3, 2)), settings)[0].backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["tau_pos", "tau_neg"])
def test_a_steepness_that_is_missing_is_named(name):
    one = torch.zeros(1, dtype=torch.int64)
    tokens = LossTokens(torch.zeros(1), torch.zeros(1), torch.ones(1), one, one + 1, GlobalCounts(1, 1))
    with pytest.raises(AssertionError) as error:
        sapo_loss(tokens, replace(GATE, **{name: None}))
    assert str(error.value).splitlines()[0] == f"sapo needs actor.{name}"


COV = Actor(clip_ratio_low=0.2, clip_ratio_high=0.3, policy_loss=PolicyLoss(ppo_kl_coef=0.5))


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
    loss, metrics = clip_cov_loss(given, COV)
    loss.backward()
    ratio = torch.tensor(0.1).exp().item()
    assert loss.item() == pytest.approx(-(ratio + 1.3) / 3)
    assert given.log_probs.grad.tolist() == pytest.approx([0.0, -ratio / 3, 0.0])
    assert metrics["pg_clipfrac"].item() == pytest.approx(1 / 3)


def test_kl_cov_adds_the_absolute_log_ratio_to_selected_tokens():
    given = tokens([0.2, 0.2, -0.4], [True, False, True])
    loss, metrics = kl_cov_loss(given, COV)
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
        kl_cov_loss(tokens, COV)[0].backward()
        gradients.append(log_probs.grad)
    assert torch.equal(*gradients)


def test_a_covariance_at_a_bound_of_clip_cov_is_no_candidate():
    log_probs, advantages = torch.tensor([-1.0, -3.0]), torch.tensor([1.0, -1.0])  # both covariances are 1
    for bounds, chosen in (((1.0, 2.0), 0), ((0.5, 1.0), 0), ((0.5, 1.5), 2)):
        assert select_clip_cov(log_probs, advantages, between(1.0, *bounds), torch.Generator()).sum() == chosen
