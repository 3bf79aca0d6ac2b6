"""Faults that were once lost, hidden or told by a traceback: each done again as a person would, to the command line."""

import json
import os
import shutil
import signal
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.end_to_end.runs import learned, metrics
from tests.faults.conftest import QUIET, SHORT
from tests.faults.machine import left

LONGER = [*SHORT, "trainer.total_training_steps=6"]
LR = "actor_rollout_ref.actor.optim.lr"
RAY = [*QUIET, "trainer.total_training_steps=100000", "trainer.save_freq=-1", "actor_rollout_ref.rollout.name=hf"]


def assert_refused(run, *said, code=2):
    """The run ended with one message: no traceback, and every text in it."""
    assert run.returncode == code, run.stdout[-3000:]
    assert "Traceback" not in run.stdout, run.stdout[-3000:]
    for text in said:
        assert text in run.stdout, (text, run.stdout[-3000:])


def wait_for(condition, run, seconds=120):
    for _ in range(seconds * 50):
        if condition():
            return
        assert run.poll() is None, run.stdout[-3000:]
        time.sleep(0.02)
    raise AssertionError(f"nothing after {seconds} s:\n{run.stdout[-3000:]}")


def wait_for_steps(run, run_dir, steps):
    path = run_dir / "metrics.jsonl"
    wait_for(lambda: path.exists() and path.read_text().count("\n") >= steps, run)


@pytest.fixture
def begun(machine, healthy, uninterrupted, run_dir):
    """A folder with a run of four steps, to go on from."""
    shutil.copytree(uninterrupted, run_dir)
    return run_dir


@pytest.fixture
def model(toy, tmp_path):
    """A copy of the toy's model, to be damaged."""
    shutil.copytree(toy / "model", tmp_path / "model")
    return tmp_path / "model"


def with_model(model):
    return f"actor_rollout_ref.model.path={model}"


def edit(path, **changes):
    content = json.loads(path.read_text())
    content.update(changes)
    path.write_text(json.dumps(content))


def test_1_bytes_flipped_in_a_shard_cost_one_checkpoint_and_no_reward(healthy, toy, begun):
    shard = next((begun / "global_step_4").rglob("*.distcp"))
    data = bytearray(shard.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(255 - byte for byte in data[middle : middle + 64])
    shard.write_bytes(data)
    run = healthy.train(toy, begun, *LONGER)
    assert run.returncode == 0, run.stdout[-3000:]
    assert "global_step_4" in run.stdout
    assert shard.name in run.stdout
    assert f"resumed from {begun / 'global_step_3'}" in run.stdout


def test_3_a_second_run_in_the_folder_of_a_living_one_is_refused_and_disturbs_nothing(healthy, toy, run_dir):
    first = healthy.start(toy, run_dir, *SHORT, "trainer.total_training_steps=100000")
    wait_for_steps(first, run_dir, 2)
    second = healthy.train(toy, run_dir, *SHORT)
    assert_refused(second, str(run_dir), str(first.pid))
    os.kill(first.pid, signal.SIGTERM)
    assert first.wait().returncode == 143, first.stdout[-3000:]
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps))


def test_3_of_two_runs_that_start_together_one_is_refused(healthy, toy, run_dir):
    both = [healthy.start(toy, run_dir, *SHORT) for _ in range(2)]
    codes = sorted(run.wait().returncode for run in both)
    assert codes == [0, 2], [run.stdout[-2000:] for run in both]
    assert "Traceback" not in both[0].stdout + both[1].stdout


def test_5_what_changed_since_the_checkpoint_is_said_and_the_old_settings_are_kept(healthy, toy, begun):
    changed = {
        "actor_rollout_ref.rollout.n": 4,
        LR: 1e-4,
        "actor_rollout_ref.rollout.temperature": 0.9,
        "algorithm.adv_estimator": "grpo",
        "data.max_response_length": 6,
    }
    run = healthy.train(toy, begun, *LONGER, *(f"{key}={value}" for key, value in changed.items()))
    assert run.returncode == 0, run.stdout[-3000:]
    for key, value in changed.items():
        assert any(key in line and str(value) in line for line in run.stdout.splitlines()), (key, run.stdout[-3000:])
    assert list((begun / "config_history").glob("*.yaml"))


def test_6_with_every_checkpoint_unusable_nothing_is_started_over(healthy, toy, begun):
    for shard in begun.rglob("*.distcp"):
        shard.write_bytes(b"")
    before = {path: path.stat().st_mtime_ns for path in begun.rglob("global_step_*/**/*")}
    run = healthy.train(toy, begun, *LONGER)
    assert_refused(run, "global_step_4", "global_step_3", "trainer.resume_mode=disable", code=1)
    assert before == {path: path.stat().st_mtime_ns for path in begun.rglob("global_step_*/**/*")}


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "data.pt"])
def test_7_damage_of_the_same_size_falls_back(healthy, toy, begun, name):
    path = next((begun / "global_step_4").rglob(name))
    path.write_bytes(bytes(path.stat().st_size))
    run = healthy.train(toy, begun, *LONGER)
    assert run.returncode == 0, run.stdout[-3000:]
    assert f"resumed from {begun / 'global_step_3'}" in run.stdout
    assert "Traceback" not in run.stdout


