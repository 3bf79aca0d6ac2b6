"""Scripts and recipes: what a variable, an argument or neither of them ends in, without a model, a GPU or a network."""

import math
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from functools import partial

import psutil
import pytest
import yaml

from tests.end_to_end.runs import LOCAL, RECIPES, ROOT, metrics, script_environment
from tests.forked import PYTHON
from verl_memopt.config.loader import PACKAGED, load_settings, to_plain
from verl_memopt.worker.nodes import free_port

AR = "actor_rollout_ref"
FOLDER = ROOT / "examples" / "memory_optimization"
GRPO = "run_grpo.sh"
PLAIN = [FOLDER / "run_rloo_single_gpu.sh", FOLDER / GRPO]
"""Scripts that set nothing of their own, so that train.sh alone decides."""
SITUATIONS = {
    "run_memory_optimized_ppo.sh": ("gae", None, "memory_optimized_ppo_toy"),
    "run_single_gpu_constrained.sh": ("rloo", "constrained", "constrained_rloo_toy"),
    "run_balanced.sh": ("rloo", "balanced", "balanced_rloo_toy"),
    "run_large_multi_gpu.sh": ("grpo", "large_multi_gpu", "large_multi_gpu_grpo_toy"),
    "run_multi_node.sh": ("grpo", "large_multi_gpu", "multi_node_grpo_toy"),
    "run_lora_24gb.sh": ("rloo", "24g", "lora_24gb_rloo_toy"),
    "run_sft_single_gpu.sh": ("sft", None, "sft_toy"),
    "run_rtx5090_rloo.sh": ("rloo", "32g", "rtx5090_rloo_toy"),
}
"""Script -> its estimator, its profile, and the name of its run with the tiny model."""
CLUSTER = {"RAY_ADDRESS": "127.0.0.1:1", "NNODES": "2"}
"""Variables that say Ray runs already; a dry run does not ask it."""
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


@pytest.fixture(params=PLAIN, ids=lambda path: path.name)
def script(request):
    return request.param


def run_script(script, folder, *arguments, **variables):
    """Gives a script that has ended well; it was called from another folder."""
    own = {*VARIABLES, "MODEL_PATH", "MEMORY", "ALGORITHM", "SEED"}
    inherited = {name: value for name, value in script_environment().items() if name not in own}
    env = {**inherited, "PATH": f"{folder}:{os.environ['PATH']}", **variables}
    command = ["bash", str(script), *arguments]
    process = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200)
    assert process.returncode == 0, process.stderr[-3000:]
    sys.stderr.write(process.stderr)
    return process


def printed(script, folder, *arguments, **variables):
    """Gives the settings that a script prints with ``debug=dry``, by dotted key."""
    return flat(yaml.safe_load(run_script(script, folder, "debug=dry", *arguments, **variables).stdout))


ONE_COPY = ("run_rtx5090_rloo.sh", "run_single_gpu_constrained.sh", "run_lora_24gb.sh")
"""Scripts that train all weights on one device: there a profile holds one copy of them instead of moving them."""


@pytest.fixture
def resolved(script, tmp_path):
    return partial(printed, script, tmp_path)


def flat(tree, prefix=""):
    found = {}
    for name, value in tree.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


@pytest.mark.parametrize("name", SITUATIONS)
def test_a_script_of_a_situation_composes_with_the_tiny_model_and_its_profile(name, toy, tmp_path):
    estimator, memory, experiment = SITUATIONS[name]
    settings = printed(FOLDER / name, tmp_path, TOY_DIR=str(toy), DEVICE="cpu", **CLUSTER if "node" in name else {})
    assert settings["algorithm.adv_estimator"] == estimator
    assert settings[f"{AR}.model.path"] == f"{toy}/model"
    assert settings["trainer.experiment_name"] == experiment
    if memory is not None:
        profile = flat(yaml.safe_load((PACKAGED / "memory" / f"{memory}.yaml").read_text()))
        told = {key: value for key, value in profile.items() if not key.startswith("critic.")}
        fsdp = f"{AR}.actor.fsdp_config"
        if name in ONE_COPY:
            told |= {f"{fsdp}.param_offload": False, f"{fsdp}.grad_offload": "lora" not in name}
        assert {key: settings[key] for key in told} == told


