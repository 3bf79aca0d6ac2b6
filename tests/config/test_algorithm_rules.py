import pytest

from verl_memopt.algorithms.records import WITH_STATISTICS, WITHOUT_BASELINE, WITHOUT_GROUPS
from verl_memopt.config.algorithm_rules import ALGORITHM_RULES
from verl_memopt.config.checks import RULES
from verl_memopt.config.values import choices

AR = "actor_rollout_ref"
LIMITS = {
    **{
        f"a group of {name} has two answers": ({"algorithm.adv_estimator": name}, f"{AR}.rollout.n", [2], [1])
        for name in choices()["algorithm.adv_estimator"]
        if name not in (*WITHOUT_BASELINE, *WITHOUT_GROUPS, *WITH_STATISTICS)
    },
    "RLOO does without a baseline": ({"algorithm.adv_estimator": "rloo"}, f"{AR}.rollout.n", [1, 2], []),
    "GRPO does without a baseline": ({"algorithm.adv_estimator": "grpo"}, f"{AR}.rollout.n", [1, 2], []),
    "REINFORCE++ compares no group": ({"algorithm.adv_estimator": "reinforce_plus_plus"}, f"{AR}.rollout.n", [1, 2], []),
    "one round a step answers its prompts": ({"data.train_batch_size": 256}, "data.gen_batch_size", [256], [255, 512]),
    "groups that are filtered are sampled": (
        {"algorithm.filter_groups.enable": True}, f"{AR}.rollout.do_sample", [True], [False],
    ),
    "groups are filtered before the KL": (
        {"algorithm.filter_groups.enable": True, "algorithm.use_kl_in_reward": True}, "algorithm.filter_groups.metric",
        ["score", "acc"], ["seq_final_reward"],
    ),
    "bypass mode reads every token": (
        {"algorithm.mask_truncated_responses": True}, "algorithm.rollout_correction.bypass_mode", [False], [True],
    ),
    "responses that never end are not all masked": (
        {f"{AR}.rollout.ignore_eos": True}, "algorithm.mask_truncated_responses", [False], [True],
    ),
    "a covariance lies between the bounds": (
        {f"{AR}.actor.policy_loss.loss_mode": "clip_cov"}, f"{AR}.actor.policy_loss.clip_cov_lb", [4.9, -1.0], [5.0, 6.0],
    ),
}  # fmt: skip
"""What must hold -> the other keys, the key that is tried, values that pass and values that are refused."""


@pytest.mark.parametrize("what", LIMITS)
def test_a_value_passes_or_is_refused_by_name(assert_limit, what):
    assert_limit(*LIMITS[what])


def test_the_rules_are_asked_when_settings_are_loaded():
    assert set(ALGORITHM_RULES) <= set(RULES)


def test_a_rule_about_groups_that_are_filtered_waits_for_the_filter(settled):
    assert settled({f"{AR}.rollout.do_sample": False})
    assert settled({"algorithm.filter_groups.metric": "seq_final_reward", "algorithm.use_kl_in_reward": True})
    assert settled({"algorithm.filter_groups.enable": True, "data.gen_batch_size": 3})
