"""The names of the published RLT recipes: what each is read as, and where they are read at all."""

import logging

import pytest

from verl_memopt.config.keys import leaf_types, value_at
from verl_memopt.config.loader import load_settings, settings_from_mapping
from verl_memopt.config.trl_names import ESTIMATORS, KeySources, Table
from verl_memopt.errors import ConfigError
from verl_memopt.recipes.rlt.rules import BATCH, OWN, PER_FORWARD, RLT_NO_EQUAL, RLT_SPELLINGS

AR = "actor_rollout_ref"
LEAST = {
    "data.train_files": "train.jsonl",
    "data.val_files": None,
    "algorithm.adv_estimator": "grpo",
    f"{AR}.model.path": "teacher",
    f"{AR}.actor.use_dynamic_bsz": True,
    f"{AR}.actor.use_kl_loss": True,
    f"{AR}.rollout.name": "vllm",
    f"{AR}.rollout.n": 4,
    "reward_model.enable": True,
    "reward_model.reward_manager": "rlt",
}
RECIPE = "recipe/rlt/config"


def settings(more):
    """Return settings of a run in which the user wrote ``more`` and a recipe the rest."""
    return settings_from_mapping(LEAST | more, written=KeySources(more.keys()))


READ_AS = [
    ({"train_batch_size": 32}, {"data.train_batch_size": 8, f"{AR}.actor.ppo_mini_batch_size": 8}),
    ({"train_batch_size": 32, "num_generations": 8}, {"data.train_batch_size": 4, f"{AR}.rollout.n": 8}),
    ({"student_model": "student"}, {"reward_model.model.path": "student"}),
    ({"student_model": None}, {"reward_model.model.path": None}),
    ({"offload_untrained_models": True}, {f"{AR}.ref.fsdp_config.param_offload": True}),
    ({"offload_untrained_models": True}, {"reward_model.model.fsdp_config.param_offload": True}),
    ({"enable_prefix_caching": False}, {f"{AR}.rollout.enable_prefix_caching": False}),
    ({"enforce_eager": True}, {f"{AR}.rollout.enforce_eager": True}),
    ({"vllm_max_model_len": 3000}, {f"{AR}.rollout.max_model_len": 3000}),
    ({"vllm_max_model_len": None}, {f"{AR}.rollout.max_model_len": 1024}),
    ({"vllm_sleep_level": 2}, {f"{AR}.rollout.free_cache_engine": True}),
    ({"vllm_sleep_level": 0}, {f"{AR}.rollout.free_cache_engine": False}),
    ({"use_ray": False}, {"trainer.worker_group": "local"}),
    ({"use_ray": True}, {"trainer.worker_group": "ray"}),
    ({"use_reference_teacher_model": True}, {"reward_model.rlt.kl_teacher": "reference"}),
    ({"answer_log_prob_coeff": [2.0, 0.5]}, {"reward_model.rlt.answer_log_prob_coeff": [2.0, 0.5]}),
    ({"kl_penalty_reward_coeff": [1.0, 0.5]}, {"reward_model.rlt.kl_penalty_reward_coeff": [1.0, 0.5]}),
    ({"clip_kl": 7.0}, {"reward_model.rlt.clip_kl": 7.0}),
    ({"use_schulman_kl_estimation": True}, {"reward_model.rlt.use_schulman_kl_estimation": True}),
    ({"not_matched_penalty": -2.0}, {"reward_model.rlt.not_matched_penalty": -2.0}),
    ({"activate_debugging_logs": True}, {"debug.mode": "memory"}),
    ({"activate_debugging_logs": False}, {"debug.mode": "off"}),
    ({"save_completions_probability": 0.1}, {"trainer.rollout_data_dir": "checkpoints/verl_examples/gsm8k/rollouts"}),
    ({"save_completions_probability": 0}, {"trainer.rollout_data_dir": None}),
]


@pytest.mark.parametrize(("names", "ours"), READ_AS, ids=lambda value: ",".join(value))
def test_a_name_is_read_as_our_key(names, ours, caplog) -> None:
    loaded = settings(names)
    assert {key: value_at(loaded, key) for key in ours} == ours
    assert all(any(f"{name}=" in message and "spelling, read as" in message for message in caplog.messages) for name in names)


