"""The metrics under TRL's names, computed by hand."""

import math

import pytest

from verl_memopt.data.dataset import PromptRow
from verl_memopt.rewards.score import RewardResult
from verl_memopt.rollout.engine import Generation
from verl_memopt.trainer.listener import Progress
from verl_memopt.trainer.rollouts import RowAnswers
from verl_memopt.trl.logs import RewardNames, answer_log, evaluation_log, scored_rows, training_log


def answers(lengths, finish_reasons, sets=None):
    """Two answers to each prompt."""
    extra = [{} if sets is None else {"validation_set": name} for name in sets or lengths]
    rows = [PromptRow(index // 2, "p", "s", None, extra[index], "a:1") for index in range(len(lengths))]
    generation = Generation([[7] * length for length in lengths], None, finish_reasons)
    return RowAnswers(rows, [[1]] * len(lengths), generation, ["x"] * len(lengths))


def test_rewards_and_lengths_are_those_of_the_answers():
    given = answers([2, 4, 6, 8], ["stop", "length", "stop", "length"])
    results = [
        RewardResult(1.0, {"a": 1.0, "b": 0.0, "seen": 3}),
        RewardResult(0.0, {"a": 0.0, "seen": 5}),
        RewardResult(2.0, {"a": 1.0, "b": 1.0}),
        RewardResult(2.0, {"a": 1.0, "b": 1.0, "note": "text"}),
    ]
    log = answer_log(scored_rows(given, results), RewardNames(["a", "b"], [1.0, 1.0]))
    expected = {
        "rewards/a/mean": 0.75, "rewards/a/std": 0.5, "rewards/b/mean": 2 / 3, "rewards/b/std": math.sqrt(1 / 3),
        "reward": 1.25, "reward_std": math.sqrt(2.75 / 3), "frac_reward_zero_std": 0.5, "seen": 4.0,
        "completions/mean_length": 5.0, "completions/min_length": 2.0, "completions/max_length": 8.0,
        "completions/clipped_ratio": 0.5, "completions/mean_terminated_length": 4.0, "completions/min_terminated_length": 2.0,
        "completions/max_terminated_length": 6.0,
    }  # fmt: skip
    assert log == pytest.approx(expected)


def test_one_function_is_logged_before_its_weight_and_a_row_without_a_reward_counts_in_no_mean():
    given = answers([1, 1], ["length", "length"])
    log = answer_log(scored_rows(given, [RewardResult(3.0), RewardResult(math.nan)]), RewardNames(["f"], [1.5]))
    assert (log["rewards/f/mean"], log["reward"], log["completions/mean_terminated_length"]) == (2.0, 3.0, 0.0)


def test_a_validation_has_metrics_of_each_dataset_that_was_given_by_name():
    given = answers([2, 4, 1, 1], ["stop"] * 4, ["easy", "easy", "hard", "hard"])
    log = evaluation_log(scored_rows(given, [RewardResult(x) for x in (1.0, 0.0, 0.5, 0.5)]), RewardNames(["f"], [1.0]), "test")
    assert (log["test_easy_reward"], log["test_hard_reward"], log["test_easy_rewards/f/mean"]) == (0.5, 0.5, 0.5)
    # The advantages of "easy" are +-0.5 / (sqrt(0.5) + 1e-4), its 6 tokens 2 and 4 of them.
    assert log["test_easy_loss"] == pytest.approx(-(2 - 4) * 0.5 / (math.sqrt(0.5) + 1e-4) / 6)
    assert log["test_hard_loss"] == 0.0
    assert not [name for name in log if not name.startswith(("test_easy_", "test_hard_"))]


def test_a_step_is_logged_under_trls_names():
    metrics = {"actor/loss": 0.3, "actor/pg_loss": 0.2, "actor/kl_loss": 1.0, "actor/lr": 1e-6, "training/epoch": 2.0}
    log = training_log(Progress("logged", 4, 9, metrics), {"reward": 0.5})
    assert log == {"loss": 0.3, "policy_loss": 0.2, "kl": 1.0, "learning_rate": 1e-6, "epoch": 2.0, "reward": 0.5}
    assert training_log(Progress("logged", 4, 9, {"actor/reward_kl_penalty": 0.1}), {}) == {"kl": 0.1}
