from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from verl_memopt.config.links import resolve_links
from verl_memopt.config.loader import load_settings, settings_from_mapping
from verl_memopt.config.plain import save_yaml
from verl_memopt.config.schema import Actor, ActorRolloutRef, Algorithm, Data, Model, PolicyLoss, Rollout, Settings
from verl_memopt.errors import ConfigError

LEAST = [
    "data.train_files=train.jsonl",
    "data.val_files=null",
    "actor_rollout_ref.model.path=folder",
    "actor_rollout_ref.actor.use_dynamic_bsz=true",
]


def refused(overrides: list[str], name: str = "rloo_trainer", folder: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(name, overrides, None if folder is None else str(folder))
    return str(caught.value)


def test_rloo_trainer_equals_the_settings_written_in_python():
    by_hand = Settings(
        data=Data(train_files="train.jsonl", val_files=None),
        actor_rollout_ref=ActorRolloutRef(
            model=Model(path="folder"),
            actor=Actor(use_dynamic_bsz=True, policy_loss=PolicyLoss(loss_mode="sequence")),
            rollout=Rollout(name="vllm", n=4),
        ),
    )
    assert load_settings("rloo_trainer", LEAST) == resolve_links(by_hand)


def test_grpo_trainer_equals_the_settings_written_in_python():
    by_hand = Settings(
        data=Data(train_files="train.jsonl", val_files=None),
        actor_rollout_ref=ActorRolloutRef(
            model=Model(path="folder"),
            actor=Actor(use_dynamic_bsz=True, use_kl_loss=True, kl_loss_coef=0.001),
            rollout=Rollout(name="vllm", n=8),
        ),
        algorithm=Algorithm(adv_estimator="grpo"),
    )
    assert load_settings("grpo_trainer", LEAST) == resolve_links(by_hand)


@pytest.mark.parametrize("name", ["rloo_trainer", "grpo_trainer"])
def test_packaged_configs_warn_of_nothing(name, caplog):
    load_settings(name, LEAST)
    assert caplog.messages == []


def test_packaged_configs_lack_only_the_files_the_model_and_the_micro_batch():
    lines = refused([]).splitlines()
    assert lines[0] == "4 problems in the settings:"
    assert [line.split(":")[0].split("=")[0] for line in lines[1:]] == [
        "data.train_files",
        "data.val_files",
        "actor_rollout_ref.model.path",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    ]


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_every_way_to_write_an_override_sets_keys_in_and_out_of_the_yaml(prefix):
    settings = load_settings("rloo_trainer", [*LEAST, f"{prefix}data.seed=7", f"{prefix}actor_rollout_ref.rollout.n=2"])
    assert (settings.data.seed, settings.actor_rollout_ref.rollout.n) == (7, 2)


def test_a_later_override_wins():
    assert load_settings("rloo_trainer", [*LEAST, "data.seed=7", "data.seed=8"]).data.seed == 8


def test_deleting_a_key_brings_its_default_back():
    settings = load_settings("rloo_trainer", [*LEAST, "~actor_rollout_ref.actor.policy_loss"])
    assert settings.actor_rollout_ref.actor.policy_loss.loss_mode == "vanilla"


def test_deleting_a_key_that_nothing_sets_is_an_error():
    assert "data.seed" in refused([*LEAST, "~data.seed"])


@pytest.mark.parametrize(("override", "mode"), [("debug=dry", "dry"), ("+debug=dry", "dry"), ("debug=off", "off")])
def test_the_debug_group_sets_the_mode(override, mode):
    assert load_settings("rloo_trainer", [*LEAST, override]).debug.mode == mode


def test_an_unknown_group_choice_is_refused_with_the_choices():
    message = refused([*LEAST, "debug=rollout_only"])
    assert "debug/rollout_only" in message
    assert "dry off" in message
    assert "search path" not in message


def test_values_keep_their_types_through_composition():
    more = ["actor_rollout_ref.actor.optim.lr=1e-6", "trainer.logger=[console]", "data.shuffle=False"]
    more += ["actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space=4", "actor_rollout_ref.actor.optim.betas=[0.9,0.95]"]
    settings = load_settings("rloo_trainer", LEAST + more)
    assert settings.actor_rollout_ref.actor.optim.lr == 1e-6
    assert settings.actor_rollout_ref.actor.optim.betas == (0.9, 0.95)
    assert settings.trainer.logger == ["console"]
    assert settings.data.shuffle is False
    assert settings.actor_rollout_ref.rollout.engine_kwargs.vllm == {"swap_space": 4}


def test_an_interpolation_reaches_defaults_that_no_yaml_sets():
    more = ["data.max_response_length=${data.max_prompt_length}", "data.max_prompt_length=100"]
    assert load_settings("rloo_trainer", LEAST + more).data.max_response_length == 100
    more = ["actor_rollout_ref.actor.data_loader_seed=${actor_rollout_ref.actor.fsdp_config.seed}"]
    assert load_settings("rloo_trainer", LEAST + more).actor_rollout_ref.actor.data_loader_seed == 42


def test_an_interpolation_of_nothing_is_an_error():
    assert "nowhere" in refused([*LEAST, "data.seed=${nowhere}"])


@pytest.mark.parametrize(
    "override", ["data=[", "data.seed", "=3", "data.seed=1,2", "hydra.run.dir=elsewhere", "debug=3", "debug={mode: dry}"]
)
def test_an_override_that_cannot_be_taken_is_named(override):
    assert refused([*LEAST, override]).startswith(f"{override}: ")


def test_all_bad_overrides_are_named_together():
    message = refused([*LEAST, "data=[", "data.seed=1,2"])
    assert "data=[: " in message
    assert "data.seed=1,2: " in message


def test_a_value_below_a_value_is_refused():
    assert "data.seed" in refused([*LEAST, "data.seed=1", "data.seed.x=2"])


def test_an_unknown_config_name_is_refused_with_the_known_ones():
    assert refused(LEAST, "ppo_trainer") == "config_name=ppo_trainer: no such config. Choose one of grpo_trainer, rloo_trainer."


def test_a_recipe_stands_on_a_packaged_config_and_below_the_command_line(tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        "defaults: [rloo_trainer, _self_]\n"
        "data: {train_files: [a.jsonl], val_files: null, seed: 1, max_prompt_length: 64}\n"
        "actor_rollout_ref: {model: {path: folder}, rollout: {n: 6}, actor: {use_dynamic_bsz: true, optim: {lr: 1e-6}}}\n"
    )
    settings = load_settings("recipe", ["data.seed=2", "debug=dry"], str(tmp_path))
    assert settings.data.train_files == ["a.jsonl"]
    assert (settings.data.seed, settings.data.max_prompt_length, settings.debug.mode) == (2, 64, "dry")
    assert settings.actor_rollout_ref.rollout.n == 6
    assert settings.actor_rollout_ref.actor.policy_loss.loss_mode == "sequence"
    assert settings.actor_rollout_ref.actor.optim.lr == 1e-6


def test_a_recipe_folder_may_hold_groups_and_odd_letters(tmp_path):
    folder = tmp_path / "it's a folder"
    (folder / "size").mkdir(parents=True)
    (folder / "size" / "small.yaml").write_text("# @package _global_\ndata: {train_batch_size: 256}\n")
    (folder / "recipe.yaml").write_text("defaults: [grpo_trainer, _self_]\n")
    assert load_settings("recipe", [*LEAST, "+size=small"], str(folder)).data.train_batch_size == 256


def test_a_missing_recipe_folder_is_named(tmp_path):
    assert refused([], "recipe", tmp_path / "absent").startswith(f"config_dir={tmp_path / 'absent'}: no such folder")


def test_a_recipe_that_is_no_yaml_is_an_error(tmp_path):
    (tmp_path / "recipe.yaml").write_text("data: {train_files: [\n")
    assert "recipe" in refused([], "recipe", tmp_path)


def test_a_section_left_empty_in_a_recipe_is_named(tmp_path):
    (tmp_path / "recipe.yaml").write_text("defaults: [rloo_trainer, _self_]\ntrainer:\n")
    assert "trainer=null: this is a section, not a key" in refused(LEAST, "recipe", tmp_path)


def test_hydra_keeps_no_state_after_success_and_failure():
    load_settings("rloo_trainer", LEAST)
    assert not GlobalHydra.instance().is_initialized()
    refused([*LEAST, "debug=nothing"])
    assert not GlobalHydra.instance().is_initialized()


def test_a_saved_config_loads_to_equal_settings(tmp_path):
    more = ["trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.optim.betas=[0.9,0.95]", "trainer.experiment_name='2024'"]
    settings = load_settings("grpo_trainer", LEAST + more)
    save_yaml(settings, tmp_path / "config.yaml")
    assert load_settings("config", [], str(tmp_path)) == settings


def test_a_nested_mapping_and_dotted_keys_build_the_same(settled, least):
    nested = {"data": {"train_files": "train.jsonl", "val_files": None, "sampler": {}}, "actor_rollout_ref": {}}
    nested["actor_rollout_ref"] = {
        "model": {"path": "folder"},
        "rollout": {"name": "hf", "n": 4},
        "actor": {"use_dynamic_bsz": True},
    }
    assert settings_from_mapping(nested) == settled({})
