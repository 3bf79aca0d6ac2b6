import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.algorithms.ragged import Ragged, ragged
from verl_memopt.algorithms.rollout_correction import bounded_weights, importance_weights, mean_weight
from verl_memopt.config.correction_rules import importance_bounds

levels = st.sampled_from(["token", "sequence"])


def naive_weights(rows, level, lower, upper):
    """Lists of raw and of bounded weights, row by row."""
    raw, bounded = [], []
    for row in rows:
        logs = row if level == "token" else [sum(row)] * len(row)
        values = [math.exp(min(max(log, -20.0), 20.0)) for log in logs]
        raw.append(values)
        if lower is None:
            bounded.append([min(value, upper) for value in values])
        else:
            bounded.append([value if lower <= value <= upper else 0.0 for value in values])
    return raw, bounded


@given(ragged(), levels, st.sampled_from([2.0, "2.0", "0.5_3.0"]), st.booleans())
def test_weights_equal_the_row_by_row_definition(sample, level, threshold, normalize):
    log_ratio = sample.tokens(0, 0.7)
    _, bounded = naive_weights(sample.lists(log_ratio), level, *importance_bounds(threshold))
    flat = [value for row in bounded for value in row]
    values = flat if level == "token" else [row[0] for row in bounded if row]
    factor = statistics.fmean(values) if normalize and values and sum(values) > 0 else 1.0
    weights, metrics = importance_weights(log_ratio, sample.row, sample.lengths, level, threshold, normalize)
    torch.testing.assert_close(weights, torch.tensor([value / factor for value in flat]), rtol=1e-6, atol=1e-7)
    assert metrics.get("rollout_is_batch_norm_factor", 1.0) == pytest.approx(factor)


@given(ragged(shortest=1), levels)
def test_metrics_equal_their_definitions(sample, level):
    log_ratio = sample.tokens(0, 0.7)
    raw, bounded = naive_weights(sample.lists(log_ratio), level, 0.5, 3.0)
    _, metrics = importance_weights(log_ratio, sample.row, sample.lengths, level, "0.5_3.0", False)
    flat, raw_flat = ([value for row in rows for value in row] for rows in (bounded, raw))
    means, raw_means = ([statistics.fmean(row) for row in rows] for rows in (bounded, raw))
    compared, extremes = (raw_flat, flat) if level == "token" else (raw_means, raw_means)
    mean_square = statistics.fmean(value**2 for value in flat)
    expected = {
        "rollout_is_mean": statistics.fmean(flat),
        "rollout_is_max": max(extremes),
        "rollout_is_min": min(extremes),
        "rollout_is_std": statistics.pstdev(flat),
        "rollout_is_eff_sample_size": statistics.fmean(flat) ** 2 / mean_square if mean_square else 0.0,
        "rollout_is_ratio_fraction_high": statistics.fmean(value > 3.0 for value in compared),
        "rollout_is_ratio_fraction_low": statistics.fmean(value < 0.5 for value in compared),
        "rollout_is_seq_mean": statistics.fmean(means),
        "rollout_is_seq_std": statistics.stdev(means) if len(means) > 1 else 0.0,
        "rollout_is_seq_max": max(means),
        "rollout_is_seq_min": min(means),
        "rollout_is_seq_max_deviation": max(abs(value - 1) for value in means),
        "rollout_is_seq_fraction_high": statistics.fmean(value > 3.0 for value in raw_means),
        "rollout_is_seq_fraction_low": statistics.fmean(value < 0.5 for value in raw_means),
        "rollout_is_oob_ratio": statistics.fmean(not 0.5 <= value <= 3.0 for value in raw_flat),
    }
    assert metrics == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_weights_have_no_gradient_and_survive_a_huge_ratio():
    log_ratio = torch.tensor([90.0, -90.0], requires_grad=True)
    sample = Ragged((2,), 0)
    weights, _ = importance_weights(log_ratio, sample.row, sample.lengths, "token", 2.0, False)
    assert not weights.requires_grad
    assert weights.tolist() == pytest.approx([2.0, math.exp(-20)])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_no_tokens_have_no_metrics_and_a_mean_of_one(level):
    nothing = torch.zeros(0)
    weights, metrics = importance_weights(nothing, nothing.long(), torch.tensor([0]), level, 2.0, True)
    assert weights.shape == (0,)
    assert metrics == {"rollout_is_batch_norm_factor": 1.0}


def test_weights_that_are_all_zero_are_not_divided():
    sample = Ragged((1,), 0)
    assert mean_weight(torch.zeros(1), sample.row, sample.lengths, "token") == 1


@pytest.mark.parametrize("threshold", ["1_2", "0.5_1"])
def test_a_ratio_at_a_bound_is_inside(threshold):
    sample = Ragged((2,), 0)
    weights, metrics = importance_weights(torch.zeros(2), sample.row, sample.lengths, "token", threshold, False)
    assert weights.tolist() == [1.0, 1.0]
    assert {name for name, value in metrics.items() if "fraction" in name or "oob" in name if value} == set()


def test_without_a_lower_bound_low_means_below_one_over_the_upper_and_rows_without_tokens_count_nowhere():
    sample, log_ratio = Ragged((2, 0, 2), 0), torch.tensor([-1.0, -1.0, 0.3, -0.3])
    _, metrics = importance_weights(log_ratio, sample.row, sample.lengths, "token", 2.0, False)
    first, second = math.exp(-1), (math.exp(0.3) + math.exp(-0.3)) / 2
    assert metrics["rollout_is_ratio_fraction_low"] == metrics["rollout_is_seq_fraction_low"] == 0.5
    assert metrics["rollout_is_ratio_fraction_high"] == metrics["rollout_is_seq_fraction_high"] == 0
    assert metrics["rollout_is_seq_mean"] == pytest.approx((first + second) / 2)
    assert metrics["rollout_is_seq_std"] == pytest.approx(statistics.stdev([first, second]))
    assert metrics["rollout_is_seq_min"] == pytest.approx(first)


def test_ratios_are_held_below_the_power_of_twenty_before_their_bounds():
    sample = Ragged((2,), 0)
    raw, _ = bounded_weights(torch.tensor([30.0, -30.0]), sample.row, sample.lengths, "token", 2.0)
    assert raw.tolist() == pytest.approx([math.exp(20), math.exp(-20)])


def test_weights_near_zero_have_a_small_share_of_effective_samples():
    sample = Ragged((2,), 0)
    _, metrics = importance_weights(torch.full((2,), -20.0), sample.row, sample.lengths, "token", 2.0, False)
    assert metrics["rollout_is_eff_sample_size"] == pytest.approx(math.exp(-40) / 1e-16)
