import json
from functools import cache
from pathlib import Path

import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra

from verl_memopt.config.keys import flatten, leaf_types, leaf_values, value_at
from verl_memopt.config.loader import PACKAGED, compose_mapping, load_settings, settings_from_mapping, to_plain, to_yaml
from verl_memopt.config.schema import Actor, ActorRolloutRef, Algorithm, Data, Model, PolicyLoss, Rollout, Settings
from verl_memopt.config.values import followers_of, with_links
from verl_memopt.errors import ConfigError

LEAST = [
    "data.train_files=train.jsonl",
    "data.val_files=null",
    "actor_rollout_ref.model.path=folder",
    "actor_rollout_ref.actor.use_dynamic_bsz=true",
]

AR = "actor_rollout_ref"
RECIPES = Path(__file__).parents[2] / "recipe" / "rloo"
ENTRIES = [(path.stem, None) for path in sorted(PACKAGED.glob("*.yaml"))]
ENTRIES += [(path.stem, str(RECIPES)) for path in sorted(RECIPES.glob("*.yaml"))]
"""Every config that a command can name: (name, folder)."""

VERL_COMMON = [
    *("data.train_files=train.parquet", "data.val_files=test.parquet", "data.train_batch_size=1024"),
    *("data.max_prompt_length=512", "data.max_response_length=1024", "data.filter_overlong_prompts=True"),
    *("data.truncation='error'", f"{AR}.model.path=Qwen/Qwen2-7B-Instruct", f"{AR}.actor.optim.lr=1e-6"),
    *(f"{AR}.model.use_remove_padding=True", f"{AR}.actor.ppo_mini_batch_size=256"),
    *(f"{AR}.model.enable_gradient_checkpointing=True", f"{AR}.actor.fsdp_config.param_offload=False"),
    *(f"{AR}.actor.fsdp_config.optimizer_offload=False", f"{AR}.rollout.tensor_model_parallel_size=2"),
    *(f"{AR}.rollout.name=vllm", f"{AR}.rollout.gpu_memory_utilization=0.6", f"{AR}.rollout.n=5"),
    *(f"{AR}.ref.fsdp_config.param_offload=True", "trainer.critic_warmup=0", "trainer.logger=['console','wandb']"),
    *("trainer.n_gpus_per_node=8", "trainer.nnodes=1", "trainer.test_freq=5", "trainer.total_epochs=15"),
    *(f"{AR}.actor.ppo_micro_batch_size_per_gpu=40", f"{AR}.rollout.log_prob_micro_batch_size_per_gpu=40"),
    *(f"{AR}.ref.log_prob_micro_batch_size_per_gpu=40",),
]
"""What verl's example scripts for GRPO and RLOO (examples/*/run_qwen2-7b.sh) give alike."""
VERL_GRPO = [
    *("algorithm.adv_estimator=grpo", f"{AR}.actor.use_kl_loss=True", f"{AR}.actor.kl_loss_coef=0.001"),
    *(f"{AR}.actor.kl_loss_type=low_var_kl", f"{AR}.actor.entropy_coeff=0", "algorithm.use_kl_in_reward=False"),
]
VERL_RLOO = [
    *("algorithm.adv_estimator=rloo", f"{AR}.actor.use_kl_loss=False", "algorithm.use_kl_in_reward=True"),
    *("algorithm.kl_penalty=kl", "algorithm.kl_ctrl.kl_coef=0.001"),
]


def set_by_files(name, folder):
    """The dotted keys that a config and the configs under it write down, read as plain YAML."""
    path = PACKAGED / f"{name}.yaml" if folder is None else Path(folder) / f"{name}.yaml"
    document = yaml.safe_load(path.read_text())
    below = [item for item in document.pop("defaults") if isinstance(item, str) and item != "_self_"]
    found = {}
    for base in below:
        found |= set_by_files(base, None)
    return found | flatten(document)


def differing(one, other):
    return {key for key in leaf_types() if value_at(one, key) != value_at(other, key)}


@cache
def by_default(given):
    return load_settings("ppo_trainer", list(given))


def refused(overrides, name="rloo_trainer", folder=None):
    with pytest.raises(ConfigError) as caught:
        load_settings(name, overrides, None if folder is None else str(folder))
    return str(caught.value)


@pytest.mark.parametrize(
    ("estimator", "actor", "n"),
    [
        ("rloo", Actor(use_dynamic_bsz=True, policy_loss=PolicyLoss(loss_mode="sequence")), 4),
        ("grpo", Actor(use_dynamic_bsz=True, use_kl_loss=True, kl_loss_coef=0.001), 8),
    ],
)
def test_a_trainer_equals_the_settings_written_in_python_and_warns_of_nothing(estimator, actor, n, caplog):
    by_hand = Settings(
        data=Data(train_files="train.jsonl", val_files=None),
        actor_rollout_ref=ActorRolloutRef(model=Model(path="folder"), actor=actor, rollout=Rollout(name="vllm", n=n)),
        algorithm=Algorithm(adv_estimator=estimator),
    )
    assert leaf_values(load_settings(f"{estimator}_trainer", LEAST)) == with_links(leaf_values(by_hand))
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


