import math
import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.algorithms.ragged import Ragged, ragged
from verl_memopt.algorithms.rollout_correction import (
    bounded_weights,
    correct,
    corrects_before_update,
    importance_weights,
    kept_lengths,
    kept_tokens,
    mean_weight,
    rejection,
)
from verl_memopt.config.algorithm_rules import REJECTIONS, importance_bounds
from verl_memopt.config.aliases import PRESETS

K = {"k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}


def statistics_of(rows, name):
    """Gives for each row the number that a rejection compares, once a token."""
    level, kind = name.rsplit("_", 1)
    joins = {"seq_sum": sum, "seq_mean": lambda values: sum(values) / len(values), "seq_max": max}
    result = []
    for row in rows:
        values = [K[kind](min(max(x, -20.0), 20.0)) for x in row]
        result.append([joins[level](values)] * len(values) if level in joins and values else values)
    return result


def threshold_of(name):
    return "0.6_1.5" if name.endswith("k1") else 0.2


@pytest.mark.parametrize("name", REJECTIONS)
def test_a_rejection_keeps_what_its_definition_keeps(name):
    @given(ragged())
    def check(sample):
        log_ratio = sample.tokens(0, 0.5)
        lower, upper = (math.log(0.6), math.log(1.5)) if name.endswith("k1") else (-math.inf, 0.2)
        stats = statistics_of(sample.lists(log_ratio), name)
        flags = [[lower <= value <= upper for value in row] for row in stats]
        kept, metrics = rejection(log_ratio, sample.row, sample.lengths, name, threshold_of(name))
        assert kept.tolist() == [flag for row in flags for flag in row]
        assert torch.equal(kept, kept_tokens(log_ratio, sample.row, sample.lengths, name, threshold_of(name)))
        filled = [row for row in flags if row]
        rejected = [not flag for row in filled for flag in row]
        prefix = f"rollout_rs_{name}_"
        share = statistics.fmean(rejected) if rejected else 0.0
        touched = statistics.fmean(not all(row) for row in filled) if filled else 0.0
        for head in (prefix, "rollout_rs_"):
            assert metrics[f"{head}masked_fraction"] == pytest.approx(share)
            assert metrics[f"{head}seq_masked_fraction"] == pytest.approx(touched)
        if filled:
            spread = torch.tensor([stat for row in stats for stat in row])
            rows = [statistics.fmean(row) for row in stats if row]
            compared = spread.tolist() if name.startswith("token") else rows
            held = spread.clamp(lower if name.endswith("k1") else 0.0, upper)
            expected = {
                "mean": statistics.fmean(spread.tolist()),
                "std": statistics.pstdev(held.tolist()),
                "max": max(compared),
                "min": min(compared),
                "fraction_high": statistics.fmean(value > upper for value in compared),
                "fraction_low": statistics.fmean(value < lower for value in compared),
                "seq_mean": statistics.fmean(rows),
                "seq_std": statistics.stdev(rows) if len(rows) > 1 else 0.0,
                "seq_max": max(rows),
                "seq_min": min(rows),
                "seq_max_deviation": max(map(abs, rows)),
                "seq_fraction_high": statistics.fmean(value > upper for value in rows),
            }
            if name.endswith("k1"):
                expected["seq_fraction_low"] = statistics.fmean(value < lower for value in rows)
            assert {key: metrics[prefix + key] for key in expected} == pytest.approx(expected, rel=1e-5, abs=1e-6)
        if filled and not name.startswith("token"):
            assert metrics[f"{prefix}fraction_high"] + metrics[f"{prefix}fraction_low"] == pytest.approx(touched)

    check()


def test_several_rejections_keep_what_all_keep():
    sample = Ragged((4, 3), 1)
    log_ratio = sample.tokens(0, 0.5)
    both, metrics = rejection(log_ratio, sample.row, sample.lengths, "token_k1, seq_max_k2", "0.6_1.6,0.3")
    parts = [
        rejection(log_ratio, sample.row, sample.lengths, name, threshold)[0]
        for name, threshold in (("token_k1", "0.6_1.6"), ("seq_max_k2", 0.3))
    ]
    assert torch.equal(both, parts[0] & parts[1])
    assert {"rollout_rs_token_k1_mean", "rollout_rs_seq_max_k2_mean", "rollout_rs_masked_fraction"} <= metrics.keys()


def test_lengths_count_kept_tokens():
    sample = Ragged((2, 0, 1), 0)
    assert kept_lengths(torch.tensor([True, False, True]), sample.row, sample.lengths).tolist() == [1, 0, 1]


@given(st.integers(0, 5))
def test_a_batch_without_tokens_keeps_nothing_and_reports_nothing_rejected(rows):
    nothing = torch.zeros(0)
    kept, metrics = rejection(nothing, nothing.long(), torch.zeros(rows, dtype=torch.int64), "token_k1,seq_max_k2", "2,2")
    assert kept.shape == (0,)
    assert set(metrics.values()) == {0.0}


@pytest.mark.parametrize(
    ("name", "threshold", "log_ratio"), [("token_k2", 0.125, 0.5), ("token_k1", "1_2", 0.0), ("token_k1", "0.5_1", 0.0)]
)
def test_a_number_at_its_bound_is_kept(name, threshold, log_ratio):
    sample, values = Ragged((1,), 0), torch.tensor([log_ratio])
    assert kept_tokens(values, sample.row, sample.lengths, name, threshold).all()
    kept, metrics = rejection(values, sample.row, sample.lengths, name, threshold)
    assert kept.all()
    assert {key for key, value in metrics.items() if "fraction" in key and value} == set()


@pytest.mark.parametrize(("far", "statistic"), [(30.0, -20.0), (-30.0, 20.0)])
def test_log_ratios_count_as_twenty_at_most(far, statistic):
    sample = Ragged((1,), 0)
    _, metrics = rejection(torch.tensor([far]), sample.row, sample.lengths, "token_k1", "0.5_2")
    assert metrics["rollout_rs_token_k1_mean"] == metrics["rollout_rs_token_k1_max"] == statistic


def test_the_deviation_of_k2_counts_nothing_below_zero_and_that_of_k1_holds_to_its_bounds():
    sample, log_ratio = Ragged((2,), 0), torch.tensor([0.0, 2.0])
    _, metrics = rejection(log_ratio, sample.row, sample.lengths, "token_k2,token_k1", "0.5,0.5_2")
    assert metrics["rollout_rs_token_k2_std"] == pytest.approx(0.25)
    assert metrics["rollout_rs_token_k1_std"] == pytest.approx(math.log(2) / 2)


levels = st.sampled_from(["token", "sequence"])


def naive_weights(rows, level, lower, upper):
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


def test_weights_have_no_gradient_and_ratios_are_held_to_the_power_of_twenty_before_their_bounds():
    log_ratio = torch.tensor([90.0, -90.0], requires_grad=True)
    sample = Ragged((2,), 0)
    weights, _ = importance_weights(log_ratio, sample.row, sample.lengths, "token", 2.0, False)
    assert not weights.requires_grad
    assert weights.tolist() == pytest.approx([2.0, math.exp(-20)])
    raw, _ = bounded_weights(log_ratio, sample.row, sample.lengths, "token", 2.0)
    assert raw.tolist() == pytest.approx([math.exp(20), math.exp(-20)])


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


def test_weights_near_zero_have_a_small_share_of_effective_samples():
    sample = Ragged((2,), 0)
    _, metrics = importance_weights(torch.full((2,), -20.0), sample.row, sample.lengths, "token", 2.0, False)
    assert metrics["rollout_is_eff_sample_size"] == pytest.approx(math.exp(-40) / 1e-16)


SAMPLE = Ragged((3, 0, 5, 1), 4)
TRAINER = -SAMPLE.tokens(0).abs()
ENGINE = TRAINER + 0.4 * SAMPLE.tokens(1)


@pytest.mark.parametrize("name", PRESETS)
def test_a_correction_has_what_its_settings_ask_for(name):
    settings = PRESETS[name]
    correction = correct(TRAINER, ENGINE, SAMPLE.row, SAMPLE.lengths, settings)
    assert (correction.weights is None) == (settings.rollout_is is None)
    assert (correction.kept is None) == (settings.rollout_rs is None)
    assert all(key.startswith("rollout_corr/") for key in correction.metrics)
    assert "rollout_corr/k3_kl" in correction.metrics
    assert ("rollout_corr/rollout_is_mean" in correction.metrics) == (settings.rollout_is is not None)
    assert ("rollout_corr/rollout_rs_masked_fraction" in correction.metrics) == (settings.rollout_rs is not None)


def test_weights_and_kept_tokens_are_those_of_the_log_ratio_trainer_minus_engine():
    settings = replace(PRESETS["decoupled_k3_rs_token_tis"], rollout_rs_threshold=0.05)
    correction = correct(TRAINER, ENGINE, SAMPLE.row, SAMPLE.lengths, settings)
    weights, _ = importance_weights(TRAINER - ENGINE, SAMPLE.row, SAMPLE.lengths, "token", 2.0, False)
    kept, _ = rejection(TRAINER - ENGINE, SAMPLE.row, SAMPLE.lengths, "seq_mean_k3", 0.05)
    assert torch.equal(correction.weights, weights)
    assert torch.equal(correction.kept, kept)
    assert 0 < kept.sum() < len(kept)


def test_normalised_weights_have_mean_one_over_the_tokens_of_the_step():
    settings = replace(PRESETS["decoupled_token_is"], rollout_is_batch_normalize=True)
    assert correct(TRAINER, ENGINE, SAMPLE.row, SAMPLE.lengths, settings).weights.mean().item() == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("weights", [None, "token"])
@pytest.mark.parametrize("rejections", [None, "token_k1"])
def test_a_step_corrects_before_its_update_in_decoupled_mode_alone_where_there_is_something_to_correct(weights, rejections):
    settings = replace(PRESETS["decoupled_token_is"], rollout_is=weights, rollout_rs=rejections)
    assert corrects_before_update(settings) is ((weights, rejections) != (None, None))
    assert not corrects_before_update(replace(settings, bypass_mode=True))
