import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForTokenClassification, AutoTokenizer

from tests.critics import call_critic, critic_batch, critic_mini, critic_plan, critic_weights, naive_values
from tests.ranks import run_ranks
from tests.worker.test_worker import ALL, AR, batch, call, mini_batch, place, plan_of, same, weights
from verl_memopt.distributed.file_records import record_folder
from verl_memopt.errors import CheckpointError
from verl_memopt.memory.lora_torch import adapters
from verl_memopt.worker.trained_model import MiniBatch
from verl_memopt.worker.worker import Worker


def test_a_loaded_worker_goes_on_bit_for_bit(made, tmp_path):
    worker = made()
    call(worker, "update_actor", [mini_batch()])
    call(worker, "save", str(tmp_path), ALL)
    metrics, expected = call(worker, "update_actor", [mini_batch()]), weights(worker)
    other = made()
    call(other, "load", str(tmp_path), ALL)
    assert call(other, "update_actor", [mini_batch()]) == metrics
    assert same(weights(other), expected)


def test_a_loaded_worker_forgets_a_gradient_of_the_weights_before(made, tmp_path):
    worker = made()
    call(worker, "save", str(tmp_path), ALL)
    worker.call("update_actor", False, "add_gradient", mini_batch())
    call(worker, "load", str(tmp_path), ALL)
    assert not worker.policy.trained.has_gradient


def test_a_checkpoint_holds_a_model_folder_with_weights_only_when_asked(made, tmp_path, tiny_folder):
    worker = made()
    call(worker, "save", str(tmp_path / "plain"), ALL)
    call(worker, "save", str(tmp_path / "whole"), [*ALL, "hf_model"])
    plain, whole = (tmp_path / name / "huggingface" for name in ("plain", "whole"))
    for folder in (plain, whole):
        assert (folder / "config.json").is_file()
        assert (folder / "tokenizer.json").is_file()
    assert not list(plain.glob("*.safetensors"))
    assert same(load_file(whole / "model.safetensors"), weights(worker))


@pytest.mark.parametrize("more", [{}, {f"{AR}.model.lora_rank": 2}])
def test_a_save_answers_with_the_record_of_every_file(made, tmp_path, more):
    assert call(made(more), "save", str(tmp_path), [*ALL, "hf_model"]) == record_folder(tmp_path, tmp_path)


def test_a_saved_tokenizer_renders_prompts_as_the_run_did(made, tmp_path):
    template = "{{ messages[0]['content'] }} ->"
    call(made({f"{AR}.model.custom_chat_template": template}), "save", str(tmp_path), ["model"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "huggingface")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "1+1="}], tokenize=False) == "1+1= ->"


def test_a_model_folder_that_cannot_be_written_is_an_error_for_the_user(made, tmp_path):
    worker = made()
    (tmp_path / "huggingface").write_text("a file where a folder must be")
    with pytest.raises(CheckpointError, match=r"the model could not be written: .*huggingface"):
        call(worker, "save", str(tmp_path), ["model"])


def two_ranks(rank, folder, out):
    """Loads what one rank wrote, takes a step of each model, saves and gives what this rank computed."""
    worker = Worker(plan_of(folder, **critic_plan(folder)), place(rank, 2))
    worker.load(str(out / "one"), ALL)
    call_critic(worker, "load_critic", str(out / "critic of one"), ALL)
    own = [2 * rank, 2 * rank + 1]
    minis = [MiniBatch(mini.batch.select(own), [[0, 1]], mini.counts) for mini in (mini_batch(), critic_mini())]
    metrics = worker.update_actor(minis[:1]) | call_critic(worker, "update_critic", minis[1:]).value
    worker.save(str(out / "two"), ALL)
    call_critic(worker, "save_critic", str(out / "critic of two"), [*ALL, "hf_model"])
    return metrics


