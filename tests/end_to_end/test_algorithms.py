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


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """A reward with many values, whose ``acc`` says whether the answer is right."""
    path = tmp_path_factory.mktemp("graded") / "reward.py"
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    right = solution_str.strip() == str(ground_truth)\n"
        "    return {'score': right + sum(map(ord, solution_str)) % 97 / 96, 'acc': right}\n"
    )
    return f"custom_reward_function.path={path}"


@pytest.mark.parametrize(("estimator", "loss", "more"), WAYS)
def test_two_steps_train_with(toy, tmp_path, graded, estimator, loss, more):
    chosen = [f"algorithm.adv_estimator={estimator}", f"{ACTOR}.policy_loss.loss_mode={loss}", graded]
    chosen += ["actor_rollout_ref.rollout.temperature=1.5"]
    chosen += ["algorithm.gdpo_reward_keys=[score,acc]"] if estimator == "gdpo" else []
    rows = steps_here(toy, tmp_path, *SHORT, *chosen, *(f"{ACTOR}.{setting}" for setting in more))
    for step in (1, 2):
        assert math.isfinite(rows[step]["actor/loss"])
        assert rows[step]["actor/grad_norm"] > 0
        assert rows[step]["actor/skipped_updates"] == 0
    assert ("actor/ppo_kl_abs" in rows[1]) == (loss == "kl_cov")
    if loss == "clip_cov":
        assert rows[1]["actor/pg_clipfrac"] == pytest.approx(0.1, abs=0.05)


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
def test_a_users_own_functions_train_as_the_packages_do(toy, tmp_path, graded, prompts_per_update):
    (tmp_path / "mine.py").write_text(MINE)
    sections = {
        "algorithm.custom_estimator": "algorithm.adv_estimator",
        f"{ACTOR}.policy_loss.custom": f"{ACTOR}.policy_loss.loss_mode",
    }
    own = [word for section, choice in sections.items() for word in (f"{choice}=custom", f"{section}.path={tmp_path}/mine.py")]
    same = ["algorithm.adv_estimator=rloo", f"{ACTOR}.policy_loss.loss_mode=vanilla", f"{ACTOR}.use_kl_loss=true"]
    same += [f"{ACTOR}.ppo_mini_batch_size={prompts_per_update}", "data.seed=3"]
    same += [graded, "actor_rollout_ref.rollout.temperature=1.5"]
    same += ["actor_rollout_ref.model.logprob_chunk_tokens=5"]
    rows = [steps_here(toy, tmp_path / name, *SHORT, *same, *more) for name, more in (("own", own), ("package", []))]
    for step in (1, 2):
        assert rows[0][step]["actor/grad_norm"] > 0
        for name in ("actor/pg_loss", "actor/grad_norm", "critic/advantages/max", "critic/score/mean", "actor/kl_loss"):
            assert rows[0][step][name] == pytest.approx(rows[1][step][name], rel=1e-4, abs=1e-6), (step, name)