@pytest.mark.parametrize("name", [name for name in SITUATIONS if any(word in name for word in ("ppo", "multi", "lora"))])
def test_a_preset_and_another_profile_take_the_place_of_the_scripts_own(name, tmp_path):
    variables = {**FILES, **CLUSTER} if "node" in name else FILES
    settings = printed(FOLDER / name, tmp_path, "model=qwen3_0_6b", "memory=16g", DEVICE="cpu", **variables)
    assert settings[f"{AR}.model.path"] == "Qwen/Qwen3-0.6B"
    assert settings["data.max_response_length"] == 512
    assert settings[f"{AR}.rollout.enforce_eager"]
    assert settings["trainer.nnodes"] == (2 if "node" in name else 1)
    multi = "node" in name or "multi" in name
    assert settings["trainer.n_gpus_per_node"] == (8 if multi else 1)
    assert settings[f"{AR}.rollout.tensor_model_parallel_size"] == (4 if multi else 1)
    if "lora" in name:
        assert settings[f"{AR}.actor.optim.lr"] == 1e-5


def test_the_script_of_memory_optimized_ppo_turns_each_of_its_features_on_and_an_argument_is_for_one_model_alone(toy, tmp_path):
    off = {f"{AR}.model.enable_activation_offload": False, "critic.ppo_max_token_len_per_gpu": 64}
    arguments = [f"{key}={str(value).lower()}" for key, value in off.items()]
    settings = printed(FOLDER / QUICK[0], tmp_path, *arguments, TOY_DIR=str(toy), DEVICE="cpu", LOGPROB_CHUNK_TOKENS="7")
    features = [
        f"{role}.model.enable_{name}" for role in (AR, "critic") for name in ("gradient_checkpointing", "activation_offload")
    ]
    fsdp = [f"{AR}.actor.fsdp_config", "critic.model.fsdp_config"]
    features += [f"{section}.{name}_offload" for section in fsdp for name in ("param", "optimizer")]
    on = dict.fromkeys([*features, f"{AR}.ref.fsdp_config.param_offload", f"{AR}.actor.use_dynamic_bsz"], True)
    numbers = {f"{AR}.actor.ppo_max_token_len_per_gpu": 8192, f"{AR}.rollout.gpu_memory_utilization": 0.5}
    expected = on | numbers | off | {f"{AR}.model.logprob_chunk_tokens": 7}
    assert {key: settings[key] for key in expected} == expected