def test_another_number_of_ranks_goes_on_from_a_checkpoint_and_back(made, tiny_folder, tmp_path):
    worker = made(**critic_plan(tiny_folder))
    call(worker, "update_actor", [mini_batch()])
    call(worker, "save", str(tmp_path / "one"), ALL)
    call_critic(worker, "update_critic", [critic_mini()])
    call_critic(worker, "save_critic", str(tmp_path / "critic of one"), ALL)
    expected = call(worker, "update_actor", [mini_batch()]) | call_critic(worker, "update_critic", [critic_mini()]).value
    answers = run_ranks(two_ranks, 2, tiny_folder, tmp_path)
    for name in ("actor/loss", "critic/vf_loss"):
        assert sum(answer[name] for answer in answers) == pytest.approx(expected[name], rel=1e-5)
    for answer in answers:
        for name in ("actor/grad_norm", "critic/grad_norm"):
            assert answer[name] == pytest.approx(expected[name], rel=1e-5)
        assert answer["actor/lr"] == expected["actor/lr"]
    assert sorted(path.name for path in (tmp_path / "two").glob("extra*")) == ["extra_rank_0.pt", "extra_rank_1.pt"]
    of_one = weights(worker), critic_weights(worker)
    back = made(**critic_plan(tiny_folder))
    call(back, "load", str(tmp_path / "two"), ALL)
    call_critic(back, "load_critic", str(tmp_path / "critic of two"), ALL)
    assert same(load_file(tmp_path / "critic of two" / "huggingface" / "model.safetensors"), critic_weights(back))
    for found, own in zip((weights(back), critic_weights(back)), of_one, strict=True):
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, own[name], rtol=0, atol=2e-5)


# The adapters that training started from, which are the reference's.


LORA = {f"{AR}.model.lora_rank": 4, f"{AR}.model.lora_alpha": 8, f"{AR}.actor.optim.lr": 1e-2}


def log_probs_of(worker, phase, method, *options):
    return worker.call(phase, False, method, batch(rows=2), [[0, 1]], *options).value.log_probs


def of_reference(worker):
    return log_probs_of(worker, "ref", "ref_log_probs")


def test_a_pretrained_adapter_is_the_reference_until_the_end_and_after_a_resume(made, tmp_path):
    first = made(LORA)
    base = of_reference(first)
    call(first, "update_actor", [mini_batch()])
    call(first, "save", str(tmp_path / "trained"), ALL)
    adapter = tmp_path / "trained" / "lora_adapter"
    started = LORA | {f"{AR}.model.lora_adapter_path": str(adapter)}
    worker = made(started)
    expected = log_probs_of(worker, "old_log_prob", "old_log_probs", False)
    assert (expected - base).abs().max() > 1e-3
    assert torch.equal(of_reference(worker), expected)  # the KL of the first step is 0
    call(worker, "update_actor", [mini_batch()])
    assert torch.equal(of_reference(worker), expected)
    records = call(worker, "save", str(tmp_path / "saved"), ALL)
    assert records == record_folder(tmp_path / "saved", tmp_path / "saved")
    # The checkpoint knows it, even where the folder has other adapters by then.
    shutil.copytree(tmp_path / "saved" / "lora_adapter", adapter, dirs_exist_ok=True)
    again = made(started)
    assert not torch.equal(of_reference(again), expected)
    call(again, "load", str(tmp_path / "saved"), ALL)
    assert torch.equal(of_reference(again), expected)
    call(again, "load", str(tmp_path / "trained"), ALL)  # of a run that started from the base
    assert torch.equal(of_reference(again), base)


def test_the_base_alone_may_be_the_reference_of_a_pretrained_adapter(made, tmp_path):
    first = made(LORA)
    base = of_reference(first)
    call(first, "update_actor", [mini_batch()])
    call(first, "save", str(tmp_path), ALL)
    worker = made(LORA | {f"{AR}.model.lora_adapter_path": str(tmp_path / "lora_adapter"), f"{AR}.ref.adapter": "base"})
    assert torch.equal(of_reference(worker), base)


