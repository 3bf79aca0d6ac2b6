import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given

from tests.algorithms.ragged import ragged
from verl_memopt.algorithms.losses import LossTokens, sapo_loss, vanilla_loss
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.config.schema import Actor

SETTINGS = Actor(clip_ratio_low=0.2, clip_ratio_high=0.3, tau_pos=1.5, tau_neg=4.0)


def naive(rows):
    """Gives SAPO's loss of its paper, from (log-ratio, advantage) of each token of each row."""
    total = 0.0
    for row in rows:
        gates = []
        for log_ratio, advantage in row:
            tau = 1.5 if advantage > 0 else 4.0
            gates.append(advantage * 4 / tau / (1 + math.exp(-tau * (math.exp(log_ratio) - 1))))
        total -= sum(gates) / len(gates) if gates else 0.0
    return total / len(rows)


@given(ragged())
def test_the_loss_is_that_of_the_paper(sample):
    old = -sample.tokens(0).abs()
    new, advantages = old + 0.5 * sample.tokens(1), sample.tokens(2)
    counts = GlobalCounts(max(len(old), 1), len(sample.sizes))
    loss, metrics = sapo_loss(LossTokens(new, old, advantages, sample.row, sample.lengths, counts), SETTINGS)
    rows = [list(zip(*row, strict=True)) for row in zip(sample.lists(new - old), sample.lists(advantages), strict=True)]
    assert loss.item() == pytest.approx(naive(rows), rel=1e-9, abs=1e-12)
    assert metrics["ratio_clamped"] == 0


def test_at_a_ratio_of_one_the_gradient_is_ppos():
    row, lengths = torch.tensor([0, 0, 1]), torch.tensor([2, 1])
    advantages, gradients = torch.tensor([1.0, -2.0, 0.5]), []
    for loss_of in (sapo_loss, vanilla_loss):
        leaf = torch.full((3,), -1.0, requires_grad=True)
        settings = replace(SETTINGS, loss_agg_mode="seq-mean-token-mean")
        loss_of(LossTokens(leaf, leaf.detach(), advantages, row, lengths, GlobalCounts(3, 2)), settings)[0].backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-6, atol=0)


def test_weights_multiply_and_rejected_tokens_are_left_out_of_the_mean():
    leaf = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    weights, kept = torch.tensor([2.0, 1.0, 1.0]), torch.tensor([True, False, True])
    tokens = LossTokens(
        leaf, leaf.detach(), torch.ones(3), torch.tensor([0, 0, 0]), torch.tensor([2]), GlobalCounts(2, 1), weights, kept
    )
    sapo_loss(tokens, SETTINGS)[0].backward()
    assert leaf.grad.tolist() == pytest.approx([-1.0, 0.0, -0.5])


@pytest.mark.parametrize("name", ["tau_pos", "tau_neg"])
def test_a_steepness_that_is_missing_is_named(name):
    one = torch.zeros(1, dtype=torch.int64)
    tokens = LossTokens(torch.zeros(1), torch.zeros(1), torch.ones(1), one, one + 1, GlobalCounts(1, 1))
    with pytest.raises(AssertionError) as error:
        sapo_loss(tokens, replace(SETTINGS, **{name: None}))
    assert str(error.value).splitlines()[0] == f"sapo needs actor.{name}"
