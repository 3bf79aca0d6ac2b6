import pytest
import yaml

from verl_memopt.trainer.main_ppo import build_parser, main

LEAST = [
    "data.train_files=train.jsonl",
    "data.val_files=null",
    "actor_rollout_ref.model.path=folder",
    "actor_rollout_ref.rollout.name=hf",
    "actor_rollout_ref.actor.use_dynamic_bsz=true",
]


def test_options_may_stand_before_between_and_after_overrides():
    parsed = build_parser("prog").parse_intermixed_args(["a=1", "--config-name", "toy", "b=2", "--config-path", "recipe"])
    assert (parsed.config_name, parsed.config_dir, parsed.overrides) == ("toy", "recipe", ["a=1", "b=2"])


def test_without_a_name_the_rloo_config_is_meant():
    parsed = build_parser("prog").parse_args([])
    assert (parsed.config_name, parsed.config_dir, parsed.cfg) == ("rloo_trainer", None, None)


@pytest.mark.parametrize("ask", [["--cfg", "job"], ["debug=dry"], ["debug.mode=dry"]])
def test_a_dry_run_prints_the_resolved_settings_and_starts_nothing(ask, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*LEAST, "actor_rollout_ref.actor.clip_ratio=0.3", *ask]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["actor_rollout_ref"]["actor"]["clip_ratio_low"] == 0.3
    assert shown["actor_rollout_ref"]["actor"]["policy_loss"]["loss_mode"] == "sequence"
    assert list(tmp_path.iterdir()) == []


def test_the_grpo_config_is_another(capsys):
    assert main([*LEAST, "--config-name", "grpo_trainer", "--cfg", "job"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["algorithm"]["adv_estimator"] == "grpo"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*LEAST, "trainer.total_epoch=1"], "ConfigError: trainer.total_epoch"),
        (LEAST[1:], "ConfigError: data.train_files"),
        ([*LEAST, "--config-name", "nothing"], "ConfigError: "),
    ],
)
def test_a_users_mistake_is_one_message_on_standard_error_and_exit_code_2(arguments, said, capsys):
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""
