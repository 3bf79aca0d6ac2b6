"""Memory profiles: ordinary keys between a recipe and the command line, and nothing else."""

import logging
from functools import cache

import pytest
import yaml

from verl_memopt.config.keys import flatten, leaf_types, value_at
from verl_memopt.config.loader import BUDGETS, PACKAGED, load_settings, with_room_for_samples
from verl_memopt.config.schema import Settings
from verl_memopt.errors import ConfigError
from verl_memopt.memory import profiles
from verl_memopt.memory.shared_weights import why_not

PROFILES = ("none", *profiles.PROFILES)
LEAST = ["data.train_files=train.jsonl", "data.val_files=null", "actor_rollout_ref.model.path=folder"]
ROLLOUT = "actor_rollout_ref.rollout"
TWO = "trainer.n_gpus_per_node=2"
"""Devices on which a profile sets its keys as its file has them: on one it holds one copy of the weights."""


@cache
def plain(trainer):
    return load_settings(trainer, [*LEAST, TWO, f"{ROLLOUT}.name=vllm", "actor_rollout_ref.actor.use_dynamic_bsz=true"])


def keys_of(profile):
    return flatten(yaml.safe_load((PACKAGED / "memory" / f"{profile}.yaml").read_text()) or {})


def test_these_are_the_profiles():
    assert {path.stem for path in (PACKAGED / "memory").glob("*.yaml")} == set(PROFILES)


@pytest.mark.parametrize(
    ("profile", "trainer"),
    [
        pytest.param(profile, trainer, marks=[pytest.mark.slow] * ((number + other) % 3 > 0))
        for number, profile in enumerate(PROFILES[1:])
        for other, trainer in enumerate(("rloo_trainer", "grpo_trainer", "ppo_trainer"))
    ],
)
def test_a_profile_sets_its_keys_in_every_trainer_and_no_other(profile, trainer, caplog):
    settings = load_settings(trainer, [*LEAST, TWO, f"{ROLLOUT}.name=vllm", f"memory={profile}"])
    profiled = keys_of(profile)
    assert all(value_at(settings, key) == value for key, value in profiled.items())
    # Keys that follow another are null until it is set; those follow the profile's.
    others = {key for key in leaf_types() if value_at(settings, key) != value_at(plain(trainer), key)} - profiled.keys()
    assert all(value_at(Settings(), key) is None for key in others)
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_key_of_the_users_own_still_earns_a_warning_where_it_has_no_effect(caplog):
    key = "critic.model.fsdp_config.param_offload"
    assert keys_of("constrained")[key] is True
    load_settings("rloo_trainer", [*LEAST, "memory=constrained", "critic.ppo_max_token_len_per_gpu=5000"])
    assert [record.message.split("=")[0] for record in caplog.records if record.levelno >= logging.WARNING] == [
        "critic.ppo_max_token_len_per_gpu"
    ]


FSDP = "actor_rollout_ref.actor.fsdp_config"
QLORA = ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.quantization=nf4"]
SHARED, MOVED, ADAPTERS = (False, True, True), (True, False, False), (False, False, False)
"""param_offload, grad_offload, split_master_weights."""
ONE_COPY = {
    "one device": ([], SHARED),
    "transformers' engine": ([f"{ROLLOUT}.name=hf"], SHARED),
    "transformers' engine beside a critic": ([f"{ROLLOUT}.name=hf", "algorithm.adv_estimator=gae"], SHARED),
    "SGD": (["actor_rollout_ref.actor.optim.optimizer=SGD"], SHARED),
    "two devices": ([TWO], MOVED),
    "adapters": (["actor_rollout_ref.model.lora_rank=4"], ADAPTERS),
    "adapters on two devices": ([TWO, "actor_rollout_ref.model.lora_rank=4"], ADAPTERS),
    "adapters on two devices beside a critic": (
        [TWO, "actor_rollout_ref.model.lora_rank=4", "algorithm.adv_estimator=gae"],
        MOVED,
    ),
    "a quantised base on two devices": ([TWO, *QLORA], ADAPTERS),
    "a quantised base on two devices beside a critic": ([TWO, *QLORA, "algorithm.adv_estimator=gae"], ADAPTERS),
    "adapters beside a critic": (["actor_rollout_ref.model.lora_rank=4", "algorithm.adv_estimator=gae"], MOVED),
    "adapters of transformers' engine": (["actor_rollout_ref.model.lora_rank=4", f"{ROLLOUT}.name=hf"], MOVED),
    "the user's own key": ([f"{FSDP}.param_offload=true"], MOVED),
    "two copies": ([f"{ROLLOUT}.share_weights=false"], MOVED),
    "another optimizer": (["actor_rollout_ref.actor.optim.optimizer=RMSprop", f"{FSDP}.optimizer_offload=false"], MOVED),
    "an engine of another precision": ([f"{ROLLOUT}.dtype=fp16"], MOVED),
}


@pytest.mark.parametrize("case", ONE_COPY)
def test_on_one_device_a_profile_that_moves_the_weights_holds_one_copy_of_them_where_that_can_be(case):
    more, expected = ONE_COPY[case]
    profile = ("constrained", "24g")[list(ONE_COPY).index(case) % 2]
    roles = load_settings("rloo_trainer", [*LEAST, f"memory={profile}", *more]).actor_rollout_ref
    fsdp = roles.actor.fsdp_config
    assert (fsdp.param_offload, fsdp.grad_offload, fsdp.split_master_weights) == expected
    if expected is not MOVED:
        assert why_not(roles, 2 if TWO in more else 1, True) is None


