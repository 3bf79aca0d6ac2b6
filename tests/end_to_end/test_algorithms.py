"""Every estimator and every loss trains the toy task."""

import math

import pytest

from tests.end_to_end.runs import LOCAL, steps_here

ACTOR = "actor_rollout_ref.actor"
SHORT = [
    *LOCAL, "trainer.total_training_steps=2", "trainer.val_before_train=false", "trainer.test_freq=-1",
    "data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=4",
]  # fmt: skip
WAYS = [
    ("rloo", "gpg", ("loss_agg_mode=token-sum",)),
    ("opo", "cispo", ("ppo_mini_batch_size=8",)),  # one update a step: the log-probs before it come from its own forward
    ("gpg", "gpg", ("ppo_mini_batch_size=8",)),
    ("gdpo", "gspo", ()),
    ("grpo_passk", "geo_mean", ()),
    ("reinforce_plus_plus", "clip_cov", ("policy_loss.clip_cov_lb=-10", "policy_loss.clip_cov_ratio=0.1")),
    ("remax", "sapo", ("tau_neg=2.0",)),
    ("optimal_token_baseline", "vanilla", ("calculate_sum_pi_squared=true",)),
    ("reinforce_plus_plus_baseline", "kl_cov", ("policy_loss.kl_cov_ratio=0.1",)),
]


def graded(folder):
    """Writes a reward with many values, whose ``acc`` says whether the answer is right."""
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    right = solution_str.strip() == str(ground_truth)\n"
        "    return {'score': right + sum(map(ord, solution_str)) % 97 / 96, 'acc': right}\n"
    )
    return folder / "reward.py"


def two_steps(toy, folder, *overrides):
    """Gives the metrics of both steps, each of which has changed the weights."""
    rows = steps_here(toy, folder / "run", *SHORT, *overrides)
    for step in (1, 2):
        assert math.isfinite(rows[step]["actor/loss"])
        assert rows[step]["actor/grad_norm"] > 0
        assert rows[step]["actor/skipped_updates"] == 0
    return rows[1], rows[2]


@pytest.mark.parametrize(("estimator", "loss", "more"), WAYS)
def test_two_steps_train_with(toy, tmp_path, estimator, loss, more):
    chosen = [f"algorithm.adv_estimator={estimator}", f"{ACTOR}.policy_loss.loss_mode={loss}"]
    chosen += [f"custom_reward_function.path={graded(tmp_path)}", "actor_rollout_ref.rollout.temperature=1.5"]
    chosen += ["algorithm.gdpo_reward_keys=[score,acc]"] if estimator == "gdpo" else []
    first, _ = two_steps(toy, tmp_path, *chosen, *(f"{ACTOR}.{setting}" for setting in more))
    assert ("actor/ppo_kl_abs" in first) == (loss == "kl_cov")
    if loss == "clip_cov":
        assert first["actor/pg_clipfrac"] == pytest.approx(0.1, abs=0.05)


MINE = """
import torch

def compute_advantages(token_level_rewards, response_mask, index):
    scores = token_level_rewards.sum(dim=-1)
    others = [scores[(index == index[i]) & (torch.arange(len(index)) != i).numpy()].mean() for i in range(len(index))]
    advantages = (scores - torch.stack(others)).unsqueeze(-1) * response_mask
    return advantages, advantages

def compute_loss(log_prob, old_log_prob, advantages, config):
    ratio = (log_prob - old_log_prob).exp()
    clipped = ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    losses = torch.maximum(-advantages * ratio, -advantages * clipped)
    return torch.where(advantages < 0, torch.minimum(losses, -advantages * config.clip_ratio_c), losses)
"""
"""RLOO's advantages and PPO's loss, as a user would write them."""


# With 8 prompts an update the step is strictly on-policy, and the update's forward gives the old log-probs.
@pytest.mark.parametrize("prompts_per_update", [4, 8])
def test_a_users_own_functions_train_as_the_packages_do(toy, tmp_path, prompts_per_update):
    (tmp_path / "mine.py").write_text(MINE)
    sections = {
        "algorithm.custom_estimator": "algorithm.adv_estimator",
        f"{ACTOR}.policy_loss.custom": f"{ACTOR}.policy_loss.loss_mode",
    }
    own = [word for section, choice in sections.items() for word in (f"{choice}=custom", f"{section}.path={tmp_path}/mine.py")]
    same = ["algorithm.adv_estimator=rloo", f"{ACTOR}.policy_loss.loss_mode=vanilla", f"{ACTOR}.use_kl_loss=true"]
    same += [f"{ACTOR}.ppo_mini_batch_size={prompts_per_update}", "data.seed=3"]
    same += [f"custom_reward_function.path={graded(tmp_path)}", "actor_rollout_ref.rollout.temperature=1.5"]
    same += ["actor_rollout_ref.model.logprob_chunk_tokens=5"]
    rows = [steps_here(toy, tmp_path / name, *SHORT, *same, *more) for name, more in (("own", own), ("package", []))]
    for step in (1, 2):
        assert rows[0][step]["actor/grad_norm"] > 0
        for name in ("actor/pg_loss", "actor/grad_norm", "critic/advantages/max", "critic/score/mean", "actor/kl_loss"):
            assert rows[0][step][name] == pytest.approx(rows[1][step][name], rel=1e-4, abs=1e-6), (step, name)


def test_reinforce_plus_plus_trains_with_one_response_to_a_prompt_and_the_kl_at_each_token(toy, tmp_path):
    more = ["actor_rollout_ref.rollout.n=1", "algorithm.gamma=0.9", "algorithm.use_kl_in_reward=true", "data.train_batch_size=32"]
    more += [f"{ACTOR}.ppo_mini_batch_size=16", f"{ACTOR}.policy_loss.loss_mode=vanilla"]
    first, second = two_steps(toy, tmp_path, "algorithm.adv_estimator=reinforce_plus_plus", *more)
    assert first["critic/returns/max"] == pytest.approx(1.0, abs=1e-5)  # the first step: the policy is the reference
    assert first["critic/returns/mean"] != pytest.approx(first["critic/advantages/mean"], abs=1e-3)
    assert second["actor/reward_kl_penalty"] != 0


def test_groups_without_a_signal_are_replaced(toy, tmp_path):
    more = ["algorithm.adv_estimator=grpo", f"{ACTOR}.policy_loss.loss_mode=vanilla", "algorithm.filter_groups.enable=true"]
    more += ["algorithm.filter_groups.metric=acc", "data.gen_batch_size=4", "actor_rollout_ref.rollout.temperature=1.5"]
    more += [f"custom_reward_function.path={graded(tmp_path)}"]
    for row in two_steps(toy, tmp_path, *more):
        assert row["reward/equal_groups_share"] == 0
        assert row["train/num_gen_batches"] >= 2
        assert 0 <= row["reward/filtered_groups_share"] < 1


def test_bypass_mode_leaves_the_pass_for_old_log_probs_out(toy, tmp_path):
    more = ["algorithm.rollout_correction.preset=bypass_pg_is", f"{ACTOR}.policy_loss.loss_mode=vanilla"]
    rows = steps_here(toy, tmp_path, *SHORT, *more, f"{ACTOR}.ppo_mini_batch_size=8")
    for step in (1, 2):
        assert "timing_s/old_log_prob" not in rows[step]
        assert rows[step]["rollout/logprob_diff_mean"] < 1e-4
        assert rows[step]["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=0.05)
