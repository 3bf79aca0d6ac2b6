"""Runs on the toy task whose policy learns from a teacher."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.end_to_end.runs import LOCAL, lines_of, steps_here
from verl_memopt.cli import main
from verl_memopt.data.toy import SHAPE
from verl_memopt.model.tiny import TinyShape, make_tiny_model

AR = "actor_rollout_ref"
SHORT = [
    *LOCAL, "algorithm.adv_estimator=distill", f"{AR}.actor.policy_loss.loss_mode=vanilla", "trainer.total_training_steps=2",
    "trainer.test_freq=-1", "trainer.val_before_train=false", "data.train_batch_size=4", f"{AR}.rollout.n=4",
    f"{AR}.actor.ppo_mini_batch_size=4", "teacher.fsdp_config.dtype=fp32",
]  # fmt: skip


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A wider model with the toy's tokenizer."""
    shape = TinyShape(hidden_size=96, num_layers=3, vocab_size=SHAPE.vocab_size, initializer_range=0.06, tie_embeddings=False)
    return make_tiny_model(tmp_path_factory.mktemp("teacher") / "model", shape, seed=8)


def log_probs_of(folder, prompt, response):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        return model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)


def test_the_loss_of_a_run_is_the_divergence_of_its_own_answers(toy, tmp_path, teacher):
    named = f"teacher.model.path={teacher}"
    rows = steps_here(toy, tmp_path / "run", *SHORT, named, f"trainer.rollout_data_dir={tmp_path}/rollouts")
    total, tokens, estimate = 0.0, 0, 0.0
    for sample in lines_of(tmp_path / "rollouts" / "1.jsonl"):
        ids = sample["prompt_ids"], sample["response_ids"]
        a, b = log_probs_of(toy / "model", *ids), log_probs_of(teacher, *ids)
        total, tokens = total + (a.exp() * (a - b)).sum().item(), tokens + len(ids[1])
        estimate += (a - b).gather(-1, torch.tensor(ids[1])[:, None]).sum().item()
    assert rows[1]["actor/distill_loss"] == pytest.approx(total / tokens, rel=1e-5)
    assert rows[1]["critic/score/mean"] > 0  # a rule fits the toy's rows, so the score is logged
    # How the rows are cut, where the teacher rests and in what order it is asked changes nothing.
    knobs = [
        "teacher.fsdp_config.param_offload=true", "teacher.log_prob_max_token_len_per_gpu=64",
        f"{AR}.model.logprob_vocab_tile=50",
        f"{AR}.actor.ppo_max_token_len_per_gpu=40", f"{AR}.actor.fsdp_config.param_offload=true",
    ]  # fmt: skip
    other = steps_here(toy, tmp_path / "other", *SHORT, named, *knobs)
    for step in (1, 2):
        for name in ("actor/distill_loss", "actor/grad_norm"):
            assert other[step][name] == pytest.approx(rows[step][name], rel=2e-5), (step, name)
    sampled = steps_here(toy, tmp_path / "sampled", *SHORT, named, "distill.divergence=sampled")
    assert sampled[1]["distill/kl_mean"] == pytest.approx(estimate / tokens, rel=1e-4)


def test_a_policy_learns_from_itself_without_rewards(toy, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "hint": "2"}\n{"prompt": "2+2=", "hint": "4"}\n' * 4)
    rows = steps_here(
        toy, tmp_path / "run", *SHORT[:-1], 'distill.teacher_prompt="{hint} {prompt}"', f"data.train_files={tmp_path}/rows.jsonl",
        "data.val_files=null", f"{AR}.actor.ppo_mini_batch_size=2",
    )  # fmt: skip
    assert rows[1]["actor/distill_loss"] > 0
    assert rows[1]["actor/grad_norm"] > 0
    assert "critic/score/mean" not in rows[1]


def refused(toy, tmp_path, capsys, *overrides):
    given = [
        f"data.train_files={toy}/train.parquet", "data.val_files=null", f"{AR}.model.path={toy}/model",
        f"trainer.default_local_dir={tmp_path}/run", f"{AR}.actor.use_dynamic_bsz=true", *LOCAL,
    ]  # fmt: skip
    assert main(["train", "--config-name", "distill_trainer", *given, *overrides]) == 2
    return capsys.readouterr().err


def test_a_teacher_with_another_tokenizer_or_too_few_tokens_is_refused(toy, tmp_path, capsys, teacher):
    other = make_tiny_model(tmp_path / "other", TinyShape(vocab_size=SHAPE.vocab_size), seed=1)
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"z":', '"ZZ":'))
    said = refused(toy, tmp_path, capsys, f"teacher.model.path={other}")
    assert "teacher.model.path=" in said
    assert "its tokenizer is another than the policy's" in said
    assert "Teacher and policy are compared token by token" in said
    assert "teacher.model.path=./nowhere" in refused(toy, tmp_path, capsys, "teacher.model.path=./nowhere")
