import pytest

from tests.config.conftest import LEAST
from verl_memopt.algorithms.rollout_correction import update_gives_old_log_probs
from verl_memopt.config.loader import settings_from_mapping

AR = "actor_rollout_ref"


@pytest.mark.parametrize(
    ("more", "left_out"),
    [
        ({}, True),
        ({f"{AR}.actor.old_log_prob_pass": "always"}, False),
        ({f"{AR}.actor.ppo_epochs": 2}, False),
        ({f"{AR}.actor.ppo_mini_batch_size": 1}, False),
        ({"algorithm.use_kl_in_reward": True}, False),
        ({f"{AR}.actor.calculate_entropy": True}, False),
        ({f"{AR}.actor.use_kl_loss": True}, True),
        ({f"{AR}.actor.policy_loss.loss_mode": "cispo"}, True),
        ({f"{AR}.actor.policy_loss.loss_mode": "clip_cov"}, False),
        ({f"{AR}.actor.policy_loss.loss_mode": "kl_cov"}, False),
        ({"algorithm.rollout_correction.rollout_is": "token"}, False),
        ({"algorithm.rollout_correction.preset": "decoupled_k3_rs"}, False),
        ({"algorithm.rollout_correction.preset": "bypass_pg_is"}, True),
        ({"algorithm.use_pf_ppo": True}, False),
        ({"algorithm.adv_estimator": "remax"}, True),
        ({"algorithm.adv_estimator": "distill", "teacher.model.path": "big"}, True),
        ({"algorithm.adv_estimator": "distill", "teacher.model.path": "big", "distill.divergence": "sampled"}, False),
        ({"algorithm.adv_estimator": "optimal_token_baseline", f"{AR}.actor.calculate_sum_pi_squared": True}, False),
    ],
)
def test_the_old_pass_is_left_out_where_one_update_follows_a_rollout_and_nothing_else_reads_it(more, left_out):
    settings = settings_from_mapping(LEAST | {"data.train_batch_size": 4, f"{AR}.actor.ppo_mini_batch_size": 4} | more)
    assert update_gives_old_log_probs(settings) is left_out
