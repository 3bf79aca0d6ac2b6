"""TRL's names where a user writes them: each becomes our key with one notice, and no two spellings meet."""

import logging
from functools import cache
from pathlib import Path

import pytest
import yaml

from verl_memopt.config.keys import flatten, leaf_types, shown, value_at
from verl_memopt.config.loader import compose_mapping, load_settings, settings_from_mapping
from verl_memopt.config.names import KeySources, read_names
from verl_memopt.config.spelling import ESTIMATORS
from verl_memopt.config.trl_names import NAMES, NO_EQUAL, ONE_SETTING, SPELLINGS
from verl_memopt.errors import ConfigError

AR = "actor_rollout_ref"
ROLLOUT, ACTOR, OPTIM = f"{AR}.rollout", f"{AR}.actor", f"{AR}.actor.optim"
N, PROMPTS, MINI = f"{ROLLOUT}.n", "data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size"
STEPS = "trainer.total_training_steps"
RECIPES = str(Path(__file__).parents[2] / "recipe" / "rloo")
RECIPE = """
defaults: [{entry}, _self_]
data: {{train_files: train.jsonl, val_files: null, train_batch_size: 64}}
actor_rollout_ref:
  model: {{path: folder}}
  actor: {{ppo_mini_batch_size: 16, use_dynamic_bsz: true}}
  rollout: {{name: hf, n: 4}}
trainer: {{total_training_steps: 100}}
"""
"""64 prompts with 4 responses each, and 4 optimizer steps a rollout."""

