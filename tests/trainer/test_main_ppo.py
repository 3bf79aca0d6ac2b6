import pytest
import yaml

from tests.config.conftest import OVERRIDES
from verl_memopt.trainer.main_ppo import main


@pytest.mark.parametrize("ask", [["--cfg", "job"], ["debug=dry"], ["debug.mode=dry"]])
def test_a_dry_run_prints_the_resolved_settings_and_starts_nothing(ask, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*OVERRIDES, "actor_rollout_ref.actor.clip_ratio=0.3", *ask]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["actor_rollout_ref"]["actor"]["clip_ratio_low"] == 0.3
    assert shown["actor_rollout_ref"]["actor"]["policy_loss"]["loss_mode"] == "vanilla"
    assert list(tmp_path.iterdir()) == []


def test_another_entry_brings_its_own_loss(capsys):
    assert main([*OVERRIDES, "--config-name", "rloo_trainer", "--cfg", "job"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["actor_rollout_ref"]["actor"]["policy_loss"]["loss_mode"] == "sequence"


@pytest.mark.parametrize(
    ("more", "kl"),
    [([], "no KL"), (["actor_rollout_ref.actor.use_kl_loss=true"], "KL in the loss 0.001 x low_var_kl")],
)
def test_what_is_trained_is_logged_and_the_settings_alone_are_printed(more, kl, capsys):
    assert main([*OVERRIDES, *more, "--cfg", "job"]) == 0
    shown = capsys.readouterr()
    assert f"objective: advantages rloo, loss vanilla (one clipped ratio per token), {kl}" in shown.err
    assert "objective" not in shown.out
