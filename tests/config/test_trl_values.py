"""Values of TRL in another unit: the arithmetic by hand, and what is refused with its reason."""

import re

import pytest

from tests.config.conftest import LEAST
from verl_memopt.config.aliases import MINI_BATCH, PROMPTS
from verl_memopt.config.keys import leaf_types
from verl_memopt.config.loader import settings_from_mapping
from verl_memopt.config.spelling import ESTIMATORS, NotConvertibleError
from verl_memopt.config.trl_names import (
    EPOCHS,
    ONE_SETTING,
    SAMPLES,
    SPELLINGS,
    STEPS,
    SYNC_ALPHA,
    SYNC_EVERY,
    batch,
    episodes,
    every,
    kl,
    loggers,
    model_arguments,
    optimizer_steps,
    passes_over_data,
    reference_sync,
    updates_per_rollout,
)
from verl_memopt.config.unused_keys import NO_EQUAL
from verl_memopt.config.values import FOREIGN, hint
from verl_memopt.errors import ConfigError

SET = {SAMPLES: 4, PROMPTS: 64, MINI_BATCH: 16, EPOCHS: 2}
"""64 prompts x 4 responses, 4 optimizer steps a pass, 2 passes."""
PER_DEVICE, ACCUMULATED, GENERATION, PASSES, MINIS = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size", "steps_per_generation",
    "num_mini_batches",
)  # fmt: skip


@pytest.mark.parametrize(
    ("given", "prompts", "mini_batch"),
    [
        ({PER_DEVICE: 8}, 2, 2),
        ({PER_DEVICE: 8, PASSES: 4}, 8, 2),
        ({PER_DEVICE: 8, ACCUMULATED: 2, PASSES: 4}, 8, 4),
        ({PER_DEVICE: 8, ACCUMULATED: 2, MINIS: 4}, 16, 4),
        ({PER_DEVICE: 8, ACCUMULATED: 2, GENERATION: 32}, 8, 4),
        ({PER_DEVICE: 8, GENERATION: None, PASSES: None}, 2, 2),
        ({GENERATION: 32}, 8, None),
        ({PASSES: 2}, None, 32),
        ({MINIS: 8}, None, 8),
    ],
)
def test_prompts_of_a_rollout_and_of_an_optimizer_step_follow_from_responses_and_passes(given, prompts, mini_batch):
    expected = {PROMPTS: prompts, MINI_BATCH: mini_batch}
    for name in given:
        assert batch(name, given, SET) == {key: number for key, number in expected.items() if number is not None}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({PER_DEVICE: 6}, "6 responses do not divide into groups of 4"),
        ({PER_DEVICE: 4, PASSES: 3, ACCUMULATED: 2}, "3 passes do not divide into optimizer steps of 2"),
        ({PER_DEVICE: 2, PASSES: 4}, "2 prompts do not divide over 4 optimizer steps"),
        ({MINIS: 5}, "64 prompts do not divide over 5 optimizer steps"),
        ({GENERATION: 32, PASSES: 2}, "TRL takes one of the two"),
        ({PER_DEVICE: 8, GENERATION: 20}, "generation_batch_size is no multiple"),
        ({ACCUMULATED: 4}, "it says nothing without per_device_train_batch_size"),
        ({PASSES: True}, "expected a whole number above 0"),
        ({MINIS: "2"}, "expected a whole number above 0"),
    ],
)
def test_what_has_no_whole_number_here_is_refused(given, reason):
    with pytest.raises(NotConvertibleError, match=reason) as caught:
        batch(next(iter(given)), given, SET)
    assert set(caught.value.names) <= given.keys()
    assert caught.value.way_out


@pytest.mark.parametrize("key", [SAMPLES, PROMPTS])
def test_a_setting_of_ours_that_is_no_number_is_named(key):
    with pytest.raises(NotConvertibleError, match=f"{key} is no whole number above 0"):
        batch(PASSES, {PASSES: 2}, {**SET, key: "many"})


def test_steps_are_rollouts_and_the_last_one_is_whole():
    assert updates_per_rollout(SET) == 8
    assert [optimizer_steps("n", {"n": steps}, SET)[STEPS] for steps in (1, 8, 9, 80)] == [1, 1, 2, 10]
    assert [episodes("n", {"n": number}, SET)[STEPS] for number in (1, 256, 257)] == [1, 1, 2]
    assert [every("key")("n", {"n": steps}, SET)["key"] for steps in (16, 12, 3)] == [2, 2, 1]
    for nothing in (None, -1):
        assert optimizer_steps("n", {"n": nothing}, SET) == {}
    assert episodes("n", {"n": None}, SET) == {}
    for read, value in ((episodes, 0), (every("key"), 0.1), (passes_over_data, 0.5)):
        with pytest.raises(NotConvertibleError):
            read("n", {"n": value}, SET)


