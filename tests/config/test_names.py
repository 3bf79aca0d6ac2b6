"""One reader of names: what the command line, Python and TRL's trainers say in the same words has the same meaning."""

import logging
from pathlib import Path

import pytest
import yaml

from verl_memopt import api, trl
from verl_memopt.config.keys import shown, value_at
from verl_memopt.config.loader import load_settings
from verl_memopt.config.names import last_parts
from verl_memopt.config.trl_defaults import DEFAULTS
from verl_memopt.config.trl_names import NAMES, NO_EQUAL, ONE_SETTING, SPELLINGS
from verl_memopt.config.values_of_python import as_override
from verl_memopt.errors import ConfigError

AR = "actor_rollout_ref"
ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(40)]
NEWEST = {
    "num_generations": 4, "num_generations_eval": 2, "num_iterations": 2, "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 2, "max_steps": 40, "num_train_epochs": 2, "save_steps": 7, "eval_steps": 6,
    "save_strategy": "steps", "eval_strategy": "steps", "logging_steps": 3, "max_completion_length": 64, "max_prompt_length": 32,
    "epsilon": 0.3, "epsilon_high": 0.4, "beta": 0.02, "sync_ref_model": True, "ref_model_sync_steps": 8,
    "ref_model_mixup_alpha": 0.5, "mask_truncated_completions": True, "temperature": 0.8, "top_p": 0.9, "top_k": 7,
    "repetition_penalty": 1.1, "learning_rate": 1e-5, "weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.9,
    "max_grad_norm": 0.5, "lr_scheduler_type": "cosine", "warmup_steps": 2, "lr_scheduler_kwargs": {"num_cycles": 0.5},
    "bf16": False, "use_cpu": True, "adam_epsilon": 1e-6, "save_total_limit": 2, "eval_on_start": True,
    "gradient_checkpointing": False, "use_vllm": True, "vllm_gpu_memory_utilization": 0.4, "vllm_tensor_parallel_size": 1,
    "vllm_max_model_length": 128, "vllm_enable_sleep_mode": True, "shuffle_dataset": False, "seed": 3, "dataset_streaming": False,
    "chat_template_kwargs": {"enable_thinking": False}, "trust_remote_code": True, "run_name": "mine", "report_to": "tensorboard",
    "reward_model_path": "judge", "model_init_kwargs": {"dtype": "bfloat16", "attn_implementation": "eager"},
}  # fmt: skip
OLDER = {
    "rloo_k": 4, "num_ppo_epochs": 2, "per_device_train_batch_size": 8, "num_mini_batches": 2, "total_episodes": 300,
    "response_length": 53, "cliprange": 0.3, "kl_coef": 0.1, "normalize_advantage": True, "exp_name": "mine", "warmup_ratio": 0.1,
}  # fmt: skip
BESIDE_OTHERS = (
    {
        "generation_batch_size": 64, "warmup_steps": 0.1, "save_strategy": "no", "eval_strategy": "no", "max_steps": 9,
        "min_p": 0.1,
    },
    {"steps_per_generation": 4, "num_train_epochs": 3.0, "generation_kwargs": {"stop": ["x"]}},
    {"num_mini_batches": 2},
)  # fmt: skip
OF_GRPO = {
    "loss_type": "dr_grpo", "scale_rewards": "none", "importance_sampling_level": "token", "delta": 4.0,
    "sapo_temperature_pos": 1.5, "sapo_temperature_neg": 1.5, "vespo_k_pos": 1.5, "vespo_lambda_pos": 1.5, "vespo_k_neg": 1.5,
    "vespo_lambda_neg": 1.5, "use_bias_correction_kl": False, "off_policy_mask_threshold": 0.5, "top_entropy_quantile": 0.5,
    "multi_objective_aggregation": "sum_then_normalize", "vllm_importance_sampling_mode": "token_mask",
    "vllm_importance_sampling_correction": True, "vllm_importance_sampling_clip_max": 2.0,
    "vllm_importance_sampling_clip_min": 0.5, "vllm_importance_sampling_cap": 4.0, "max_tool_calling_iterations": 2,
}  # fmt: skip
OF_RLOO = {"normalize_advantages": True, "reward_clip_range": [-1.0, 1.0]}
ENTROPY = {
    "use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 1.5, "entropy_coef_delta": 0.01,
    "entropy_coef_min": 0.02, "entropy_coef_max": 0.3,
}  # fmt: skip
OF_TEACHER = {
    "beta": 0.3, "lmbda": 1.0, "seq_kd": False, "teacher_model_name_or_path": "wise",
    "teacher_model_init_kwargs": {"dtype": "bfloat16"},
}  # fmt: skip
SELF = {
    "distillation_mode": "full_logits", "distillation_alpha": 0.3, "distillation_is_clip": 2.0, "teacher_model_kind": "ema",
    "teacher_update_rate": 0.1, "teacher_sync_steps": 1,
    "teacher_prompt_template": "{prompt} {answer}",
}  # fmt: skip
SPARSE = {"max_new_tokens": 7, "max_length": 99, "beta": 0.0, "loss_top_k": 8, "teacher_model_name_or_path": "wise"}
READ = {
    "grpo": [NEWEST | OF_GRPO, {"entropy_coef": 0.1}, ENTROPY, {"cast_lm_head_to_fp32": False}, *BESIDE_OTHERS],
    "rloo": [NEWEST | OF_RLOO, OLDER, {"normalize_reward": True}],
    "distill": [NEWEST | OF_TEACHER, SELF, SPARSE],
}
"""Estimator -> names that are read together."""
ARGUMENTS = {"model_name_or_path", "sft_model_path", "output_dir", "reward_weights", "resume_from_checkpoint"}
"""Names of what the calls of Python have an argument for."""
WITHOUT_EQUAL = {name: row.inert for name, row in NO_EQUAL.items() if name not in ARGUMENTS}
REFUSED = {name: 3.5 for name, inert in WITHOUT_EQUAL.items() if inert is not None}
PASSING = {name: 3 if inert is None else inert[0] if inert else None for name, inert in WITHOUT_EQUAL.items()}


