import pytest

from verl_memopt.config.keys import leaf_types, leaf_values, value_at
from verl_memopt.config.schema import Settings
from verl_memopt.config.values import DERIVED, LINKS, with_links

AR = "actor_rollout_ref"


def another(key):
    """Return a value that no key has by default; nothing here reads its meaning."""
    return ["another"] if "list" in str(leaf_types()[key]) else 4444


@pytest.mark.parametrize("follower", LINKS)
def test_a_follower_takes_the_value_of_its_target_unless_it_is_given_one_of_its_own(follower):
    target, defaults = LINKS[follower], leaf_values(Settings())
    given = defaults | {target: another(target)}
    assert with_links(given)[follower] == given[target]
    assert with_links(given | {follower: 33})[follower] == 33


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
