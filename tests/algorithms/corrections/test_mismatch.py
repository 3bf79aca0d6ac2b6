import math
import statistics

import pytest
import torch
from hypothesis import given

from tests.algorithms.ragged import ragged
from verl_memopt.algorithms.rollout_correction import mismatch_metrics

MEAN = statistics.fmean


@given(ragged())
def test_metrics_equal_their_definitions(sample):
    trainer = -sample.tokens(0).abs()
    engine = trainer + 0.3 * sample.tokens(1)
    metrics = mismatch_metrics(trainer, engine, sample.row, sample.lengths)
    rows = [pair for pair in zip(sample.lists(trainer), sample.lists(engine), strict=True) if pair[0]]
    if not rows:
        assert metrics == {}
        return
    ratios = [[t - e for t, e in zip(*pair, strict=True)] for pair in rows]
    flat = [x for row in ratios for x in row]
    trainer_means, engine_means = ([MEAN(pair[side]) for pair in rows] for side in (0, 1))
    gaps = [e - t for t, e in zip(trainer_means, engine_means, strict=True)]
    assert metrics == pytest.approx(
        {
            "training_ppl": MEAN(math.exp(-m) for m in trainer_means),
            "training_log_ppl": -MEAN(trainer_means),
            "rollout_ppl": MEAN(math.exp(-m) for m in engine_means),
            "rollout_log_ppl": -MEAN(engine_means),
            "kl": -MEAN(flat),
            "k3_kl": MEAN(math.exp(x) - x - 1 for x in flat),
            "log_ppl_diff": MEAN(gaps),
            "log_ppl_abs_diff": MEAN(map(abs, gaps)),
            "log_ppl_diff_max": max(gaps),
            "log_ppl_diff_min": min(gaps),
            "ppl_ratio": MEAN(map(math.exp, gaps)),
            "chi2_token": MEAN(math.exp(2 * x) for x in flat) - 1,
            "chi2_seq": MEAN(math.exp(2 * sum(row)) for row in ratios) - 1,
        },
        rel=1e-9,
        abs=1e-9,
    )


def test_equal_probabilities_have_no_mismatch():
    log_probs, row = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([0, 0, 1])
    metrics = mismatch_metrics(log_probs, log_probs, row, torch.tensor([2, 1]))
    assert {name for name, value in metrics.items() if value == 0} == {
        "kl", "k3_kl", "log_ppl_diff", "log_ppl_abs_diff", "log_ppl_diff_max", "log_ppl_diff_min", "chi2_token", "chi2_seq",
    }  # fmt: skip
    assert metrics["ppl_ratio"] == 1


@pytest.mark.parametrize("far", [30.0, -30.0])
def test_log_ratios_beyond_twenty_count_as_twenty_where_they_are_raised_to_a_power(far):
    trainer, engine, row = torch.tensor([-40.0, -1.0]), torch.tensor([-40.0 - far, -1.0]), torch.tensor([0, 1])
    metrics = mismatch_metrics(trainer, engine, row, torch.tensor([1, 1]))
    held = math.copysign(20.0, far)
    assert metrics["kl"] == -far / 2
    assert metrics["k3_kl"] == pytest.approx((math.exp(held) - held - 1) / 2, rel=1e-12)
    assert metrics["chi2_token"] == metrics["chi2_seq"] == pytest.approx((math.exp(2 * held) + 1) / 2 - 1, rel=1e-12)