def right(answer):
    return 1.0


def from_python(algorithm, given, folder, **more):
    call = api.Call("folder", ROWS, given, algorithm, rewards=None, eval_dataset=ROWS, run_dir=folder, **more)
    return call.load()[1]


def from_the_command_line(algorithm, given, folder):
    """The values that a call of Python sets by itself stand in a file of the user."""
    rows = from_python(algorithm, {"distill.teacher_prompt": "{prompt} {answer}"}, folder).data
    call = {
        "defaults": [f"{algorithm}_trainer", "_self_"],
        "data": {"train_files": rows.train_files, "val_files": rows.val_files, "train_batch_size": 32},
        AR: {"model": {"path": "folder"}, "actor": {"use_dynamic_bsz": True, "ppo_mini_batch_size": None}},
        "trainer": {
            "default_local_dir": str(folder),
            "resume_mode": "disable",
            "test_freq": api.VALIDATE_EVERY,
            "save_freq": api.LAST_ALONE,
        },
    }
    folder.mkdir(exist_ok=True)
    (folder / "mine.yaml").write_text(yaml.safe_dump(call))
    return load_settings("mine", [f"{name}={as_override(value)}" for name, value in given.items()], str(folder))


def from_a_trainer_of_trl(algorithm, given, folder):
    if algorithm == "distill":
        trainer = trl.DistillationTrainer("folder", None, trl.DistillationConfig(**given), ROWS, ROWS)
    else:
        kind = {"grpo": (trl.GRPOTrainer, trl.GRPOConfig), "rloo": (trl.RLOOTrainer, trl.RLOOConfig)}[algorithm]
        trainer = kind[0]("folder", right, kind[1](**given), ROWS, ROWS)
    settings, defaults = trainer._settings()
    return from_python(algorithm, settings, folder, trl_defaults=defaults)


