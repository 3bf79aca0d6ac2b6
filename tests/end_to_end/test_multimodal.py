"""Runs on folders of models that read images too: the text part is trained, and the rest reaches the saved model as it was."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from tests.end_to_end.runs import LOCAL, metrics, train_here
from tests.model.architectures import tiny_folder, whole_model
from verl_memopt.cli import main
from verl_memopt.model.weights import WeightFolder

AR = "actor_rollout_ref"
KINDS = (
    "qwen3_vl",
    "gemma3",
    "qwen3_5",
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gemma4", "qwen3_5_moe", "qwen3_vl_moe")),
)


def tensors_of(folder):
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def folder_of(toy, at, kind):
    folder = tiny_folder(at, kind, vocab_size=320, head_dim=32)
    AutoTokenizer.from_pretrained(toy / "model").save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text("{}")
    file = folder / "model.safetensors"
    save_file(
        load_file(file) | ({"mtp.fc.weight": torch.randn(4, 8)} if kind.startswith("qwen3_5") else {}), file, {"format": "pt"}
    )
    return folder


class Lived:
    """A run of three steps that has ended, with a checkpoint of the last one."""

    def __init__(self, toy, root, kind, *more):
        self.folder, self.run, rewards = folder_of(toy, root / "model", kind), root / "run", root / "rewards.py"
        rewards.write_text(
            "def compute_score(data_source, solution_str, *others, **more):\n    return len(solution_str) % 3 / 2\n"
        )
        overrides = [f"{AR}.model.path={self.folder}", f"custom_reward_function.path={rewards}", "trainer.save_freq=3"]
        steps = ["trainer.total_training_steps=3", "trainer.val_before_train=false"]
        assert train_here(toy, self.run, *LOCAL, *overrides, *steps, *more) == 0


@pytest.fixture(scope="module", params=KINDS)
def lived(request, toy, tmp_path_factory):
    return Lived(toy, tmp_path_factory.mktemp(request.param), request.param)


def test_the_engine_and_the_trainer_agree_and_the_policy_learns(lived):
    rows = metrics(lived.run)
    assert max(row["rollout/logprob_diff_mean"] for row in rows.values()) < 2e-6
    assert min(row["actor/grad_norm"] for row in rows.values()) > 0.1


def test_the_saved_model_differs_in_the_text_part_alone_and_loads_whole(lived):
    before, after, source = tensors_of(lived.folder), tensors_of(lived.run / "model"), WeightFolder(lived.folder)
    assert before.keys() == after.keys()
    learning = {stored for stored in source.stored.values() if not stored.endswith(".layer_scalar")}
    assert {name for name in before if not torch.equal(before[name], after[name])} == learning
    assert (lived.run / "model" / "preprocessor_config.json").read_text() == "{}"
    trained, names = whole_model(lived.run / "model"), set(source.names)
    assert {name.replace("model.language_model.", "model.") for name in trained.state_dict()} >= names


def test_the_command_exports_what_the_run_saved(lived, tmp_path):
    assert main(["export", str(lived.run), str(tmp_path / "out")]) == 0
    for name in ("model.safetensors", "config.json", "preprocessor_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (lived.run / "model" / name).read_bytes()


def test_an_export_needs_the_folder_that_has_the_other_parts(lived, tmp_path, capsys):
    away = Path(shutil.move(lived.folder, tmp_path / "away"))
    try:
        assert main(["export", str(lived.run), str(tmp_path / "out")]) != 0
        assert "the model that has its other parts is missing" in capsys.readouterr().err
        assert main(["export", str(lived.run), str(tmp_path / "out"), "--base", str(away)]) == 0
        saved = (lived.run / "model" / "model.safetensors").read_bytes()
        assert (tmp_path / "out" / "model.safetensors").read_bytes() == saved
    finally:
        shutil.move(away, lived.folder)


def test_a_chat_loads_the_saved_model(lived, capsys):
    assert main(["chat", str(lived.run), "--prompt", "2+3=", "--max-tokens", "4", "--temperature", "0"]) == 0


def test_adapters_have_the_names_of_the_whole_model_and_start_another_run(toy, tmp_path):
    first = Lived(toy, tmp_path / "first", "qwen3_vl", f"{AR}.model.lora_rank=2")
    adapter = first.run / "model" / "adapter"
    names = load_file(adapter / "adapter_model.safetensors")
    assert all(name.startswith("base_model.model.model.language_model.layers.") for name in names)
    more = [f"{AR}.model.lora_adapter_path={adapter}", f"{AR}.model.lora_rank=2", f"{AR}.actor.optim.lr=0"]
    again = Lived(toy, tmp_path / "again", "qwen3_vl", *more)
    started = load_file(again.run / "model" / "adapter" / "adapter_model.safetensors")
    assert all(torch.equal(started[name], names[name]) for name in names)
