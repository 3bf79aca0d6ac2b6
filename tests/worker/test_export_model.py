"""A checkpoint of any number of ranks gives the model that its run would write, in one process and a tensor at a time."""

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from tests.critics import call_critic, critic_mini, critic_plan, critic_weights
from tests.model import architectures
from tests.ranks import run_ranks
from tests.worker.test_worker import ALL, AR, call, mini_batch, place, plan_of, weights
from verl_memopt.cli import main
from verl_memopt.errors import ConfigError
from verl_memopt.model.weights import WeightFolder
from verl_memopt.run.checkpoints import CheckpointStore
from verl_memopt.run.export_model import StoredModel, export_model, find_checkpoint
from verl_memopt.worker.worker import Worker

LORA = {f"{AR}.model.lora_rank": 2, f"{AR}.model.lora_alpha": 8}
BFLOAT16 = {f"{AR}.actor.fsdp_config.model_dtype": "bf16"}
OFFLOADED = {f"{AR}.actor.fsdp_config.param_offload": True}


def files(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def commit(root, folder, more=None, step=1, score=None, **of_critic):
    """Make what was written to ``global_step_N.partial`` a checkpoint of the run folder, with what its driver would say."""
    base = WeightFolder(folder)
    settings = {
        f"{AR}.model.path": str(folder), f"{AR}.model.lora_rank": 0, f"{AR}.model.lora_alpha": 16,
        f"{AR}.model.trust_remote_code": False, f"{AR}.actor.fsdp_config.model_dtype": "fp32",
        "critic.model.path": str(folder), "critic.model.lora_rank": 0, "critic.model.lora_alpha": 16,
        f"{AR}.model.use_rslora": False, "critic.model.use_rslora": False,
        "critic.model.trust_remote_code": False, "critic.model.fsdp_config.model_dtype": "fp32",
    }  # fmt: skip
    shapes = {name: list(base.shape(name)) for name in of_critic.pop("order", base.names)}
    dtypes = {"actor": "float32", "critic": "float32"}
    driver = {"settings": settings | (more or {}), "weights": shapes, "critic_weights": {}, "dtypes": dtypes, **of_critic}
    driver = {"seed": 0, "loader": {}, "token_budgets": {}} | driver
    CheckpointStore(root, None).commit(step, driver, 1, score=score)


def aside(root, step=1):
    folder = CheckpointStore(root, None).begin(step)
    return folder / "actor", folder / "critic"


def saved(worker, folder, root, more=None, **driver):
    """Save a worker's policy as the checkpoint of a run, and give the order of its weights."""
    order = [name for name in weights(worker) if name.rsplit(".", 1)[-1] not in ("lora_A", "lora_B")]
    call(worker, "save", str(aside(root)[0]), ALL)
    commit(root, folder, more, order=order, **driver)
    return order


def trained(made, more=None):
    worker = made(more)
    call(worker, "update_actor", [mini_batch(), mini_batch()])
    return worker


@pytest.mark.parametrize("more", [{}, LORA, BFLOAT16, LORA | OFFLOADED])
def test_an_export_has_the_weights_that_the_run_writes_itself(made, tiny_folder, tmp_path, more):
    worker = trained(made, more)
    saved(worker, tiny_folder, tmp_path / "run", more)
    worker.call("save_checkpoint", False, "save_model", str(tmp_path / "written"))
    export_model(StoredModel(find_checkpoint(tmp_path / "run", None)), tmp_path / "out")
    (tmp_path / "out" / "training.json").unlink()
    assert files(tmp_path / "out") == files(tmp_path / "written")


def on_two_ranks(rank, folder, source, out, more):
    worker = Worker(plan_of(folder, more), place(rank, 2))
    worker.load(str(source / "global_step_1" / "actor"), ALL)
    worker.save(str(out), ALL)
    worker.save_model(str(out.parent / "written"))


@pytest.mark.parametrize("more", [{}, LORA])
def test_checkpoints_of_one_and_of_two_ranks_give_the_same_bytes(made, tiny_folder, tmp_path, more):
    one, two = tmp_path / "one", tmp_path / "two"
    order = saved(trained(made, more), tiny_folder, one, more)
    made.close()
    run_ranks(on_two_ranks, 2, tiny_folder, one, aside(two)[0], more)
    shutil.move(two / "global_step_1.partial" / "written", tmp_path / "written")
    commit(two, tiny_folder, more, order=order)
    for root in (one, two):
        assert main(["export", str(root), str(tmp_path / f"{root.name}_out")]) == 0
    assert len(list((two / "global_step_1" / "actor" / "dcp").glob("*.distcp"))) == 2
    exported = files(tmp_path / "one_out")
    assert files(tmp_path / "two_out") == exported
    # Two ranks merge their halves of a layer, whose products may be summed in another order.
    for name, tensor in load_file(tmp_path / "written" / "model.safetensors").items():
        torch.testing.assert_close(tensor, load_file(tmp_path / "one_out" / "model.safetensors")[name], rtol=0, atol=1e-6)


def save_on_two_ranks(rank, folder, out):
    Worker(dataclasses.replace(plan_of(folder, {}), engine_folder=None, has_more=True), place(rank, 2)).save_model(str(out))


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5", "qwen3_5_moe", "gemma4"])
def test_two_ranks_save_a_multimodal_model_whole(tiny_folder, tmp_path, kind):
    folder = architectures.tiny_folder(tmp_path / "model", kind)
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(folder)
    run_ranks(save_on_two_ranks, 2, folder, tmp_path / "out")
    before, after = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def save_without_the_rest(rank, folder, out):
    worker = Worker(dataclasses.replace(plan_of(folder, {}), engine_folder=None, has_more=True), place(rank, 1))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError) as refused:
        worker.save_model(str(out))
    return str(refused.value)


