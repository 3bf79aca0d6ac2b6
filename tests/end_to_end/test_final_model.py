"""A run leaves a model that transformers and vLLM load as it is, and answers as the run's last validation did."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.end_to_end.runs import LOCAL, lines_of, metrics, steps_here, succeeded, train, train_here
from tests.rollout.tools import place_at, sampling
from verl_memopt.cli import main
from verl_memopt.config import schema
from verl_memopt.rollout.engine import build_engine

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
        self.run_dir, val, self.rollouts = root / "run", root / "val", root / "rollouts"
        dumps = [f"trainer.validation_data_dir={val}", f"trainer.rollout_data_dir={self.rollouts}"]
        command = [*SHORT, "trainer.save_freq=1", *dumps, *overrides]
        self.process = succeeded(train(toy, self.run_dir, *command))
        self.model, self.checkpoint = self.run_dir / "model", self.run_dir / "global_step_2"
        self.answers = lines_of(val / "2.jsonl")
        self.score = metrics(self.run_dir)[2][SCORE]


@pytest.fixture(scope="module")
def ended(toy, tmp_path_factory):
    kept = [f"{AR}.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]", "data.train_batch_size=8"]
    best = ["trainer.keep_best_checkpoint=" + SCORE, f"{AR}.actor.ppo_mini_batch_size=8"]
    return Ended(toy, tmp_path_factory.mktemp("ended"), *kept, *best)


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
    prompts, answers = ([row[name] for row in ended.answers] for name in ("prompt_ids", "response_ids"))
    longest, most = max(map(len, prompts)), max(map(len, answers))
    settings = schema.Rollout(
        name="vllm", prompt_length=longest, response_length=most, dtype="fp32", enforce_eager=True, kv_cache_memory_gb=0.05,
        load_format="auto", seed=1,
    )  # fmt: skip
    engine = build_engine(settings, place_at(ended.model))
    try:
        greedy = sampling(do_sample=False, max_tokens=most, ignore_eos=False)
        assert engine.generate(prompts, [0] * len(prompts), greedy).response_ids == answers
    finally:
        engine.shutdown()


def test_a_checkpoint_that_holds_a_model_has_that_of_its_step(ended):
    kept, last = (load_file(folder / FILE) for folder in (ended.checkpoint / "actor" / "huggingface", ended.model))
    assert kept.keys() == last.keys()
    assert all(torch.equal(kept[name], tensor) for name, tensor in last.items())


@torch.no_grad()
def test_logits_of_transformers_are_those_of_the_policy_in_the_checkpoint(ended, toy, tmp_path):
    """The policy computes its log-probs of a dump from the checkpoint itself, transformers from the model."""
    rows = (ended.rollouts / "2.jsonl").read_text()
    (tmp_path / "next").mkdir()  # the step after the checkpoint has the responses of the last step
    (tmp_path / "next" / "3.jsonl").write_text(rows)
    at = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={ended.checkpoint}", "trainer.total_training_steps=3"]
    again = [*SHORT, "data.train_batch_size=8", f"{AR}.actor.ppo_mini_batch_size=8", "debug.mode=score_only", *at]
    assert train_here(toy, tmp_path / "scored", *again, f"{AR}.rollout.skip_dump_dir={tmp_path}/next") == 0
    model, log_probs = AutoModelForCausalLM.from_pretrained(ended.model, dtype=torch.float32).eval(), []
    for row in lines_of(tmp_path / "next" / "3.jsonl"):
        ids, start = row["prompt_ids"] + row["response_ids"], len(row["prompt_ids"])
        logits = model(torch.tensor([ids])).logits[0, start - 1 : -1].float()
        log_probs.append(logits.log_softmax(-1).gather(-1, torch.tensor(ids[start:])[:, None])[:, 0])
    expected, scored = torch.cat(log_probs).double(), metrics(tmp_path / "scored" / "score_only")[3]
    for name, value in (("mean", expected.mean()), ("min", expected.min()), ("max", expected.max())):
        assert scored[f"score/log_prob/{name}"] == pytest.approx(value.item(), abs=1e-5)


def test_a_new_run_starts_where_the_model_ended(ended, toy, tmp_path):
    more = [f"{AR}.model.path={ended.model}", "trainer.val_only=true", f"trainer.validation_data_dir={tmp_path / 'val'}"]
    assert train_here(toy, tmp_path / "new", *SHORT, *more) == 0
    first = lines_of(tmp_path / "val" / "0.jsonl")
    for name in ("response_ids", "score"):
        assert [row[name] for row in first] == [row[name] for row in ended.answers]


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
    again = [*SHORT, "trainer.save_freq=1", "data.train_batch_size=8", f"{AR}.actor.ppo_mini_batch_size=8"]
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
def test_in_twenty_steps_a_quantised_base_learns_as_an_unquantised_one(toy, tmp_path):
    more = ["trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.total_training_steps=20"]
    more += [f"{AR}.model.lora_rank=8", f"{AR}.actor.optim.lr=2e-3"]
    engine, learned = [f"{AR}.rollout.name=vllm", f"{AR}.rollout.enforce_eager=true"], {}
    for kind in ("none", "int8", "nf4"):
        found = steps_here(toy, tmp_path / kind, *more, *engine, f"{AR}.model.quantization={kind}")
        rewards = [row["critic/score/mean"] for _, row in sorted(found.items())]
        learned[kind] = sum(rewards[-5:]) / 5
        assert learned[kind] > sum(rewards[:3]) / 3 + 0.1
        assert max(row["training/rollout_probs_diff_max"] for row in found.values()) <= 1e-5
    assert max(learned.values()) - min(learned.values()) <= 0.03
