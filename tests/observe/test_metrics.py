"""verl's groups, against numbers worked out by hand."""

import dataclasses
import math

import pytest
import torch

from verl_memopt.observe.metrics import (
    ValidationRow,
    compile_metrics,
    critic_metrics,
    headline_score,
    length_metrics,
    memory_metrics,
    reward_metrics,
    summary_of,
    throughput_metrics,
    token_timings,
    validation_metrics,
)
from verl_memopt.observe.phase import GIB, PhaseMemory


def phase(name, peak, allocated=None, reserved=None, rss=0):
    return PhaseMemory(name, 1.0, peak, allocated, reserved, None, rss)


def test_advantages_are_averaged_over_tokens_and_scores_over_rows():
    metrics = critic_metrics(
        scores=torch.tensor([1.0, 0.0]),
        rewards=torch.tensor([0.5, 0.0]),
        advantages=torch.tensor([1.0, 1.0, 1.0, -1.0]),
        returns=torch.tensor([2.0, 2.0, 2.0, 4.0]),
    )
    assert metrics["critic/score/mean"] == 0.5
    assert metrics["critic/rewards/max"] == 0.5
    assert metrics["critic/advantages/mean"] == pytest.approx((3 * 1.0 - 1.0) / 4)
    assert metrics["critic/returns/mean"] == pytest.approx((3 * 2.0 + 4.0) / 4)
    assert len(metrics) == 12


def test_a_batch_without_a_token_has_no_summary_of_advantages():
    assert summary_of("a", torch.tensor([9.0, 1.0])) == {"a/mean": 5.0, "a/max": 9.0, "a/min": 1.0}
    assert summary_of("a", torch.zeros(0)) == {}


def test_lengths_report_caps_and_aborted_rows():
    metrics = length_metrics(torch.tensor([4, 8]), torch.tensor([0, 16]), max_prompt_length=8, max_response_length=16)
    assert metrics["prompt_length/mean"] == 6
    assert metrics["prompt_length/clip_ratio"] == 0.5
    assert metrics["response_length/mean"] == 8
    assert metrics["response_length_non_aborted/mean"] == 16
    assert metrics["response_length_non_aborted/clip_ratio"] == 1.0
    assert metrics["response/aborted_ratio"] == 0.5


def test_throughput_is_per_device_and_generation_is_timed_by_response_tokens():
    assert throughput_metrics(1000, 2.0, 4)["perf/throughput"] == 125.0
    timings = {"timing_s/gen": 1.0, "timing_s/update_actor": 2.0, "timing_s/reward": 9.0}
    assert token_timings(timings, response_tokens=100, total_tokens=1000) == {
        "timing_per_token_ms/gen": 10.0,
        "timing_per_token_ms/update_actor": 2.0,
    }


