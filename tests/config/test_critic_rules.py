import pytest

from verl_memopt.config.algorithm_rules import WITHOUT_CRITIC
from verl_memopt.config.keys import leaf_types

GAE = {"algorithm.adv_estimator": "gae", "trainer.total_training_steps": 10}
FSDP, POOL, PER_NODE = "critic.model.fsdp_config", "critic.enable_resource_pool", "critic.n_gpus_per_node"
CASES = {
    "a critic that is switched off": ({"critic.enable": False}, {"critic.enable": True}),
    "a mini-batch that does not divide the step": ({"critic.ppo_mini_batch_size": 100}, {"critic.ppo_mini_batch_size": 128}),
    "shards over devices that they do not divide": (
        {f"{FSDP}.fsdp_size": 3, "trainer.n_gpus_per_node": 4}, {f"{FSDP}.fsdp_size": 2},
    ),
    "a pool without devices": ({POOL: True, PER_NODE: 0}, {PER_NODE: 2}),
    "a pool beside a local group": ({POOL: True, "trainer.worker_group": "local"}, {"trainer.worker_group": "ray"}),
    "shards over the devices of the pool": ({f"{FSDP}.fsdp_size": 2, POOL: True, PER_NODE: 3}, {PER_NODE: 4}),
    "split masters over the pool's devices": ({f"{FSDP}.split_master_weights": True, POOL: True, PER_NODE: 2}, {PER_NODE: 1}),
    "another number of checkpoints than the policy's": (
        {"trainer.max_critic_ckpt_to_keep": 3}, {"trainer.max_actor_ckpt_to_keep": 3},
    ),
    "a warm-up longer than the run": ({"trainer.critic_warmup": 11}, {"trainer.critic_warmup": 10}),
    "an optimizer in backward that accumulates": (
        {"critic.optim.in_backward": True, "critic.use_dynamic_bsz": False, "critic.ppo_micro_batch_size_per_gpu": 1},
        {"critic.use_dynamic_bsz": True, "critic.optim.clip_grad": None},
    ),
    "two kinds of offload": (
        {"critic.fsdp.offload_policy": True, "critic.fsdp.param_offload": True}, {"critic.fsdp.offload_policy": False},
    ),
    "a budget below the longest sample": ({"critic.forward_max_token_len_per_gpu": 1000}, {"data.max_prompt_length": 400}),
}  # fmt: skip
"""What a run with a critic refuses -> settings that are wrong, and those of them that make it right."""


@pytest.mark.parametrize("name", CASES)
def test_a_run_with_a_critic_refuses(complaint, settled, name):
    wrong, right = CASES[name]
    assert f"{next(iter(wrong)).replace('critic.fsdp.', f'{FSDP}.')}=" in complaint(GAE | wrong)
    settled(GAE | wrong | right)


@pytest.mark.parametrize("name", [name for name in CASES if "switched off" not in name])
def test_without_a_critic_nothing_is_refused_and_each_key_is_warned_of(settled, caplog, name):
    wrong, _ = CASES[name]
    settled({"algorithm.adv_estimator": "grpo", "trainer.total_training_steps": 10, **wrong})
    critics = [key for key in wrong if key.startswith("critic.") or key in WITHOUT_CRITIC]
    assert len([text for text in caplog.messages if "has no effect here" in text]) == len(critics)


def test_switching_the_critic_off_is_what_other_estimators_do_anyway(settled, caplog):
    settled({"algorithm.adv_estimator": "grpo", "critic.enable": False})
    assert caplog.messages == []
    settled({"algorithm.adv_estimator": "grpo", "critic.enable": True})
    (warning,) = caplog.messages
    assert warning.startswith("critic.enable=true has no effect here: algorithm.adv_estimator is not gae")


def test_every_key_of_the_critic_is_known_to_have_no_effect_without_one():
    assert {key for key in leaf_types() if key.startswith("critic.")} <= WITHOUT_CRITIC.keys()
    assert WITHOUT_CRITIC.keys() <= set(leaf_types())


def test_the_optimal_token_baseline_builds_no_critic_and_says_so(settled, caplog):
    sums = "actor_rollout_ref.actor.calculate_sum_pi_squared"
    settled({"algorithm.adv_estimator": "optimal_token_baseline", sums: True, "critic.enable": True, "critic.optim.lr": 1e-4})
    assert len(caplog.messages) == 2
    assert all("is not gae, the one estimator that reads the values of a critic" in text for text in caplog.messages)
