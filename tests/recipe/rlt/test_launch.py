"""The launcher: which config, models, data and GPU a run gets, without a GPU and without a network."""

import json
import os
import re
import stat
import subprocess
from pathlib import Path

import pytest
import yaml

from recipe.rlt.make_toy import RltToyRecipe
from tests.end_to_end.runs import ROOT, metrics, script_environment
from tests.forked import PYTHON
from tests.rlt import brief_toy
from verl_memopt.config.keys import flatten

MONO, MULTI = ROOT / "recipe" / "rlt" / "launch_mono.sh", ROOT / "recipe" / "rlt" / "launch_multi.sh"
AR = "actor_rollout_ref"
OWN = ("MODEL_PATH", "STUDENT_PATH", "TRAIN_FILES", "VAL_FILES", "TOY_DIR", "SEED", "CUDA_VISIBLE_DEVICES", "NGPUS")


@pytest.fixture(scope="module")
def rlt_toy(tmp_path_factory):
    """A toy task with few held-out sums and models that know nothing, marked as the one that the launcher makes."""
    folder = brief_toy(tmp_path_factory.mktemp("rlt") / "toy")
    record = json.loads((folder / "rlt_toy.json").read_text())
    whole = json.loads(json.dumps({"recipe": RltToyRecipe()}, default=lambda each: vars(each)))
    (folder / "rlt_toy.json").write_text(json.dumps(record | whole))
    return folder


def launch(script, folder, *arguments, **variables):
    """Return a launcher that has ended; it was called from another folder."""
    inherited = {name: value for name, value in script_environment().items() if name not in OWN}
    env = {**inherited, "PATH": f"{folder}:{os.environ['PATH']}", "DEVICE": "cpu", **variables}
    command = ["bash", str(script), *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200)


def resolved(script, folder, *arguments, **variables):
    """Return the settings that a launcher resolves, by dotted key."""
    process = launch(script, folder, *arguments, "debug=dry", **variables)
    assert process.returncode == 0, process.stderr[-3000:]
    return flatten(yaml.safe_load(process.stdout))


def fake_nvidia_smi(folder):
    """Put a program on the path that lists two GPUs, the second a moment later, as the real one may."""
    program = folder / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: one'\nsleep 0.2\necho 'GPU 1: two'\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


def test_without_a_gpu_and_a_model_the_toy_task_is_trained(rlt_toy, tmp_path) -> None:
    settings = resolved(MONO, tmp_path, "num_generations=4", "beta=0.1", TOY_DIR=str(rlt_toy))
    assert settings[f"{AR}.model.path"] == f"{rlt_toy}/teacher"
    assert settings["reward_model.model.path"] == f"{rlt_toy}/student"
    assert settings["data.train_files"] == f"{rlt_toy}/train.parquet"
    assert settings["reward_model.rlt.tag_format"] == "short"
    assert (settings[f"{AR}.rollout.n"], settings[f"{AR}.actor.kl_loss_coef"]) == (4, 0.1)
    assert settings["trainer.experiment_name"] == "rlt_toy"


def test_the_published_path_of_a_config_names_the_one_here(tmp_path) -> None:
    published = resolved(MONO, tmp_path, "cfgs/run_cfg/teacher_rlt_mono.yaml", "memory=24g", MODEL_PATH="/m", TRAIN_FILES="/d")
    assert published == resolved(MONO, tmp_path, "memory=24g", MODEL_PATH="/m", TRAIN_FILES="/d")


@pytest.mark.parametrize(("script", "devices", "batch"), [(MONO, 1, 4), (MULTI, 8, 16)])
def test_a_model_and_data_of_ones_own_take_the_recipes_place(script, devices, batch, tmp_path) -> None:
    variables = {"MODEL_PATH": "/m/teacher", "STUDENT_PATH": "/m/student", "TRAIN_FILES": "/d/a.jsonl", "VAL_FILES": "/d/b.jsonl"}
    settings = resolved(script, tmp_path, "memory=24g", **variables)
    assert settings[f"{AR}.model.path"] == "/m/teacher"
    assert settings["reward_model.model.path"] == "/m/student"
    assert (settings["data.train_files"], settings["data.val_files"]) == ("/d/a.jsonl", "/d/b.jsonl")
    assert (settings["trainer.n_gpus_per_node"], settings["data.train_batch_size"]) == (devices, batch)


