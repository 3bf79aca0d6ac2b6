import dataclasses
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.rollout.test_vllm_build import installed
from tests.rollout.tools import place_at
from tests.trainer.conftest import AR
from verl_memopt.errors import ConfigError
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.rollout.vllm_process import engine_arguments
from verl_memopt.run.environment import frees_engine
from verl_memopt.trainer.build import build_run


def resolved(settings):
    """Return the environment of a run, whose lock is released."""
    context = build_run(settings)
    context.lock.release()
    return context.environment


def test_the_environment_of_a_run_on_this_machine_counts_its_ranks_and_rows(settled, tiny_folder, tmp_path):
    environment = resolved(settled())
    assert (environment.device, environment.num_devices, environment.free_engine) == ("cpu", 1, False)
    assert (environment.folder, environment.tokenizer_folder, environment.reference_folder) == (tiny_folder, tiny_folder, None)
    assert environment.tokenizer.eos_token_id in environment.eos_token_ids
    assert environment.run_dir == tmp_path / "run"
    assert not environment.run_dir.exists(), "a refused run leaves no folder"
    assert environment.embedding_rows == 320
    many = {"trainer.worker_group": "ray", "trainer.nnodes": 2, "trainer.n_gpus_per_node": 2}
    assert resolved(settled(many)).num_devices == 4


@pytest.mark.parametrize("key", ["algorithm.use_kl_in_reward", f"{AR}.actor.use_kl_loss"])
def test_a_kl_brings_the_reference_which_is_the_model_unless_another_is_named(settled, tiny_folder, untied_folder, key):
    assert resolved(settled({key: True})).reference_folder == tiny_folder
    assert resolved(settled({key: True, f"{AR}.ref.model.path": str(untied_folder)})).reference_folder == untied_folder


@pytest.mark.parametrize(
    ("key", "needed"),
    [(f"{AR}.ref.model.path", {f"{AR}.actor.use_kl_loss": True}), ("critic.model.path", {"algorithm.adv_estimator": "gae"})],
)
def test_a_missing_reference_or_critic_is_refused_under_its_own_key_and_only_where_it_is_needed(settled, key, needed):
    environment = resolved(settled({key: "/nowhere"}))
    assert (environment.reference_folder, environment.critic_folder) == (None, None)
    with pytest.raises(ConfigError, match=re.escape(f"{key}=/nowhere")):
        resolved(settled(needed | {key: "/nowhere"}))


def test_another_tokenizer_folder_is_taken(settled, untied_folder):
    assert resolved(settled({f"{AR}.model.tokenizer_path": str(untied_folder)})).tokenizer_folder == untied_folder


def test_vllm_on_a_cpu_cannot_be_asked_to_sleep_but_hf_can(settled):
    with pytest.raises(ConfigError, match=re.escape(f"{AR}.rollout.free_cache_engine=true: vLLM on a CPU")):
        resolved(settled({f"{AR}.rollout.name": "vllm", f"{AR}.rollout.free_cache_engine": True}))
    assert resolved(settled({f"{AR}.rollout.name": "hf", f"{AR}.rollout.free_cache_engine": True})).free_engine
    assert not resolved(settled({f"{AR}.rollout.free_cache_engine": False})).free_engine


