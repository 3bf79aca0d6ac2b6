import math

import pytest
import torch

from tests.trainer.conftest import AR
from tests.trainer.test_group_filter import step_batch
from tests.trainer.test_step import running
from tests.worker.test_reward_scores import classifier
from verl_memopt.trainer.step import add_baselines

REMAX = {"algorithm.adv_estimator": "remax", f"{AR}.actor.policy_loss.loss_mode": "vanilla"}


def reward(text):
    """The reward of these tests (tests/trainer/conftest.py)."""
    return sum(map(ord, text)) % 5 / 4


def test_the_advantage_is_the_reward_minus_that_of_the_greedy_response(settled):
    with running(settled(REMAX)) as learner:
        batch = learner.advantages(learner.scored(1))
        prompts = batch.prompts.prompt_ids[::2]
        answers = learner.rollouts.generator.generate_greedy(batch.prompts, 1)
        again = learner.rollouts.generator.generate_greedy(batch.prompts, 2)
        phases = [span.name for span in learner.workers.clock.take()]
    assert answers.prompt_ids == prompts
    assert answers.texts == again.texts  # greedy: no seed, no step
    assert batch.baselines.tolist() == [reward(text) for text in answers.texts for _ in range(2)]
    lengths = batch.rows.responses.sizes()
    own = [score - base for score, base in zip(batch.scores.tolist(), batch.baselines.tolist(), strict=True)]
    expected = [value for value, size in zip(own, lengths, strict=True) for _ in range(size)]
    assert batch.advantages.per_token.tolist() == pytest.approx(expected)
    assert any(expected)
    assert batch.rows.num_rows == len(batch.answers.texts) == 8  # the greedy responses are not among the rows
    assert batch.metrics["critic/baselines/mean"] == pytest.approx(batch.baselines.mean().item())
    assert phases[2:7] == ["gen", "gen", "reward", "reward", "old_log_prob"]


def test_with_a_group_filter_only_the_prompts_that_stay_are_answered_greedily(settled):
    more = {"algorithm.filter_groups.enable": True, "data.gen_batch_size": 2, f"{AR}.rollout.temperature": 1.5}
    with running(settled(REMAX | more)) as learner:
        batch = learner.rollouts.step_batch(1)
        phases = [span.name for span in learner.workers.clock.take()]
        greedy = learner.rollouts.generator.generate_greedy(batch.prompts, 1)
        result = learner.train_step(2)
    rounds = int(batch.metrics["train/num_gen_batches"])
    assert rounds >= 2
    assert phases[2:] == ["gen", "reward"] * rounds + ["gen", "reward"]
    assert batch.baselines.tolist() == [reward(text) for text in greedy.texts for _ in range(2)]
    assert result.metrics["actor/grad_norm"] > 0


def test_a_greedy_response_without_a_score_gives_no_advantage():
    batch, greedy = (step_batch(scores) for scores in ([1.0, 0.5, 0.25, 1.0], [math.nan, 0.25]))
    assert add_baselines(batch, greedy, 2).baselines.tolist()[2:] == [0.25, 0.25]
    assert batch.baselines[:2].isnan().all()
    assert batch.metrics == {"critic/baselines/mean": 0.25, "critic/baselines/max": 0.25, "critic/baselines/min": 0.25}


SCORED = {
    "custom_reward_function.path": None,
    "reward_model.enable": True,
    "reward_model.model.input_tokenizer": None,
    "reward_model.model.fsdp_config.dtype": "fp32",
    "reward_model.model.fsdp_config.param_offload": True,
}
DAPO = {
    "reward_model.reward_manager": "dapo",
    "reward_model.reward_kwargs.max_resp_len": 4,
    **{f"reward_model.reward_kwargs.overlong_buffer_cfg.{key}": value for key, value in (("enable", True), ("len", 2))},
}


def model_rewards(model, answers):
    """Scores each answer alone with transformers, less DAPO's penalty of half a point for each token beyond the second."""
    rewards = []
    for prompt, response in zip(answers.prompt_ids, answers.generation.response_ids, strict=True):
        with torch.no_grad():
            logit = model(torch.tensor([[*prompt, *response]])).logits.item()
        rewards.append(logit - max(len(response) - 2, 0) / 2)
    return rewards


def test_a_reward_model_and_dapos_penalty_score_the_greedy_responses_too(settled, tiny_folder, tmp_path):
    folder, model = classifier(tmp_path / "rm", tiny_folder)
    with running(settled(REMAX | SCORED | DAPO | {"reward_model.model.path": str(folder)})) as learner:
        batch = learner.rollouts.step_batch(1)
        answers = learner.rollouts.generator.generate_greedy(batch.prompts, 1)
    assert batch.scores.tolist() == pytest.approx(model_rewards(model, batch.answers), abs=1e-5)
    expected = [reward for reward in model_rewards(model, answers) for _ in range(2)]
    assert batch.baselines.tolist() == pytest.approx(expected, abs=1e-5)
    assert len(set(expected)) > 1


def test_a_batch_manager_scores_the_greedy_responses_in_a_call_of_their_own(settled, tmp_path):
    (tmp_path / "batch.py").write_text(
        "def compute_score(data_sources, solution_strs, ground_truths, extra_infos=None):\n"
        "    return [float(len(solution_strs))] * len(solution_strs)\n"
    )
    more = {"reward_model.reward_manager": "batch", "custom_reward_function.path": str(tmp_path / "batch.py")}
    with running(settled(REMAX | more)) as learner:
        batch = learner.rollouts.step_batch(1)
    assert batch.scores.tolist() == [8.0] * 8
    assert batch.baselines.tolist() == [4.0] * 8


def test_a_group_filter_reads_the_scores_of_a_reward_model(settled, tiny_folder, tmp_path):
    folder, _ = classifier(tmp_path / "rm", tiny_folder)
    more = {"reward_model.model.path": str(folder), "algorithm.filter_groups.enable": True, f"{AR}.rollout.temperature": 1.5}
    with running(settled(SCORED | more | {"data.gen_batch_size": 2})) as learner:
        batch = learner.rollouts.step_batch(1)
        phases = [span.name for span in learner.workers.clock.take()]
        result = learner.train_step(2).metrics
    rounds = int(batch.metrics["train/num_gen_batches"])
    assert phases.count("gen") == rounds >= 2
    for prompt in range(4):
        first, second = batch.scores[2 * prompt : 2 * prompt + 2].tolist()
        assert first != second
    assert result["reward/equal_groups_share"] == 0
    assert result["actor/grad_norm"] > 0
