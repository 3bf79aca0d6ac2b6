"""``trainer.device=cpu`` decides: on a machine with a GPU nothing of a run touches it."""

import json
import subprocess
import sys

import pytest

from tests.end_to_end.runs import LOCAL, ROOT, environment
from tests.forked import shared_server

AR = "actor_rollout_ref"
SHORT = [
    *("trainer.total_training_steps=1", "trainer.save_freq=1", "trainer.resume_mode=disable"),
    *("data.train_batch_size=4", f"{AR}.actor.ppo_mini_batch_size=4", f"{AR}.rollout.n=2"),
]
KNOBS = [
    *("memory=constrained", f"{AR}.model.activation_offload_min_bytes=1", f"{AR}.actor.use_kl_loss=true"),
    *("memory.device_limit_gb=8", "memory.host_limit_gb=4", "memory.pinned_limit_gb=4", "trainer.track_memory_every_steps=1"),
    *(f"{AR}.ref.fsdp_config.{setting}" for setting in ("param_offload=false", "offload_policy=true")),
]
"""Everything that rests on the host, and FSDP2's own offload."""


@pytest.fixture
def run(tiny_folder, tmp_path):
    """Trains in a process that sees a GPU: one of its own, or one forked from a process that has imported torch."""
    row = {"data_source": "toy/arithmetic", "prompt": "1+2=", "reward_model": {"ground_truth": "3"}}
    (tmp_path / "train.jsonl").write_text((json.dumps(row) + "\n") * 4)

    def go(*overrides, forked=False):
        module = ["tests.end_to_end.gpu_in_sight", "verl_memopt.trainer.main_ppo"]
        recipe = ["--config-dir", "recipe/rloo", "--config-name", "toy", f"data.train_files={tmp_path}/train.jsonl"]
        files = ["data.val_files=null", f"{AR}.model.path={tiny_folder}", f"trainer.default_local_dir={tmp_path}/run"]
        command = ["-m", *module, *recipe, *files, "trainer.logger=[jsonl]", *LOCAL, *SHORT, *overrides]
        if forked:
            return shared_server().fork(command, apart=True).wait()
        return subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300
        )

    return go


def test_a_run_on_the_cpu_touches_no_gpu_and_pins_no_memory(run, tmp_path):
    found = run(*KNOBS, "trainer.device=cpu")
    assert found.returncode == 0, found.stderr[-3000:]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1
    assert (tmp_path / "run" / "global_step_1").is_dir()


def test_the_gpu_in_sight_is_one_that_auto_takes(run):
    found = run("trainer.device=auto", forked=True)
    assert found.returncode != 0
    assert "touched: torch.cuda." in found.stderr