QUICK = ("run_memory_optimized_ppo.sh",)
"""The script whose two steps are in every run of the tests. The others differ from it in settings alone."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SITUATIONS if "node" not in name]
)
def test_two_steps_of_a_script(name, toy, tmp_path):
    short = ["trainer.total_training_steps=2", "data.train_batch_size=8", f"{AR}.actor.ppo_mini_batch_size=8"]
    one = ["trainer.n_gpus_per_node=1", f"{AR}.rollout.tensor_model_parallel_size=1"]
    folder = tmp_path / "run"
    run_script(
        FOLDER / name, tmp_path, *LOCAL, *short, *one, f"trainer.default_local_dir={folder}", "trainer.logger=[jsonl]",
        TOY_DIR=str(toy), DEVICE="cpu",
    )  # fmt: skip
    rows = metrics(folder)
    assert list(rows) == [0, 1, 2]
    assert all(math.isfinite(rows[step]["actor/grad_norm"]) and rows[step]["actor/skipped_updates"] == 0 for step in (1, 2))
    assert ("critic/vf_loss" in rows[2]) == ("ppo" in name)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_nodes_train_together(toy, tmp_path):
    """Two nodes of a Ray cluster that the script starts on this machine, with a worker each."""
    short = ["trainer.total_training_steps=2", "data.train_batch_size=8", f"{AR}.actor.ppo_mini_batch_size=8"]
    folder, temporary = tmp_path / "run", tempfile.mkdtemp(dir="/tmp")
    run_script(
        FOLDER / "run_multi_node.sh", tmp_path, *short, f"{AR}.rollout.name=hf", f"trainer.default_local_dir={folder}",
        "trainer.logger=[jsonl]", "trainer.val_before_train=false",
        TOY_DIR=str(toy), DEVICE="cpu", PYTHON=sys.executable, NODES="localhost localhost", NGPUS_PER_NODE="1", ROLLOUT_TP="1",
        RAY_PORT=str(free_port("127.0.0.1")), RAY_START_ARGS=f"--temp-dir={temporary}", RAY_WAIT_SECONDS="100",
    )  # fmt: skip
    assert list(metrics(folder)) == [1, 2]
    assert not [
        process for process in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(process.info["cmdline"] or ())
    ]


def test_several_nodes_without_any_named_are_refused(tmp_path):
    env = {name: value for name, value in os.environ.items() if name not in ("NODES", "RAY_ADDRESS", "SLURM_JOB_NODELIST")}
    command = ["bash", str(FOLDER / "run_multi_node.sh")]
    process = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert process.returncode == 2
    assert 'set NODES="host1 host2"' in process.stderr


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


def test_a_seed_is_the_runs_seed_and_names_its_folder(tmp_path):
    settings = printed(PLAIN[0], tmp_path, MODEL_PATH="/models/mine", SEED="3", **FILES)
    assert settings["data.seed"] == settings[f"{AR}.rollout.seed"] == 3
    assert settings["trainer.default_local_dir"].endswith("_seed3")


def test_a_model_path_takes_the_gsm8k_recipe(tmp_path):
    settings = printed(FOLDER / GRPO, tmp_path, MODEL_PATH="/models/mine", DEVICE="cpu", **FILES)
    assert settings[f"{AR}.model.path"] == "/models/mine"
    assert settings["trainer.experiment_name"] == "grpo_gsm8k"
    assert settings["data.train_files"] == "/data/train.parquet"


def test_the_script_of_the_real_model_trains_the_model_and_the_split_that_are_named(toy, tmp_path):
    named = {"MODEL_PATH": f"{toy}/model", "DATA_DIR": str(tmp_path / "data"), "SEED": "3"}
    settings = printed(FOLDER / "run_real_model_cpu.sh", tmp_path, "trainer.total_training_steps=2", **named)
    assert settings[f"{AR}.model.path"] == f"{toy}/model"
    assert settings["algorithm.adv_estimator"] == "grpo"
    assert settings["trainer.total_training_steps"] == 2
    assert settings["data.seed"] == settings[f"{AR}.rollout.seed"] == 3
    for split in ("train", "val"):
        assert settings[f"data.{split}_files"] == f"{tmp_path}/data/{split}.parquet"
        assert (tmp_path / "data" / f"{split}.parquet").is_file()


def executable(path, text):
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


GPU_IN_SIGHT = f"""#!/bin/sh
[ "$1" = -m ] || exec {PYTHON} "$@"
shift
exec {PYTHON} -m tests.end_to_end.gpu_in_sight "$@"
"""


@pytest.fixture
def gpu(tmp_path):
    """A machine with a GPU: what nvidia-smi and PyTorch say there, and a hub cache that holds nothing."""
    executable(tmp_path / "nvidia-smi", "#!/bin/sh\necho 'GPU 0: a card (UUID: GPU-0)'\n")
    return {"PYTHON": executable(tmp_path / "python", GPU_IN_SIGHT), "HF_HUB_CACHE": str(tmp_path / "hub")}


def test_a_gpu_takes_the_gsm8k_recipe_and_its_model(tmp_path, gpu):
    cached = tmp_path / "hub" / "models--Qwen--Qwen2.5-0.5B-Instruct"
    for name, text in (("refs/main", "abc"), ("snapshots/abc/config.json", "{}"), ("snapshots/abc/model.safetensors", "{}")):
        (cached / name).parent.mkdir(parents=True, exist_ok=True)
        (cached / name).write_text(text)
    settings = printed(PLAIN[0], tmp_path, **FILES, **gpu)
    assert settings[f"{AR}.model.path"] == "Qwen/Qwen2.5-0.5B-Instruct"
    assert settings["trainer.device"] == "auto"
    assert settings[f"{AR}.rollout.dtype"] == "bfloat16"


def test_a_gpu_out_of_reach_of_the_hub_trains_the_toy_task_in_a_gpus_precision(tmp_path, toy, gpu, capfd):
    settings = printed(PLAIN[0], tmp_path, TOY_DIR=str(toy), HF_HUB_OFFLINE="1", **gpu)
    assert settings[f"{AR}.model.path"] == f"{toy}/model"
    assert settings["trainer.experiment_name"] == "rloo_toy"
    assert (settings["trainer.device"], settings[f"{AR}.rollout.name"]) == ("auto", "vllm")
    for place in ("rollout", "actor.fsdp_config", "ref.fsdp_config"):
        assert settings[f"{AR}.{place}.dtype"] == "bfloat16"
    assert settings[f"{AR}.rollout.max_logprob_diff"] == 0.05
    said = [line for line in capfd.readouterr().err.splitlines() if "is not in the local cache" in line]
    assert len(said) == 1
    assert "(HF_HUB_OFFLINE is set), so the toy task is trained on the GPU." in said[0]


def test_the_cpu_is_taken_beside_a_gpu_where_it_is_asked_for(resolved, script, toy, gpu):
    by_argument = script.name == GRPO
    settings = resolved(*["trainer.device=cpu"] * by_argument, TOY_DIR=str(toy), **gpu, DEVICE="auto" if by_argument else "cpu")
    assert settings["trainer.device"] == "cpu"
    assert settings[f"{AR}.model.path"] == f"{toy}/model"
    assert settings[f"{AR}.rollout.dtype"] == "fp32"


RAY_ELSEWHERE = """#!{python}
import os, signal, socket, sys
log = open({log!r}, "a", buffering=1)
def stop(*_):
    log.write("stopped\\n")
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
if "--head" in sys.argv:
    port = next(word for word in sys.argv if word.startswith("--port=")).partition("=")[2]
    listening = socket.create_server(("127.0.0.1", int(port)))
