import logging

import pytest

from verl_memopt.config.aliases import GLOBAL_MICRO_BATCHES, MET_BY_CHUNKING, RENAMED, VALUES, our_key
from verl_memopt.config.keys import leaf_types, value_at
from verl_memopt.config.unused_keys import refusal_of
from verl_memopt.config.values import choices

AR = "actor_rollout_ref"
OVERRIDE = f"{AR}.model.override_config"

SAMPLES = {f"{role}.optim.optimizer": ("lion", "adam") for role in (f"{AR}.actor", "critic")} | {
    f"{AR}.actor.strategy": ("fsdp2", "megatron"),
    "critic.strategy": ("fsdp2", "megatron"),
    "reward_model.reward_manager": ("dapo", "naive"),
}
"""Our key -> two values that differ, the first of them allowed. The other keys have values of their types."""


def samples_of(key):
    if key in SAMPLES:
        return SAMPLES[key]
    if key in choices():
        return choices()[key][:2]
    if key.endswith(("sequence_parallel_size", "token_len_per_gpu")):
        return (1, 2) if key.endswith("size") else (4096, 8192)
    kinds = {bool: (False, True), int: (4, 2), float: (1.5, 2.5)}
    return next((values for kind, values in kinds.items() if kind.__name__ in str(leaf_types()[key])), ("q_proj", "k_proj"))


RENAMED_HERE = {alias: key for alias, key in RENAMED.items() if key in leaf_types()}


def given(alias, value):
    """The alias as a user writes it, with what it needs beside it."""
    if alias.endswith("lora.adapter_path"):
        return {alias: value, alias.replace("lora.adapter_path", "lora_rank"): 8}
    if alias.endswith("distill_coef"):
        return {alias: value, "teacher.model.path": "big"}
    section, _, name = alias.rpartition(".")
    return {section: {name: value}} if section.endswith("override_config") else {alias: value}


@pytest.mark.parametrize("alias", RENAMED_HERE)
def test_an_alias_sets_our_key_and_may_stand_beside_it_with_the_same_value_only(settled, complaint, alias):
    key = RENAMED_HERE[alias]
    one, other = samples_of(key)
    assert value_at(settled(given(alias, one)), key) == one
    assert value_at(settled(given(alias, one) | {key: one}), key) == one
    line = next(line for line in complaint(given(alias, one) | {key: other}).splitlines() if "different values" in line)
    for part in (f"{alias}={str(one).lower()}", f"{key}={str(other).lower()}"):
        assert part in line


def test_every_alias_is_unknown_to_the_schema_and_every_other_one_spells_a_key_without_effect():
    assert not {*RENAMED, *GLOBAL_MICRO_BATCHES, *MET_BY_CHUNKING} & set(leaf_types())
    others = {key for alias, key in RENAMED.items() if alias not in RENAMED_HERE}
    assert [key for key in others if refusal_of(key) is None and key not in MET_BY_CHUNKING] == []


def test_two_aliases_of_one_key_with_two_values_are_refused(complaint):
    message = complaint({f"{AR}.actor.grad_clip": 1.0, f"{AR}.actor.optim.grad_clip": 2.0})
    assert f"{AR}.actor.grad_clip=1.0, {AR}.actor.optim.grad_clip=2.0" in message


def test_whole_reward_sections_are_read_as_ours(settled):
    settings = settled(
        {
            "reward.custom_reward_function.path": "score.py",
            "reward.custom_reward_function.reward_kwargs": {"scale": 2},
            "reward.reward_model.reward_manager": "naive",
        }
    )
    assert settings.custom_reward_function.path == "score.py"
    assert settings.custom_reward_function.reward_kwargs == {"scale": 2}
    assert our_key("reward.reward_model.enable") == "reward_model.enable"
    assert our_key("reward.reward_kwargs.max_resp_len") == "reward_model.reward_kwargs.max_resp_len"


@pytest.mark.parametrize("alias", GLOBAL_MICRO_BATCHES)
def test_a_global_micro_batch_is_divided_by_the_devices_refused_where_that_fails_and_nothing_where_null(
    settled, complaint, alias
):
    four = {"trainer.nnodes": 2, "trainer.n_gpus_per_node": 2}
    assert value_at(settled({alias: 12} | four), GLOBAL_MICRO_BATCHES[alias]) == 3
    message = f"{alias}=10: not divisible by the 4 devices. Set {GLOBAL_MICRO_BATCHES[alias]} instead."
    assert complaint({alias: 10} | four) == message
    assert settled({alias: None}) == settled({})


def test_a_global_micro_batch_and_another_per_device_are_refused(complaint):
    message = complaint({f"{AR}.actor.ppo_micro_batch_size": 4, f"{AR}.actor.ppo_micro_batch_size_per_gpu": 8})
    assert "ppo_micro_batch_size=4, " in message
    assert "ppo_micro_batch_size_per_gpu=8: " in message


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("alias", [*sorted(MET_BY_CHUNKING), f"{AR}.actor.use_fused_kernels"])
def test_a_switch_that_chunking_serves_changes_nothing_and_is_noticed(settled, caplog, alias, value):
    caplog.set_level(logging.INFO)
    assert settled({alias: value}) == settled({})
    assert len([text for text in caplog.messages if text.startswith(f"{alias}={str(value).lower()}")]) == 1


@pytest.mark.parametrize("alias", [*sorted(MET_BY_CHUNKING), f"{AR}.actor.use_fused_kernels"])
def test_a_switch_that_chunking_serves_is_refused_without_chunking(complaint, settled, alias):
    chunk = f"{AR}.model.logprob_chunk_tokens"
    assert f"{alias}=true, {chunk}=0: " in complaint({alias: True, chunk: 0})
    assert settled({alias: False, chunk: 0}).actor_rollout_ref.model.logprob_chunk_tokens == 0


