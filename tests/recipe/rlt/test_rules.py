"""What the settings of RLT must hold together, and the names of the published recipes."""

import logging

import pytest

from tests.config.conftest import LEAST
from verl_memopt.config.keys import leaf_types, value_at
from verl_memopt.config.loader import load_settings, settings_from_mapping
from verl_memopt.config.names import KeySources
from verl_memopt.config.spelling import ESTIMATORS
from verl_memopt.config.trl_names import NAMES
from verl_memopt.errors import ConfigError
from verl_memopt.recipes.rlt.rules import BATCH, OWN, PER_FORWARD, RLT_NO_EQUAL, RLT_RULES, RLT_SPELLINGS

AR, MODEL, RLT = "actor_rollout_ref", "reward_model.model", "reward_model.rlt"
STUDENT = {"reward_model.enable": True, "reward_model.reward_manager": "rlt", f"{MODEL}.path": "student"}
KL = {f"{AR}.actor.use_kl_loss": True}
ALIAS = {**STUDENT, **KL, f"{MODEL}.path": None}
SWAP = {**STUDENT, **KL, "reward_model.residency": "swap", f"{AR}.ref.fsdp_config.param_offload": True}


@pytest.mark.parametrize("more", [STUDENT, ALIAS, SWAP, ALIAS | {"reward_model.residency": "alias_ref"}])
def test_a_student_of_its_own_and_the_reference_as_student_are_settings_without_a_warning(settled, caplog, more):
    assert settled(more).reward_model.recipe
    assert caplog.messages == []


def test_a_reward_function_or_a_classifier_is_no_student(settled):
    assert not settled({}).reward_model.recipe
    classifier = {"reward_model.enable": True, f"{MODEL}.path": "judge", "critic.ppo_max_token_len_per_gpu": 4096}
    assert not settled({**classifier, "critic.use_dynamic_bsz": True}).reward_model.recipe


def test_the_student_reads_at_the_temperature_of_the_rollouts(settled, complaint):
    heat, own = f"{AR}.rollout.temperature", f"{RLT}.unbias_student_log_probs_temp"
    for more in ({heat: 0.7, own: 0.7}, {heat: 0.7}, {heat: 0.7, f"{AR}.rollout.do_sample": False, own: 1.0}):
        settled(STUDENT | more | {"algorithm.adv_estimator": "reinforce_plus_plus"})
    assert complaint(STUDENT | {heat: 0.7, own: 0.5}).startswith(f"{own}=0.5, {heat}=0.7: both sides of the KL would")


