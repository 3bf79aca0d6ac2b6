import pytest

from verl_memopt.config.keys import leaf_types, leaf_values, value_at
from verl_memopt.config.schema import Settings
from verl_memopt.config.values import DERIVED, LINKS, with_links

AR = "actor_rollout_ref"
OTHER = {
    "data.train_batch_size": 512,
    f"{AR}.actor.clip_ratio": 0.3,
    "data.max_response_length": 99,
    f"{AR}.actor.checkpoint.save_contents": ["model"],
    f"{AR}.actor.fsdp_config.model_dtype": "bfloat16",
    f"{AR}.model.path": "elsewhere",
    f"{AR}.actor.ppo_micro_batch_size_per_gpu": 5,
    f"{AR}.actor.use_dynamic_bsz": True,
    f"{AR}.actor.adaptive_token_budget": True,
    f"{AR}.actor.ppo_max_token_len_per_gpu": 5555,
    f"{AR}.actor.use_torch_compile": False,
    "data.max_prompt_length": 77,
    "data.seed": 3,
    "trainer.rollout_data_dir": "dump",
    f"{AR}.model.tokenizer_path": "tokenizer",
    f"{AR}.model.trust_remote_code": True,
    f"{AR}.model.external_lib": "json",
    f"{AR}.model.attn_implementation": "eager",
    f"{AR}.actor.ppo_mini_batch_size": 128,
    f"{AR}.actor.fsdp_config.ulysses_sequence_parallel_size": 1,
    f"{AR}.actor.ppo_epochs": 3,
    f"{AR}.actor.shuffle": True,
    f"{AR}.actor.loss_agg_mode": "seq-mean-token-sum",
    f"{AR}.actor.loss_scale_factor": 44,
    "critic.ppo_micro_batch_size_per_gpu": 4,
    "critic.ppo_max_token_len_per_gpu": 9999,
    "critic.use_dynamic_bsz": True,
    "critic.adaptive_token_budget": True,
    f"{AR}.rollout.log_prob_micro_batch_size_per_gpu": 9,
    "critic.forward_max_token_len_per_gpu": 7070,
    "critic.model.fsdp_config.model_dtype": "bfloat16",
    "critic.checkpoint.save_contents": ["model", "extra"],
    "trainer.max_actor_ckpt_to_keep": 5,
}
"""Target -> a value that is not its default."""
OWN = {
    "data.gen_batch_size": 768,
    f"{AR}.actor.clip_ratio_low": 0.1,
    f"{AR}.actor.clip_ratio_high": 0.4,
    f"{AR}.actor.loss_scale_factor": 7,
    f"{AR}.actor.checkpoint.load_contents": ["extra"],
    f"{AR}.actor.optim.state_dtype": "int8",
    f"{AR}.ref.model.path": "reference",
    f"{AR}.ref.log_prob_micro_batch_size_per_gpu": 6,
    f"{AR}.ref.log_prob_use_dynamic_bsz": False,
    f"{AR}.ref.log_prob_adaptive_token_budget": False,
    f"{AR}.ref.log_prob_max_token_len_per_gpu": 6666,
    f"{AR}.ref.use_torch_compile": True,
    f"{AR}.ref.fsdp_config.ulysses_sequence_parallel_size": 2,
    f"{AR}.rollout.log_prob_micro_batch_size_per_gpu": 7,
    f"{AR}.rollout.log_prob_use_dynamic_bsz": False,
    f"{AR}.rollout.log_prob_adaptive_token_budget": False,
    f"{AR}.rollout.log_prob_max_token_len_per_gpu": 7777,
    f"{AR}.rollout.prompt_length": 600,
    f"{AR}.rollout.response_length": 9,
    f"{AR}.rollout.seed": 0,
    f"{AR}.rollout.skip_dump_dir": "other_dump",
    "reward_model.reward_kwargs.max_resp_len": 88,
    "reward_model.model.external_lib": "pathlib",
    "reward_model.micro_batch_size_per_gpu": 8,
    "reward_model.use_dynamic_bsz": False,
    "reward_model.adaptive_token_budget": False,
    "reward_model.forward_max_token_len_per_gpu": 8888,
    "critic.model.path": "critic",
    "critic.model.tokenizer_path": "critics_tokenizer",
    "critic.model.trust_remote_code": False,
    "critic.model.external_lib": "csv",
    "critic.model.attn_implementation": "sdpa",
    "critic.ppo_mini_batch_size": 64,
    "critic.ppo_epochs": 2,
    "critic.shuffle": False,
    "critic.use_dynamic_bsz": False,
    "critic.adaptive_token_budget": False,
    "critic.loss_agg_mode": "token-mean",
    "critic.loss_scale_factor": 55,
    "critic.forward_micro_batch_size_per_gpu": 2,
    "critic.forward_max_token_len_per_gpu": 8888,
    "critic.optim.state_dtype": "int8",
    "critic.checkpoint.load_contents": ["extra"],
    "trainer.max_critic_ckpt_to_keep": 6,
}
"""Follower -> a value of its own."""
MICRO = {f"{AR}.{role}.log_prob_micro_batch_size_per_gpu": 1 for role in ("rollout", "ref")}