def test_vllm_on_a_gpu_needs_a_compiler_and_the_headers_of_python(settled, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.syspath_prepend(installed(tmp_path / "gpu_build", vllm="0.32.0"))
    with_vllm = settled({f"{AR}.rollout.name": "vllm", "trainer.device": "cuda"})
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"rollout\.name=vllm: .*no C compiler \(apt install gcc.*rollout\.name=hf"):
        resolved(with_vllm)
    (tmp_path / "gcc").touch(mode=0o755)
    monkeypatch.setattr("sysconfig.get_paths", lambda **_: {"include": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"Python\.h \(apt install python3\.\d+-dev"):
        resolved(with_vllm)


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_a_build_of_vllm_for_gpus_is_refused_on_the_cpu_by_name_with_two_ways_out(settled, tmp_path, monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.syspath_prepend(installed(tmp_path / "gpu_build", vllm="0.32.0"))
    with pytest.raises(ConfigError) as caught:
        resolved(settled({f"{AR}.rollout.name": "vllm", "trainer.device": device}))
    assert str(caught.value) == (
        f"trainer.device={device}, {AR}.rollout.name=vllm: the run is on the CPU, and the installed vLLM is a build for GPUs. "
        f"Set {AR}.rollout.name=hf, or install the other build: VERL_MEMOPT_BUILD=cpu ./setup_env.sh."
    )
    assert resolved(settled({f"{AR}.rollout.name": "hf", "trainer.device": device})).device == "cpu"


def test_a_build_of_vllm_for_cpus_is_refused_on_a_gpu(settled, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("sys.path", [installed(tmp_path / "cpu_build", vllm="0.32.0+cpu"), *sys.path])
    with pytest.raises(ConfigError, match="the run is on the GPU, and the installed vLLM is a build for CPUs"):
        resolved(settled({f"{AR}.rollout.name": "vllm", "trainer.device": "cuda"}))


@pytest.mark.parametrize("asked", [None, True, False])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_engine_that_is_to_sleep_is_built_so_that_it_can(settled, asked, device):
    rollout = settled({f"{AR}.rollout.name": "vllm", f"{AR}.rollout.free_cache_engine": asked}).actor_rollout_ref.rollout
    if (asked, device) == (True, "cpu"):
        return
    place = dataclasses.replace(place_at(Path("folder")), device=torch.device(device))
    arguments = engine_arguments(rollout, place)
    assert arguments["enable_sleep_mode"] == frees_engine(rollout, device) == (device == "cuda" if asked is None else asked)


def test_a_run_folder_that_cannot_be_made_is_refused(settled, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"trainer\.default_local_dir=.*file/run: cannot be made \(Not a directory\)"):
        resolved(settled({"trainer.default_local_dir": str(tmp_path / "file" / "run")}))


def test_a_tilde_is_the_home_folder(settled, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolved(settled({"trainer.default_local_dir": "~/runs/one"})).run_dir == tmp_path / "runs" / "one"


@pytest.mark.parametrize(
    ("key", "more"),
    [
        (f"{AR}.model.path", {f"{AR}.model.tokenizer_path": None}),
        (f"{AR}.ref.model.path", {f"{AR}.actor.use_kl_loss": True}),
        ("critic.model.path", {"algorithm.adv_estimator": "gae"}),
    ],
)
def test_a_tokenizer_with_more_tokens_than_the_embedding_has_rows_is_refused(settled, tiny_folder, tmp_path, key, more):
    small = make_tiny_model(tmp_path / "small", TinyShape(vocab_size=300))
    folders = {name: str(tiny_folder) for name, value in more.items() if value is None}
    with pytest.raises(
        ConfigError, match=re.escape(f"{key}={small}: its embedding has 300 rows, and the tokenizer has 320 tokens")
    ):
        resolved(settled(more | folders | {key: str(small)}))


GAE = {"algorithm.adv_estimator": "gae"}
CRITIC = "critic.model.path"


def test_a_critic_starts_from_the_policys_folder_unless_another_is_named(settled, tiny_folder, untied_folder):
    assert resolved(settled()).critic_folder is None
    environment = resolved(settled(GAE))
    assert environment.critic_folder == tiny_folder
    head = {"score.weight": (1, 64), "score.bias": (1,)}
    assert environment.critic_weights == environment.weights | head  # the LM head of this model is its embedding
    assert resolved(settled(GAE | {CRITIC: str(untied_folder)})).critic_folder == untied_folder


def test_a_critic_with_another_vocabulary_is_refused_with_both_folders(settled, tmp_path, tiny_folder):
    other = make_tiny_model(tmp_path / "other", TinyShape())
    file = other / "tokenizer.json"
    file.write_text(file.read_text().replace('"A": ', '"swapped": ').replace('"B": ', '"A": ').replace('"swapped": ', '"B": '))
    with pytest.raises(ConfigError) as caught:
        resolved(settled(GAE | {CRITIC: str(other)}))
    assert str(caught.value).startswith(f"{CRITIC}={other}: its tokenizer is another than the policy's in {tiny_folder}")
    (other / "tokenizer.json").unlink()
    assert resolved(settled(GAE | {CRITIC: str(other)})).critic_folder == other  # it is taken to use the policy's
