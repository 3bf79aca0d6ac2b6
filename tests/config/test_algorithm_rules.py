import json
import logging

import pytest

from verl_memopt.algorithms.records import WITH_STATISTICS, WITHOUT_BASELINE, WITHOUT_GROUPS
from verl_memopt.config.unused_keys import ALPHA, EVERY
from verl_memopt.config.values import choices
from verl_memopt.errors import ConfigError

AR = "actor_rollout_ref"
LIMITS = {
    **{
        f"a group of {name} has two answers": ({"algorithm.adv_estimator": name}, f"{AR}.rollout.n", [2], [1])
        for name in choices()["algorithm.adv_estimator"]
        if name not in (*WITHOUT_BASELINE, *WITHOUT_GROUPS, *WITH_STATISTICS)
    },
    "RLOO does without a baseline": ({"algorithm.adv_estimator": "rloo"}, f"{AR}.rollout.n", [1, 2], []),
    "GRPO does without a baseline": ({"algorithm.adv_estimator": "grpo"}, f"{AR}.rollout.n", [1, 2], []),
    "REINFORCE++ compares no group": ({"algorithm.adv_estimator": "reinforce_plus_plus"}, f"{AR}.rollout.n", [1, 2], []),
    "one round a step answers its prompts": ({"data.train_batch_size": 256}, "data.gen_batch_size", [256], [255, 512]),
    "groups that are filtered are sampled": (
        {"algorithm.filter_groups.enable": True}, f"{AR}.rollout.do_sample", [True], [False],
    ),
    "groups are filtered before the KL": (
        {"algorithm.filter_groups.enable": True, "algorithm.use_kl_in_reward": True}, "algorithm.filter_groups.metric",
        ["score", "acc"], ["seq_final_reward"],
    ),
    "bypass mode reads every token": (
        {"algorithm.mask_truncated_responses": True}, "algorithm.rollout_correction.bypass_mode", [False], [True],
    ),
    "responses that never end are not all masked": (
        {f"{AR}.rollout.ignore_eos": True}, "algorithm.mask_truncated_responses", [False], [True],
    ),
    "a covariance lies between the bounds": (
        {f"{AR}.actor.policy_loss.loss_mode": "clip_cov"}, f"{AR}.actor.policy_loss.clip_cov_lb", [4.9, -1.0], [5.0, 6.0],
    ),
}  # fmt: skip
"""What must hold -> the other keys, the key that is tried, values that pass and values that are refused."""


@pytest.mark.parametrize("what", LIMITS)
def test_a_value_passes_or_is_refused_by_name(assert_limit, what):
    assert_limit(*LIMITS[what])


def test_a_rule_about_groups_that_are_filtered_waits_for_the_filter(settled):
    assert settled({f"{AR}.rollout.do_sample": False})
    assert settled({"algorithm.filter_groups.metric": "seq_final_reward", "algorithm.use_kl_in_reward": True})
    assert settled({"algorithm.filter_groups.enable": True, "data.gen_batch_size": 3})


MODEL = "actor_rollout_ref.model"


def folder_of(tmp_path, **config):
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    return {f"{MODEL}.lora_adapter_path": str(tmp_path)}


def test_what_is_not_given_is_read_from_the_folder(settled, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    config = {"r": 6, "lora_alpha": 24, "target_modules": ["q_proj", "v_proj"], "exclude_modules": None, "bias": "none"}
    model = settled(folder_of(tmp_path, **config)).actor_rollout_ref.model
    assert (model.lora_rank, model.lora_alpha, model.target_modules) == (6, 24.0, ["q_proj", "v_proj"])
    assert model.exclude_modules is None
    (notice,) = [text for text in caplog.messages if "lora_adapter_path" in text]
    assert notice.endswith(f"sets {MODEL}.lora_rank=6, {MODEL}.lora_alpha=24, {MODEL}.target_modules=[q_proj,v_proj]")


def test_experts_are_read_from_the_folder_and_then_no_layers_but_those_that_it_names(settled, tmp_path):
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    for modules in (None, ["q_proj"]):
        given = folder_of(tmp_path, r=4, target_parameters=experts, target_modules=modules)
        model = settled(given).actor_rollout_ref.model
        assert (list(model.target_parameters), list(model.target_modules)) == (experts, modules or [])


def test_a_key_that_is_given_keeps_its_value(settled, tmp_path):
    given = folder_of(tmp_path, r=6, lora_alpha=24)
    assert settled(given | {f"{MODEL}.lora_alpha": 8}).actor_rollout_ref.model.lora_alpha == 8
    own = settled(given | {f"{MODEL}.lora.rank": 6}).actor_rollout_ref.model
    assert (own.lora_rank, own.lora_alpha) == (6, 24)


def test_a_rank_that_the_adapters_do_not_have_is_refused(complaint, tmp_path):
    given = folder_of(tmp_path, r=6) | {f"{MODEL}.lora_rank": 4}
    assert f"{MODEL}.lora_rank=4, {MODEL}.lora_adapter_path={tmp_path}: the adapters have rank 6. Leave" in complaint(given)


def test_a_folder_that_says_nothing_leaves_the_rank_to_the_user(complaint, tmp_path):
    said = (
        f"{MODEL}.lora_rank=0, {MODEL}.lora_adapter_path={tmp_path}: adapters are given, but rank 0 means that there are none. "
    )
    assert complaint({f"{MODEL}.lora_adapter_path": str(tmp_path)}).startswith(said)
    assert complaint(folder_of(tmp_path, lora_alpha=8)).startswith(said)


@pytest.mark.parametrize("text", ["{", "[]", "\ufeff{}"])
def test_a_file_that_is_no_json_object_is_refused(complaint, tmp_path, text):
    (tmp_path / "adapter_config.json").write_text(text)
    assert f"={tmp_path}: its adapter_config.json is no JSON object." in complaint({f"{MODEL}.lora_adapter_path": str(tmp_path)})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_dora", True),
        ("rank_pattern", {"q_proj": 2}),
        ("trainable_token_indices", [5]),
        ("peft_type", "IA3"),
        ("init_lora_weights", "pissa_niter_4"),
        ("bias", "all"),
    ],
)
def test_adapters_of_another_kind_are_refused(complaint, settled, tmp_path, name, value):
    said = complaint(folder_of(tmp_path, r=4, **{name: value}))
    assert f"its adapter_config.json has {name}=" in said
    assert "Give adapters without them." in said
    assert settled(folder_of(tmp_path, r=4, **{name: None})).actor_rollout_ref.model.lora_rank == 4