def test_a_multimodal_model_is_not_saved_without_the_rest(tiny_folder, tmp_path):
    folder = architectures.tiny_folder(tmp_path / "model", "qwen3_vl")
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(folder)
    (message,) = run_ranks(save_without_the_rest, 1, folder, tmp_path / "out")
    assert f"path={folder}: model.safetensors is missing" in message


def test_merged_weights_and_the_adapter_alone_are_one_model(made, tiny_folder, tmp_path):
    saved(trained(made, LORA), tiny_folder, tmp_path / "run", LORA)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "merged")]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "adapter"), "--adapter-only"]) == 0
    assert files(tmp_path / "merged" / "adapter") == files(tmp_path / "adapter")
    base, merged = (load_file(folder / "model.safetensors") for folder in (tiny_folder, tmp_path / "merged"))
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    told = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (told["r"], told["lora_alpha"], told["base_model_name_or_path"]) == (2, 8, str(tiny_folder))
    changed = [name for name in base if not torch.equal(base[name], merged[name])]
    assert len(changed) == len(adapter) / 2 > 0
    for name in changed:
        down, up = (adapter[f"base_model.model.{name.removesuffix('.weight')}.lora_{part}.weight"] for part in "AB")
        torch.testing.assert_close(merged[name], base[name] + 8 / 2 * up @ down, rtol=0, atol=1e-6)
    AutoModelForCausalLM.from_pretrained(tmp_path / "merged")


def test_adapters_without_their_base_name_the_way_out_and_another_folder_serves(made, tiny_folder, tmp_path, capsys):
    moved = tmp_path / "moved"
    saved(trained(made, LORA), tiny_folder, tmp_path / "run", LORA | {f"{AR}.model.path": str(tmp_path / "gone")})
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 1
    message = capsys.readouterr().err
    assert str(tmp_path / "gone") in message
    assert "--base" in message
    assert not (tmp_path / "out").exists()
    shutil.copytree(tiny_folder, moved)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--base", str(moved)]) == 0


