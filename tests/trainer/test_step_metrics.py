import math

import pytest
import torch

from tests.trainer.conftest import batch_of
from verl_memopt.data.prompts import StepPrompts
from verl_memopt.rewards.score import RewardResult
from verl_memopt.rollout.engine import Generation
from verl_memopt.trainer.rollouts import Advantages, Answers, StepBatch
from verl_memopt.trainer.step import StepMetrics


def described(truncates=False, kl_mean=None, entropy=None, old_log_prob=-5.0, values=None):
    """Describes two groups of two: responses of 4, 1, 0 and 3 tokens, rewards 1, 0, 0.5 and 0.5, the last one a failure."""
    rows = batch_of([4, 1, 0, 3])
    rows.old_log_probs[0] = old_log_prob
    rows.old_values = values
    results = [RewardResult(1.0, {}), RewardResult(0.0, {}), RewardResult(0.5, {}), RewardResult(0.5, {}, failed=True)]
    per_token = torch.tensor([1.0, -1.0, 0.0, 0.0])[rows.response_row()]
    scores = torch.tensor([result.score for result in results])
    advantages = Advantages(per_token, per_token + 0.5, scores - 0.25, kl_mean, {"groups": 2.0})
    answers = Answers([], [], Generation([], None, [], cached_tokens=6), [])
    prompts = StepPrompts([], [], rows_truncated=2, tokens_dropped=9)
    batch = StepBatch(3, prompts, answers, rows, results, entropy, advantages)
    return StepMetrics(3, 4, truncates).describe(batch, 0.5)


def test_a_step_is_described_by_means_shares_and_counts():
    metrics = described()
    assert metrics["critic/score/mean"] == 0.5
    assert metrics["critic/rewards/mean"] == 0.25
    assert metrics["critic/advantages/mean"] == pytest.approx((4 - 1) / 8)
    assert metrics["critic/returns/mean"] == pytest.approx((4 - 1) / 8 + 0.5)
    metrics = described()
    assert metrics["prompt_length/clip_ratio"] == 1.0  # each prompt has three tokens, which is the cap
    assert metrics["response_length/clip_ratio"] == 0.25
    assert metrics["response/aborted_ratio"] == 0.25
    metrics = described()
    assert (metrics["reward/failed_rows"], metrics["reward/groups"]) == (1.0, 2.0)
    assert metrics["rollout/prefix_cache_hit_rate"] == 6 / 12


@pytest.mark.parametrize(("old_log_prob", "count"), [(-5.0, 0.0), (math.nan, 1.0), (-math.inf, 1.0)])
def test_log_probs_that_are_not_finite_are_counted(old_log_prob, count):
    assert described(old_log_prob=old_log_prob)["training/log_probs_not_finite"] == count


def test_what_a_run_does_not_compute_is_absent():
    assert {"actor/entropy", "actor/reward_kl_penalty", "data/tokens_dropped"}.isdisjoint(described())
    assert "actor/entropy" not in described(entropy=torch.zeros(0))
    metrics = described(truncates=True, kl_mean=0.125, entropy=torch.tensor([1.0, 2.0]))
    assert metrics["actor/entropy"] == 1.5
    assert (metrics["actor/reward_kl_penalty"], metrics["actor/reward_kl_penalty_coeff"]) == (0.125, 0.5)
    assert (metrics["data/tokens_dropped"], metrics["data/rows_truncated"]) == (9.0, 2.0)


def test_values_are_described_and_compared_with_the_returns_where_there_is_a_critic():
    assert not any(name.startswith(("critic/values", "critic/vf_")) for name in described())
    returns = torch.tensor([1.5, 1.5, 1.5, 1.5, -0.5, 0.5, 0.5, 0.5])
    metrics = described(values=returns - torch.tensor([0.5, -0.5] * 4))
    assert (metrics["critic/values/min"], metrics["critic/values/max"]) == (-1.0, 2.0)
    residual, total = torch.tensor([0.5, -0.5] * 4).double().var(), returns.double().var()
    assert metrics["critic/vf_explained_var"] == pytest.approx(float(1 - residual / (total + 1e-5)))
    assert described(values=returns)["critic/vf_explained_var"] == 1.0
