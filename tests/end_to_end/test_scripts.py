"""Scripts and recipes: what a variable, an argument or neither of them ends in, without a model, a GPU or a network."""

import os
import shutil
import stat
import subprocess
import sys

import pytest
import yaml

from tests.end_to_end.runs import RECIPES, ROOT, script_environment
from tests.forked import PYTHON
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
        inherited = {
            name: value for name, value in script_environment().items() if name not in {*VARIABLES, "MODEL_PATH", "SEED"}
        }
        env = {**inherited, "PATH": f"{tmp_path}:{os.environ['PATH']}", **variables}
        command = ["bash", str(script), "debug=dry", *arguments]
        process = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
        assert process.returncode == 0, process.stderr[-3000:]
        sys.stderr.write(process.stderr)
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


def executable(path, text):
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


GPU_IN_SIGHT = """#!/bin/sh
[ "$1" = -m ] || exec {python} "$@"
shift
exec {python} -m tests.end_to_end.gpu_in_sight "$@"
"""


@pytest.fixture
def gpu(tmp_path):
    """A machine with a GPU: what nvidia-smi and PyTorch say there, and a hub cache that holds nothing."""
    return gpu_machine(tmp_path, PYTHON)


def gpu_machine(folder, python):
    """Gives the environment of a machine with a GPU. The hub's client reads them only in a new interpreter."""
    executable(folder / "nvidia-smi", "#!/bin/sh\necho 'GPU 0: a card (UUID: GPU-0)'\n")
    return {"PYTHON": executable(folder / "python", GPU_IN_SIGHT.format(python=python)), "HF_HUB_CACHE": str(folder / "hub")}


def in_cache(hub, kind, name, *files):
    """Puts files into a hub cache, laid out as the hub's client lays it out."""
    place = hub / f"{kind}s--{name.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("abc")
    for file in files:
        path = place / "snapshots" / "abc" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")


def test_a_gpu_takes_the_gsm8k_recipe_and_its_model(resolved, tmp_path):
    gpu = gpu_machine(tmp_path, sys.executable)
    in_cache(tmp_path / "hub", "model", "Qwen/Qwen2.5-0.5B-Instruct", "config.json", "model.safetensors")
    settings = resolved(**FILES, **gpu)
    assert settings[f"{AR}.model.path"] == "Qwen/Qwen2.5-0.5B-Instruct"
    assert settings["trainer.device"] == "auto"
    assert settings[f"{AR}.rollout.dtype"] == "bfloat16"


def test_a_gpu_out_of_reach_of_the_hub_trains_the_toy_task_in_a_gpus_precision(resolved, script, toy, gpu, capfd):
    settings = resolved(TOY_DIR=str(toy), HF_HUB_OFFLINE="1", **gpu)
    assert settings[f"{AR}.model.path"] == f"{toy}/model"
    assert settings["trainer.experiment_name"] == ("grpo_toy" if script.name == GRPO else "rloo_toy")
    assert (settings["trainer.device"], settings[f"{AR}.rollout.name"]) == ("auto", "vllm")
    assert {settings[f"{AR}.{place}"] for place in ("rollout.dtype", *(f"{r}.fsdp_config.dtype" for r in ("actor", "ref")))} == {
        "bfloat16"
    }
    assert settings[f"{AR}.rollout.max_logprob_diff"] == 0.05
    said = [line for line in capfd.readouterr().err.splitlines() if "is not in the local cache" in line]
    assert len(said) == 1
    assert "(HF_HUB_OFFLINE is set), so the toy task is trained on the GPU." in said[0]


def test_the_cpu_is_taken_beside_a_gpu_where_it_is_asked_for(resolved, script, toy, gpu):
    by_argument = script.name == GRPO
    settings = resolved(
        *["trainer.device=cpu"] * by_argument, TOY_DIR=str(toy), **gpu, **{} if by_argument else {"DEVICE": "cpu"}
    )
    assert settings["trainer.device"] == "cpu"
    assert settings[f"{AR}.model.path"] == f"{toy}/model"
    assert settings[f"{AR}.rollout.dtype"] == "fp32"