def test_adapters_of_another_model_are_named(settled, tmp_path, caplog):
    other = folder_of(tmp_path, r=4, base_model_name_or_path="Qwen/Qwen3-8B-Base")
    for path, said in (("/models/Qwen3-8B", 1), ("/models/Qwen3-8B-Base", 0), ("/hub/snapshots/0a1b", 0)):
        caplog.clear()
        settled(other | {f"{MODEL}.path": path})
        assert sum("trained on Qwen/Qwen3-8B-Base" in text for text in caplog.messages) == said


def test_the_scale_of_adapters_is_read_from_their_folder(settled, tmp_path):
    model = settled(folder_of(tmp_path, r=4, lora_alpha=8, use_rslora=True)).actor_rollout_ref.model
    assert (model.use_rslora, model.lora_scale) == (True, 4.0)  # 8 / sqrt(4)


def test_a_critics_adapters_may_have_its_head_beside_them(settled, tmp_path):
    given = {**folder_of(tmp_path, r=4, modules_to_save=["score"]), "algorithm.adv_estimator": "gae"}
    given["critic.model.lora_adapter_path"] = given.pop(f"{MODEL}.lora_adapter_path")
    assert settled(given).critic.model.lora_rank == 4


@pytest.mark.parametrize("name", ["modules_to_save", "trainable_token_indices"])
def test_what_is_trained_beside_adapters_is_refused_with_its_reason(complaint, name):
    assert f"{MODEL}.{name}=[5]: " in complaint({f"{MODEL}.lora_rank": 4, f"{MODEL}.{name}": [5]})


def test_another_scale_than_that_of_the_adapters_and_their_dropout_are_named(settled, tmp_path, caplog):
    settled(folder_of(tmp_path, r=6, lora_alpha=24, lora_dropout=0.05) | {f"{MODEL}.lora_alpha": 8})
    dropout, scale = sorted(record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert scale == f"{MODEL}.lora_alpha=8: the adapters of {tmp_path} were trained with 24"
    assert dropout.endswith("the adapters were trained with dropout, and are trained on without it")


FOLLOWS = {f"{AR}.actor.use_kl_loss": True, EVERY: 32}


@pytest.mark.parametrize(
    ("more", "why", "way_out"),
    [
        ({f"{AR}.model.lora_rank": 4}, "with LoRA the reference is the policy's frozen base", f"Set {AR}.model.lora_rank=0"),
        ({f"{AR}.ref.quantization": "int8"}, "quantised weights are too coarse", f"Set {AR}.ref.quantization=none"),
        (
            {f"{AR}.model.load_mode": "mmap", f"{AR}.ref.fsdp_config.param_offload": True},
            "mapped files of the model's folder",
            f"Set {AR}.model.load_mode=stream",
        ),
        (
            {f"{AR}.ref.fsdp_config.fsdp_size": 1, "trainer.n_gpus_per_node": 2},
            "must be sharded over the same number of devices",
            f"Set {AR}.ref.fsdp_config.fsdp_size to {AR}.actor.fsdp_config.fsdp_size",
        ),
    ],
)
def test_a_reference_that_cannot_follow_is_refused_with_the_way_out(settled, more, why, way_out):
    with pytest.raises(ConfigError) as refused:
        settled(FOLLOWS | more)
    assert f"{EVERY}=32" in str(refused.value)
    assert why in str(refused.value)
    assert way_out in str(refused.value)
    settled(FOLLOWS | more | {EVERY: None})


def test_a_reference_that_follows_the_policy_is_taken_and_one_device_has_no_shards_that_could_differ(settled):
    ref = settled(FOLLOWS | {f"{AR}.ref.fsdp_config.fsdp_size": 1}).actor_rollout_ref.ref
    assert (ref.sync_every_steps, ref.sync_mixup_alpha, ref.fsdp_config.fsdp_size) == (32, 0.9, 1)


@pytest.mark.parametrize(("more", "key"), [({EVERY: 32}, EVERY), ({f"{AR}.actor.use_kl_loss": True, ALPHA: 0.5}, ALPHA)])
def test_a_key_without_effect_is_named(settled, caplog, more, key):
    with caplog.at_level(logging.WARNING):
        settled(more)
    assert f"{key}=" in caplog.text
    assert "has no effect here" in caplog.text
