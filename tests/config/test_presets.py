"""Presets of models and of cards: every pair composes, and what a card's file claims follows from the knobs' formulas."""

import logging
from functools import cache
from itertools import cycle, product

import pytest
import yaml

from verl_memopt.config.keys import flatten, leaf_types, value_at
from verl_memopt.config.loader import PACKAGED, compose_mapping, load_settings, settings_from_mapping
from verl_memopt.errors import ConfigError
from verl_memopt.ladder.measure import UpdateSize, measure_row, row_settings
from verl_memopt.memory import profiles
from verl_memopt.model.sizes import PUBLISHED, ModelSize
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.plan.peaks import Sizes, predict
from verl_memopt.plan.verdict import Card, judge

AR = "actor_rollout_ref"
FILES = ["data.train_files=train.jsonl", "data.val_files=null"]
DYNAMIC = f"{AR}.actor.use_dynamic_bsz"
LEAST_KV_TOKENS = 8192
"""Of the KV cache: eight sequences of the default lengths."""
PARAMS = {
    "qwen2_5_0_5b": 494_032_768, "qwen2_5_1_5b": 1_543_714_304, "qwen2_5_3b": 3_085_938_688, "qwen2_5_7b": 7_615_616_512,
    "qwen3_0_6b": 596_049_920, "qwen3_1_7b": 1_720_574_976, "qwen3_4b": 4_022_468_096, "qwen3_8b": 8_190_735_360,
    "qwen2_5_14b": 14_770_033_664, "qwen2_5_32b": 32_763_876_352, "qwen3_14b": 14_768_307_200, "qwen3_32b": 32_762_123_264,
    "llama3_2_1b": 1_235_814_400, "llama3_2_3b": 3_212_749_824, "gemma3_4b": 3_880_263_168, "qwen3_30b_a3b": 30_532_122_624,
    "gpt_oss_20b": 20_914_757_184,
    "qwen3_5_0_8b": 752_393_024, "qwen3_5_4b": 4_205_751_296, "qwen3_5_9b": 8_953_803_264, "qwen3_5_27b": 26_895_998_464,
    "glm4_5_air": 106_852_245_504, "qwen3_5_35b_a3b": 34_660_610_688, "gemma4_31b": 30_697_345_340,
    "gemma4_26b_a4b": 25_233_141_790, "gemma4_e4b": 7_463_013_418,
}  # fmt: skip
"""Preset -> parameters, as the model's card says. The tiny model is none of them: it fits everywhere."""
MODELS = tuple(PARAMS)
NAMES = ("tiny", *MODELS)


@cache
def keys_of(group, name):
    return flatten(yaml.safe_load((PACKAGED / group / f"{name}.yaml").read_text()) or {})


@cache
def recipe():
    return flatten(compose_mapping("rloo_trainer", FILES)[0])


@cache
def settings_of(model, memory, **more):
    """The settings of a pair, of which a test of its own says that Hydra composes the same."""
    presets = keys_of("memory", memory) | keys_of("model", model)
    return settings_from_mapping(recipe() | presets | more, presets.keys())


def test_these_are_the_presets():
    assert {path.stem for path in (PACKAGED / "model").glob("*.yaml")} == set(NAMES)


def needed(memory):
    return {DYNAMIC: True} if memory == "none" else {}


@pytest.mark.parametrize(("model", "memory"), zip(NAMES, cycle(("none", *profiles.PROFILES))))
def test_hydra_puts_both_presets_over_the_recipe(model, memory, caplog):
    more = [f"{key}={value}" for key, value in needed(memory).items()]
    composed = load_settings("rloo_trainer", [*FILES, f"model={model}", f"memory={memory}", *more])
    assert composed == settings_of(model, memory, **needed(memory))
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("memory", ["none", *profiles.PROFILES])
def test_every_model_goes_with_every_profile_and_both_say_what_holds(memory, caplog):
    for model in NAMES:
        settings = settings_of(model, memory, **needed(memory), **{"trainer.n_gpus_per_node": 2})
        said = keys_of("memory", memory) | keys_of("model", model)
        # YAML 1.1 reads 2e-4 as text, hence the types.
        assert {key: value_at(settings, key) for key in said} == {
            key: type(value_at(settings, key))(value) for key, value in said.items()
        }
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_where_a_model_and_a_profile_set_one_key_they_agree():
    for model, memory in product(NAMES, profiles.PROFILES):
        ours, theirs = keys_of("model", model), keys_of("memory", memory)
        assert [key for key in ours.keys() & theirs.keys() if ours[key] != theirs[key]] == []


def test_a_model_wins_over_a_recipe_and_the_command_line_over_a_model(tmp_path):
    (tmp_path / "mine.yaml").write_text(f"defaults:\n  - rloo_trainer\n  - _self_\n{AR}:\n  model:\n    path: recipe\n")
    assert load_settings("mine", [*FILES, "model=qwen3_4b", "memory=24g"], str(tmp_path)).actor_rollout_ref.model.path == (
        "Qwen/Qwen3-4B"
    )
    given = load_settings("mine", [f"{AR}.model.path=mine", *FILES, "model=qwen3_4b", "memory=24g"], str(tmp_path))
    assert given.actor_rollout_ref.model.path == "mine"