@pytest.mark.parametrize("follower", LINKS)
def test_a_follower_takes_the_value_of_its_target_unless_it_is_given_one_of_its_own(settled, follower):
    target = LINKS[follower]
    assert value_at(settled({target: OTHER[target]}), follower) == OTHER[target]
    around = MICRO | {"algorithm.filter_groups.enable": True}
    more = {key: value for key, value in around.items() if key != follower}
    assert value_at(settled(more | {target: OTHER[target], follower: OWN[follower]}), follower) == OWN[follower]


def test_every_follower_may_be_null():
    for key in (*LINKS, *DERIVED):
        assert value_at(Settings(), key) is None
        assert type(None) in leaf_types()[key].__args__


def test_longest_sequence_and_run_folder_are_computed(settled):
    more = {"data.max_prompt_length": 10, f"{AR}.rollout.response_length": 5}
    settings = settled(more | {"trainer.project_name": "p", "trainer.experiment_name": "e"})
    assert settings.actor_rollout_ref.rollout.max_model_len == 15
    assert settings.trainer.default_local_dir == "checkpoints/p/e"
    own = settled({f"{AR}.rollout.max_model_len": 4096, "trainer.default_local_dir": "here"})
    assert (own.actor_rollout_ref.rollout.max_model_len, own.trainer.default_local_dir) == (4096, "here")


@pytest.mark.parametrize(("temperature", "samples"), [(0.0, False), (0.7, True)])
def test_validation_samples_if_it_has_a_temperature_unless_that_is_given(settled, temperature, samples):
    val = f"{AR}.rollout.val_kwargs"
    assert settled({f"{val}.temperature": temperature}).actor_rollout_ref.rollout.val_kwargs.do_sample is samples
    own = settled({f"{val}.temperature": 0.7, f"{val}.do_sample": True}).actor_rollout_ref.rollout.val_kwargs
    assert (own.do_sample, own.temperature) == (True, 0.7)


def test_no_follower_stays_null_but_those_of_null_targets(settled):
    settings = settled({})
    open_targets = {"data.seed", f"{AR}.actor.ppo_micro_batch_size_per_gpu", "critic.ppo_micro_batch_size_per_gpu"}
    open_targets |= {f"{AR}.rollout.log_prob_micro_batch_size_per_gpu"}
    open_targets |= {f"{AR}.model.tokenizer_path", f"{AR}.model.external_lib", "trainer.max_actor_ckpt_to_keep"}
    open_targets |= {"trainer.rollout_data_dir", f"{AR}.actor.fsdp_config.ulysses_sequence_parallel_size"}
    assert {LINKS[key] for key in LINKS if value_at(settings, key) is None} == open_targets
    assert all(value_at(settings, key) is not None for key in DERIVED)


def test_resolving_twice_changes_nothing(settled):
    values = leaf_values(settled({}))
    assert with_links(values) == values


def test_a_list_is_copied_so_that_two_keys_share_no_object(settled):
    checkpoint = settled({}).actor_rollout_ref.actor.checkpoint
    assert checkpoint.load_contents is not checkpoint.save_contents
