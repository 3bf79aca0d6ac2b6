from dataclasses import replace

import pytest
import torch

from verl_memopt.algorithms.losses import LossTokens, clip_bounds
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.config.schema import Actor


def tokens(**options):
    values = torch.tensor([1.0, 2.0, 4.0])
    row, lengths = torch.tensor([0, 0, 1]), torch.tensor([2, 1])
    return LossTokens(values, torch.zeros(3), torch.ones(3), row, lengths, GlobalCounts(3, 2), **options)


def test_weights_and_rejection_apply_to_values_shares_and_means():
    kept = torch.tensor([True, False, True])
    plain, masked = tokens(), replace(tokens(weights=torch.tensor([2.0, 3.0, 5.0]), kept=kept), lengths=torch.tensor([1, 1]))
    values = torch.tensor([1.0, 2.0, 4.0])
    assert plain.weighted(values).tolist() == [1, 2, 4]
    assert masked.masked(values).tolist() == [1, 0, 4]
    assert masked.weighted(values).tolist() == [2, 0, 20]
    assert plain.row_means(values).tolist() == [1.5, 4]
    assert masked.row_means(values).tolist() == [1, 4]
    assert plain.share(values > 1).item() == pytest.approx(2 / 3)
    assert masked.share(values > 1).item() == pytest.approx(1 / 3)


def test_a_rejected_token_may_hold_anything():
    masked = tokens(kept=torch.tensor([True, False, True]))
    assert masked.masked(torch.tensor([1.0, float("nan"), 2.0])).tolist() == [1, 0, 2]


def test_clips_and_aggregation_come_from_the_actors_section():
    actor = Actor(clip_ratio_low=0.1, clip_ratio_high=0.3, loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=5)
    assert clip_bounds(actor) == (0.1, 0.3)
    assert tokens().aggregated(torch.ones(3), actor).item() == pytest.approx(0.3)