@pytest.mark.parametrize("prefix", ["+", "++"])
def test_every_way_to_write_an_override_sets_keys_in_and_out_of_the_yaml(prefix):
    settings = load_settings("rloo_trainer", [*LEAST, f"{prefix}data.seed=7", f"{prefix}actor_rollout_ref.rollout.n=2"])
    assert (settings.data.seed, settings.actor_rollout_ref.rollout.n) == (7, 2)


def test_a_later_override_wins_and_deleting_a_key_brings_its_default_back():
    settings = load_settings("rloo_trainer", [*LEAST, "data.seed=7", "data.seed=8", "~actor_rollout_ref.actor.policy_loss"])
    assert (settings.data.seed, settings.actor_rollout_ref.actor.policy_loss.loss_mode) == (8, "vanilla")


def test_the_debug_group_sets_the_mode_with_a_plus_too_and_an_unknown_choice_is_refused_with_the_choices():
    assert load_settings("rloo_trainer", [*LEAST, "+debug=dry"]).debug.mode == "dry"
    message = refused([*LEAST, "debug=rollouts"])
    assert message.startswith(
        "debug=rollouts: there is no such preset. Did you mean debug=rollout_only? There are deterministic, dry, "
    )


def test_values_keep_their_types_through_composition():
    more = ["actor_rollout_ref.actor.optim.lr=1e-6", "trainer.logger=[console]", "data.shuffle=False"]
    more += ["actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space=4", "actor_rollout_ref.actor.optim.betas=[0.9,0.95]"]
    settings = load_settings("rloo_trainer", LEAST + more)
    assert settings.actor_rollout_ref.actor.optim.lr == 1e-6
    assert settings.actor_rollout_ref.actor.optim.betas == (0.9, 0.95)
    assert settings.trainer.logger == ["console"]
    assert settings.data.shuffle is False
    assert settings.actor_rollout_ref.rollout.engine_kwargs.vllm == {"swap_space": 4}


def test_an_interpolation_reaches_defaults_that_no_yaml_sets_and_one_of_nothing_is_an_error():
    more = ["data.max_response_length=${data.max_prompt_length}", "data.max_prompt_length=100"]
    more += ["actor_rollout_ref.actor.data_loader_seed=${actor_rollout_ref.actor.fsdp_config.seed}"]
    settings = load_settings("rloo_trainer", LEAST + more)
    assert (settings.data.max_response_length, settings.actor_rollout_ref.actor.data_loader_seed) == (100, 42)
    assert "nowhere" in refused([*LEAST, "data.seed=${nowhere}"])


@pytest.mark.parametrize(
    "override", ["data=[", "data.seed", "=3", "data.seed=1,2", "hydra.run.dir=elsewhere", "debug=3", "debug={mode: dry}"]
)
def test_an_override_that_cannot_be_taken_is_named(override):
    assert refused([*LEAST, override]).startswith(f"{override}: ")


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["data=[", "data.seed=1,2"], ["data=[: ", "data.seed=1,2: "]),
        (["data.seed=1", "data.seed.x=2"], ["data.seed"]),
        (["~data.seed"], ["data.seed"]),
    ],
    ids=["all bad ones together", "a value below a value", "a key to delete that nothing sets"],
)
def test_overrides_that_do_not_go_together_are_named(overrides, named):
    message = refused([*LEAST, *overrides])
    assert all(text in message for text in named)


def test_verls_commands_train_verls_losses_under_the_default_entry():
    settings = load_settings("ppo_trainer", VERL_COMMON + VERL_GRPO)
    actor, algorithm = settings.actor_rollout_ref.actor, settings.algorithm
    assert (algorithm.adv_estimator, algorithm.norm_adv_by_std_in_grpo) == ("grpo", True)
    assert (actor.policy_loss.loss_mode, actor.loss_agg_mode) == ("vanilla", "token-mean")
    assert (actor.use_kl_loss, actor.kl_loss_coef, actor.kl_loss_type) == (True, 0.001, "low_var_kl")
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_c) == (0.2, 0.2, 3.0)
    assert not algorithm.use_kl_in_reward
    settings = load_settings("ppo_trainer", VERL_COMMON + VERL_RLOO)
    actor, algorithm = settings.actor_rollout_ref.actor, settings.algorithm
    assert (actor.policy_loss.loss_mode, actor.use_kl_loss) == ("vanilla", False)
    assert (algorithm.use_kl_in_reward, algorithm.kl_penalty, algorithm.kl_ctrl.kl_coef) == (True, "kl", 0.001)


@pytest.mark.parametrize(
    ("name", "folder", "given"),
    [(*entry, VERL_COMMON + (VERL_GRPO, VERL_RLOO)[number % 2]) for number, entry in enumerate(ENTRIES)],
)
def test_a_command_means_the_same_under_every_entry_but_for_the_keys_that_the_entry_writes_down(name, folder, given):
    settings = load_settings(name, given, folder)
    allowed = followers_of(set_by_files(name, folder)) - {line.split("=")[0] for line in given}
    assert differing(settings, by_default(tuple(given))) <= allowed


