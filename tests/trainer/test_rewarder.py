import pytest

from verl_memopt.config.schema import CustomReward, OverlongBuffer, RewardKwargs, RewardModel
from verl_memopt.data.dataset import PromptRow
from verl_memopt.rewards.runner import RewardRunner
from verl_memopt.rewards.score import RewardResult
from verl_memopt.rollout.engine import Generation
from verl_memopt.trainer.rollouts import Answers
from verl_memopt.trainer.scoring import Dapo, Rewarder


def answers_of(texts, truths, lengths=None):
    rows = [PromptRow(i, "", "toy/arithmetic", truth, {}, "") for i, truth in enumerate(truths)]
    responses = [[1] * length for length in lengths or map(len, texts)]
    return Answers(rows, [[1]] * len(rows), Generation(responses, None, []), list(texts))


def test_answers_are_scored_with_their_own_ground_truth():
    with RewardRunner(CustomReward(), 1) as runner:
        results = Rewarder(runner).score(answers_of("224", "234"))
    assert [(result.score, result.extra) for result in results] == [(1.0, {}), (0.0, {}), (1.0, {})]


def dapo(enable=True, log=False, length=4, factor=0.5, longest=10):
    buffer = OverlongBuffer(enable=enable, len=length, penalty_factor=factor, log=log)
    return Dapo(RewardKwargs(overlong_buffer_cfg=buffer, max_resp_len=longest))


def test_the_penalty_shapes_rewards_for_the_manager_dapo_alone():
    assert Dapo.of(RewardModel()) is None
    assert Dapo.of(RewardModel(reward_manager="prime")) is None
    assert Dapo.of(RewardModel(reward_manager="dapo")) == Dapo(RewardKwargs())
    (result,) = dapo().shaped([RewardResult(1.0)], [10])
    assert (result.score, result.extra) == (0.5, {"acc": 1.0})
    assert dapo(enable=False, log=True).shaped([RewardResult(1.0)], [10]) == [RewardResult(1.0, {"acc": 1.0})]


def test_a_response_loses_in_proportion_to_what_it_has_in_the_buffer():
    """The buffer is tokens 7 to 10: 8 tokens have half of it, and half of 0.5 is lost."""
    with RewardRunner(CustomReward(), 1) as runner:
        results = Rewarder(runner, dapo(log=True)).score(answers_of("2222", "2223", [6, 8, 10, 10]))
    assert [result.score for result in results] == [1.0, 0.75, 0.5, -0.5]
    assert [result.extra for result in results] == [
        {"acc": 1.0, "overlong_reward": 0.0, "overlong": False},
        {"acc": 1.0, "overlong_reward": -0.25, "overlong": True},
        {"acc": 1.0, "overlong_reward": -0.5, "overlong": True},
        {"acc": 0.0, "overlong_reward": -0.5, "overlong": True},
    ]


def test_a_function_that_returns_a_dict_keeps_its_own_accuracy():
    (result,) = dapo(enable=False).shaped([RewardResult(1.0, {"acc": 0.0, "pred": "x"})], [10])
    assert result == RewardResult(1.0, {"acc": 0.0, "pred": "x"})
    (other,) = dapo(enable=False).shaped([RewardResult(1.0, {"steps": 3})], [10])
    assert other.extra == {"steps": 3}


def test_a_row_that_failed_keeps_its_fallback_score():
    failed = RewardResult(-1.0, failed=True)
    assert dapo(log=True).shaped([failed], [10]) == [failed]


@pytest.mark.parametrize("enable", [True, False])
def test_no_rows_are_no_rewards(enable):
    assert dapo(enable=enable).shaped([], []) == []