def test_the_scale_of_a_root_is_saved_exported_and_computed(made, tiny_folder, tmp_path):
    """rsLoRA: alpha / sqrt(rank) = 8 / 2, which is what rank 4 has with alpha 16."""
    by_root = LORA | {f"{AR}.model.use_rslora": True}
    worker = made(by_root)
    call(worker, "update_actor", [mini_batch()])
    call(worker, "save", str(tmp_path), [*ALL, "hf_model"])
    saved = log_probs_of(worker, "old_log_prob", "old_log_probs", False)
    config = json.loads((tmp_path / "lora_adapter" / "adapter_config.json").read_text())
    assert (config["lora_alpha"], config["use_rslora"]) == (8, True)
    assert {layer.scale for layer in adapters(worker.policy.model).values()} == {4.0}
    adapter = {f"{AR}.model.lora_adapter_path": str(tmp_path / "lora_adapter")}
    as_plain = made(LORA | adapter | {f"{AR}.model.lora_alpha": 16, f"{AR}.model.use_rslora": False})
    assert torch.equal(log_probs_of(as_plain, "old_log_prob", "old_log_probs", False), saved)
    merged = made({}, tmp_path / "huggingface")
    torch.testing.assert_close(log_probs_of(merged, "old_log_prob", "old_log_probs", False), saved, rtol=0, atol=1e-5)


# The critic.


@pytest.mark.parametrize("offload", [False, True])
def test_a_loaded_critic_goes_on_bit_for_bit(made, tiny_folder, tmp_path, offload):
    plan = critic_plan(
        tiny_folder, {f"critic.model.fsdp_config.{name}": offload for name in ("param_offload", "optimizer_offload")}
    )
    worker = made(**plan)
    call_critic(worker, "update_critic", [critic_mini()])
    records = call_critic(worker, "save_critic", str(tmp_path), [*ALL, "hf_model"]).value
    assert records == record_folder(tmp_path, tmp_path)
    metrics = call_critic(worker, "update_critic", [critic_mini()]).value
    expected = critic_weights(worker)
    other = made(**plan)
    call_critic(other, "load_critic", str(tmp_path), ALL)
    assert call_critic(other, "update_critic", [critic_mini()]).value == metrics
    assert same(critic_weights(other), expected)


@pytest.mark.parametrize("lora", [0, 4])
def test_an_exported_critic_gives_its_values_in_transformers_and_here(made, tiny_folder, one_rank, tmp_path, lora):
    worker = made(**critic_plan(tiny_folder, {"critic.model.lora_rank": lora}))
    call_critic(worker, "update_critic", [critic_mini(), critic_mini()])
    whole = critic_batch(rows=4)
    expected = call_critic(worker, "values", whole, [[0, 1, 2, 3]]).value
    assert expected.abs().mean() > 1e-4
    call_critic(worker, "save_critic", str(tmp_path), ["hf_model"])
    exported = tmp_path / "huggingface"
    theirs = AutoModelForTokenClassification.from_pretrained(exported).eval()
    assert theirs.config.num_labels == 1
    with torch.no_grad():
        torch.testing.assert_close(naive_values(theirs, whole), expected, rtol=0, atol=1e-5)
    again = made(**critic_plan(exported))
    torch.testing.assert_close(call_critic(again, "values", whole, [[0, 1, 2, 3]]).value, expected, rtol=0, atol=1e-5)


def test_a_critics_adapters_are_saved_with_its_head_and_come_back(made, tiny_folder, tmp_path):
    worker = made(**critic_plan(tiny_folder, {"critic.model.lora_rank": 4}))
    call_critic(worker, "update_critic", [critic_mini(), critic_mini()])
    whole = critic_batch(rows=4)
    expected = call_critic(worker, "values", whole, [[0, 1, 2, 3]]).value
    call_critic(worker, "save_critic", str(tmp_path), ["model"])
    config = json.loads((tmp_path / "lora_adapter" / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("TOKEN_CLS", ["score"])
    adapter = {"critic.model.lora_rank": 4, "critic.model.lora_adapter_path": str(tmp_path / "lora_adapter")}
    again = made(**critic_plan(tiny_folder, adapter))
    torch.testing.assert_close(call_critic(again, "values", whole, [[0, 1, 2, 3]]).value, expected, rtol=0, atol=1e-6)