def test_8_a_tokenizer_larger_than_the_embedding_is_refused_with_both_numbers(healthy, toy, run_dir, model):
    weights = load_file(model / "model.safetensors")
    rows = weights["model.embed_tokens.weight"].shape[0]
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][: rows // 2].clone()
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    edit(model / "config.json", vocab_size=rows // 2)
    assert_refused(healthy.train(toy, run_dir, *SHORT, with_model(model)), str(model), str(rows // 2))


FORKS = """
import subprocess, sys

started = False

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    global started
    if not started:
        started = True
        for number in range(64):
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=bool(number % 2))
    return 1.0
"""


def test_9_what_a_reward_function_started_dies_with_the_run(healthy, toy, run_dir, tmp_path):
    (tmp_path / "forks.py").write_text(FORKS)
    reward = f"custom_reward_function.path={tmp_path}/forks.py"
    run = healthy.start(toy, run_dir, *SHORT, reward, "trainer.total_training_steps=100000")
    wait_for_steps(run, run_dir, 1)
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    assert not left(run)


def test_11_hanging_up_saves(healthy, toy, run_dir):
    run = healthy.start(toy, run_dir, *SHORT, "trainer.save_freq=-1", "trainer.total_training_steps=100000")
    wait_for_steps(run, run_dir, 2)
    os.kill(run.pid, signal.SIGHUP)
    assert run.wait().returncode == 129, run.stdout[-3000:]
    assert (run_dir / "latest_checkpointed_iteration.txt").read_text().strip() == str(max(metrics(run_dir)))


def test_12_a_special_token_in_a_users_text_is_text(healthy, toy, run_dir, tmp_path):
    row = {
        "data_source": "toy/arithmetic",
        "prompt": [{"role": "user", "content": "1+1=<|im_end|>"}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
    }
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(64)))
    run = healthy.train(toy, run_dir, *SHORT, f"data.train_files={tmp_path}/rows.jsonl", "data.max_prompt_length=64")
    assert run.returncode == 0, run.stdout[-3000:]
    assert "64 special tokens inside 64 prompts" in run.stdout
    assert "are encoded as plain text. Set data.allow_special_tokens=true" in run.stdout


@pytest.mark.parametrize("name", ["../..", "a/../../b", "/tmp/elsewhere"])
def test_13_a_name_cannot_leave_the_run_folder(healthy, toy, run_dir, name):
    run = healthy.train(toy, run_dir, *SHORT, f"trainer.experiment_name='{name}'")
    assert_refused(run, "trainer.experiment_name")


def test_13_an_index_cannot_name_a_file_outside_its_folder(healthy, toy, run_dir, model):
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(model / "model.safetensors"), "../model.safetensors")}
    (model / "model.safetensors").rename(model.parent / "model.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_refused(healthy.train(toy, run_dir, *SHORT, with_model(model)), "model.safetensors.index.json")


def test_14_scores_that_no_sum_can_hold_are_refused_with_their_row(healthy, toy, run_dir, tmp_path):
    (tmp_path / "huge.py").write_text("def compute_score(*given, **more):\n    return 3e38\n")
    run = healthy.train(toy, run_dir, *SHORT, f"custom_reward_function.path={tmp_path}/huge.py")
    assert_refused(run, "train.parquet", "3e+38", code=1)


def test_14_a_head_that_a_tied_config_would_ignore_is_refused(healthy, toy, run_dir, model):
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"] = torch.randn_like(weights["model.embed_tokens.weight"])
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    edit(model / "config.json", tie_word_embeddings=True)
    run = healthy.train(toy, run_dir, *SHORT, with_model(model))
    assert_refused(run, "lm_head.weight", code=run.returncode)
    assert run.returncode in (1, 2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompt": None}, "null"),
        ({"data_source": "nobody/knows"}, "nobody/knows"),
        ({"prompt": [{"role": "user", "content": "1+1=\ud800"}]}, "surrogate"),
    ],
    ids=["a null prompt", "an unknown source", "half a character"],
)
def test_14_and_15_a_row_that_cannot_be_used_is_named(healthy, toy, run_dir, tmp_path, change, said):
    row = {
        "data_source": "toy/arithmetic",
        "prompt": [{"role": "user", "content": "1+1="}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
    }
    rows = [row] * 63 + [row | change]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = healthy.train(toy, run_dir, *SHORT, f"data.train_files={tmp_path}/rows.jsonl")
    assert_refused(run, "rows.jsonl", said)


@pytest.mark.parametrize("seed", [2**63, 2**70, -1])
def test_15_a_seed_that_no_generator_takes_is_refused(healthy, toy, run_dir, seed):
    assert_refused(healthy.train(toy, run_dir, *SHORT, f"data.seed={seed}"), "data.seed")


def test_15_a_model_of_fewer_than_no_layers_is_refused(healthy, toy, run_dir, model):
    edit(model / "config.json", num_hidden_layers=-1)
    assert_refused(healthy.train(toy, run_dir, *SHORT, with_model(model)), "num_hidden_layers")


def test_15_an_index_that_is_no_json_is_refused(healthy, toy, run_dir, model):
    (model / "model.safetensors.index.json").write_text("{")
    assert_refused(healthy.train(toy, run_dir, *SHORT, with_model(model)), "model.safetensors.index.json")


def test_15_a_home_that_cannot_be_written_is_survived_or_named(healthy, toy, run_dir, uninterrupted):
    run = healthy.train(toy, run_dir, *SHORT, HOME="/proc", XDG_CACHE_HOME="/proc/cache")
    assert run.returncode == 0, run.stdout[-3000:]
    assert [learned(row) for row in metrics(run_dir).values()] == [learned(row) for row in metrics(uninterrupted).values()]


def test_15_a_long_temporary_folder_is_survived_or_named(healthy, toy, run_dir, tmp_path):
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    run = healthy.train(toy, run_dir, *RAY, "trainer.total_training_steps=1", RAY_TMPDIR=str(folder), TMPDIR=str(folder))
    assert "Traceback" not in run.stdout, run.stdout[-3000:]
    assert run.returncode == 0 or "RAY_TMPDIR" in run.stdout
    assert not left(run)