def test_a_critic_beside_one_copy_rests_on_the_host_with_split_masters():
    critic = load_settings("ppo_trainer", [*LEAST, "memory=24g"]).critic.model.fsdp_config
    assert (critic.param_offload, critic.grad_offload, critic.split_master_weights) == (True, True, True)


REFERENCE = "actor_rollout_ref.ref.fsdp_config.param_offload"
KL = "actor_rollout_ref.actor.use_kl_loss=true"
STREAMED = {
    "one device": ([KL], "stream"),
    "no reference": ([], True),
    "two devices": ([KL, TWO], True),
    "adapters": ([KL, "actor_rollout_ref.model.lora_rank=4"], True),
    "the user's own key": ([KL, f"{REFERENCE}=true"], True),
    "a mapped file": ([KL, "actor_rollout_ref.model.load_mode=mmap"], True),
    "a reference that follows the policy": ([KL, "actor_rollout_ref.ref.sync_every_steps=1"], True),
}


@pytest.mark.parametrize("case", STREAMED)
def test_on_one_device_a_profile_that_moves_the_reference_streams_it_where_that_can_be(case, caplog):
    more, expected = STREAMED[case]
    profile = ("constrained", "balanced")[list(STREAMED).index(case) % 2]
    assert value_at(load_settings("rloo_trainer", [*LEAST, f"memory={profile}", *more]), REFERENCE) == expected
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_no_profile_is_no_key():
    assert keys_of("none") == {}
    more = [*LEAST, "actor_rollout_ref.actor.use_dynamic_bsz=true"]
    assert load_settings("rloo_trainer", [*more, "memory=none"]) == load_settings("rloo_trainer", more)


def test_the_command_line_wins_over_a_profile_wherever_it_stands_and_deleting_a_key_brings_its_default_back():
    given = [f"{ROLLOUT}.max_num_seqs=5", "memory.device_limit_gb=32", "memory=constrained"]
    for order in (1, -1):
        settings = load_settings("rloo_trainer", [*LEAST, *given[::order]])
        assert (settings.actor_rollout_ref.rollout.max_num_seqs, settings.memory.device_limit_gb) == (5, 32)
    settings = load_settings("rloo_trainer", [*LEAST, "memory=constrained", f"~{ROLLOUT}.max_num_seqs"])
    assert settings.actor_rollout_ref.rollout.max_num_seqs == 256


def test_a_profile_wins_over_a_recipe(tmp_path):
    recipe = (
        "defaults:\n  - rloo_trainer\n  - _self_\nactor_rollout_ref:\n  rollout:\n    gpu_memory_utilization: 0.9\n    n: 16\n"
    )
    (tmp_path / "mine.yaml").write_text(recipe)
    rollout = load_settings("mine", [*LEAST, "memory=constrained"], str(tmp_path)).actor_rollout_ref.rollout
    assert (rollout.gpu_memory_utilization, rollout.n) == (0.5, 16)


def test_a_profile_says_which_keys_it_set_and_which_the_command_line_set(caplog):
    with caplog.at_level(logging.INFO):
        load_settings("rloo_trainer", [*LEAST, "memory=constrained", f"{ROLLOUT}.max_num_seqs=5"])
    said = "\n".join(caplog.messages)
    assert "memory=constrained sets actor_rollout_ref.model.enable_gradient_checkpointing=true, " in said
    assert f"memory=constrained: the command line says {ROLLOUT}.max_num_seqs=5 (profile: 64)" in said
    assert all(key in said for key in keys_of("constrained"))


ACTOR, LOG_PROBS, CRITIC = BUDGETS
LONG = {"data.max_prompt_length": 2048, "data.max_response_length": 4096}


def test_budgets_of_a_preset_become_the_longest_sample_and_others_stay(caplog):
    budgets = {ACTOR: 4096, LOG_PROBS: 8192, CRITIC: 512}
    with caplog.at_level(logging.WARNING):
        values = with_room_for_samples({**LONG, **budgets}, {ACTOR, LOG_PROBS, CRITIC, "data.seed"})
    assert values == {**LONG, ACTOR: 6144, LOG_PROBS: 8192, CRITIC: 6144}
    assert "budget of 512 tokens is raised to 6144" in caplog.text
    assert with_room_for_samples({**LONG, **budgets}, {CRITIC}) == {**LONG, **budgets, CRITIC: 6144}
    assert with_room_for_samples({**LONG, **budgets}, frozenset()) == {**LONG, **budgets}


def test_budgets_of_a_critic_alone_of_lengths_that_are_no_numbers_and_of_default_lengths(caplog):
    with_room_for_samples({**LONG, CRITIC: 512}, {CRITIC})
    assert caplog.messages == [], "a profile sets it in runs without a critic too"
    values = {"data.max_prompt_length": "long", ACTOR: 8}
    assert with_room_for_samples(values, {ACTOR}) == values
    assert with_room_for_samples({ACTOR: 1000}, {ACTOR}) == {ACTOR: 1024}


def test_a_profile_serves_long_samples_and_a_small_budget_of_the_user_is_refused():
    files = ["data.train_files=train.jsonl", "data.val_files=null", "actor_rollout_ref.model.path=folder", "memory=12g"]
    lengths = [f"{key}={value}" for key, value in LONG.items()]
    actor = load_settings("rloo_trainer", [*files, *lengths]).actor_rollout_ref.actor
    assert actor.ppo_max_token_len_per_gpu == 6144
    with pytest.raises(ConfigError, match=f"{ACTOR}=4096: a sample may have 6144 tokens"):
        load_settings("rloo_trainer", [*files, *lengths, f"{ACTOR}=4096"])