def test_removing_the_previous_checkpoint_keeps_one(settled):
    alias = "trainer.remove_previous_ckpt_in_save"
    assert settled({alias: True}).trainer.max_actor_ckpt_to_keep == 1
    assert settled({alias: False}).trainer.max_actor_ckpt_to_keep is None


@pytest.mark.parametrize(("key", "word"), [(key, word) for key, words in VALUES.items() for word in words])
def test_a_spelling_of_a_value_is_read_as_ours(settled, key, word):
    ours = VALUES[key][word]
    assert value_at(settled({key: word}), key) == ours
    assert value_at(settled({key: ours}), key) == ours


def test_spellings_inside_the_logger_list_are_read(settled):
    assert settled({"trainer.logger": ["console", "file", "tracking"]}).trainer.logger == ["console", "jsonl", "wandb"]


def test_hyphens_in_a_loss_mode_are_read_as_underscores(settled):
    settings = settled({f"{AR}.actor.policy_loss.loss_mode": "geo-mean"})
    assert settings.actor_rollout_ref.actor.policy_loss.loss_mode == "geo_mean"


def test_an_alias_and_our_key_agree_when_their_values_are_two_spellings_of_one(settled):
    alias, key = f"{AR}.actor.fsdp_config.mixed_precision.param_dtype", f"{AR}.actor.fsdp_config.dtype"
    assert value_at(settled({alias: "bf16", key: "bfloat16"}), key) == "bfloat16"


def test_an_override_of_the_model_config_keeps_its_other_names(settled):
    settings = settled({OVERRIDE: {"attn_implementation": "eager", "rope_theta": 1.0}})
    assert settings.actor_rollout_ref.model.override_config == {"rope_theta": 1.0}


NO_ADAPTERS = {f"{AR}.model.lora_rank": 0, f"{AR}.model.lora_alpha": 0}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"trainer.test_freq": False, "trainer.save_freq": False}, {"trainer.test_freq": -1, "trainer.save_freq": -1}),
        ({"custom_reward_function.name": None}, {"custom_reward_function.name": "compute_score"}),
        ({f"{AR}.actor.strategy": "fsdp", "critic.strategy": "fsdp", f"{AR}.ref.strategy": "fsdp"}, {"critic.strategy": "fsdp2"}),
        ({"trainer.resume_mode": "auto", "trainer.resume_from_path": "old"}, {"trainer.resume_mode": "auto"}),
        ({"algorithm.rollout_correction.rollout_is_threshold": None}, {"algorithm.rollout_correction.rollout_is": None}),
        (
            {
                "trainer.nnodes": 2,
                "trainer.n_gpus_per_node": 2,
                f"{AR}.actor.fsdp_config.fsdp_size": 5,
                "critic.fsdp.fsdp_size": 4,
            },
            {f"{AR}.actor.fsdp_config.fsdp_size": -1, "critic.model.fsdp_config.fsdp_size": 4},
        ),
        (NO_ADAPTERS, {f"{AR}.model.lora_rank": 0, f"{AR}.model.lora_alpha": 16.0}),
        ({f"{AR}.rollout.name": "sglang"}, {f"{AR}.rollout.name": "vllm"}),
        ({f"{AR}.actor.ppo_mini_batch_size": None, "data.train_batch_size": 48}, {f"{AR}.actor.ppo_mini_batch_size": 48}),
    ],
)
def test_a_value_that_verl_takes_is_taken(settled, given, expected):
    settings = settled(given)
    assert {key: value_at(settings, key) for key in expected} == expected


def test_adapters_without_a_rank_have_that_of_their_folder(settled, tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 2}')
    model = settled({**NO_ADAPTERS, f"{AR}.model.lora_adapter_path": str(tmp_path)}).actor_rollout_ref.model
    assert (model.lora_rank, model.lora_alpha) == (4, 2)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({f"{AR}.model.lora_rank": 8, f"{AR}.model.lora_alpha": 0}, f"{AR}.model.lora_alpha=0.0: must be above 0"),
        (
            {f"{AR}.rollout.name": "sglang", f"{AR}.rollout.engine_kwargs.sglang.attention_backend": "fa3"},
            f"{AR}.rollout.engine_kwargs.sglang.attention_backend=fa3: the engines are vllm and hf",
        ),
        (
            {"algorithm.rollout_correction.rollout_is": "token", "algorithm.rollout_correction.rollout_is_threshold": None},
            "rollout_is_threshold=null: importance weights need a threshold",
        ),
        ({"trainer.test_freq": True}, "trainer.test_freq=true: expected a whole number"),
    ],
)
def test_a_value_that_asks_for_what_is_not_here_is_refused(complaint, given, reason):
    assert reason in complaint(given)


def test_the_section_of_a_refused_key_is_one_complaint(complaint, caplog):
    mtp = f"{AR}.model.mtp"
    message = complaint({f"{mtp}.enable": True, f"{mtp}.speculative_algorithm": "EAGLE", f"{mtp}.speculative_num_steps": 3})
    assert message.startswith(f"{mtp}.enable=true: ")
    assert not any(mtp in text for text in caplog.messages)
    megatron = f"{AR}.actor.megatron"
    message = complaint({f"{megatron}.tensor_model_parallel_size": 2, f"{megatron}.param_offload": True})
    assert message.startswith(f"{megatron}.tensor_model_parallel_size=2, {megatron}.param_offload=true: ")