@pytest.mark.parametrize(
    ("by_size", "by_name"),
    [
        ("[rloo_trainer, {memory: 32}, _self_]", "[rloo_trainer, {memory: 32g}, _self_]"),
        ("\n  - rloo_trainer\n  - memory: '24 GB'  # the card\n  - _self_", "[rloo_trainer, {memory: 24g}, _self_]"),
        ("[base, _self_, {override memory: 24}]", "[rloo_trainer, {memory: 24g}, _self_]"),
        ("[base, _self_]", "[rloo_trainer, {memory: 80g}, _self_]"),
    ],
)
def test_a_file_may_name_a_profile_by_the_size_of_a_card_as_a_command_line_may(tmp_path, by_size, by_name):
    (tmp_path / "base.yaml").write_text("defaults: [rloo_trainer, {memory: 80}, _self_]\n")
    rest = f"{AR}: {{model: {{path: mine}}, actor: {{optim: {{lr: 2e-6}}}}}}\n"
    for name, defaults in (("size", by_size), ("name", by_name)):
        (tmp_path / f"{name}.yaml").write_text(f"# Größe\ndefaults: {defaults}\n{rest}", encoding="utf-8")
    assert load_settings("size", FILES, str(tmp_path)) == load_settings("name", FILES, str(tmp_path))
    assert {file.name for file in tmp_path.iterdir()} == {"base.yaml", "size.yaml", "name.yaml"}


def test_a_size_that_no_profile_has_is_refused_with_the_file(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults:\n  - rloo_trainer\n  - memory: 13\n  - _self_\n")
    with pytest.raises(
        ConfigError, match=r"mine\.yaml: memory=13: no profile is for a card of that size\. Choose one of .*memory=12g"
    ):
        load_settings("mine", FILES, str(tmp_path))


@pytest.mark.parametrize("model", NAMES)
def test_a_model_leaves_lengths_to_the_user(model):
    assert not [key for key in keys_of("model", model) if key.startswith("data.")]
    assert keys_of("model", model).keys() <= leaf_types().keys()


@pytest.mark.parametrize("model", MODELS)
def test_the_published_sizes_have_the_parameters_of_the_model_cards(model):
    size = PUBLISHED[keys_of("model", model)[f"{AR}.model.path"]]
    assert size.params == PARAMS[model]
    file = (PACKAGED / "model" / f"{model}.yaml").read_text()
    assert f"{size.params / 1e9:.2f} billion parameters" in file
    assert ("tied head" in file) == size.tied


@pytest.mark.parametrize(("model", "cards", "card"), [("qwen3_8b", 8, "24g"), ("qwen2_5_7b", 4, "32g")])
def test_large_multi_gpu_shares_a_model_over_cards(model, cards, card):
    more = {"trainer.n_gpus_per_node": cards, f"{AR}.rollout.tensor_model_parallel_size": 2}
    more[f"{AR}.actor.ppo_max_token_len_per_gpu"] = 8192
    verdict = judge(settings_of(model, "large_multi_gpu", **more), Card.of(int(card.removesuffix("g"))))
    assert verdict.fits, verdict.line
    assert verdict.peaks.kv_tokens >= LEAST_KV_TOKENS


CONSTRAINED = (
    f"{AR}.model.enable_gradient_checkpointing=true", f"{AR}.model.logprob_chunk_tokens=64",
    *(f"{AR}.{role}.fsdp_config.{key}" for role in ("actor", "ref") for key in ("dtype=bfloat16", "param_offload=true")),
    f"{AR}.actor.fsdp_config.optimizer_offload=true", f"{AR}.actor.optim.bucket_megabytes=1",
    f"{AR}.rollout.dtype=bfloat16", f"{AR}.rollout.free_cache_engine=true",
    f"{AR}.actor.ppo_max_token_len_per_gpu=512", f"{AR}.rollout.log_prob_max_token_len_per_gpu=1024",
)  # fmt: skip
HALF_BUDGETS = (
    f"{AR}.actor.policy_loss.loss_mode=sequence",
    f"{AR}.actor.ppo_max_token_len_per_gpu=256", f"{AR}.rollout.log_prob_max_token_len_per_gpu=512",
)  # fmt: skip
WORK = UpdateSize(rows=4, prompt=256, response=128, group=2)
SMALL = UpdateSize(rows=2, prompt=128, response=64, group=2)


@pytest.mark.parametrize(
    ("work", "shape", "more"),
    [
        pytest.param(WORK if name != "vocabulary" else SMALL, *case, id=name, marks=pytest.mark.slow)
        for name, case in {
            "vocabulary": ({"vocab_size": 8192, "num_layers": 2, "tie_embeddings": False}, HALF_BUDGETS),
            "blocks": ({"vocab_size": 512, "num_layers": 8}, (f"{AR}.model.enable_activation_offload=true",)),
            "lora": (
                {"vocab_size": 512, "num_layers": 6},
                (f"{AR}.model.lora_rank=8", f"{AR}.actor.fsdp_config.model_dtype=bfloat16"),
            ),
        }.items()
    ],
)
def test_the_arithmetic_holds_for_a_real_update(work, shape, more, tmp_path):
    """The bytes that a small model's phases hold on a CPU: never 4 % more than estimated, and at most 30 % less."""
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    folder = make_tiny_model(tmp_path / "model", TinyShape(**sizes | shape))
    settings = [*CONSTRAINED, *more]
    row = measure_row(folder, work, "", tuple(settings))
    tiny = TinyShape(**sizes | shape)
    size = ModelSize(256, 768, tiny.num_layers, 4, 2, 64, tiny.vocab_size, tiny.tie_embeddings, qk_norm=True)
    phases = ("old_log_prob", "ref", "update_actor", "update_weights")
    estimated = predict(row_settings(str(folder), work, settings), Sizes(size), phases, "cpu").totals
    ratios = {phase: row.phases[phase] / estimated[phase] for phase in phases}
    assert all(0.7 <= ratio <= 1 for ratio in ratios.values()), ratios
