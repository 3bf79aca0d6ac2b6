"""A run leaves a model that transformers and vLLM load as it is, and answers as the run's last validation did."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from tests.end_to_end.runs import (
    LOCAL,
    ROOT,
    lines_of,
    metrics,
    settings_of,
    start,
    steps_here,
    succeeded,
    train,
    train_here,
    wait_for_step,
)
from tests.end_to_end.test_saved_models import check_vllm_answers
from tests.rlt import brief_toy, values_of
from verl_memopt.cli import main
from verl_memopt.config.loader import settings_from_mapping
from verl_memopt.trainer.main_ppo import train as run_settings

AR = "actor_rollout_ref"
FILE = "model.safetensors"
SCORE = "val-core/toy/arithmetic/reward/mean@1"
SHORT = [*LOCAL, "trainer.val_before_train=false", "trainer.total_training_steps=2", "trainer.test_freq=1"]


def files(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def record(folder):
    return json.loads((folder / "training.json").read_text())


class Ended:
    """A run of two steps that has ended, with its last validation answers, which are greedy."""

    def __init__(self, toy, root, *overrides):
        self.run_dir, val = root / "run", root / "val"
        command = [*SHORT, "trainer.save_freq=1", f"trainer.validation_data_dir={val}", *overrides]
        self.process = succeeded(train(toy, self.run_dir, *command))
        self.model, self.answers = self.run_dir / "model", lines_of(val / "2.jsonl")
        self.score = metrics(self.run_dir)[2][SCORE]


@pytest.fixture(scope="module")
def ended(toy, tmp_path_factory):
    return Ended(toy, tmp_path_factory.mktemp("ended"), "trainer.keep_best_checkpoint=" + SCORE)


@torch.no_grad()
def answers_of_transformers(folder, answers, dtype="auto"):
    """Give the greedy answers of the folder to the prompts of some answers."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval(), AutoTokenizer.from_pretrained(folder)
    prompts = [row["prompt_ids"] for row in answers]
    found = []
    for prompt in prompts:
        output = model.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False, pad_token_id=0)
        found.append(tokenizer.decode(output[0, len(prompt) :], skip_special_tokens=True))
    return found


def share_right(found, answers):
    return sum(text == row["gts"] for text, row in zip(found, answers, strict=True)) / len(answers)


def test_transformers_gives_the_validation_score_of_the_run(ended):
    assert share_right(answers_of_transformers(ended.model, ended.answers), ended.answers) == pytest.approx(ended.score)


def test_vllm_gives_the_answers_of_the_run(ended):
    check_vllm_answers(ended.model, *([row[name] for row in ended.answers] for name in ("prompt_ids", "response_ids")))


def test_the_end_of_a_run_says_where_the_model_is_and_the_last_line_is_still_the_folder(ended):
    *_, model, best, folder = ended.process.stdout.rstrip().splitlines()
    assert f"step 2: {ended.model} " in model
    assert f"chat {ended.model}" in model
    assert str(ended.run_dir / "model_best") in best
    assert folder == str(ended.run_dir)


def test_the_model_says_its_step_and_what_it_started_from(ended, toy):
    of_run = {"step": 2, "role": "actor", "base_model": str(toy / "model"), "dtype": "float32"}
    assert record(ended.model) == {**of_run, "files": sorted(files(ended.model))}


