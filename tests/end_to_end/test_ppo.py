"""PPO with a critic on the toy task, from the command line."""

import itertools
import json
import math

import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.runs import LOCAL, ROOT, assert_nine_of_ten_seeds_learn, learned, settings_of, steps_here
from verl_memopt.cli import main

AR = "actor_rollout_ref"
FSDP = "critic.model.fsdp_config"
SHORT = [
    *LOCAL, "trainer.val_before_train=false", "trainer.test_freq=-1",
    "data.train_batch_size=8", f"{AR}.actor.ppo_mini_batch_size=4", f"{AR}.rollout.n=4",
]  # fmt: skip
OFFLOADED = [
    *(f"{fsdp}.{key}=true" for fsdp in (FSDP, f"{AR}.actor.fsdp_config") for key in ("param_offload", "optimizer_offload")),
    f"{AR}.rollout.free_cache_engine=true",
]
"""Policy and critic take turns on the device, and the engine sleeps outside of the rollout. It changes no number, so most tests
have it on."""


def command(toy, run_dir, *overrides):
    return ["train", "--config-dir", str(ROOT / "recipe" / "ppo"), "--config-name", "toy", *settings_of(toy, run_dir), *overrides]


def train_ppo(toy, run_dir, *overrides):
    return steps_here(toy, run_dir, *overrides, config=("toy", ROOT / "recipe" / "ppo"))


def test_the_toy_task_is_learned_in_few_steps_with_a_critic_that_learns_its_returns(toy, tmp_path):
    counted = ["trainer.track_memory_every_steps=10", "trainer.total_training_steps=6", "trainer.test_freq=6"]
    rows = train_ppo(toy, tmp_path, *LOCAL, *OFFLOADED, *counted)
    score = "val-core/toy/arithmetic/reward/mean@1"
    assert rows[0][score] <= 0.5
    assert rows[6][score] >= 0.9
    first, last = rows[1], rows[6]
    # The value head starts at 0, so that the first advantages are the whitened returns.
    assert first["critic/values/max"] == first["critic/values/min"] == 0
    assert first["critic/returns/mean"] == pytest.approx(first["critic/score/mean"], abs=1e-6)
    assert first["critic/vf_explained_var"] == pytest.approx(0, abs=1e-3)
    assert first["critic/advantages/mean"] == pytest.approx(0, abs=1e-5)
    assert last["critic/vf_loss"] < first["critic/vf_loss"] / 2
    assert abs(last["critic/values/mean"] - last["critic/returns/mean"]) < 0.5
    for row in (first, last):
        assert row["critic/grad_norm"] > 0
        assert row["critic/lr"] == pytest.approx(1e-3)
        assert row["critic/skipped_updates"] == row["actor/skipped_updates"] == 0
        assert math.isfinite(row["critic/vpred_mean"])
        assert 0 <= row["critic/vf_clipfrac"] <= 1
        assert {"timing_s/values", "timing_s/update_critic"} <= row.keys()
    assert {"memory/values/peak_allocated_gb", "memory/update_critic/peak_allocated_gb"} <= first.keys()


def test_where_the_critic_rests_changes_no_number(toy, tmp_path):
    kept = train_ppo(toy, tmp_path / "kept", *SHORT, "trainer.total_training_steps=2")
    moved = train_ppo(toy, tmp_path / "moved", *SHORT, *OFFLOADED, "trainer.total_training_steps=2")
    for step in (1, 2):
        for name in ("critic/vf_loss", "critic/grad_norm", "actor/pg_loss", "actor/grad_norm", "critic/score/mean"):
            assert moved[step][name] == pytest.approx(kept[step][name], rel=1e-6), name


def test_a_resumed_run_equals_an_uninterrupted_one(toy, tmp_path):
    more = [*SHORT, *OFFLOADED, f"{AR}.rollout.temperature=1.5", "trainer.save_freq=1"]
    whole = train_ppo(toy, tmp_path / "whole", *more, "trainer.total_training_steps=3")
    train_ppo(toy, tmp_path / "parts", *more, "trainer.total_training_steps=1")
    parts = train_ppo(toy, tmp_path / "parts", *more, "trainer.total_training_steps=3")
    assert [learned(parts[step]) for step in (1, 2, 3)] == [learned(whole[step]) for step in (1, 2, 3)]
    folder = tmp_path / "parts" / "global_step_3"
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"actor", "critic"}
    files = json.loads((folder / "meta.json").read_text())["files"]
    assert any(name.startswith("actor/") for name in files)
    assert any(name.startswith("critic/") for name in files)


def test_a_warm_up_trains_the_critic_and_leaves_the_policy_as_it_is(toy, tmp_path):
    more = [*SHORT, *OFFLOADED, "trainer.critic_warmup=3", "trainer.save_freq=1", "trainer.total_training_steps=3"]
    more.append("trainer.max_actor_ckpt_to_keep=null")
    parts = [f"{role}.checkpoint.save_contents=[model,optimizer,extra,hf_model]" for role in (f"{AR}.actor", "critic")]
    rows = train_ppo(toy, tmp_path, *more, *parts)
    started = load_file(toy / "model" / "model.safetensors")
    policies, critics = (
        [load_file(tmp_path / f"global_step_{step}" / role / "huggingface" / "model.safetensors") for step in (1, 2, 3)]
        for role in ("actor", "critic")
    )
    for step, policy in enumerate(policies, start=1):
        unchanged = all(torch.equal(policy[name], started[name]) for name in policy)
        assert unchanged == (step <= 2)
        assert ("actor/grad_norm" in rows[step]) == (step == 3)
        assert rows[step]["critic/grad_norm"] > 0
        assert rows[step]["training/log_probs_not_finite"] == 0
        assert rows[step]["rollout/logprob_diff_max"] <= 1e-4
    for one, next_one in itertools.pairwise(critics):
        assert any(not torch.equal(one[name], next_one[name]) for name in one)


def test_the_kl_in_the_reward_is_taken_off_at_each_token(toy, tmp_path):
    more = ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.5", "algorithm.kl_ctrl.type=adaptive"]
    more += ["algorithm.kl_penalty=low_var_kl", "algorithm.lam=0.9", "algorithm.gamma=0.95", f"{AR}.actor.entropy_coeff=0.01"]
    rows = train_ppo(toy, tmp_path, *SHORT, *more, "trainer.total_training_steps=2", f"{AR}.rollout.temperature=1.5")
    assert rows[1]["actor/reward_kl_penalty"] == 0 < rows[2]["actor/reward_kl_penalty"]
    assert rows[2]["actor/reward_kl_penalty_coeff"] != 0.5
    assert rows[2]["critic/rewards/mean"] < rows[2]["critic/score/mean"]
    assert rows[1]["critic/returns/min"] < rows[1]["critic/returns/max"]
    assert rows[2]["actor/skipped_updates"] == rows[2]["critic/skipped_updates"] == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_nine_of_ten_seeds_learn_in_a_shortened_run(tmp_path):
    def run(toy, run_dir, *overrides):
        assert main(command(toy, run_dir, *overrides, "trainer.save_freq=-1", *LOCAL)) == 0

    assert_nine_of_ten_seeds_learn(tmp_path, run)
