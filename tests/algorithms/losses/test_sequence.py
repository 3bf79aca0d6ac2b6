import math

import pytest
import torch
from hypothesis import given

from tests.algorithms.ragged import ragged
from verl_memopt.algorithms.losses import LossTokens, cispo_loss, geo_mean_loss, gspo_loss, sequence_loss
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.config.schema import Actor

SETTINGS = Actor(clip_ratio_low=0.2, clip_ratio_high=0.3, loss_agg_mode="seq-mean-token-mean")


def padded_gspo(new, old, advantages, mask):
    """GSPO of its paper on padded rows: one ratio a row, mean over rows with tokens; empty rows add 0."""
    sizes = mask.sum(1).clamp(min=1)
    ratio = (((new - old) * mask).sum(1) / sizes).exp()
    objective = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.3) * advantages)
    return -(objective * (mask.sum(1) > 0)).sum() / mask.shape[0]


def padded_sequence(new, old, advantages, mask):
    ratio = ((new - old) * mask).sum(1).exp()
    objective = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.3) * advantages)
    return -(objective * (mask.sum(1) > 0)).sum() / mask.shape[0]


def padded_geo_mean(new, old, advantages, mask):
    log_ratio, sign = new - old, advantages.sign()[:, None]
    low, high = torch.tensor(-0.2, dtype=new.dtype), torch.tensor(0.3, dtype=new.dtype)
    bounded = torch.where(sign > 0, torch.minimum(log_ratio, high), torch.maximum(log_ratio, low))
    bounded = torch.where(sign == 0, 0.0, bounded)
    ratio = ((bounded * mask).sum(1) / mask.sum(1).clamp(min=1)).exp()
    return -(ratio * advantages * (mask.sum(1) > 0)).sum() / mask.shape[0]


def pad(sample, flat):
    width = max(*sample.sizes, 1)
    out = flat.new_zeros(len(sample.sizes), width)
    for i, part in enumerate(flat.split(list(sample.sizes))):
        out[i, : len(part)] = part
    return out


@pytest.mark.parametrize(
    ("loss_of", "naive"), [(gspo_loss, padded_gspo), (sequence_loss, padded_sequence), (geo_mean_loss, padded_geo_mean)]
)
def test_loss_and_gradient_equal_the_padded_definition(loss_of, naive):
    @given(ragged())
    def check(sample):
        old = -sample.tokens(0).abs()
        new, advantages = old + 0.3 * sample.tokens(1), sample.rows(2)
        flat, wide = new.clone().requires_grad_(), pad(sample, new).requires_grad_()
        counts = GlobalCounts(max(len(old), 1), len(sample.sizes))
        loss, _ = loss_of(LossTokens(flat, old, advantages[sample.row], sample.row, sample.lengths, counts), SETTINGS)
        expected = naive(wide, pad(sample, old), advantages, pad(sample, torch.ones_like(old)))
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
        loss.backward()
        expected.backward()
        torch.testing.assert_close(pad(sample, flat.grad), wide.grad, rtol=1e-10, atol=1e-12)

    check()


def test_gspo_gives_each_token_the_gradient_of_its_own_advantage():
    # ratio of the row: exp((0.1 - 0.1) / 2) = 1, so that the gradient of a token is -its advantage / tokens / rows
    leaf = torch.tensor([0.1, -0.1], dtype=torch.float64, requires_grad=True)
    row, lengths = torch.tensor([0, 0]), torch.tensor([2])
    advantages = torch.tensor([1.0, 3.0], dtype=torch.float64)
    loss, _ = gspo_loss(LossTokens(leaf, leaf.detach() * 0, advantages, row, lengths, GlobalCounts(2, 1)), SETTINGS)
    loss.backward()
    assert leaf.grad.tolist() == pytest.approx([-0.5, -1.5])


def test_geo_mean_counts_tokens_outside_its_clips_by_the_sign_of_their_advantage():
    new = torch.tensor([0.5, 0.1, -0.5, 0.1])
    tokens = LossTokens(
        new, torch.zeros(4), torch.tensor([1.0, 1.0, -1.0, -1.0]), torch.tensor([0, 0, 1, 1]), torch.tensor([2, 2]),
        GlobalCounts(4, 2),
    )  # fmt: skip
    loss, metrics = geo_mean_loss(tokens, SETTINGS)
    # rows: -exp((0.3 + 0.1) / 2) and +exp((-0.2 + 0.1) / 2)
    assert loss.item() == pytest.approx((-math.exp(0.2) + math.exp(-0.05)) / 2)
    assert (metrics["pg_clipfrac"].item(), metrics["pg_clipfrac_lower"].item()) == (0.25, 0.25)


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
    assert metrics == {"pg_clipfrac": factor != 1.0, "ratio_clamped": 0.0}