def test_an_export_of_the_last_checkpoint_has_the_bytes_of_the_model(ended, tmp_path, capsys):
    assert main(["export", str(ended.run_dir), str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "out")
    assert files(tmp_path / "out") == files(ended.model)
    assert main(["export", str(ended.run_dir / "global_step_2"), str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0
    whole, half = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "half"))
    assert all(torch.equal(half[name], tensor.bfloat16()) for name, tensor in whole.items())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.bfloat16


def test_the_best_checkpoint_is_a_model_of_its_own(ended, tmp_path):
    scores = {step: row[SCORE] for step, row in metrics(ended.run_dir).items() if SCORE in row}
    best = max(scores, key=lambda step: (scores[step], step))
    assert record(ended.run_dir / "model_best")["step"] == best
    assert main(["export", str(ended.run_dir), str(tmp_path / "out"), "--step", "best"]) == 0
    assert files(tmp_path / "out") == files(ended.run_dir / "model_best")


def test_chat_answers_from_a_run_a_model_and_a_checkpoint(ended, capsys):
    shown = []
    for path in (ended.run_dir, ended.model, ended.run_dir / "global_step_2"):
        assert main(["chat", str(path), "--prompt", "27+5=", "--temperature", "0"]) == 0
        shown.append(capsys.readouterr().out)
    (row,) = [row for row in [*ended.answers, None] if row is None or "27+5=" in row["input"]][:1]
    assert len(set(shown)) == 1
    assert row is None or shown[0].strip() == row["output"]
    assert shown[0].strip().isdigit()


def test_a_run_with_nothing_left_writes_its_model_again_and_a_key_leaves_it_out(ended, toy, tmp_path):
    before = files(ended.model)
    for path in ended.model.iterdir():
        path.unlink()
    (ended.run_dir / "model.partial").mkdir()
    again = [*SHORT, "trainer.save_freq=1"]
    assert train_here(toy, ended.run_dir, *again, "trainer.save_final_model=false") == 0
    assert files(ended.model) == {}
    assert train_here(toy, ended.run_dir, *again) == 0
    assert files(ended.model) == before
    assert not list(ended.run_dir.glob("*.partial"))


# The same of other runs.


def check(ended, within=0.0):
    """The model of a run gives the score of its last validation, and is what an export of its last checkpoint gives."""
    score = share_right(answers_of_transformers(ended.model, ended.answers), ended.answers)
    assert score == pytest.approx(ended.score, abs=within or 1e-9)
    assert record(ended.model)["step"] == 2
    out = ended.run_dir.parent / "out"
    assert main(["export", str(ended.run_dir), str(out)]) == 0
    model, exported = (load_file(folder / "model.safetensors") for folder in (ended.model, out))
    for name, tensor in model.items():
        torch.testing.assert_close(exported[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_with_lora_the_adapters_are_merged_and_lie_beside(toy, tmp_path):
    ended = Ended(
        toy, tmp_path, f"{AR}.model.lora_rank=8", f"{AR}.actor.optim.lr=2e-3", f"{AR}.actor.fsdp_config.param_offload=true"
    )
    check(ended)
    told = json.loads((ended.model / "adapter" / "adapter_config.json").read_text())
    assert (told["r"], told["base_model_name_or_path"]) == (8, str(toy / "model"))
    before, after = (load_file(folder / "model.safetensors") for folder in (toy / "model", ended.model))
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_two_workers_under_ray_with_vllm_write_one_model(toy, tmp_path):
    more = ["trainer.worker_group=ray", "trainer.n_gpus_per_node=2", f"{AR}.rollout.name=vllm"]
    check(Ended(toy, tmp_path, *more))


@pytest.mark.slow
def test_a_bfloat16_model_stays_one(toy, tmp_path):
    base = tmp_path / "base"
    model = AutoModelForCausalLM.from_pretrained(toy / "model", dtype=torch.bfloat16)
    model.save_pretrained(base)
    AutoTokenizer.from_pretrained(toy / "model").save_pretrained(base)
    more = [f"{AR}.model.path={base}", f"{AR}.rollout.dtype=bfloat16", f"{AR}.rollout.max_logprob_diff=null"]
    ended = Ended(toy, tmp_path, *more)
    assert {tensor.dtype for tensor in load_file(ended.model / "model.safetensors").values()} == {torch.bfloat16}
    assert record(ended.model)["dtype"] == "bfloat16"
    check(ended, within=0.05)


@pytest.mark.slow
def test_ppo_leaves_the_policy_and_its_critic_is_exported(toy, tmp_path):
    command = ["train", "--config-dir", str(ROOT / "recipe" / "ppo"), "--config-name", "toy", *settings_of(toy, tmp_path / "run")]
    assert main([*command, *SHORT, "trainer.save_freq=1", f"trainer.validation_data_dir={tmp_path / 'val'}"]) == 0
    answers, score = lines_of(tmp_path / "val" / "2.jsonl"), metrics(tmp_path / "run")[2][SCORE]
    assert share_right(answers_of_transformers(tmp_path / "run" / "model", answers), answers) == pytest.approx(score)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "critic"), "--critic"]) == 0
    assert AutoModelForTokenClassification.from_pretrained(tmp_path / "critic").config.num_labels == 1