def test_memory_is_reported_by_phase_in_gib_with_the_steps_maximum():
    metrics = memory_metrics(
        [phase("gen", GIB, GIB, 3 * GIB, rss=GIB), phase("update_actor", 2 * GIB, GIB // 2, 2 * GIB, rss=GIB)]
    )
    assert metrics["memory/gen/peak_allocated_gb"] == 1.0
    assert metrics["memory/update_actor/peak_reserved_gb"] == 2.0
    assert metrics["perf/max_memory_allocated_gb"] == 2.0
    assert metrics["perf/max_memory_reserved_gb"] == 3.0
    assert metrics["perf/memory_allocated_gb"] == 0.5


def test_a_figure_the_device_does_not_have_is_absent_and_not_zero():
    metrics = memory_metrics([phase("gen", None, rss=GIB)])
    assert metrics == {"memory/gen/host_rss_gb": 1.0, "perf/cpu_memory_used_gb": 1.0}
    held = dataclasses.replace(phase("update_actor", None), host_buffer_bytes=3 * GIB)
    names = {name: value for name, value in memory_metrics([phase("gen", None), held]).items() if "host_buffers" in name}
    assert names == {"memory/update_actor/host_buffers_gb": 3.0}
    twice = memory_metrics([phase("testing", 2 * GIB), phase("testing", GIB)])
    assert twice["memory/testing/peak_allocated_gb"] == 2.0


def test_compilations_are_summed_over_the_phases_that_count_them():
    counted = [dataclasses.replace(phase("gen", None), compiles=n, compile_fallbacks=n - 2) for n in (3, 2)]
    assert compile_metrics([*counted, phase("adv", None)]) == {"perf/compiles": 5.0, "perf/compile_fallbacks": 1.0}
    assert compile_metrics([phase("gen", None)]) == {}


def test_numbers_of_the_reward_function_are_summarised_over_the_rows_that_have_them():
    rows = [{"acc": True, "steps": 3, "pred": 7}, {"acc": False, "note": "x"}, {}, {"steps": math.nan, "score": 2.0}]
    assert reward_metrics(rows) == {
        "reward/acc/mean": 0.5,
        "reward/acc/max": 1.0,
        "reward/acc/min": 0.0,
        "reward/steps/mean": 3.0,
        "reward/steps/max": 3.0,
        "reward/steps/min": 3.0,
    }
    assert reward_metrics([]) == {}


def rows(*scores_of_prompts, source="toy", extra=None):
    return [
        ValidationRow(f"prompt {i}", source, score, extra[i][j] if extra else {})
        for i, scores in enumerate(scores_of_prompts)
        for j, score in enumerate(scores)
    ]


def test_one_sample_a_prompt_gives_the_mean_alone():
    assert validation_metrics(rows([1.0], [0.0], [0.0], [1.0])) == {"val-core/toy/reward/mean@1": 0.5}


def test_best_and_worst_are_taken_within_a_prompt_and_averaged_over_prompts():
    metrics = validation_metrics(rows([1.0, 0.0], [0.5, 0.5]))
    assert metrics["val-core/toy/reward/mean@2"] == 0.5
    assert metrics["val-core/toy/reward/best@2/mean"] == 0.75
    assert metrics["val-aux/toy/reward/worst@2/mean"] == 0.25
    assert math.isclose(metrics["val-aux/toy/reward/std@2"], math.sqrt(0.5) / 2)
    assert not any("maj@" in name for name in metrics)


def test_the_majority_answer_scores_once_a_prompt_and_ties_go_to_the_earliest():
    extra = [[{"pred": "7"}, {"pred": "8"}, {"pred": "8"}], [{"pred": "1"}, {"pred": "2"}, {"pred": "3"}]]
    metrics = validation_metrics(rows([1.0, 0.0, 0.0], [1.0, 0.0, 0.0], extra=extra))
    assert metrics["val-core/toy/reward/maj@3/mean"] == (0.0 + 1.0) / 2


def test_fewer_samples_are_a_mean_over_all_choices_of_so_many():
    """Of 4 samples, 6 choices of 2: the best is 1 in all but that of the two zeros."""
    extra = [[{"pred": answer} for answer in "aabc"]]
    metrics = validation_metrics(rows([1.0, 1.0, 0.0, 0.0], extra=extra))
    assert metrics["val-aux/toy/reward/best@2/mean"] == pytest.approx(5 / 6)
    assert metrics["val-aux/toy/reward/worst@2/mean"] == pytest.approx(1 / 6)
    # The earlier of two answers wins where they differ: a or b, so 1 unless neither is an a.
    assert metrics["val-aux/toy/reward/maj@2/mean"] == pytest.approx(5 / 6)
    assert {name.split("/")[-2] for name in metrics if name.endswith("/mean")} == {
        *("best@2", "worst@2", "maj@2", "best@4", "worst@4", "maj@4")
    }
    assert "val-core/toy/reward/best@4/mean" in metrics
    many = validation_metrics(rows([1.0] * 5 + [0.0] * 11, extra=[[{"pred": "x"}] * 5 + [{"pred": "y"}] * 11]))
    assert [name.split("/")[-2] for name in many if "/maj@" in name] == ["maj@2", "maj@4", "maj@8", "maj@16"]
    # A majority of 8 drawn from 5 and 11 is x with 5 or more, or with 4 of each, since its first x stands before its first y.
    wins = sum(math.comb(5, k) * math.comb(11, 8 - k) for k in (4, 5)) / math.comb(16, 8)
    assert many["val-aux/toy/reward/maj@8/mean"] == pytest.approx(wins, abs=4 * math.sqrt(wins * (1 - wins) / 200))


def test_accuracy_is_the_core_where_the_reward_function_returns_it():
    extra = [[{"acc": 1, "note": "text"}], [{"acc": 0, "note": "text"}]]
    metrics = validation_metrics(rows([0.9], [0.1], extra=extra))
    assert metrics == {"val-core/toy/acc/mean@1": 0.5, "val-aux/toy/reward/mean@1": 0.5}


def test_data_sources_are_kept_apart_and_the_headline_averages_them():
    metrics = validation_metrics(rows([1.0], source="a") + rows([0.0], [0.0], source="b"))
    assert metrics == {"val-core/a/reward/mean@1": 1.0, "val-core/b/reward/mean@1": 0.0}
    assert headline_score(metrics) == 0.5
    assert headline_score({"critic/score/mean": 1.0}) is None
