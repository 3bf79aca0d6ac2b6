import math

import pytest
import torch
from hypothesis import given

from tests.algorithms.ragged import Ragged, ragged
from verl_memopt.algorithms.kl import (
    KL_ESTIMATORS,
    EntropyController,
    KlController,
    kl_estimate,
    shaped_rewards,
    token_level_rewards,
)
from verl_memopt.config.schema import EntropyControl, KlControl

POLICY, REFERENCE = [-1.0, -2.0, -0.5], [-1.5, -1.0, -0.5]

NAIVE = {
    "k1": lambda p, r: p - r,
    "abs": lambda p, r: abs(p - r),
    "k2": lambda p, r: (p - r) ** 2 / 2,
    "k3": lambda p, r: math.exp(r - p) - (r - p) - 1,
}
ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
KINDS = [kind + plus for kind in KL_ESTIMATORS for plus in ("", "+")]


@pytest.mark.parametrize("kind", KINDS)
def test_estimates_equal_their_formulas(kind):
    name = kind.removesuffix("+")
    expected = [NAIVE[ALIASES.get(name, name)](p, r) for p, r in zip(POLICY, REFERENCE, strict=True)]
    estimate = kl_estimate(torch.tensor(POLICY), torch.tensor(REFERENCE), kind)
    torch.testing.assert_close(estimate, torch.tensor(expected), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", KL_ESTIMATORS)
def test_a_trailing_plus_takes_the_gradient_of_k2(kind):
    log_probs = torch.tensor(POLICY, requires_grad=True)
    kl_estimate(log_probs, torch.tensor(REFERENCE), kind + "+").sum().backward()
    assert log_probs.grad.tolist() == [0.5, -1.0, 0.0]  # d/dp of (p - r)^2 / 2 = p - r


def test_k1_and_k3_are_unbiased_and_k3_is_never_negative():
    policy, reference = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    exact = (policy * (policy / reference).log()).sum()
    for kind in ("k1", "k3"):
        values = kl_estimate(policy.log(), reference.log(), kind)
        torch.testing.assert_close((policy * values).sum(), exact, rtol=1e-6, atol=0)
    assert kl_estimate(policy.log(), reference.log(), "k3").min() >= 0


def test_a_token_the_policy_nearly_excludes_gives_a_finite_capped_k3_without_a_gradient():
    log_probs = torch.tensor([-200.0], requires_grad=True)
    k3 = kl_estimate(log_probs, torch.tensor([0.0]), "k3")
    k3.sum().backward()
    assert (k3.tolist(), log_probs.grad.tolist()) == ([10.0], [0.0])


def test_kl_shifts_the_reward_by_exactly_beta_times_its_sum_and_carries_no_gradient():
    scores, row = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 0, 2])
    kl = torch.tensor([0.5, -0.25, 1.0], requires_grad=True)
    shaped = shaped_rewards(scores, kl, row, beta=0.5)
    assert shaped.tolist() == [0.875, 2.0, 2.5]
    assert not shaped.requires_grad


def test_without_tokens_rewards_stay():
    assert shaped_rewards(torch.ones(1), torch.zeros(0), torch.zeros(0, dtype=torch.long), 0.1).tolist() == [1.0]


def test_a_fixed_coefficient_stays():
    controller = KlController(KlControl(type="fixed", kl_coef=0.05))
    controller.update(mean_kl=9.0, num_sequences=1000)
    assert controller.coefficient == 0.05


def test_an_adaptive_coefficient_follows_the_target_by_at_most_a_fifth_per_horizon():
    settings = KlControl(type="adaptive", kl_coef=1.0, horizon=100, target_kl=0.1)
    controller = KlController(settings)
    controller.update(mean_kl=10.0, num_sequences=50)  # error capped at 0.2: 1 + 0.2 * 50 / 100
    assert controller.coefficient == pytest.approx(1.1, rel=1e-12)
    controller.update(mean_kl=0.09, num_sequences=100)  # error -0.1: 1.1 * 0.9
    assert controller.coefficient == pytest.approx(0.99, rel=1e-12)
    resumed = KlController(settings)
    resumed.load_state_dict(controller.state_dict())
    assert resumed.coefficient == controller.coefficient
    resumed.update(mean_kl=0.0, num_sequences=50)  # error -1 capped at -0.2: 1 - 0.2 * 50 / 100
    assert resumed.coefficient == pytest.approx(0.99 * 0.9, rel=1e-12)


def test_the_weight_of_the_entropy_bonus_grows_while_the_entropy_is_low_and_acts_only_then():
    settings = EntropyControl(target=0.2, delta=0.25, min=0.0, max=1.0)
    controller, seen = EntropyController(settings, 0.5), []
    for entropy, num_updates in ((0.2, 1), (0.1, 2), (0.1, 1), (0.3, 3), (0.1, 1)):
        controller.num_updates = num_updates
        seen.append((controller.applied, controller.weight))
        controller.update(entropy)
    # One delta for each optimizer step, within the bounds; no bonus before the first step and after one above the target.
    assert seen == [(0.0, 0.5), (0.75, 0.75), (1.0, 1.0), (1.0, 1.0), (0.0, 0.25)]
    resumed = EntropyController(settings, 0.5)
    resumed.load_state_dict(controller.state_dict())
    assert (resumed.applied, resumed.weight) == (controller.applied, controller.weight) == (0.5, 0.5)
    resumed.update(0.1)  # one optimizer step, unless more are set
    assert resumed.weight == 0.75


@given(ragged())
def test_token_rewards_are_the_score_at_the_end_of_a_row_minus_the_kl_everywhere(sample):
    scores, kl = sample.rows(0), sample.tokens(1)
    expected = []
    for score, row in zip(scores.tolist(), sample.lists(kl), strict=True):
        rewards = [-0.3 * value for value in row]
        if rewards:
            rewards[-1] += score
        expected += rewards
    rewards = token_level_rewards(scores, sample.row, sample.lengths, kl.requires_grad_(), 0.3)
    torch.testing.assert_close(rewards, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-14)
    assert not rewards.requires_grad
    sums = shaped_rewards(scores, kl, sample.row, 0.3)
    for score, part in zip(sums.tolist(), sample.lists(rewards), strict=True):
        assert not part or sum(part) == pytest.approx(score, rel=1e-12, abs=1e-12)


def test_token_rewards_without_a_kl_or_a_coefficient_are_the_scores_alone():
    sample, scores = Ragged((2, 0, 1), 0), torch.tensor([1.0, 2.0, 3.0])
    for kl in ((), (torch.ones(3),)):
        assert token_level_rewards(scores, sample.row, sample.lengths, *kl).tolist() == [0.0, 1.0, 3.0]