@pytest.mark.slow
def test_a_killed_run_that_is_started_again_ends_with_the_model_of_an_uninterrupted_one(toy, tmp_path):
    command = [*SHORT, "trainer.total_training_steps=4", "trainer.save_freq=1"]
    process = start(toy, tmp_path / "killed", *command)
    wait_for_step(process, tmp_path / "killed", 2)
    process.kill()
    process.wait(60)
    assert not (tmp_path / "killed" / "model").exists()
    for name in ("killed", "whole"):
        assert train_here(toy, tmp_path / name, *command) == 0
    assert files(tmp_path / "killed" / "model") == files(tmp_path / "whole" / "model")


@pytest.mark.slow
def test_supervised_fine_tuning_and_rlt_leave_a_model_too(toy, tmp_path):
    sft = [
        *(f"data.{name}_files={toy}/{name}.parquet" for name in ("train", "val")), f"{AR}.model.path={toy}/model",
        "data.response_key=extra_info.answer", "data.train_batch_size=32", f"trainer.default_local_dir={tmp_path}/sft", *LOCAL,
        "trainer.total_training_steps=2", "trainer.test_freq=1", "trainer.keep_best_checkpoint=min:val/loss",
        f"{AR}.actor.fsdp_config.dtype=fp32", "data.max_prompt_length=16", "data.max_response_length=4",
    ]  # fmt: skip
    assert main(["sft", *sft]) == 0
    assert record(tmp_path / "sft" / "model")["step"] == 2
    assert files(tmp_path / "sft" / "model_best").keys() == files(tmp_path / "sft" / "model").keys()
    task = brief_toy(tmp_path / "toy")
    values = values_of(task, tmp_path / "rlt", {"trainer.total_training_steps": 1})
    assert run_settings(settings_from_mapping(values)) == 0
    AutoModelForCausalLM.from_pretrained(tmp_path / "rlt" / "model")
    assert record(tmp_path / "rlt" / "model")["step"] == 1


QLORA = [f"{AR}.model.lora_rank=8", f"{AR}.actor.optim.lr=2e-3", f"{AR}.model.quantization=int8"]


@pytest.mark.slow
def test_with_a_quantised_base_the_adapters_are_merged_into_the_unquantised_weights_and_chat_answers(toy, tmp_path, capsys):
    ended = Ended(toy, tmp_path, *QLORA, f"{AR}.rollout.name=vllm")
    check(ended, within=0.1)  # the base that answered in the run was rounded
    before, after, adapter = (
        load_file(path)
        for path in (toy / "model" / FILE, ended.model / FILE, ended.model / "adapter" / "adapter_model.safetensors")
    )
    name = "model.layers.0.mlp.up_proj"
    down, up = (adapter[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    merged = before[f"{name}.weight"] + 2 * up @ down  # alpha 16 over rank 8
    assert (after[f"{name}.weight"] - merged).abs().max() <= 1e-6
    assert torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    assert main(["chat", str(ended.model), "--prompt", "27+5=", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.slow
def test_in_twenty_steps_a_quantised_base_learns_as_an_unquantised_one(toy, tmp_path):
    more = ["trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.total_training_steps=20", *QLORA[:2]]
    engine, learned = [f"{AR}.rollout.name=vllm", f"{AR}.rollout.enforce_eager=true"], {}
    for kind in ("none", "int8", "nf4"):
        found = steps_here(toy, tmp_path / kind, *more, *engine, f"{AR}.model.quantization={kind}")
        rewards = [row["critic/score/mean"] for _, row in sorted(found.items())]
        learned[kind] = sum(rewards[-5:]) / 5
        assert learned[kind] > sum(rewards[:3]) / 3 + 0.1
        assert max(row["training/rollout_probs_diff_max"] for row in found.values()) <= 1e-5
    assert max(learned.values()) - min(learned.values()) <= 0.03