CASES = [
    (STUDENT | {f"{RLT}.answer_log_prob_coeff": [1.0]}, f"{RLT}.answer_log_prob_coeff=[1.0]", "1 weights for 2 reductions"),
    (STUDENT | {f"{RLT}.kl_penalty_reward_coeff": [1.0] * 3}, f"{RLT}.kl_penalty_reward_coeff", "3 weights for 2 reductions"),
    (STUDENT | {f"{RLT}.reduction_kl_fn": ["mean", "mean"]}, f"{RLT}.reduction_kl_fn", "a reduction appears twice"),
    (STUDENT | {f"{RLT}.reduction_log_prob_fn": ["min", "min"]}, f"{RLT}.reduction_log_prob_fn", "Name it once"),
    (STUDENT | {"reward_model.enable": False}, "reward_model.reward_manager=rlt, reward_model.enable=false", "enable=true"),
    (ALIAS | {"reward_model.residency": "separate"}, f"{MODEL}.path=null, reward_model.residency=separate", "auto"),
    (STUDENT | KL | {"reward_model.residency": "alias_ref"}, f"{MODEL}.path=student, reward_model.residency=alias_ref", "Remove"),
    (ALIAS | {f"{AR}.actor.use_kl_loss": False}, f"{MODEL}.path=null", "without a KL there is no reference"),
    (STUDENT | {f"{RLT}.kl_teacher": "reference"}, f"{RLT}.kl_teacher=reference", "kl_teacher=policy"),
    (ALIAS | {f"{MODEL}.quantization": "int8"}, f"{MODEL}.quantization=int8", f"{AR}.ref.quantization={{int8,nf4}}"),
    (SWAP | {f"{AR}.actor.use_kl_loss": False}, "reward_model.residency=swap", "no reference to take turns with"),
    (SWAP | {f"{AR}.model.lora_rank": 2}, f"reward_model.residency=swap, {AR}.model.lora_rank=2", "residency=separate"),
    (SWAP | {f"{AR}.ref.fsdp_config.param_offload": False}, "reward_model.residency=swap", "param_offload=true"),
    (SWAP | {f"{AR}.ref.fsdp_config.param_offload": "stream"}, "reward_model.residency=swap", "streams has no place"),
    (SWAP | {f"{MODEL}.quantization": "nf4"}, f"reward_model.residency=swap, {MODEL}.quantization=nf4", "residency=separate"),
    (SWAP | {f"{AR}.ref.quantization": "int8"}, f"reward_model.residency=swap, {AR}.ref.quantization=int8", "=none"),
    (STUDENT | {"algorithm.filter_groups.enable": True}, "algorithm.filter_groups.enable=true", "Set algorithm.filter_groups"),
    (STUDENT | {"algorithm.adv_estimator": "remax"}, "algorithm.adv_estimator=remax", "Use grpo or rloo."),
    (STUDENT | {"custom_reward_function.path": "f.py"}, "custom_reward_function.path=f.py", "path=null"),
    (STUDENT | {"data.custom_cls.path": "f.py", "data.custom_cls.name": "A"}, "data.custom_cls.path=f.py", "path=null"),
    (STUDENT | {"data.truncation": "left"}, "data.truncation=left", "filter_overlong_prompts=true"),
    (
        STUDENT | {"algorithm.rollout_correction.bypass_mode": True},
        "algorithm.rollout_correction.bypass_mode=true, reward_model.reward_manager=rlt: the KL of the reward", "",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("more", "address", "text"), CASES)
def test_what_a_run_of_rlt_cannot_have_is_refused(complaint, more, address, text):
    message = complaint(more)
    assert message.startswith(address)
    assert text in message
    assert "\n" not in message


MMAP = {f"{AR}.model.load_mode": "mmap"}
RESTS = STUDENT | {f"{MODEL}.fsdp_config.param_offload": True}


@pytest.mark.parametrize("more", [{}, KL, {f"{AR}.model.lora_rank": 2}, KL | {f"{AR}.ref.fsdp_config.offload_policy": True}])
def test_a_student_that_rests_on_the_host_may_rest_in_its_file(settled, complaint, more):
    assert settled(RESTS | MMAP | more).actor_rollout_ref.model.load_mode == "mmap"
    assert complaint(STUDENT | MMAP | more).startswith(f"{AR}.model.load_mode=mmap")


def test_a_quantised_student_rests_in_no_file(settled, complaint):
    quantised = MMAP | KL | {f"{MODEL}.quantization": "int8", f"{AR}.ref.fsdp_config.param_offload": True}
    message = complaint(RESTS | quantised)
    assert message.startswith(f"{AR}.model.load_mode=mmap, {MODEL}.quantization=int8: ")
    settled(STUDENT | quantised)


def test_rules_of_a_student_say_nothing_of_other_runs(settled):
    more = {"reward_model.residency": "swap", f"{RLT}.kl_teacher": "reference", "data.truncation": "left"}
    settings = settled({**more, "algorithm.filter_groups.enable": True})
    assert (settings.reward_model.residency, settings.algorithm.filter_groups.enable) == ("swap", True)


@pytest.mark.parametrize(
    ("key", "value", "more", "because"),
    [
        (f"{RLT}.max_student_len", 9, {}, "reward_model.reward_manager is not rlt"),
        ("reward_model.residency", "swap", {}, "reward_model.reward_manager is not rlt"),
        ("reward_model.max_length", 9, STUDENT, "reward_model.reward_manager is rlt"),
        (f"{MODEL}.fsdp_config.param_offload", True, ALIAS, "the student uses the reference's own module"),
        (f"{MODEL}.fsdp_config.model_dtype", "bfloat16", SWAP, "reference's own module (reward_model.residency=swap)"),
        (f"{MODEL}.input_tokenizer", None, STUDENT, "reward_model.reward_manager is rlt"),
        ("reward_model.micro_batch_size_per_gpu", 9, STUDENT, "reward_model.reward_manager is rlt"),
        ("reward_model.forward_max_token_len_per_gpu", 9, STUDENT, "reward_model.reward_manager is rlt"),
    ],
)
def test_keys_of_the_other_kind_of_model_are_warned_of(settled, caplog, key, value, more, because):
    settled(more | {key: value})
    (text,) = [text for text in caplog.messages if text.startswith(f"{key}=")]
    assert because in text


def test_every_rule_has_a_case():
    assert len(RLT_RULES) == len(CASES) + 1


# The names of the published RLT recipes: what each is read as, and where they are read at all.


A_RUN = LEAST | {
    "algorithm.adv_estimator": "grpo", f"{AR}.actor.use_kl_loss": True, f"{AR}.rollout.name": "vllm",
    "reward_model.enable": True, "reward_model.reward_manager": "rlt",
}  # fmt: skip
RECIPE = "recipe/rlt/config"


def settings(more):
    """Return settings of a run in which the user wrote ``more`` and a recipe the rest."""
    return settings_from_mapping(A_RUN | more, written=KeySources(more.keys()))


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
    ({"kl_penalty_reward_coeff": [1.0, 0.5]}, {"reward_model.rlt.kl_penalty_reward_coeff": [1.0, 0.5]}),
    ({"activate_debugging_logs": True}, {"debug.mode": "memory"}),
    ({"activate_debugging_logs": False}, {"debug.mode": "off"}),
    ({"save_completions_probability": 0.1}, {"trainer.rollout_data_dir": "checkpoints/verl_examples/gsm8k/rollouts"}),
    ({"save_completions_probability": 0}, {"trainer.rollout_data_dir": None}),
]


