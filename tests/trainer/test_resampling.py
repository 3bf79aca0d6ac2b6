from collections import Counter

import pytest
import torch

from tests.trainer.conftest import AR, batch_of
from tests.trainer.test_step import running
from verl_memopt.config.schema import PfPpo
from verl_memopt.data.dataset import PromptRow
from verl_memopt.data.prompts import StepPrompts
from verl_memopt.rewards.score import RewardResult
from verl_memopt.rollout.engine import Generation
from verl_memopt.trainer.group_filter import draw_rows, drawn_rows
from verl_memopt.trainer.rollouts import Answers, StepBatch

NAN = float("nan")


def test_rows_are_drawn_by_the_power_of_their_score_and_never_without_one():
    counts = Counter(drawn_rows(torch.tensor([1.0, -2.0, 0.0, 3.0] * 500), PfPpo(weight_pow=1.0), 5))
    kinds = [sum(number for row, number in counts.items() if row % 4 == kind) / 2000 for kind in range(4)]
    assert kinds == pytest.approx([1 / 6, 2 / 6, 0, 3 / 6], abs=0.03)
    assert set(drawn_rows(torch.tensor([NAN, 0.5, NAN, 0.25] * 20), PfPpo(), 1)) <= set(range(1, 80, 2))
    assert drawn_rows(torch.tensor([NAN, NAN]), PfPpo(), 1) == [0, 1]
    assert len(set(drawn_rows(torch.zeros(500), PfPpo(), 1))) == pytest.approx(500 * (1 - 1 / 2.718281828), rel=0.1)


def test_a_draw_repeats_with_its_seed_and_changes_with_another():
    scores = torch.linspace(0.1, 1, 40)
    draws = [drawn_rows(scores, PfPpo(), seed) for seed in (3, 3, 4)]
    assert draws[0] == draws[1] != draws[2]
    assert all(len(draw) == 40 and set(draw) <= set(range(40)) for draw in draws)


def step_batch(scores):
    rows = [PromptRow(index, "", "toy/arithmetic", "", {}, f"rows:{index}") for index in range(len(scores))]
    answers = Answers(rows, [], Generation([], None, []), [])
    results = [RewardResult(score, {}) for score in scores]
    return StepBatch(1, StepPrompts([], [], 0, 0), answers, batch_of([2, 1, 3, 1][: len(scores)]), results)


def test_the_update_reads_the_drawn_rows_and_the_batch_stays():
    batch = step_batch([0.0, 0.0, 1.0, 0.0])
    draw_rows(batch, PfPpo(), 1)
    rows, names = batch.for_update()
    assert batch.drawn == [2, 2, 2, 2]
    assert batch.metrics == {"pf_ppo/drawn_rows_share": 0.25}
    assert names == ["rows:2 (sample of step 1)"] * 4
    assert rows.responses.sizes() == [3, 3, 3, 3]
    assert rows.group.tolist() == [1, 1, 1, 1]
    assert len(set(rows.prompt_groups())) == 1  # the drawn copies compute their prompt once
    assert batch.rows.responses.sizes() == [2, 1, 3, 1]


def test_log_probs_of_an_update_return_to_the_rows_that_it_read():
    batch = step_batch([0.0] * 4)
    assert batch.for_update()[0] is batch.rows
    batch.drawn = [3, 1, 3, 3]
    batch.keep_log_probs(torch.tensor([-3.0, -1.0, -3.0, -3.0]))
    assert batch.rows.old_log_probs.tolist() == [-5.0, -5.0, -1.0, -5.0, -5.0, -5.0, -3.0]
    batch.drawn = None
    batch.keep_log_probs(torch.zeros(7))
    assert batch.rows.old_log_probs.tolist() == [0.0] * 7


def test_a_step_with_pf_ppo_trains_on_the_rows_that_it_drew(settled):
    more = {"algorithm.use_pf_ppo": True, "algorithm.pf_ppo.reweight_method": "max_min"}
    with running(settled(more | {f"{AR}.actor.ppo_mini_batch_size": 4})) as learner:
        batch = learner.advantages(learner.scored(1))
        rows, _ = batch.for_update()
        result = learner.train_step(2).metrics
    scores = batch.scores
    assert all(scores[row] in (scores.max(), scores.min()) for row in batch.drawn)
    assert rows.responses.sizes() == [batch.rows.responses.sizes()[row] for row in batch.drawn]
    assert torch.equal(rows.advantages[: rows.responses.sizes()[0]], batch.rows.select(batch.drawn[:1]).advantages)
    assert result["actor/grad_norm"] > 0
    assert 0 < result["pf_ppo/drawn_rows_share"] < 1


def test_pf_ppo_and_bypass_mode_go_together(settled):
    more = {"algorithm.use_pf_ppo": True, "algorithm.rollout_correction.preset": "bypass_ppo_clip", f"{AR}.rollout.n": 4}
    with running(settled(more)) as learner:
        result = learner.train_step(1).metrics
    assert result["rollout/logprob_diff_mean"] < 1e-4
    assert result["training/log_probs_not_finite"] == result["actor/skipped_updates"] == 0


def test_a_critic_learns_the_returns_of_the_rows_that_were_drawn(settled):
    more = {"algorithm.adv_estimator": "gae", "algorithm.use_pf_ppo": True, "algorithm.pf_ppo.weight_pow": 1.0}
    with running(settled(more | {f"{AR}.actor.ppo_mini_batch_size": 4})) as learner:
        batch = learner.scored(1)
        batch.rows.old_values = learner.critic.values(batch.rows, batch.names)
        learner.advantages(batch)
        rows, _ = batch.for_update()
        batch.metrics |= learner.critic.update(*batch.for_update(), 1)
        learner.policy.update(batch)
        result = batch.metrics
    assert torch.equal(rows.returns, torch.cat([batch.rows.select([row]).returns for row in batch.drawn]))
    assert torch.equal(rows.old_values, torch.cat([batch.rows.select([row]).old_values for row in batch.drawn]))
    expected = 0.5 * rows.returns.square().mean().item()  # the value head starts at 0
    assert result["critic/vf_loss"] == pytest.approx(expected, rel=1e-5)
    assert expected != pytest.approx(0.5 * batch.rows.returns.square().mean().item(), rel=1e-2)
    assert result["actor/grad_norm"] > 0