LOSS, IS = f"{ACTOR}.policy_loss.loss_mode", "algorithm.rollout_correction.rollout_is"
VESPO = ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
MEANINGS = {
    "max_tool_calling_iterations": (3, {f"{AR}.rollout.multi_turn.max_assistant_turns": 4}),
    "num_generations": (8, {N: 8}),
    "rloo_k": (8, {N: 8}),
    "num_generations_eval": (3, {f"{ROLLOUT}.val_kwargs.n": 3}),
    "num_iterations": (3, {f"{ACTOR}.ppo_epochs": 3}),
    "num_ppo_epochs": (3, {f"{ACTOR}.ppo_epochs": 3}),
    "per_device_train_batch_size": (64, {PROMPTS: 16, MINI: 16}),
    "generation_batch_size": (2048, {PROMPTS: 512}),
    "steps_per_generation": (2, {PROMPTS: 64, MINI: 32}),
    "num_mini_batches": (2, {PROMPTS: 64, MINI: 32}),
    "max_steps": (7, {STEPS: 2}),
    "total_episodes": (257, {STEPS: 2}),
    "num_train_epochs": (2.0, {"trainer.total_epochs": 2, STEPS: None}),
    "save_strategy": ("no", {"trainer.save_freq": -1}),
    "eval_strategy": ("no", {"trainer.test_freq": -1}),
    "save_steps": (39, {"trainer.save_freq": 10}),
    "eval_steps": (4, {"trainer.test_freq": 1}),
    "logging_steps": (5, {"trainer.table_every_steps": 5}),
    "max_completion_length": (64, {"data.max_response_length": 64}),
    "response_length": (64, {"data.max_response_length": 64}),
    "max_prompt_length": (64, {"data.max_prompt_length": 64, "data.truncation": "error"}),
    "epsilon": (0.3, {f"{ACTOR}.clip_ratio": 0.3, f"{ACTOR}.clip_ratio_low": 0.3, f"{ACTOR}.clip_ratio_high": 0.3}),
    "cliprange": (0.3, {f"{ACTOR}.clip_ratio": 0.3, f"{ACTOR}.clip_ratio_low": 0.3, f"{ACTOR}.clip_ratio_high": 0.3}),
    "epsilon_high": (0.28, {f"{ACTOR}.clip_ratio_low": 0.2, f"{ACTOR}.clip_ratio_high": 0.28}),
    "beta": (0.05, {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.05, f"{ACTOR}.use_kl_loss": False}),
    "kl_coef": (0.05, {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.05, f"{ACTOR}.use_kl_loss": False}),
    "sync_ref_model": (True, {f"{AR}.ref.sync_every_steps": 128, f"{AR}.ref.sync_mixup_alpha": 0.6}),
    "normalize_advantages": (True, {"algorithm.normalize_advantages": True}),
    "normalize_advantage": (True, {"algorithm.normalize_advantages": True}),
    "normalize_reward": (True, {"algorithm.normalize_advantages": True}),
    "mask_truncated_completions": (True, {"algorithm.mask_truncated_responses": True}),
    "bf16": (False, {f"{ACTOR}.fsdp_config.dtype": "fp32", f"{AR}.ref.fsdp_config.dtype": "fp32"}),
    "use_cpu": (True, {"trainer.device": "cpu"}),
    "adam_epsilon": (1e-6, {f"{ACTOR}.optim.override_optimizer_config": {"eps": 1e-6}}),
    "save_total_limit": (2, {"trainer.max_actor_ckpt_to_keep": 2}),
    "eval_on_start": (False, {"trainer.val_before_train": False}),
    "temperature": (0.7, {f"{ROLLOUT}.temperature": 0.7}),
    "top_p": (0.9, {f"{ROLLOUT}.top_p": 0.9}),
    "top_k": (0, {f"{ROLLOUT}.top_k": -1}),
    "repetition_penalty": (1.1, {f"{ROLLOUT}.repetition_penalty": 1.1}),
    "learning_rate": (3e-6, {f"{OPTIM}.lr": 3e-6}),
    "weight_decay": (0.1, {f"{OPTIM}.weight_decay": 0.1}),
    "adam_beta1": (0.8, {f"{OPTIM}.betas": (0.8, 0.999)}),
    "adam_beta2": (0.95, {f"{OPTIM}.betas": (0.9, 0.95)}),
    "max_grad_norm": (0.5, {f"{OPTIM}.clip_grad": 0.5}),
    "lr_scheduler_type": ("linear", {f"{OPTIM}.lr_scheduler_type": "linear", f"{OPTIM}.lr_schedule_steps": "updates"}),
    "warmup_steps": (3, {f"{OPTIM}.lr_warmup_steps": 3, f"{OPTIM}.lr_schedule_steps": "updates"}),
    "warmup_ratio": (0.1, {f"{OPTIM}.lr_warmup_steps_ratio": 0.1, f"{OPTIM}.lr_schedule_steps": "updates"}),
    "lr_scheduler_kwargs": ({"num_cycles": 2}, {f"{OPTIM}.lr_scheduler_kwargs": {"num_cycles": 2}}),
    "chat_template_kwargs": ({"enable_thinking": False}, {"data.apply_chat_template_kwargs": {"enable_thinking": False}}),
    "trust_remote_code": (True, {f"{AR}.model.trust_remote_code": True}),
    "gradient_checkpointing": (False, {f"{AR}.model.enable_gradient_checkpointing": False}),
    "use_vllm": (True, {f"{ROLLOUT}.name": "vllm"}),
    "vllm_gpu_memory_utilization": (0.3, {f"{ROLLOUT}.gpu_memory_utilization": 0.3}),
    "vllm_tensor_parallel_size": (1, {f"{ROLLOUT}.tensor_model_parallel_size": 1}),
    "vllm_max_model_length": (2048, {f"{ROLLOUT}.max_model_len": 2048}),
    "vllm_enable_sleep_mode": (True, {f"{ROLLOUT}.free_cache_engine": True}),
    "shuffle_dataset": (False, {"data.shuffle": False}),
    "dataset_streaming": (False, {"data.streaming": False}),
    "min_p": (0.1, {f"{ROLLOUT}.min_p": 0.1}),
    "generation_kwargs": (
        {"stop": "x", "stop_token_ids": [3], "top_k": 0, "temperature": 0.5, "max_new_tokens": 9},
        {
            f"{ROLLOUT}.stop": ["x"],
            f"{ROLLOUT}.stop_token_ids": [3],
            f"{ROLLOUT}.top_k": -1,
            f"{ROLLOUT}.temperature": 0.5,
            "data.max_response_length": 9,
        },
    ),
    "seed": (3, {"data.seed": 3}),
    "model_name_or_path": ("other", {f"{AR}.model.path": "other"}),
    "sft_model_path": ("other", {f"{AR}.model.path": "other"}),
    "reward_model_path": ("judge", {"reward_model.enable": True, "reward_model.model.path": "judge"}),
    "model_init_kwargs": (
        {"dtype": "torch.bfloat16", "attn_implementation": "sdpa", "revision": "main", "device_map": "auto"},
        {f"{ACTOR}.fsdp_config.model_dtype": "bfloat16", f"{AR}.model.attn_implementation": "sdpa"},
    ),
    "output_dir": ("out", {"trainer.default_local_dir": "out"}),
    "resume_from_checkpoint": ("old", {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "old"}),
    "reward_clip_range": ([-1.0, 1.0], {"algorithm.reward_clip_range": [-1.0, 1.0]}),
    "run_name": ("mine", {"trainer.experiment_name": "mine"}),
    "exp_name": ("mine", {"trainer.experiment_name": "mine"}),
    "report_to": (["wandb", "trackio"], {"trainer.logger": ["console", "jsonl", "wandb", "trackio"]}),
}
"""Name of TRL -> a value, and the settings that it makes of the recipe below."""
IN_GRPO = {
    "beta": (0.04, {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.04, "algorithm.use_kl_in_reward": False}),
    "scale_rewards": (
        "batch",
        {
            f"algorithm.norm_adv_{name}": value
            for name, value in (("by_std_in_grpo", True), ("std_of", "batch"), ("epsilon", 1e-4))
        },
    ),
    "loss_type": ("dr_grpo", {LOSS: "vanilla", f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm"}),
    "importance_sampling_level": ("sequence", {LOSS: "gspo"}),
    "delta": (4.0, {f"{ACTOR}.clip_ratio_c": 4.0}),
    "sapo_temperature_pos": (1.5, {f"{ACTOR}.tau_pos": 1.5}),
    "sapo_temperature_neg": (1.5, {f"{ACTOR}.tau_neg": 1.5}),
    **{name: (1.5, {f"{ACTOR}.policy_loss.{name}": 1.5}) for name in VESPO},
    "use_bias_correction_kl": (True, {f"{ACTOR}.kl_loss_by_ratio": True}),
    "off_policy_mask_threshold": (0.5, {f"{ACTOR}.off_policy_mask_threshold": 0.5}),
    "top_entropy_quantile": (0.2, {"algorithm.top_entropy_quantile": 0.2}),
    "entropy_coef": (0.1, {f"{ACTOR}.entropy_coeff": 0.1, f"{ACTOR}.entropy_agg_mode": "token-mean"}),
    "use_adaptive_entropy": (
        True,
        {
            f"{ACTOR}.entropy_ctrl.{name}": value
            for name, value in (("target", 0.2), ("delta", 0.005), ("min", 0.0), ("max", 1.0))
        },
    ),
    "cast_lm_head_to_fp32": (False, {}),
    "multi_objective_aggregation": ("sum_then_normalize", {"algorithm.adv_estimator": "grpo"}),
    **dict.fromkeys((f"vllm_importance_sampling_{name}" for name in ("clip_max", "clip_min", "cap")), (2.0, {IS: None})),
    "vllm_importance_sampling_correction": (False, {IS: None}),
    "vllm_importance_sampling_mode": ("token_mask", {IS: None}),  # the engine is hf
}
DIVERGENCE, AGG_MODE = "distill.divergence", f"{ACTOR}.loss_agg_mode"
IN_DISTILL = {
    "beta": (0.3, {DIVERGENCE: "jsd", "distill.beta": 0.3, f"{ACTOR}.use_kl_loss": False}),
    "teacher_model_name_or_path": ("wise", {"teacher.model.path": "wise"}),
    "teacher_model_init_kwargs": (
        {"dtype": "bfloat16", "quantization_config": {"load_in_8bit": True}},
        {"teacher.fsdp_config.model_dtype": "bfloat16", "teacher.quantization": "int8"},
    ),
    "bf16": (False, {f"{ACTOR}.fsdp_config.dtype": "fp32", "teacher.fsdp_config.dtype": "fp32"}),
    "lmbda": (1.0, {}),
    "seq_kd": (False, {}),
    "max_new_tokens": (64, {"data.max_response_length": 64}),
    "max_length": (64, {"data.max_prompt_length": 64}),
    "distillation_is_clip": (None, {}),
    "teacher_model_kind": ("base", {"teacher.weights": "reference", "teacher.model.path": None}),
    "teacher_prompt_template": ("{prompt} {hint}", {"distill.teacher_prompt": "{prompt} {hint}"}),
}
TOLD = {"distill.teacher_prompt": "{prompt} {solution}"}
NEEDS_ANOTHER = {
    "gradient_accumulation_steps", "ref_model_sync_steps", "ref_model_mixup_alpha", "entropy_target", "entropy_coef_delta",
    "entropy_coef_min", "entropy_coef_max", "loss_top_k", "distillation_mode", "distillation_alpha",
    "teacher_update_rate", "teacher_sync_steps",
}  # fmt: skip
"""Names that mean something beside another name alone."""


@cache
def recipe(entry):
    """The keys of the recipe on top of a trainer, and those that it writes itself."""
    own = flatten(yaml.safe_load(RECIPE.format(entry=entry)))
    return flatten(compose_mapping(entry, [])[0]) | {key: value for key, value in own.items() if key != "defaults"}, own.keys()


def load(given, entry="rloo_trainer"):
    """The settings of the recipe with some keys of a command line on top."""
    values, own = recipe(entry)
    return settings_from_mapping(values | given, written=KeySources(given.keys(), own))


plain = cache(lambda: load({}))


def refused(given, **more):
    with pytest.raises(ConfigError) as caught:
        load(given, **more)
    return str(caught.value)


@pytest.fixture
def load_file(tmp_path):
    """Gives what Hydra makes of the recipe with some lines more, and of overrides on top."""

    def settings(*overrides, lines=""):
        (tmp_path / "mine.yaml").write_text(RECIPE.format(entry="rloo_trainer") + lines)
        return load_settings("mine", list(overrides), str(tmp_path))

    return settings


def test_every_name_is_tried():
    known = {name for spelling in SPELLINGS for name in spelling.names}
    assert known == MEANINGS.keys() | IN_GRPO.keys() | IN_DISTILL.keys() | NEEDS_ANOTHER
    assert not known & NO_EQUAL.keys()
    assert not {
        name for name in known | NO_EQUAL.keys() if "." in name or any(key.startswith(f"{name}.") for key in leaf_types())
    }
    assert known | NO_EQUAL.keys() == NAMES


@pytest.mark.parametrize("name", MEANINGS)
def test_a_name_of_trl_wins_over_the_recipe_and_earns_one_notice(caplog, name):
    value, expected = MEANINGS[name]
    caplog.set_level(logging.INFO)
    settings = load({name: value})
    assert {key: value_at(settings, key) for key in expected} == expected
    (record,) = [record for record in caplog.records if "TRL's spelling" in record.message]
    assert record.levelno == logging.INFO
    notice = record.message
    assert f"{name}=" in notice
    keys = {key for spelling in SPELLINGS if name in spelling.names and "rloo" in spelling.estimators for key in spelling.keys}
    assert any(f"{key}=" in notice for key in keys)


@pytest.mark.parametrize("name", IN_GRPO)
def test_grpo_reads_the_names_in_its_own_way(name):
    value, expected = IN_GRPO[name]
    settings = load({name: value}, entry="grpo_trainer")
    assert {key: value_at(settings, key) for key in expected} == expected
    if name not in MEANINGS:
        assert refused({name: value}) == f"{name}={shown(value)}: rloo has no such setting. Remove it."


@pytest.mark.parametrize("name", IN_DISTILL)
def test_a_run_that_distills_reads_the_names_in_its_own_way(name):
    value, expected = IN_DISTILL[name]
    told = {} if name == "teacher_prompt_template" else TOLD
    settings = load({name: value, **told}, entry="distill_trainer")
    assert {key: value_at(settings, key) for key in expected} == expected
    if name not in MEANINGS:
        assert refused({name: value}) == f"{name}={shown(value)}: rloo has no such setting. Remove it."


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"beta": 0}, {DIVERGENCE: "forward_kl"}),
        ({"beta": 1.0}, {DIVERGENCE: "reverse_kl"}),
        ({"beta": 0.0, "loss_top_k": 8}, {DIVERGENCE: "forward_kl", "distill.top_k": 8}),
        (
            {"distillation_mode": "full_logits", "distillation_alpha": 0.3},
            {DIVERGENCE: "jsd", "distill.beta": 0.3, AGG_MODE: "seq-mean-token-mean"},
        ),
        ({"distillation_mode": "full_logits", "distillation_alpha": 1.0}, {DIVERGENCE: "reverse_kl"}),
        ({"distillation_mode": "sampled_token", "distillation_alpha": 1.0}, {DIVERGENCE: "sampled"}),
        ({"teacher_model_kind": "live"}, {"teacher.weights": "policy"}),
        (
            {"teacher_model_kind": "ema", "teacher_update_rate": 0.2, "teacher_sync_steps": 8},
            {"teacher.weights": "reference", f"{AR}.ref.sync_every_steps": 2, f"{AR}.ref.sync_mixup_alpha": 0.2},
        ),
    ],
)
def test_trls_numbers_name_a_divergence(given, expected):
    settings = load({**given, **TOLD}, entry="distill_trainer")
    assert {key: value_at(settings, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("name", "key"), [(name, row.keys[-1]) for row in SPELLINGS if "rloo" in row.estimators for name in row.names]
)
def test_a_name_and_our_key_at_once_are_refused_even_if_they_agree(name, key):
    value = MEANINGS.get(name, (2, {}))[0]
    message = refused({name: value, key: None})
    assert any(
        line.startswith(f"{name}={shown(value)}, ") and "two spellings of one setting. Keep " in line
        for line in message.splitlines()
    )


@pytest.mark.parametrize("names", [names for names in ONE_SETTING if len(names) > 1], ids=" ".join)
def test_an_old_and_a_new_name_at_once_are_refused(names):
    given = {name: (MEANINGS | IN_DISTILL)[name][0] for name in names}
    address = ", ".join(f"{name}={shown(value)}" for name, value in given.items())
    assert address + ": two spellings of one setting. Keep one." in refused(given)


def test_a_recipe_may_use_the_names_and_may_not_have_both_spellings(load_file):
    with pytest.raises(ConfigError, match=r"num_generations=2, actor_rollout_ref\.rollout\.n=4: two spellings"):
        load_file(lines="num_generations: 2\n")
    assert load_file(lines="temperature: 0.5\n").actor_rollout_ref.rollout.temperature == 0.5
    assert load_file("rloo_k=2").actor_rollout_ref.rollout.n == 2
    assert "rloo_k=4, actor_rollout_ref.rollout.n=" in refused({"rloo_k": 4, f"{ACTOR}.rollout_n": 4})
    with pytest.raises(ConfigError, match=r"temperature=0\.5"):
        load_file(f"{ROLLOUT}.temperature=0.7", lines="temperature: 0.5\n")


def test_a_mapping_is_one_place_where_no_two_spellings_meet():
    tree = {"algorithm.adv_estimator": "rloo", "rloo_k": 4}
    values, _, problems = read_names(tree)
    assert (values, problems) == ({"algorithm.adv_estimator": "rloo", N: 4}, [])
    assert read_names({**tree, "algorithm.adv_estimator": "rloo_vectorized"})[0][N] == 4
    values, _, (conflict,) = read_names({**tree, AR: {"rollout": {"n": 8}}})
    assert conflict.text == f"rloo_k=4, {N}=8: two spellings of one setting. Keep {N}."
    assert values[N] == 8


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus"])
def test_with_another_estimator_a_name_is_unknown_and_the_hint_says_where_it_is_read(estimator):
    message = refused({"rloo_k": 4, "algorithm.adv_estimator": estimator}, entry="ppo_trainer")
    assert f"rloo_k: no such key. Did you mean {N}? With algorithm.adv_estimator={' or '.join(ESTIMATORS)} " in message


@pytest.mark.parametrize("name", NO_EQUAL)
def test_a_name_without_an_equal_is_refused_with_the_way_out_or_asks_for_nothing(caplog, name):
    refusal = NO_EQUAL[name]
    caplog.set_level(logging.INFO)
    for value in refusal.inert or ():
        caplog.clear()
        assert load({name: value}) == plain()
        assert sum(f"{name}=" in text and "does nothing here" in text for text in caplog.messages) == 1
    if refusal.inert is None:
        assert load({name: 3}) == plain()
    else:
        assert refused({name: 3}) == f"{name}=3: {refusal.reason}."


@pytest.mark.parametrize("word", [True, "true", None, False, ""])
def test_a_resume_without_a_path_goes_on_at_the_newest_checkpoint_or_asks_for_nothing(word):
    assert load({"resume_from_checkpoint": word}).trainer.resume_mode == plain().trainer.resume_mode == "auto"


def test_a_top_p_of_null_cuts_nothing_off(load_file):
    assert load_file(lines="top_p: 0.5").actor_rollout_ref.rollout.top_p == 0.5
    assert load_file("top_p=null", lines="top_p: 0.5").actor_rollout_ref.rollout.top_p == 1.0


def test_a_head_in_fp32_is_that_of_a_model_in_fp32():
    dtype = {f"{ACTOR}.fsdp_config.dtype": "fp32"}
    assert load({"cast_lm_head_to_fp32": True, **dtype}, entry="grpo_trainer") == load(dtype, entry="grpo_trainer")
    message = refused({"cast_lm_head_to_fp32": True}, entry="grpo_trainer")
    assert message.startswith("cast_lm_head_to_fp32=true: in half precision")
    assert f"{ACTOR}.fsdp_config.dtype=fp32" in message


def test_a_script_of_the_older_trainer_means_what_it_meant(load_file):
    settings = load_file(
        "rloo_k=4", "cliprange=0.2", "kl_coef=0.03", "num_ppo_epochs=2", "num_mini_batches=2", "per_device_train_batch_size=8",
        "gradient_accumulation_steps=4", "response_length=53", "total_episodes=1000", "normalize_reward=true", "temperature=0.7",
    )  # fmt: skip
    # 8 rows x 4 passes x 2 mini-batches = 64 responses = 16 prompts; 1000 / 64 = 15.6 rollouts.
    expected = {PROMPTS: 16, MINI: 8, STEPS: 16, f"{ACTOR}.ppo_epochs": 2, "data.max_response_length": 53, N: 4}
    assert {key: value_at(settings, key) for key in expected} == expected


def test_a_script_of_the_newer_trainer_means_what_it_meant(load_file):
    settings = load_file(
        "num_generations=8", "epsilon=0.2", "epsilon_high=0.28", "beta=0.0", "num_iterations=2", "steps_per_generation=8",
        "per_device_train_batch_size=16", "gradient_accumulation_steps=2", "max_completion_length=256", "max_steps=100",
        "normalize_advantages=true", "save_steps=16", "learning_rate=1e-6", "++trainer.n_gpus_per_node=2",
    )  # fmt: skip
    # 16 rows x 2 devices x 8 passes = 256 responses = 32 prompts; 8 / 2 = 4 optimizer steps a pass, 8 a rollout; 100 / 8 = 12.5.
    expected = {PROMPTS: 32, MINI: 8, STEPS: 13, "trainer.save_freq": 2, "algorithm.use_kl_in_reward": False, N: 8}
    assert {key: value_at(settings, key) for key in expected} == expected
