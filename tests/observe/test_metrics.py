"""Reductions and verl's groups, against numbers worked out by hand."""

import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from verl_memopt.observe.metrics import (
    Metrics,
    critic_metrics,
    length_metrics,
    memory_metrics,
    summary_of,
    throughput_metrics,
    token_timings,
)
from verl_memopt.observe.phase import GIB, PhaseMemory


def phase(name: str, peak: int | None, allocated: int | None = None, reserved: int | None = None, rss: int = 0) -> PhaseMemory:
    return PhaseMemory(name, 1.0, peak, allocated, reserved, None, rss)


def test_each_metric_is_reduced_the_way_it_declares_and_not_by_its_name() -> None:
    metrics = Metrics()
    for value in (1.0, 2.0, 6.0):
        metrics.add("actor/max_ratio", value)
        metrics.add("peak", value, "max")
        metrics.add("least", value, "min")
        metrics.add("tokens", value, "sum")
    assert metrics.result() == {"actor/max_ratio": 3.0, "peak": 6.0, "least": 1.0, "tokens": 9.0}


def test_a_weighted_mean_counts_each_value_by_its_weight() -> None:
    metrics = Metrics()
    metrics.add("entropy", 1.0, weight=3)
    metrics.add("entropy", 5.0, weight=1)
    metrics.add("entropy", 100.0, weight=0)
    assert metrics.result() == {"entropy": 2.0}


def test_metrics_of_ranks_merge_after_a_trip_through_pickle() -> None:
    whole, part = Metrics(), Metrics()
    whole.add("loss", 1.0, "sum")
    part.add("loss", torch.tensor(2.0), "sum")
    part.add("lr", 0.5, "max")
    whole.merge(pickle.loads(pickle.dumps(part)))
    assert whole.result() == {"loss": 3.0, "lr": 0.5}


def test_two_reductions_of_one_name_are_a_broken_invariant() -> None:
    metrics = Metrics()
    metrics.add("x", 1.0, "sum")
    with pytest.raises(AssertionError, match="x is reduced by sum"):
        metrics.add("x", 1.0, "max")


def test_adding_reads_no_tensor_so_that_a_pass_can_run_fake() -> None:
    with FakeTensorMode():
        metrics = Metrics()
        metrics.update({"loss": torch.ones(()) * 2}, "sum")


def test_advantages_are_averaged_over_tokens_and_scores_over_rows() -> None:
    metrics = critic_metrics(
        scores=torch.tensor([1.0, 0.0]),
        rewards=torch.tensor([0.5, 0.0]),
        advantages=torch.tensor([1.0, -1.0]),
        returns=torch.tensor([2.0, 4.0]),
        lengths=torch.tensor([3, 1]),
    )
    assert metrics["critic/score/mean"] == 0.5
    assert metrics["critic/rewards/max"] == 0.5
    assert metrics["critic/advantages/mean"] == pytest.approx((3 * 1.0 - 1.0) / 4)
    assert metrics["critic/returns/mean"] == pytest.approx((3 * 2.0 + 4.0) / 4)
    assert len(metrics) == 12


def test_an_empty_response_has_no_token_to_weigh_in_advantages() -> None:
    assert summary_of("a", torch.tensor([9.0, 1.0]), torch.tensor([0, 2])) == {"a/mean": 1.0, "a/max": 1.0, "a/min": 1.0}
    assert summary_of("a", torch.tensor([9.0]), torch.tensor([0])) == {}


def test_lengths_report_caps_and_aborted_rows() -> None:
    metrics = length_metrics(torch.tensor([4, 8]), torch.tensor([0, 16]), max_prompt_length=8, max_response_length=16)
    assert metrics["prompt_length/mean"] == 6
    assert metrics["prompt_length/clip_ratio"] == 0.5
    assert metrics["response_length/mean"] == 8
    assert metrics["response_length_non_aborted/mean"] == 16
    assert metrics["response_length_non_aborted/clip_ratio"] == 1.0
    assert metrics["response/aborted_ratio"] == 0.5


def test_throughput_is_per_device() -> None:
    assert throughput_metrics(1000, 2.0, 4)["perf/throughput"] == 125.0


def test_generation_is_timed_by_response_tokens_and_the_rest_by_all() -> None:
    timings = {"timing_s/gen": 1.0, "timing_s/update_actor": 2.0, "timing_s/reward": 9.0}
    assert token_timings(timings, response_tokens=100, total_tokens=1000) == {
        "timing_per_token_ms/gen": 10.0,
        "timing_per_token_ms/update_actor": 2.0,
    }


def test_memory_is_reported_by_phase_in_gib_with_the_steps_maximum() -> None:
    metrics = memory_metrics(
        [phase("gen", GIB, GIB, 3 * GIB, rss=GIB), phase("update_actor", 2 * GIB, GIB // 2, 2 * GIB, rss=GIB)]
    )
    assert metrics["memory/gen/peak_allocated_gb"] == 1.0
    assert metrics["memory/update_actor/peak_reserved_gb"] == 2.0
    assert metrics["perf/max_memory_allocated_gb"] == 2.0
    assert metrics["perf/max_memory_reserved_gb"] == 3.0
    assert metrics["perf/memory_allocated_gb"] == 0.5


def test_a_figure_the_device_does_not_have_is_absent_and_not_zero() -> None:
    metrics = memory_metrics([phase("gen", None, rss=GIB)])
    assert metrics == {"memory/gen/host_rss_gb": 1.0, "perf/cpu_memory_used_gb": 1.0}


def test_a_phase_that_runs_twice_in_a_step_keeps_its_higher_peak() -> None:
    metrics = memory_metrics([phase("testing", 2 * GIB), phase("testing", GIB)])
    assert metrics["memory/testing/peak_allocated_gb"] == 2.0