@pytest.mark.parametrize(("names", "ours"), READ_AS, ids=lambda value: ",".join(value))
def test_a_name_is_read_as_our_key(names, ours, caplog) -> None:
    caplog.set_level(logging.INFO)
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
    assert names.isdisjoint(NAMES)
    assert all(row.estimators == ESTIMATORS for row in RLT_SPELLINGS)


def test_without_a_student_the_batch_counts_prompts_and_other_names_are_unknown_keys() -> None:
    judge = {"reward_model.reward_manager": "naive", "reward_model.model.path": "judge", "ppo_mini_batch_size": 32}
    assert settings({**judge, "train_batch_size": 32}).data.train_batch_size == 32
    with pytest.raises(ConfigError, match=r"student_model: no such key"):
        settings({**judge, "student_model": "a"})


@pytest.mark.parametrize("name", PER_FORWARD)
def test_rows_per_forward_say_nothing_beside_the_batch(name, caplog) -> None:
    caplog.set_level(logging.INFO)
    loaded = settings({BATCH: 32, name: 1})
    assert loaded.data.train_batch_size == 8
    assert any(f"{name}=1 does nothing here (forwards are cut by tokens" in message for message in caplog.messages)


def test_responses_are_counted_and_must_divide_into_groups() -> None:
    assert settings({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}).data.train_batch_size == 3
    with pytest.raises(ConfigError, match=r"train_batch_size=30: 30 responses do not divide into groups of 4"):
        settings({"train_batch_size": 30})


def test_rounds_of_generation_do_nothing_and_a_server_is_refused(caplog) -> None:
    caplog.set_level(logging.INFO)
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