log.write(" ".join([os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"], *sys.argv[1:4]]) + "\\n")
signal.pause()
"""


def test_ray_on_other_machines_gets_the_token_unseen_and_ends_with_the_script(tmp_path):
    """With an ssh that stays here, and a Ray that only listens. The nodes never join, so that the script gives up."""
    log, port = tmp_path / "log", free_port("127.0.0.1")
    executable(tmp_path / "ssh", '#!/bin/bash\nshift\nexec bash -c "$*"\n')
    env = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "SLURM_JOB_ID")}
    env |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NODES": "127.0.0.1 127.0.0.1", "RAY_PORT": str(port)}
    env |= {"RAY": executable(tmp_path / "ray", RAY_ELSEWHERE.format(python=sys.executable, log=str(log)))}
    env |= {"PYTHON": executable(tmp_path / "python", "#!/bin/bash\nsleep 1\nexit 1\n"), "RAY_WAIT_SECONDS": "30"}
    command = ["bash", "-x", str(FOLDER / "run_multi_node.sh")]
    process = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert process.returncode == 1
    assert f"not all of 127.0.0.1 127.0.0.1 joined Ray at 127.0.0.1:{port} within 30 seconds" in process.stderr
    deadline = time.monotonic() + 20
    while log.read_text().count("stopped") < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    head, worker, *stops = log.read_text().splitlines()
    mode, token, *arguments = head.split()
    assert (mode, len(token), arguments) == ("token", 64, ["start", "--block", "--head"])
    assert worker.split() == ["token", token, "start", "--block", f"--address=127.0.0.1:{port}"]
    assert stops == ["stopped", "stopped"]
    assert token not in process.stderr


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
def test_a_machine_gets_the_build_that_runs_on_it(setup, tmp_path, machine, said):
    found = setup("--check", PYTHON=python_that_says(tmp_path, "3.11"), **machine)
    assert (found.returncode, found.stdout) == ((2, "") if said is None else (0, f"{said}\n"))


@pytest.mark.skipif(any(os.path.exists(f"{folder}/nvidia-smi") for folder in ("/usr/bin", "/bin")), reason="it has an nvidia-smi")
def test_a_machine_without_nvidia_smi_gets_the_build_for_cpus(setup, tmp_path):
    assert setup("--check", PYTHON=python_that_says(tmp_path, "3.11")).stdout == "the cpu build (no nvidia-smi)\n"


def python_that_says(folder, version, headers="."):
    code = f'#!/bin/sh\ncase "$2" in *version*) echo {version} ;; *) echo {headers} ;; esac\n'
    return executable(folder / "python", code)


def test_a_check_refuses_a_python_that_an_installation_would_refuse(setup, tmp_path):
    python = python_that_says(tmp_path, "3.13")
    checked, installed = setup("--check", PYTHON=python), setup(PYTHON=python)
    assert (checked.returncode, checked.stderr) == (installed.returncode, installed.stderr)
    assert "3.13; 3.11 or 3.12 is needed" in checked.stderr


def test_a_gpu_without_the_headers_of_python_is_told_what_vllm_will_miss(setup, tmp_path):
    headers = tmp_path / "python3.11"
    found = setup("--check", reply="580.65.06", PYTHON=python_that_says(tmp_path, "3.11", headers))
    assert found.returncode == 0
    assert found.stderr.endswith(f"vLLM does not start without {headers}/Python.h (apt install python3.11-dev)\n")
    headers.mkdir()
    (headers / "Python.h").touch()
    assert setup("--check", reply="580.65.06", PYTHON=str(tmp_path / "python"), CC="cc").stderr == ""


@pytest.mark.parametrize(("build", "constraints"), [("gpu", "constraints-gpu.txt"), ("cpu", "constraints.txt")])
def test_each_build_is_installed_in_the_versions_of_its_own_constraints(build, constraints, tmp_path):
    for name in ("setup_env.sh", "setup.py", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    log = tmp_path / "log"
    # A Python that says its version, makes an environment of itself, and installs nothing.
    python = executable(
        tmp_path / "python",
        f'#!/bin/sh\necho "$@" >> {log}\ncase "$1 $2" in\n"-m venv") mkdir -p .venv/bin; cp "$0" .venv/bin/python;;\n'
        "-c*) echo 3.11;;\nesac\n",
    )
    env = {**os.environ, "PYTHON": str(python), "VERL_MEMOPT_BUILD": build, "CC": "cc"}
    subprocess.run(["bash", str(tmp_path / "setup_env.sh")], env=env, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    (asked,) = [line for line in log.read_text().splitlines() if f"-r requirements/{build}.txt" in line]
    assert asked.endswith(f"-c requirements/{constraints}")


@pytest.mark.parametrize(("argument", "variables"), [("--what", {}), ("--check", {"VERL_MEMOPT_BUILD": "tpu"})])
def test_setup_refuses_what_it_does_not_know(setup, argument, variables):
    assert setup(argument, **variables).returncode == 2


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipe").glob("*/*.yaml")), ids=lambda path: f"{path.parent.name} {path.stem}")
def test_a_recipe_composes_with_files_and_a_model_and_means_what_it_says(recipe):
    given = ["data.train_files=train.parquet", "data.val_files=val.parquet", f"{AR}.model.path=model"]
    given += ["teacher.model.path=teacher"] * (recipe.parent.name == "distill")
    settings = flat(to_plain(load_settings(recipe.stem, given, str(recipe.parent))))
    document = yaml.safe_load(recipe.read_text())
    del document["defaults"]
    # YAML 1.1 reads 1e-4 as text, hence the types.
    said = {key: type(settings[key])(value) for key, value in flat(document).items()}
    assert {key: settings[key] for key in said} == said