@pytest.mark.parametrize(("name", "folder"), ENTRIES)
def test_an_entry_composes_the_keys_of_its_files_and_no_other(name, folder):
    composed, written = flatten(compose_mapping(name, [], folder)[0]), set_by_files(name, folder)
    written |= {key: written[value[2:-1]] for key, value in written.items() if str(value).startswith("${")}
    # YAML 1.1 reads 1e-4 as text, Hydra as a number.
    assert {key: str(value) for key, value in composed.items() if key != "debug.mode"} == {
        key: str(float(value)) if str(value).endswith(("e-4", "e-6")) else str(value) for key, value in written.items()
    }


def test_the_default_entry_sets_nothing_and_is_ppo_with_a_critic_of_the_policys_model():
    assert set_by_files("ppo_trainer", None) == {}
    settings = load_settings("ppo_trainer", [*LEAST, f"{AR}.rollout.name=hf"])
    assert (settings.algorithm.adv_estimator, settings.critic.optim.lr) == ("gae", 1e-5)
    assert settings.critic.model.path == settings.actor_rollout_ref.model.path


def test_an_unknown_config_name_is_refused_with_the_known_ones():
    known, way_out = (
        "distill_trainer, grpo_trainer, ppo_trainer, rloo_trainer, sft_trainer",
        "For one of your own give --config-dir as well.",
    )
    assert refused(LEAST, "dpo_trainer") == f"config_name=dpo_trainer: no such config. Choose one of {known}. {way_out}"


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


def test_the_config_path_of_verls_scripts_is_the_packaged_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("config", "./config"):
        assert compose_mapping("rloo_trainer.yaml", [], path) == compose_mapping("rloo_trainer", [])
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "mine.yaml").write_text("trainer:\n  nnodes: 3\n")
    assert compose_mapping("mine", [], "config") == ({"trainer": {"nnodes": 3}}, {})


def test_a_recipe_that_is_missing_no_yaml_or_has_an_empty_section_is_named(tmp_path):
    assert refused([], "recipe", tmp_path / "absent").startswith(f"config_dir={tmp_path / 'absent'}: no such folder")
    for text, said in (
        ("data: {train_files: [\n", "recipe"),
        ("defaults: [rloo_trainer, _self_]\ntrainer:\n", "trainer=null: this is a section, not a key"),
    ):
        (tmp_path / "recipe.yaml").write_text(text)
        assert said in refused(LEAST, "recipe", tmp_path)


def test_hydra_keeps_no_state_after_success_and_failure():
    load_settings("rloo_trainer", LEAST)
    assert not GlobalHydra.instance().is_initialized()
    refused([*LEAST, "debug=nothing"])
    assert not GlobalHydra.instance().is_initialized()


def test_a_saved_config_loads_to_equal_settings(tmp_path):
    more = ["trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.optim.betas=[0.9,0.95]", "trainer.experiment_name='2024'"]
    settings = load_settings("grpo_trainer", [*LEAST, *more, "trainer.project_name='ünïcode: #1'"])
    (tmp_path / "config.yaml").write_text(to_yaml(settings), encoding="utf-8")
    assert yaml.safe_load(to_yaml(settings)) == to_plain(settings)
    assert load_settings("config", [], str(tmp_path)) == settings


def test_a_nested_mapping_and_dotted_keys_build_the_same(settled):
    roles = {"model": {"path": "folder"}, "rollout": {"name": "hf", "n": 4}, "actor": {"use_dynamic_bsz": True}}
    nested = {"data": {"train_files": "train.jsonl", "val_files": None, "sampler": {}}, "actor_rollout_ref": roles}
    assert settings_from_mapping(nested | {"algorithm": {"adv_estimator": "rloo"}}) == settled({})


def test_an_argument_of_spaces_alone_is_left_out_with_one_warning(caplog):
    assert load_settings("ppo_trainer", [*LEAST, " ", ""]) == load_settings("ppo_trainer", [*LEAST])
    assert [record.getMessage() for record in caplog.records if "only spaces" in record.getMessage()] == [
        "an argument that has only spaces is ignored: a backslash with a space after it does not continue a line"
    ]


def test_the_plain_tree_holds_every_key_and_only_plain_values_of_its_own(settled):
    settings = settled({"ray_kwargs.ray_init": {"num_cpus": 2}})
    plain = to_plain(settings)
    assert list(plain) == list(yaml.safe_load(to_yaml(settings)))
    plain["ray_kwargs"]["ray_init"]["num_cpus"] = 3
    assert settings.ray_kwargs.ray_init == {"num_cpus": 2}
    plain = to_plain(settled({}))
    assert list(flatten(plain)) == list(leaf_types())
    assert json.loads(json.dumps(plain)) == plain
