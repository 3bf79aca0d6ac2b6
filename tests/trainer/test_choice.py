import pytest
import torch
from huggingface_hub import constants

from recipe.choose_model import GPU_TOY, OWN_GENERATION, choose, main
from tests.rollout.test_vllm_build import installed

MODEL, DATA = "owner/model", "owner/data"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty hub cache without a hub, and a way to put files into it."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def put(kind, name, *files):
        place = tmp_path / "hub" / f"{kind}s--{name.replace('/', '--')}"
        (place / "refs").mkdir(parents=True)
        (place / "refs" / "main").write_text("abc")
        for file in files:
            path = place / "snapshots" / "abc" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")

    return put


@pytest.fixture
def gpu(cache, monkeypatch):
    """A GPU that PyTorch sees."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_the_cpu_trains_the_toy_task_and_says_nothing(cache, device):
    assert choose(device, MODEL, DATA, "nowhere", gpu_listed=False) == (["toy"], None)


def test_the_cpu_is_taken_beside_a_gpu_where_it_is_asked_for(cache, gpu):
    assert choose("cpu", MODEL, DATA, "nowhere", gpu_listed=True) == (["toy"], None)


def test_a_gpu_that_pytorch_does_not_see_is_told(cache):
    task, sentence = choose("auto", MODEL, DATA, "nowhere", gpu_listed=True)
    assert task == ["toy"]
    assert "nvidia-smi" in sentence
    assert "VERL_MEMOPT_BUILD=gpu" in sentence


def test_on_the_cpu_a_build_of_vllm_for_gpus_leaves_generation_to_transformers(cache, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(installed(tmp_path / "gpu_build", vllm="0.32.0"))
    task, sentence = choose("cpu", MODEL, DATA, "nowhere", gpu_listed=True)
    assert task == ["toy", OWN_GENERATION]
    assert sentence == "The installed vLLM is a build for GPUs, so transformers generates."


def test_a_gpu_with_model_and_data_at_hand_needs_no_hub(cache, gpu, tmp_path):
    cache("model", MODEL, "config.json", "model.safetensors")
    (tmp_path / "train.parquet").write_text("")
    assert choose("auto", MODEL, DATA, str(tmp_path / "train.parquet"), gpu_listed=True) == (["gsm8k"], None)
    assert choose("cuda", MODEL, None, "nowhere", gpu_listed=True) == (["gsm8k"], None)
    cache("dataset", DATA, "main/train.parquet", "main/test.parquet")
    assert choose("auto", MODEL, DATA, "nowhere", gpu_listed=True) == (["gsm8k"], None)


def test_a_gpu_without_the_model_or_its_data_trains_the_toy_task_and_says_why(cache, gpu):
    task, sentence = choose("auto", MODEL, DATA, "nowhere", gpu_listed=True)
    assert task == ["toy", GPU_TOY]
    assert sentence.startswith(f"the model {MODEL} is not in the local cache and the hub cannot give it (HF_HUB_OFFLINE is set)")
    cache("model", MODEL, "config.json", "model.safetensors")
    task, sentence = choose("auto", MODEL, DATA, "nowhere", gpu_listed=True)
    assert task == ["toy", GPU_TOY]
    assert sentence.startswith(f"the dataset {DATA} is not in the local cache")


def test_the_choice_is_one_line_for_the_shell_and_the_sentence_another_for_the_reader(cache, gpu, capsys):
    assert main(["--device", "auto", "--model", MODEL, "--dataset", DATA, "--train-file", "nowhere", "--nvidia-smi"]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"toy {GPU_TOY}\n"
    assert shown.err.count("\n") == 1


def test_a_gpu_that_is_asked_for_and_not_there_is_an_error(capsys):
    assert main(["--device", "cuda", "--model", MODEL, "--dataset", DATA, "--train-file", "nowhere"]) == 2
    assert "trainer.device=cuda: no CUDA device is visible" in capsys.readouterr().err