def test_epochs_win_over_the_steps_of_a_recipe_and_not_over_steps_in_trls_names():
    assert passes_over_data("e", {"e": 3.0, "max_steps": -1}, SET) == {"trainer.total_epochs": 3, STEPS: None}
    for name in ("max_steps", "total_episodes"):
        assert passes_over_data("e", {"e": 3, name: 5}, SET) == {"trainer.total_epochs": 3}


@pytest.mark.parametrize("estimator", ["rloo", "grpo", "grpo_vectorized"])
def test_no_kl_asks_for_no_reference(estimator):
    switch = "algorithm.use_kl_in_reward" if estimator == "rloo" else "actor_rollout_ref.actor.use_kl_loss"
    values = {"algorithm.adv_estimator": estimator}
    assert kl("beta", {"beta": 0.0}, values) == kl("beta", {"beta": None}, values) == {switch: False}
    assert kl("beta", {"beta": 0.1}, values)[switch] is True


FOLLOWS = {"sync_ref_model": True, "ref_model_sync_steps": 32, "ref_model_mixup_alpha": 0.9}


def test_a_reference_follows_the_policy_with_trls_defaults_for_what_is_not_written():
    rollouts = {PROMPTS: 8, MINI_BATCH: 4, EPOCHS: 1}  # two optimizer steps each
    for name in FOLLOWS:
        assert reference_sync(name, FOLLOWS, rollouts) == {SYNC_EVERY: 16, SYNC_ALPHA: 0.9}
    assert reference_sync("sync_ref_model", {"sync_ref_model": True}, rollouts) == {SYNC_EVERY: 256, SYNC_ALPHA: 0.6}


def test_moves_of_the_reference_lie_between_whole_rollouts():
    rollouts = {PROMPTS: 12, MINI_BATCH: 4, EPOCHS: 1}
    with pytest.raises(NotConvertibleError, match="512 optimizer steps: a training step takes 3"):
        reference_sync("sync_ref_model", {"sync_ref_model": True}, rollouts)


def test_loggers_join_the_console_and_the_file_and_one_that_is_not_here_is_refused():
    for value, others in (("none", []), (None, []), (["none"], []), (["tensorboard", "wandb"], ["tensorboard", "wandb"])):
        assert loggers("report_to", {"report_to": value}, {}) == {"trainer.logger": ["console", "jsonl", *others]}
    with pytest.raises(NotConvertibleError, match="no equal"):
        loggers("report_to", {"report_to": ["wandb", "comet_ml"]}, {})


AT = "actor_rollout_ref"


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        (None, {}),
        ({"dtype": "auto", "device_map": "auto", "revision": "main", "quantization_config": None}, {}),
        ({"torch_dtype": "torch.float32"}, {f"{AT}.actor.fsdp_config.model_dtype": "fp32"}),
        ({"trust_remote_code": True}, {f"{AT}.model.trust_remote_code": True}),
        ({"quantization_config": {"load_in_8bit": True, "load_in_4bit": False}}, {f"{AT}.model.quantization": "int8"}),
        ({"quantization_config": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}, {f"{AT}.model.quantization": "nf4"}),
    ],
)
def test_arguments_of_a_models_loading_set_dtype_attention_and_a_quantised_base(given, ours):
    assert model_arguments("model_init_kwargs", {"model_init_kwargs": given}, {}) == ours


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"dtype": "float16"}, "dtype=float16"),
        ({"revision": "v2"}, "revision='v2'"),
        ({"attn_implementation": "flex_attention"}, "attn_implementation='flex_attention'"),
        ({"quantization_config": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}}, "bnb_4bit_quant_type=fp4"),
        ({"quantization_config": {"load_in_4bit": True}}, "bnb_4bit_quant_type=fp4, the default of bitsandbytes"),
    ],
)
def test_an_argument_of_a_models_loading_without_an_equal_is_named(given, reason):
    with pytest.raises(NotConvertibleError, match=reason):
        model_arguments("model_init_kwargs", {"model_init_kwargs": given}, {})


