"""Every mistake in settings, model, data or machine ends in one message that names what to mend, before anything is lost."""

import json
import shutil
import sys
from importlib.machinery import PathFinder

import pyarrow
import pytest
import torch
from pyarrow import parquet

from tests.end_to_end.runs import LOCAL

AR = "actor_rollout_ref"
ONE_STEP = [
    "trainer.total_training_steps=1",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "data.train_batch_size=8",
    f"{AR}.actor.ppo_mini_batch_size=8",
]
UNREADABLE = "/proc/self/mem"
"""A file whose first byte cannot be read, not even by root."""


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            [
                "trainer.save_freq=often",
                "trainer.total_trainig_steps=3",
                "algorithm.adv_estimator=grpo_passk",
                f"{AR}.rollout.n=1",
            ],
            ["3 problems in the settings:\n", "trainer.save_freq=often", "trainer.total_training_steps?", f"{AR}.rollout.n=1"],
        ),
        (
            [f"{AR}.actor.grad_clip=2", f"{AR}.actor.optim.clip_grad=1"],
            [f"{AR}.actor.grad_clip=2", f"{AR}.actor.optim.clip_grad=1"],
        ),
        ([f"{AR}.rollout.n=4,8"], [f"{AR}.rollout.n=4,8: several values for one key", f"{AR}.rollout.n=[a,b]"]),
        ([f"{AR}.rollout.tensor_model_parallel_size=2"], [f"{AR}.rollout.tensor_model_parallel_size=2", "1 devices"]),
        (["trainer.n_gpus_per_node=2", *LOCAL], ["trainer.worker_group=local", "trainer.n_gpus_per_node=2"]),
        ([f"{AR}.model.external_lib=nowhere_to_be_found"], [f"{AR}.model.external_lib=nowhere_to_be_found", "Install"]),
        (["trainer.experiment_name=../.."], ["trainer.experiment_name=../..: this is one part of the run folder's path"]),
        ([f"{AR}.model.override_config.hidden_size=wide"], [f"{AR}.model.override_config.hidden_size=wide", "expected int"]),
    ],
)
def test_settings_that_cannot_be_are_refused_under_their_keys(refused, overrides, said):
    message = refused(*overrides)
    for part in said:
        assert part in message


def test_more_gpus_than_there_are_are_refused(refused):
    some, none = "trainer.n_gpus_per_node=256: this machine has", "trainer.device=cuda: no CUDA device is visible"
    message = refused("trainer.device=cuda", "trainer.n_gpus_per_node=256")
    assert message.startswith(some if torch.cuda.is_available() else none)


def test_a_ray_address_where_nothing_answers_is_refused_at_once(refused):
    message = refused("ray_kwargs.ray_init.address=127.0.0.1:1")
    assert message.startswith("ray_kwargs.ray_init.address=127.0.0.1:1: nothing answers there")


class WithoutVllm(PathFinder):
    """Finds what is installed, but no vLLM."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        return None if fullname == "vllm" else super().find_spec(fullname, path, target)


def test_vllm_that_is_not_installed_is_named_with_the_way_to_get_it_and_the_way_without(refused, monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [WithoutVllm if finder is PathFinder else finder for finder in sys.meta_path])
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    message = refused(f"{AR}.rollout.name=vllm")
    assert message.startswith(f"{AR}.rollout.name=vllm: vLLM is not installed")
    assert "setup_env.sh" in message
    assert f"{AR}.rollout.name=hf" in message


def test_vllm_that_cannot_be_imported_is_told_with_its_own_reason(refused, tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('libnothing.so.1: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    message = refused("trainer.worker_group=local", *ONE_STEP, leaves=["config.yaml", "console.log"])
    assert message.startswith(f"{AR}.rollout.name=vllm: vLLM cannot be imported (libnothing.so.1")


def torn(path):
    """Cuts the end off a file."""
    path.write_bytes(path.read_bytes()[:-2])


def unreadable(path):
    path.unlink()
    path.symlink_to(UNREADABLE)


@pytest.mark.parametrize(
    ("damage", "name", "said"),
    [
        (torn, "config.json", "its config.json cannot be read"),
        (unreadable, "config.json", "its config.json cannot be read"),
        (torn, "model.safetensors", "model.safetensors: not a whole safetensors file"),
        (torn, "tokenizer.json", "its tokenizer cannot be read"),
        (torn, "generation_config.json", "generation_config.json: not JSON"),
        (unreadable, "generation_config.json", "generation_config.json: not JSON"),
    ],
)
def test_a_model_folder_that_cannot_be_used_is_named_with_what_is_wrong_in_it(refused, toy, tmp_path, damage, name, said):
    folder = shutil.copytree(toy / "model", tmp_path / "model")
    damage(folder / name)
    message = refused(f"{AR}.model.path={folder}", *LOCAL)
    assert str(folder) in message
    assert said in message


def test_a_model_that_is_neither_here_nor_on_the_hub_is_named(refused):
    message = refused(f"{AR}.model.path=nobody/nothing")
    assert message.startswith(f"{AR}.model.path=nobody/nothing: no such folder here, and the hub could not give it")


def test_weights_of_another_model_are_listed_and_the_folder_takes_the_right_ones_next_time(refused, here, toy, tmp_path):
    folder = shutil.copytree(toy / "model", tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"intermediate_size": 2 * settings["intermediate_size"]}))
    message = refused(f"{AR}.model.path={folder}", *LOCAL)
    assert message.startswith(f"{AR}.model.path={folder}: weights and config disagree: ")
    assert "model.layers.0.mlp.gate_proj.weight has shape (128, 64), the config says (256, 64)" in message
    assert here(*LOCAL, *ONE_STEP) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 1


@pytest.fixture
def rows(toy):
    return parquet.read_table(toy / "train.parquet").to_pylist()


def test_a_dataset_that_is_no_parquet_file_or_has_no_rows_is_named_under_its_key(refused, rows, tmp_path):
    path = tmp_path / "rows.parquet"
    path.write_text("PAR1")
    assert f"{path}: this is not a readable parquet file" in refused(f"data.val_files={path}", kind="DataError")
    parquet.write_table(pyarrow.Table.from_pylist(rows).slice(0, 0), path)
    assert refused(f"data.train_files={path}", kind="DataError").startswith(f"data.train_files: {path}: the file has no rows")


def test_a_dataset_that_cannot_be_read_is_named(refused, tmp_path):
    for path in (tmp_path / "rows.jsonl", tmp_path / "rows.parquet"):
        path.symlink_to(UNREADABLE)
        message = refused(f"data.train_files={path}", kind="DataError")
        assert str(path) in message
        assert "read" in message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"reward_model": None}, "the column 'reward_model' is null in this row"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": "1+" * 30}, "the prompt has 60 tokens, but data.max_prompt_length is 16"),
        ({"data_source": "mine"}, "data_source 'mine' has no rule. There are rules for toy/arithmetic"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_by_file_and_row(refused, rows, tmp_path, change, said):
    rows[4] |= change
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    message = refused(f"data.train_files={path}", kind="DataError")
    assert message.startswith(f"{path}:5: {said}")
    assert ("custom_reward_function.path" in message) == ("data_source" in change)


def test_a_chat_template_that_does_not_render_is_named(refused):
    template = '{{ raise_exception("no turns here") }}'
    message = refused(f"{AR}.model.custom_chat_template='{template}'", kind="DataError")
    assert "train.parquet:1: the chat template cannot render this prompt" in message
    assert f"{AR}.model.custom_chat_template" in message