@pytest.mark.parametrize("lora", [0, 4])
def test_a_critic_is_a_token_classifier(made, tiny_folder, tmp_path, lora):
    worker = made(**critic_plan(tiny_folder, {"critic.model.lora_rank": lora}))
    call_critic(worker, "update_critic", [critic_mini(), critic_mini()])
    actor, critic = aside(tmp_path / "run")
    call(worker, "save", str(actor), ALL)
    call_critic(worker, "save_critic", str(critic), [*ALL, "hf_model"])
    written = load_file(critic / "huggingface" / "model.safetensors")
    shapes = {name: list(tensor.shape) for name, tensor in written.items()}
    commit(tmp_path / "run", tiny_folder, {"critic.model.lora_rank": lora}, critic_weights=shapes)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--critic"]) == 0
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in written.items())
    assert AutoModelForTokenClassification.from_pretrained(tmp_path / "out").config.num_labels == 1
    assert lora or set(written) == set(critic_weights(worker))


# What a person must mend is one line, and leaves no folder.


@pytest.fixture
def run(made, tiny_folder, tmp_path):
    """A run folder with two checkpoints, the first one better."""
    worker = trained(made)
    saved(worker, tiny_folder, tmp_path / "run", score=0.5)
    call(worker, "save", str(aside(tmp_path / "run", 2)[0]), ALL)
    commit(tmp_path / "run", tiny_folder, step=2, score=0.25)
    return tmp_path / "run"


def refused(run, capsys, *arguments, code=1):
    out = run.parent / "refused"
    assert main(["export", *(str(argument) for argument in arguments[:1]), str(out), *arguments[1:]]) == code
    lines = capsys.readouterr().err.splitlines()
    assert not out.exists()
    assert not list(run.parent.glob("*.partial"))
    assert len(lines) == 1
    return lines[0]


def step_of(run, *arguments):
    out = run.parent / "out"
    shutil.rmtree(out, ignore_errors=True)
    assert main(["export", str(run), str(out), *arguments]) == 0
    return json.loads((out / "training.json").read_text())["step"]


def test_a_step_is_chosen_by_number_as_the_best_or_as_the_newest(run, capsys):
    assert [step_of(run), step_of(run, "--step", "1"), step_of(run, "--step", "best")] == [2, 1, 1]
    assert "step 3" in (message := refused(run, capsys, run, "--step", "3"))
    assert "1, 2" in message
    assert "--step" in refused(run, capsys, run / "global_step_1", "--step", "1", code=2)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_a_dtype_of_the_command_line_is_that_of_the_weights_and_of_the_config(run, name):
    step_of(run, "--dtype", name)
    weights = load_file(run.parent / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {getattr(torch, name)}
    assert json.loads((run.parent / "out" / "config.json").read_text())["dtype"] == name


def test_a_folder_without_checkpoints_is_named(run, capsys):
    assert "global_step_N" in refused(run, capsys, run.parent / "elsewhere")
    (run.parent / "empty").mkdir()
    assert "global_step_N" in refused(run, capsys, run.parent / "empty")


def test_a_damaged_file_is_named_and_the_newest_whole_checkpoint_serves_a_run(run, capsys):
    (shard,) = (run / "global_step_2" / "actor" / "dcp").glob("*.distcp")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    message = refused(run, capsys, run / "global_step_2")
    assert shard.name in message
    assert "other contents" in message
    assert step_of(run) == 1


def test_a_folder_with_something_in_it_is_left_as_it_is(run, capsys):
    occupied = run.parent / "occupied"
    occupied.mkdir()
    (occupied / "mine.txt").write_text("mine")
    assert main(["export", str(run), str(occupied)]) == 2
    assert "not empty" in capsys.readouterr().err
    assert files(occupied) == {"mine.txt": b"mine"}


def test_a_run_without_critic_or_adapter_says_so(run, capsys):
    assert "no critic" in refused(run, capsys, run, "--critic")
    assert "--adapter-only" in refused(run, capsys, run, "--adapter-only")


def test_a_disk_without_room_is_refused_before_anything_is_written(run, capsys, monkeypatch):
    usage = shutil.disk_usage(run)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    message = refused(run, capsys, run)
    assert "MiB free" in message
    assert "another disk" in message