def outcome(door, algorithm, given, folder):
    try:
        return door(algorithm, given, folder)
    except ConfigError as error:
        return str(error)


def with_trls_defaults(algorithm, given):
    """What a config of TRL with these values holds, of all that has an equal here."""
    said_otherwise = {each for names in ONE_SETTING if given.keys() & set(names) for each in names}
    further = {"max_steps", "adam_epsilon", "report_to", *NO_EQUAL, *said_otherwise, *given}
    off = ("vllm_",) if not given.get("use_vllm") else ("ref_model_",)
    off += () if given.get("use_adaptive_entropy") else ("entropy_coef_", "entropy_target")
    defaults = {
        name: value
        for name, value in DEFAULTS[algorithm].items()
        if (value is not None or name == "delta") and name in NAMES - further
    }
    return {name: value for name, value in defaults.items() if not name.startswith((*off, "ref_model_"))} | given


def test_every_name_of_trl_goes_through_the_doors_below():
    tried = {name for groups in READ.values() for group in groups for name in group}
    assert tried | WITHOUT_EQUAL.keys() | ARGUMENTS == NAMES
    assert {name for row in SPELLINGS for name in row.names} | NO_EQUAL.keys() == NAMES


@pytest.mark.parametrize("algorithm", READ)
def test_names_that_are_read_mean_the_same_through_every_door(algorithm, tmp_path):
    for given in READ[algorithm]:
        expected = from_python(algorithm, given, tmp_path)
        assert from_the_command_line(algorithm, given, tmp_path) == expected, given
        whole = from_python(algorithm, with_trls_defaults(algorithm, given), tmp_path)
        assert from_a_trainer_of_trl(algorithm, given, tmp_path) == whole, given


@pytest.mark.parametrize("algorithm", READ)
def test_names_without_an_equal_are_refused_together_and_with_the_same_reasons_through_every_door(algorithm, tmp_path):
    lines = []
    for door in (from_python, from_the_command_line, from_a_trainer_of_trl):
        message = outcome(door, algorithm, REFUSED | {"lora_rnak": 3, "freeze_all": 1}, tmp_path)
        lines.append(sorted(message.splitlines()[1:]))
    assert lines[0] == lines[1] == lines[2]
    assert set(lines[0]) >= {f"{name}=3.5: {NO_EQUAL[name].reason}." for name in REFUSED}
    assert any(line.startswith("lora_rnak: no such key. Did you mean actor_rollout_ref.model.lora_rank?") for line in lines[0])
    assert any(line.startswith("freeze_all: no such key") for line in lines[0])


@pytest.mark.parametrize("door", [from_python, from_the_command_line, from_a_trainer_of_trl])
def test_names_that_ask_for_nothing_pass_through_every_door_and_all_names_cost_one_line(door, tmp_path, caplog):
    plain = door("grpo", {}, tmp_path)
    caplog.clear()
    caplog.set_level(logging.INFO)
    given = PASSING | {"lora_rank": 8, "learning_rate": 1e-6}
    settings = door("grpo", given, tmp_path)
    assert (settings.actor_rollout_ref.model.lora_rank, settings.actor_rollout_ref.actor.optim.lr) == (8, 1e-6)
    assert door("grpo", PASSING, tmp_path) == plain
    first = next(record for record in caplog.records if "log_completions=" in record.message)
    assert first.levelno == logging.INFO
    assert "\n" not in first.message
    assert all(f"{name}={shown(value)}" in first.message for name, value in given.items())
    assert not [text for text in caplog.messages if text.startswith("log_completions")]


