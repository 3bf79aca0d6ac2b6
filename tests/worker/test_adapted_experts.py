"""Adapters on experts in a worker: they come back from a checkpoint, and saved and exported models have merged experts."""

import pytest
import torch
from safetensors.torch import load_file

from tests.ranks import run_ranks
from tests.worker.test_checkpoint import log_probs_of, of_reference
from tests.worker.test_export_model import files
from tests.worker.test_export_model import saved as saved_run
from tests.worker.test_worker import ALL, AR, call, mini_batch, place, plan_of, same, weights
from verl_memopt.memory.lora_torch import adapters
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.run.export_model import StoredModel, export_model, find_checkpoint
from verl_memopt.worker.worker import Worker

LORA = {
    f"{AR}.model.lora_rank": 4, f"{AR}.model.lora_alpha": 8, f"{AR}.actor.optim.lr": 1e-2,
    f"{AR}.model.target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}  # fmt: skip


@pytest.fixture(scope="module", params=["qwen3_moe", "gpt_oss"])
def folder(request, tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("mixture") / "model", TinyShape(request.param, num_layers=2), seed=3)


def learned(worker):
    return {name: layer.lora_B.detach().clone() for name, layer in adapters(worker.policy.model).items() if ".experts." in name}


def test_a_loaded_worker_goes_on_bit_for_bit_and_its_reference_is_what_it_started_from(made, folder, tmp_path):
    worker = made(LORA, folder)
    base = of_reference(worker)
    call(worker, "update_actor", [mini_batch()])
    assert all(factor.any() for factor in learned(worker).values())
    call(worker, "save", str(tmp_path), ALL)
    metrics, expected = call(worker, "update_actor", [mini_batch()]), weights(worker)
    other = made(LORA, folder)
    call(other, "load", str(tmp_path), ALL)
    assert call(other, "update_actor", [mini_batch()]) == metrics
    assert same(weights(other), expected)
    assert torch.equal(of_reference(other), base)
    started = made(LORA | {f"{AR}.model.lora_adapter_path": str(tmp_path / "lora_adapter")}, folder)
    first = log_probs_of(started, "old_log_prob", "old_log_probs", False)
    assert not torch.equal(first, base)
    assert torch.equal(of_reference(started), first)


def test_a_saved_model_has_merged_experts_and_an_export_has_what_the_run_writes(made, folder, tmp_path):
    worker = made(LORA, folder)
    call(worker, "update_actor", [mini_batch(), mini_batch()])
    saved_run(worker, folder, tmp_path / "run", LORA)
    worker.call("save_checkpoint", False, "save_model", str(tmp_path / "written"))
    written = load_file(tmp_path / "written" / "model.safetensors")
    plain = load_file(folder / "model.safetensors")
    changed = {name for name in plain if not torch.equal(plain[name], written[name])}
    assert any(".experts." in name for name in changed)
    export_model(StoredModel(find_checkpoint(tmp_path / "run", None)), tmp_path / "out")
    (tmp_path / "out" / "training.json").unlink()
    assert files(tmp_path / "out") == files(tmp_path / "written")
    expected = log_probs_of(worker, "old_log_prob", "old_log_probs", False)
    merged = log_probs_of(made({}, tmp_path / "written"), "old_log_prob", "old_log_probs", False)
    torch.testing.assert_close(merged, expected, rtol=0, atol=1e-5)


def on_two_ranks(rank, folder, source, out):
    worker = Worker(plan_of(folder, LORA), place(rank, 2))
    worker.load(str(source), ALL)
    worker.save(str(out / "again"), ALL)
    worker.save_model(str(out / "written"))


def test_two_ranks_go_on_from_a_checkpoint_of_one_and_write_the_same(made, folder, tmp_path):
    worker = made(LORA, folder)
    call(worker, "update_actor", [mini_batch(), mini_batch()])
    call(worker, "save", str(tmp_path / "one"), ALL)
    worker.call("save_checkpoint", False, "save_model", str(tmp_path / "model"))
    expected = learned(worker)
    made.close()
    run_ranks(on_two_ranks, 2, folder, tmp_path / "one", tmp_path)
    for name in ("adapter/adapter_model.safetensors", "model.safetensors"):
        one, two = (load_file(tmp_path / place / name) for place in ("model", "written"))
        assert one.keys() == two.keys()
        for key, tensor in one.items():
            torch.testing.assert_close(two[key], tensor, rtol=0, atol=1e-6)
    back = made(LORA, folder)
    call(back, "load", str(tmp_path / "again"), ALL)
    assert all(torch.equal(factor, expected[name]) for name, factor in learned(back).items())