def test_every_name_has_a_case_above_and_sets_keys_that_exist() -> None:
    copied = {row.names[0] for row in RLT_SPELLINGS if row.keys[0] == f"reward_model.rlt.{row.names[0]}"}
    tried = {name for names, _ in READ_AS for name in names}
    assert {name for row in RLT_SPELLINGS for name in row.names} <= tried | copied
    assert {key for row in RLT_SPELLINGS for key in row.keys} <= set(leaf_types())
    assert {f"reward_model.rlt.{name}" for name in (*OWN, *copied)} == {
        key for key in leaf_types() if key.startswith("reward_model.rlt.")
    }


def test_no_name_is_one_of_trls_with_another_meaning() -> None:
    names = {name for row in RLT_SPELLINGS for name in row.names} | RLT_NO_EQUAL.keys()
    assert names.isdisjoint(Table.of({}).names)
    assert all(row.estimators == ESTIMATORS for row in RLT_SPELLINGS)


def test_without_a_student_the_names_are_unknown_keys() -> None:
    """A batch that counts responses must not be read where the user may mean prompts."""
    with pytest.raises(ConfigError, match=r"train_batch_size: no such key\. Did you mean data\.train_batch_size"):
        settings({"reward_model.reward_manager": "naive", "reward_model.model.path": "judge", "train_batch_size": 32})


@pytest.mark.parametrize("name", PER_FORWARD)
def test_rows_per_forward_say_nothing_beside_the_batch(name, caplog) -> None:
    loaded = settings({BATCH: 32, name: 1})
    assert loaded.data.train_batch_size == 8
    assert any(message.startswith(f"{name}=1 does nothing here: forwards are cut by tokens") for message in caplog.messages)


def test_responses_are_counted_and_must_divide_into_groups() -> None:
    assert settings({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}).data.train_batch_size == 3
    with pytest.raises(ConfigError, match=r"train_batch_size=30: 30 responses do not divide into groups of 4"):
        settings({"train_batch_size": 30})


def test_rounds_of_generation_do_nothing_and_a_server_is_refused(caplog) -> None:
    settings({"generation_aggregation_steps": 8, "use_vllm_server": False})
    assert any("generation_aggregation_steps=8 does nothing here" in message for message in caplog.messages)
    with pytest.raises(ConfigError, match=f"use_vllm_server=true: .*{AR}.rollout.name=vllm"):
        settings({"use_vllm_server": True})


def test_two_spellings_on_one_command_line_are_refused_and_a_recipes_value_gives_way() -> None:
    with pytest.raises(ConfigError, match=r"student_model=a, reward_model.model.path=b: two spellings of one setting"):
        load_settings("teacher_rlt_mono", ["student_model=a", "reward_model.model.path=b"], RECIPE)
    loaded = load_settings("teacher_rlt_mono", ["student_model=a", "train_batch_size=64", "max_steps=9"], RECIPE)
    assert loaded.reward_model.model.path == "a"
    assert (loaded.data.train_batch_size, loaded.trainer.total_training_steps) == (8, 9)


def test_the_published_values_leave_the_recipe_as_it_is() -> None:
    """The published names with the published values mean what the recipe's files set."""
    published = [
        "train_batch_size=32", "num_generations=8", "max_completion_length=4096", "vllm_gpu_memory_utilization=0.7",
        "enable_prefix_caching=true", "offload_untrained_models=true", "beta=0.04", "temperature=0.7", "learning_rate=1e-6",
        "max_steps=125", "answer_log_prob_coeff=[1,0.01]", "kl_penalty_reward_coeff=[3,0.03]", "use_vllm=true",
        "per_device_train_batch_size=1", "generation_aggregation_steps=8",
    ]  # fmt: skip
    assert load_settings("teacher_rlt_mono", published, RECIPE) == load_settings("teacher_rlt_mono", [], RECIPE)
    many = [
        "train_batch_size=1024", "num_generations=64", "max_completion_length=16384", "max_prompt_length=16384",
        "vllm_gpu_memory_utilization=0.9", "enable_prefix_caching=false", "enforce_eager=true", "save_steps=25", "max_steps=125",
    ]  # fmt: skip
    assert load_settings("teacher_rlt_multi", many, RECIPE) == load_settings("teacher_rlt_multi", [], RECIPE)


def test_a_notice_says_whose_spelling_it_is(caplog) -> None:
    with caplog.at_level(logging.WARNING):
        settings({"enforce_eager": True, "num_generations": 4})
    assert [message.split(",")[0].split(" is ")[1] for message in caplog.messages if "spelling" in message] == [
        "RLT's spelling",
        "TRL's spelling",
    ]