def test_arguments_win_over_variables_and_a_preset_names_the_model(tmp_path) -> None:
    arguments = ["model=qwen2_5_3b", "student_model=/m/other", "data.train_files=/d/a.jsonl", "max_completion_length=2048"]
    settings = resolved(MONO, tmp_path, "teacher_rlt_mono", *arguments)
    assert settings[f"{AR}.model.path"] == "Qwen/Qwen2.5-3B-Instruct"
    assert settings["reward_model.model.path"] == "/m/other"
    assert settings["data.max_response_length"] == 2048


def test_a_config_of_ones_own_is_run_as_it_is(tmp_path) -> None:
    recipe = ROOT / "recipe" / "rlt" / "config" / "teacher_rlt_mono.yaml"
    mine = tmp_path / "mine.yaml"
    text = recipe.read_text().replace("  - trainer_cfg: grpo_mono\n", "")
    mine.write_text(text.replace("experiment_name: rlt_mono", "experiment_name: mine"))
    settings = resolved(MONO, tmp_path, str(mine), f"{AR}.rollout.n=2", f"{AR}.actor.use_dynamic_bsz=true")
    assert settings["trainer.experiment_name"] == "mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["teacher_rlt"], "teacher_rlt: there is no recipe/rlt/config/teacher_rlt.yaml. Use one of .*teacher_rlt_mono.yaml"),
        (["model=tiny"], "model=tiny: the toy task of RLT has two tiny models of its own"),
    ],
)
def test_what_cannot_be_run_is_refused_with_a_way_out(arguments, message, tmp_path) -> None:
    process = launch(MONO, tmp_path, *arguments)
    assert process.returncode == 2
    assert re.search(message, process.stderr), process.stderr


def test_expandable_segments_are_refused_unless_the_engine_stays_awake(tmp_path) -> None:
    files = {"MODEL_PATH": "/m/teacher", "TRAIN_FILES": "/d/a.jsonl", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    process = launch(MONO, tmp_path, "debug=dry", **files)
    assert process.returncode == 2
    assert "expandable_segments:True and an engine that sleeps exclude each other" in process.stderr
    assert resolved(MONO, tmp_path, f"{AR}.rollout.free_cache_engine=false", **files)


@pytest.mark.parametrize(("visible", "pinned"), [(None, "0"), ("1,0", "1"), ("GPU-abc", "GPU-abc")])
def test_one_gpu_is_pinned(visible, pinned, tmp_path) -> None:
    """The training entry here is a program that prints what it was given."""
    fake_nvidia_smi(tmp_path)
    entry = tmp_path / "python"
    entry.write_text("#!/bin/sh\necho pinned=$CUDA_VISIBLE_DEVICES\n")
    entry.chmod(entry.stat().st_mode | stat.S_IXUSR)
    files = {"MODEL_PATH": "/m/teacher", "TRAIN_FILES": "/d/a.jsonl", "PYTHON": str(entry)}
    variables = files if visible is None else {**files, "CUDA_VISIBLE_DEVICES": visible}
    assert f"pinned={pinned}\n" in launch(MONO, tmp_path, **variables).stdout
    assert "pinned=1,0\n" in launch(MULTI, tmp_path, **{**files, "CUDA_VISIBLE_DEVICES": "1,0"}).stdout


def test_two_steps_of_the_toy_task_train(rlt_toy, tmp_path) -> None:
    run = tmp_path / "run"
    process = launch(
        MONO, tmp_path, "trainer.worker_group=local", f"{AR}.rollout.name=hf", "max_steps=2", "train_batch_size=16",
        f"output_dir={run}", "report_to=none", TOY_DIR=str(rlt_toy),
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    rows = metrics(run)
    assert list(rows) == [0, 1, 2]
    assert {"rlt/r_ss", "rlt/r_kl", "rlt/match", "actor/kl_loss"} <= rows[2].keys()
    assert (run / "global_step_2" / "actor" / "huggingface" / "model.safetensors").is_file()


def test_prepared_files_are_written_and_a_fault_is_one_line(tmp_path) -> None:
    source = tmp_path / "mine.jsonl"
    source.write_text("".join(json.dumps({"question": f"{n}?", "solution": str(n)}) + "\n" for n in range(5)))
    program = [PYTHON, str(ROOT / "recipe" / "rlt" / "prepare_rlt.py"), "--out", str(tmp_path / "out")]
    env = script_environment()
    ended = subprocess.run([*program, "--files", str(source), "--num-validation", "2"], env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "wrote 3 rows" in ended.stderr
    assert (tmp_path / "out" / "val.parquet").is_file()
    missing = subprocess.run([*program, "--files", "nowhere.jsonl"], env=env, capture_output=True, text=True)
    assert missing.returncode == 2
    assert len(missing.stderr.splitlines()) == 1
    assert Path("nowhere.jsonl").name in missing.stderr