KEY = re.compile(r"\b(?:actor_rollout_ref|algorithm|data|trainer|custom_reward_function|reward_model|teacher|distill)(?:\.\w+)+")


def test_rows_and_reasons_name_keys_that_exist_and_every_name_stands_once_for_an_estimator():
    for row in SPELLINGS:
        assert {*row.keys, *KEY.findall(row.note)} <= set(leaf_types()), row.names
        assert row.estimators
        assert set(row.estimators) <= set(ESTIMATORS)
    for estimator in ESTIMATORS:
        names = [name for row in SPELLINGS if estimator in row.estimators for name in row.names]
        assert len(names) == len(set(names))
    assert [name for name, row in NO_EQUAL.items() if not set(KEY.findall(row.reason)) <= set(leaf_types())] == []
    known = {name for row in SPELLINGS for name in row.names}
    assert {name for names in ONE_SETTING for name in names} == known


def test_every_foreign_name_answers_with_keys_that_exist():
    named = {name: KEY.findall(text) for name, text in FOREIGN.items()}
    assert [name for name, keys in named.items() if not keys or not set(keys) <= set(leaf_types())] == []


def test_a_foreign_name_is_answered_with_our_key_or_the_reason_below_any_section():
    assert hint("reward.kl_penalty_reward_coeff") == "Did you mean reward_model.rlt.kl_penalty_reward_coeff?"
    assert hint("algorithm.num_generations") == "Did you mean actor_rollout_ref.rollout.n?"
    assert hint("algorithm.missing_eos_penalty") == (
        "It has no equal here: a score has no further penalty. "
        "Use custom_reward_function.path: it belongs in the reward function."
    )


REFUSED_LOSSES = {
    "a loss that TRL does not have": ({"loss_type": "ppo"}, "loss_type=ppo: TRL has grpo, dapo"),
    "a level that TRL does not have": ({"importance_sampling_level": "word"}, "level=word: TRL has token and"),
    "CISPO by sequence": ({"loss_type": "cispo", "importance_sampling_level": "sequence"}, "cispo has a ratio of its own"),
    "SAPO by sequence": ({"loss_type": "sapo", "importance_sampling_level": "sequence"}, "sapo has a ratio of its own"),
    "two sides by sequence": ({"delta": 3.0, "importance_sampling_level": "sequence"}, "the ratio of a sequence has no"),
    "a bound below the clip": ({"delta": 1.1, "epsilon": 0.2}, "delta=1.1: below 1 + 0.2 TRL also bounds positive advantages"),
    "an unknown scale": ({"scale_rewards": "row"}, "scale_rewards=row: TRL has group, batch and none"),
    "an unknown sum": ({"multi_objective_aggregation": "max"}, "multi_objective_aggregation=max: TRL has"),
    "a bonus of some tokens": (
        {"entropy_coef": 0.1, "top_entropy_quantile": 0.5}, "entropy_coef=0.1, top_entropy_quantile=0.5: TRL's bonus is then",
    ),
    "some tokens by sequence": (
        {"top_entropy_quantile": 0.5, "importance_sampling_level": "sequence"}, "with the ratio of a sequence TRL scales",
    ),
    "VESPO with weights by sequence": (
        {"loss_type": "vespo", "use_vllm": True, "vllm_importance_sampling_correction": True}, "VESPO multiplies the weights",
    ),
    "an unknown correction": (
        {"use_vllm": True, "vllm_importance_sampling_mode": "word_mask"}, "vllm_importance_sampling_mode=word_mask: TRL has",
    ),
    "truncated weights with a lower bound": (
        {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_min": 0.5},
        "truncated weights have no lower bound here",
    ),
    "an argument of sampling that only one engine has": (
        {"generation_kwargs": {"num_beams": 4, "top_p": 0.9}}, "are read in both engines, and not num_beams",
    ),
    "sampling that is no mapping": ({"generation_kwargs": "top_p"}, "generation_kwargs=top_p: it is no mapping"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED_LOSSES)
def test_a_loss_or_sampling_without_an_equal_is_refused_with_the_reason(case):
    given, message = REFUSED_LOSSES[case]
    least = {key: value for key, value in LEAST.items() if key != "actor_rollout_ref.rollout.name"}
    with pytest.raises(ConfigError, match=re.escape(message)):
        settings_from_mapping(least | {"algorithm.adv_estimator": "grpo", "use_vllm": False} | given)
