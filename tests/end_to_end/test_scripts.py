"""Scripts and recipes: what a variable, an argument or neither of them ends in, without a model, a GPU or a network."""

import os
import stat
import subprocess
import sys

import pytest
import yaml

from tests.end_to_end.runs import RECIPES, ROOT, environment
from verl_memopt.config.loader import load_settings
from verl_memopt.config.plain import to_plain

AR = "actor_rollout_ref"
SCRIPTS = sorted((ROOT / "examples" / "memory_optimization").glob("run_*.sh"))
GRPO = "run_grpo.sh"
VARIABLES = {
    "TRAIN_BATCH_SIZE": ("48", "data.train_batch_size", 48),
    "PPO_MINI_BATCH_SIZE": ("24", f"{AR}.actor.ppo_mini_batch_size", 24),
    "MAX_PROMPT_LENGTH": ("20", "data.max_prompt_length", 20),
    "MAX_RESPONSE_LENGTH": ("5", "data.max_response_length", 5),
    "PPO_MAX_TOKEN_LEN_PER_GPU": ("5000", f"{AR}.actor.ppo_max_token_len_per_gpu", 5000),
    "ACTOR_LR": ("3e-5", f"{AR}.actor.optim.lr", 3e-5),
    "ROLLOUT_N": ("16", f"{AR}.rollout.n", 16),
    "ROLLOUT_TP": ("2", f"{AR}.rollout.tensor_model_parallel_size", 2),
    "ROLLOUT_GPU_MEM_UTIL": ("0.3", f"{AR}.rollout.gpu_memory_utilization", 0.3),
    "TOTAL_EPOCHS": ("5", "trainer.total_epochs", 5),
    "SAVE_FREQ": ("7", "trainer.save_freq", 7),
    "TEST_FREQ": ("9", "trainer.test_freq", 9),
    "PROJECT_NAME": ("mine", "trainer.project_name", "mine"),
    "EXPERIMENT_NAME": ("first", "trainer.experiment_name", "first"),
    "NGPUS_PER_NODE": ("2", "trainer.n_gpus_per_node", 2),
    "TRAIN_FILES": ("/data/train.jsonl", "data.train_files", "/data/train.jsonl"),
    "VAL_FILES": ("/data/val.jsonl", "data.val_files", "/data/val.jsonl"),
}
"""Environment variable -> its text, the key it ends in, and the value there."""
FILES = {"TRAIN_FILES": "/data/train.parquet", "VAL_FILES": "/data/test.parquet"}


@pytest.fixture(params=SCRIPTS, ids=lambda path: path.name)
def script(request):
    return request.param


@pytest.fixture
def resolved(script, tmp_path):
    """Runs a script with ``debug=dry`` from another folder and gives the settings it prints, by dotted key."""

    def run(*arguments, **variables):
        inherited = {name: value for name, value in environment().items() if name not in {*VARIABLES, "MODEL_PATH", "SEED"}}
        env = {**inherited, "PYTHON": sys.executable, "PATH": f"{tmp_path}:{os.environ['PATH']}", **variables}
        command = ["bash", str(script), "debug=dry", *arguments]
        process = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
        assert process.returncode == 0, process.stderr[-3000:]
        return flat(yaml.safe_load(process.stdout))

    return run


def flat(tree, prefix=""):
    found = {}
    for name, value in tree.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def test_there_are_scripts_for_both_algorithms():
    assert {"run_rloo_single_gpu.sh", GRPO} <= {path.name for path in SCRIPTS}


def test_without_a_gpu_or_a_model_the_toy_recipe_is_meant(resolved, script, toy):
    settings = resolved(TOY_DIR=str(toy), DEVICE="cpu")
    recipe = "toy_grpo" if script.name == GRPO else "toy"
    expected = flat(yaml.safe_load((RECIPES / f"{recipe}.yaml").read_text()))
    assert settings["algorithm.adv_estimator"] == ("grpo" if script.name == GRPO else "rloo")
    for key in (f"{AR}.rollout.n", "data.train_batch_size", "trainer.total_training_steps", "trainer.experiment_name"):
        assert settings[key] == expected[key]
    assert settings[f"{AR}.model.path"] == f"{toy}/model"
    assert settings["data.train_files"] == f"{toy}/train.parquet"
    assert settings["data.val_files"] == f"{toy}/val.parquet"
    assert settings["trainer.device"] == "cpu"


def test_every_variable_ends_in_its_key_and_an_argument_wins_over_it(resolved, script, toy):
    variables = {name: text for name, (text, _, _) in VARIABLES.items()}
    settings = resolved("trainer.test_freq=11", TOY_DIR=str(toy), DEVICE="cpu", KL_COEF="0.02", **variables)
    assert settings.pop("trainer.test_freq") == 11
    expected = {key: value for _, key, value in VARIABLES.values() if key != "trainer.test_freq"}
    expected |= {f"{AR}.actor.kl_loss_coef" if script.name == GRPO else "algorithm.kl_ctrl.kl_coef": 0.02}
    assert {key: settings[key] for key in expected} == expected


def test_a_seed_is_the_runs_seed_and_names_its_folder(resolved):
    settings = resolved(MODEL_PATH="/models/mine", SEED="3", **FILES)
    assert settings["data.seed"] == settings[f"{AR}.rollout.seed"] == 3
    assert settings["trainer.default_local_dir"].endswith("_seed3")


def test_a_model_path_takes_the_gsm8k_recipe(resolved, script):
    settings = resolved(MODEL_PATH="/models/mine", DEVICE="cpu", **FILES)
    assert settings[f"{AR}.model.path"] == "/models/mine"
    assert settings["trainer.experiment_name"] == ("grpo_gsm8k" if script.name == GRPO else "rloo_gsm8k")
    assert settings["data.train_files"] == "/data/train.parquet"


def test_a_gpu_takes_the_gsm8k_recipe_and_its_model(resolved, tmp_path):
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho 'GPU 0: a card (UUID: GPU-0)'\n")
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    settings = resolved(**FILES)
    assert settings[f"{AR}.model.path"] == "Qwen/Qwen2.5-0.5B-Instruct"
    assert settings["trainer.device"] == "auto"


@pytest.mark.parametrize("recipe", sorted(path.stem for path in RECIPES.glob("*.yaml")))
def test_a_recipe_composes_with_files_and_a_model_and_means_what_it_says(recipe):
    given = ["data.train_files=train.parquet", "data.val_files=val.parquet", f"{AR}.model.path=model"]
    settings = flat(to_plain(load_settings(recipe, given, str(RECIPES))))
    document = yaml.safe_load((RECIPES / f"{recipe}.yaml").read_text())
    del document["defaults"]
    # YAML 1.1 reads 1e-4 as text, hence the types.
    said = {key: type(settings[key])(value) for key, value in flat(document).items()}
    assert {key: settings[key] for key in said} == said
