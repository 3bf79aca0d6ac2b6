import math

import pytest
import torch

from verl_memopt.algorithms.losses import LossTokens, cispo_loss
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.config.schema import Actor

SETTINGS = Actor(clip_ratio_low=0.2, clip_ratio_high=0.3)


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