@pytest.mark.parametrize("door", [from_python, from_the_command_line, from_a_trainer_of_trl])
@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        ({"lora_rank": 8}, f"{AR}.model.lora_rank", 8),
        ({f"{AR}.actor.optim.grad_clip": 0.3}, f"{AR}.actor.optim.clip_grad", 0.3),
        ({"reward_kwargs": {"a": 1}}, "custom_reward_function.reward_kwargs", {"a": 1}),
        ({"trainer": {"save_freq": 5, "logger": ["console"]}}, "trainer.logger", ["console"]),
        ({"train_batch_size": 16}, f"{AR}.actor.ppo_mini_batch_size", 16),
    ],
)
def test_a_key_has_its_whole_name_verls_its_last_part_or_its_section_through_every_door(door, given, key, value, tmp_path):
    assert value_at(door("grpo", given, tmp_path), key) == value


@pytest.mark.parametrize("door", [from_python, from_the_command_line])
def test_the_end_of_several_keys_is_refused_with_all_of_them_and_beside_its_key_it_is_two_spellings(door, tmp_path):
    message = outcome(door, "grpo", {"use_torch_compile": 1, "lora_rank": 2, f"{AR}.model.lora_rank": 4}, tmp_path)
    assert f"lora_rank=2, {AR}.model.lora_rank=4: two spellings of one setting" in message
    message = outcome(door, "grpo", {"attn_implementation": 3, "name": "x"}, tmp_path)
    assert "name=x: several settings end in this name: " in message


def test_a_last_part_that_means_one_key_of_the_policy_is_that_one():
    parts = last_parts()
    assert parts["lora_rank"] == (f"{AR}.model.lora_rank",)
    assert len(parts["name"]) > 1
    assert not {"trainer", "data", "critic", "reward_model", "debug"} & parts.keys()


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        ({"eval_steps": 6}, "trainer.test_freq", 6),
        ({"trainer": {"test_freq": 5}}, "trainer.test_freq", 5),
        ({"eval_strategy": "no"}, "trainer.test_freq", -1),
        ({"steps_per_generation": 4}, f"{AR}.actor.ppo_mini_batch_size", 8),
        ({"generation_batch_size": 64}, "data.train_batch_size", 8),
        ({"generation_batch_size": 64}, f"{AR}.actor.ppo_mini_batch_size", 8),
        ({"data": {"train_batch_size": 16}}, f"{AR}.actor.ppo_mini_batch_size", 16),
        ({"use_dynamic_bsz": False, "ppo_micro_batch_size_per_gpu": 2}, f"{AR}.actor.use_dynamic_bsz", False),
        ({"trainer.resume_mode": "auto"}, "trainer.resume_mode", "auto"),
    ],
)
def test_what_a_call_sets_by_itself_yields_to_any_spelling(given, key, value, tmp_path):
    assert value_at(from_python("grpo", given, tmp_path), key) == value


