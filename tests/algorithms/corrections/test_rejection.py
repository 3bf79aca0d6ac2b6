import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.algorithms.ragged import Ragged, ragged
from verl_memopt.algorithms.rollout_correction import kept_lengths, kept_tokens, rejection
from verl_memopt.config.correction_rules import REJECTIONS

K = {"k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}


def naive_rejection(rows, name, lower, upper):
    """A list of flags for each row."""
    level, kind = name.rsplit("_", 1)
    flags = []
    for row in rows:
        values = [K[kind](min(max(x, -20.0), 20.0)) for x in row]
        if level == "token":
            flags.append([lower <= value <= upper for value in values])
            continue
        total = {"seq_sum": sum, "seq_mean": lambda v: sum(v) / len(v), "seq_max": max}[level](values) if values else 0.0
        flags.append([lower <= total <= upper] * len(row))
    return flags


def statistics_of(rows, name):
    """A list of the compared number for each row, once a token."""
    level, kind = name.rsplit("_", 1)
    result = []
    for row in rows:
        values = [K[kind](x) for x in row]
        total = {"seq_sum": sum, "seq_mean": lambda v: sum(v) / len(v), "seq_max": max}.get(level)
        result.append([total(values)] * len(values) if total and values else values)
    return result


def threshold_of(name):
    return "0.6_1.5" if name.endswith("k1") else 0.2


@pytest.mark.parametrize("name", REJECTIONS)
def test_a_rejection_keeps_what_its_definition_keeps(name):
    @given(ragged())
    def check(sample):
        log_ratio = sample.tokens(0, 0.5)
        lower, upper = (math.log(0.6), math.log(1.5)) if name.endswith("k1") else (-math.inf, 0.2)
        flags = naive_rejection(sample.lists(log_ratio), name, lower, upper)
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
            spread = torch.tensor([stat for row in statistics_of(sample.lists(log_ratio), name) for stat in row])
            rows = [statistics.fmean(row) for row in statistics_of(sample.lists(log_ratio), name) if row]
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


def test_equal_probabilities_are_always_kept():
    sample = Ragged((2, 0, 1), 0)
    for name in REJECTIONS:
        assert rejection(torch.zeros(3), sample.row, sample.lengths, name, threshold_of(name))[0].all()


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
