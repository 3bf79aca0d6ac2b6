import math

import pytest
import torch

from tests.trainer.conftest import Member, group_of
from tests.trainer.test_rewarder import dapo
from verl_memopt.config.schema import Actor, CustomReward, RewardModel
from verl_memopt.data.dataset import PromptRow
from verl_memopt.errors import ConfigError, RewardError
from verl_memopt.rewards.runner import RewardRunner
from verl_memopt.rewards.score import RewardResult
from verl_memopt.rollout.engine import Generation
from verl_memopt.trainer.micro_batching import Budget
from verl_memopt.trainer.rollouts import Answers
from verl_memopt.trainer.scoring import BUDGET_KEY, END, Conversations, ModelScores, Rewarder, reward_budget


class Scorer(Member):
    """Scores a conversation as the sum of its ids; one with the id 99 as NaN."""

    def reward_scores(self, batch, micro_batches):
        assert sorted(row for rows in micro_batches for row in rows) == list(range(batch.num_rows))
        assert all(batch.row_tokens().cost(rows) <= 12 for rows in micro_batches)
        pairs = zip(batch.prompts.rows(), batch.responses.rows(), strict=True)
        rows = [[*prompt.tolist(), *response.tolist()] for prompt, response in pairs]
        assert all(ids[-1] == END for ids in rows)
        return torch.tensor([math.nan if 99 in ids else float(sum(ids)) for ids in rows])


def scores_over(*members, max_tokens=12, balance=True, shared=True):
    budget = Budget(True, max_tokens, None, BUDGET_KEY)
    actor = Actor(use_prefix_grouper=shared)
    return ModelScores(group_of(*members), Conversations(None, None), budget, actor, balance)


def answers_of(*responses, samples=2):
    prompts = [PromptRow(i, "", "toy/arithmetic", "2", {"a": 1}, f"rows:{i + 1}") for i in range(len(responses) // samples)]
    rows = [prompt for prompt in prompts for _ in range(samples)]
    ids = [[10 * (row.index + 1)] * (row.index + 1) for row in rows]
    return Answers(rows, ids, Generation([list(ids) for ids in responses], None, []), ["2"] * len(rows))


RESPONSES = [(1, 2), (3,), (), (4, 5, 6), (7,), (8, 9)]
SCORES = [13.0, 13.0, 40.0, 55.0, 97.0, 107.0]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("balance", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_every_answer_gets_its_score_on_any_number_of_ranks(ranks, balance, shared):
    members = [Scorer(rank) for rank in range(ranks)]
    scores = scores_over(*members, balance=balance, shared=shared)
    assert scores.score(answers_of(*RESPONSES)) == SCORES
    ((phase, _, method, (batch, _)),) = members[0].asked
    assert (phase, method) == ("reward", "reward_scores")
    assert batch.num_rows == math.ceil(6 / ranks)


def test_no_answers_are_no_call():
    member = Scorer(0)
    assert scores_over(member).score(answers_of()) == []
    assert member.asked == []


def test_a_conversation_over_the_limit_and_a_score_that_is_not_finite_are_named():
    with pytest.raises(ConfigError, match=rf"(?s){BUDGET_KEY}=4.*rows:2"):
        scores_over(Scorer(0), max_tokens=4).score(answers_of(*RESPONSES))
    with pytest.raises(RewardError, match=r"^rows:2: the reward model gave the score nan"):
        scores_over(Scorer(0)).score(answers_of((1,), (2,), (99,), (3,)))


def test_the_budget_is_the_reward_models_own():
    model = RewardModel(use_dynamic_bsz=True, forward_max_token_len_per_gpu=77, micro_batch_size_per_gpu=3)
    assert reward_budget(model) == Budget(True, 77, 3, BUDGET_KEY)


def test_without_a_function_the_models_score_is_the_reward():
    with RewardRunner(CustomReward(), 1) as runner:
        rewarder = Rewarder(runner, model=scores_over(Scorer(0)), model_alone=True)
        assert rewarder.score(answers_of(*RESPONSES)) == [RewardResult(score) for score in SCORES]


def test_a_function_reads_the_models_score_and_returns_the_reward(tmp_path):
    (tmp_path / "mixed.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    right = float(solution_str == ground_truth)\n"
        "    return {'score': right + extra_info['rm_score'] / 100, 'right': right, 'a': extra_info['a']}\n"
    )
    with RewardRunner(CustomReward(path=str(tmp_path / "mixed.py")), 1) as runner:
        results = Rewarder(runner, model=scores_over(Scorer(0))).score(answers_of(*RESPONSES))
    assert [result.score for result in results] == pytest.approx([1 + score / 100 for score in SCORES])
    assert results[0].extra == {"rm_score": 13.0, "right": 1.0, "a": 1}


def test_the_penalty_of_dapo_comes_off_the_models_score():
    with RewardRunner(CustomReward(), 1) as runner:
        shaping = dapo(length=1, factor=0.5, longest=3)
        rewarder = Rewarder(runner, shaping, scores_over(Scorer(0)), model_alone=True)
        results = rewarder.score(answers_of(*RESPONSES))
    assert [result.score for result in results] == [13.0, 13.0, 40.0, 54.5, 97.0, 107.0]