@pytest.mark.parametrize("name", ["output_dir", "trainer.default_local_dir", "default_local_dir", "trainer"])
def test_the_folder_of_a_run_has_any_of_its_names(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    there = str(tmp_path / "there")
    value = {"default_local_dir": there} if name == "trainer" else there
    folder, settings, inputs = api.Call("folder", ROWS, {name: value}).load()
    assert (str(folder), settings.trainer.default_local_dir) == (there, there)
    with inputs.written():
        rows = Path(settings.data.train_files)
        assert (rows.is_file(), rows.parent) == (True, folder / "inputs")
    assert [each.name for each in tmp_path.iterdir()] == ["there"]


def test_what_an_argument_and_a_setting_both_say_is_refused_all_at_once(tmp_path):
    given = {"output_dir": "x", "max_steps": 3, "model_name_or_path": "other"}
    with pytest.raises(ConfigError) as caught:
        api.Call("folder", ROWS, given, run_dir=tmp_path, steps=4).load()
    for name, argument in (("output_dir", "run_dir"), ("max_steps", "steps"), ("model_name_or_path", "model")):
        assert f"Keep one of {argument} and {name}." in str(caught.value)


# TRL's defaults in a script of TRL.


def test_a_value_that_is_trls_default_holds(tmp_path):
    given = {
        "per_device_train_batch_size": 8, "num_generations": 2, "beta": 0.05, "lr_scheduler_type": "linear", "weight_decay": 0.0
    }  # fmt: skip
    for said in (given, {}):
        settings = from_a_trainer_of_trl("rloo", said, tmp_path)
        actor = settings.actor_rollout_ref.actor
        assert (settings.algorithm.use_kl_in_reward, settings.algorithm.kl_ctrl.kl_coef) == (True, 0.05)
        assert (settings.actor_rollout_ref.rollout.n, settings.data.train_batch_size, actor.ppo_mini_batch_size) == (2, 4, 4)
        optim = actor.optim
        assert (optim.lr_scheduler_type, optim.lr_schedule_steps, optim.weight_decay) == ("linear", "updates", 0)
        assert (settings.trainer.total_epochs, settings.trainer.test_freq, settings.data.seed) == (3, -1, 42)
        assert (settings.data.max_response_length, settings.actor_rollout_ref.rollout.name) == (512, "hf")


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        ({"data.train_batch_size": 16}, f"{AR}.actor.ppo_mini_batch_size", 16),
        ({"rollout.name": None, f"{AR}.rollout.name": "vllm"}, f"{AR}.rollout.name", "vllm"),
        ({"total_episodes": 64}, "trainer.total_training_steps", 8),
        ({"steps_per_generation": 8}, f"{AR}.actor.ppo_mini_batch_size", 1),
        ({"num_iterations": 3}, "trainer.save_freq", 167),
        ({"eval_strategy": "steps"}, "trainer.test_freq", 10),
        ({"eval_steps": 5, "eval_strategy": "steps"}, "trainer.test_freq", 5),
        ({"use_kl_loss": True}, f"{AR}.actor.use_kl_loss", True),
    ],
)
def test_a_default_of_trl_gives_way_to_any_spelling_of_its_setting(given, key, value, tmp_path):
    given = {name: each for name, each in given.items() if name != "rollout.name"}
    assert value_at(from_a_trainer_of_trl("grpo", given, tmp_path), key) == value


def test_the_defaults_that_differ_from_ours_are_logged_in_one_table(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    from_a_trainer_of_trl("grpo", {"beta": 0.1}, tmp_path)
    (table,) = [text for text in caplog.messages if "defaults of TRL" in text]
    assert "lr_scheduler_type=linear" in table
    assert f"{AR}.actor.optim.lr_scheduler_type=linear (our default: constant)" in table
    assert "temperature" not in table
    assert f"{AR}.actor.kl_loss_by_ratio=true (our default: false)" in table
    assert f"{AR}.actor.clip_ratio_c=null (our default: 3.0)" in table
    keys = [line.split()[1].partition("=")[0] for line in table.splitlines()[1:]]
    assert len(keys) == len(set(keys))
    caplog.clear()
    from_a_trainer_of_trl("grpo", {}, tmp_path)
    assert not any("use_bias_correction_kl" in text for text in caplog.messages)


@pytest.mark.parametrize("given", [{"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "none"}, {}])
def test_rewards_that_are_normalized_one_by_one_are_those_of_the_functions(given, tmp_path):
    functions = {"right": right, "short": right}
    call = api.Call("folder", ROWS, given, "grpo", rewards=functions, reward_weights=[1.0, 0.5], run_dir=tmp_path)
    algorithm = call.load()[1].algorithm
    if not given:
        assert (algorithm.adv_estimator, algorithm.gdpo_reward_keys) == ("grpo", None)
        return
    assert (algorithm.adv_estimator, algorithm.gdpo_whiten_over) == ("gdpo", "rows")
    assert (algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights) == (["right", "short"], [1.0, 0.5])
    assert (algorithm.norm_adv_by_std_in_grpo, algorithm.norm_adv_epsilon) == (True, 1e-4)