@pytest.fixture
def setup(tmp_path):
    """Runs a copy of setup_env.sh that has nothing to install, beside an nvidia-smi that answers as it is told."""

    def run(*arguments, reply=None, code=0, **variables):
        shutil.copy(ROOT / "setup_env.sh", tmp_path)
        if reply is not None:
            executable(tmp_path / "nvidia-smi", f"#!/bin/sh\necho '{reply}'\nexit {code}\n")
        inherited = {name: value for name, value in os.environ.items() if name != "VERL_MEMOPT_BUILD"}
        env = {**inherited, "PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHON": "/nowhere/python", **variables}
        command = ["bash", str(tmp_path / "setup_env.sh"), *arguments]
        found = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        assert not (tmp_path / ".venv").exists()
        return found

    return run


@pytest.mark.parametrize("arguments", [(), ("--check",)])
def test_an_older_driver_is_refused_before_anything_is_installed(setup, arguments):
    found = setup(*arguments, reply="535.183.01")
    assert found.returncode == 2
    assert found.stderr == (
        "setup_env.sh: the NVIDIA driver is 535.183.01, and PyTorch's build for CUDA 13 needs 580 or newer. "
        "Update the driver, or install the build for CPUs: VERL_MEMOPT_BUILD=cpu ./setup_env.sh\n"
    )


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        ({"reply": "580.65.06"}, "the gpu build (driver 580.65.06)"),
        ({"reply": "1000.1"}, "the gpu build (driver 1000.1)"),
        ({"reply": "580.65.06\n580.65.06"}, "the gpu build (driver 580.65.06)"),
        ({"reply": "579.99"}, None),
        ({"reply": "No devices were found"}, "the cpu build (nvidia-smi lists no GPU: No devices were found)"),
        ({"reply": "NVIDIA-SMI has failed", "code": 9}, "the cpu build (nvidia-smi lists no GPU: NVIDIA-SMI has failed)"),
        ({"reply": "535.183.01", "VERL_MEMOPT_BUILD": "cpu"}, "the cpu build (VERL_MEMOPT_BUILD=cpu)"),
        ({"reply": "535.183.01", "VERL_MEMOPT_BUILD": "gpu"}, "the gpu build (VERL_MEMOPT_BUILD=gpu)"),
    ],
)
def test_a_machine_gets_the_build_that_runs_on_it(setup, machine, said):
    found = setup("--check", **machine)
    assert (found.returncode, found.stdout) == ((2, "") if said is None else (0, f"{said}\n"))


@pytest.mark.skipif(any(os.path.exists(f"{folder}/nvidia-smi") for folder in ("/usr/bin", "/bin")), reason="it has an nvidia-smi")
def test_a_machine_without_nvidia_smi_gets_the_build_for_cpus(setup):
    assert setup("--check").stdout == "the cpu build (no nvidia-smi)\n"


@pytest.mark.parametrize(("argument", "variables"), [("--what", {}), ("--check", {"VERL_MEMOPT_BUILD": "tpu"})])
def test_setup_refuses_what_it_does_not_know(setup, argument, variables):
    assert setup(argument, **variables).returncode == 2


@pytest.mark.parametrize("recipe", sorted(path.stem for path in RECIPES.glob("*.yaml")))
def test_a_recipe_composes_with_files_and_a_model_and_means_what_it_says(recipe):
    given = ["data.train_files=train.parquet", "data.val_files=val.parquet", f"{AR}.model.path=model"]
    settings = flat(to_plain(load_settings(recipe, given, str(RECIPES))))
    document = yaml.safe_load((RECIPES / f"{recipe}.yaml").read_text())
    del document["defaults"]
    # YAML 1.1 reads 1e-4 as text, hence the types.
    said = {key: type(settings[key])(value) for key, value in flat(document).items()}
    assert {key: settings[key] for key in said} == said
