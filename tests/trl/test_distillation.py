"""TRL's trainers that learn from a teacher: what they compute is what TRL's formulas give, and the rest is refused."""

import math

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.end_to_end.runs import lines_of
from verl_memopt import trl
from verl_memopt.errors import ConfigError

SMALL = {
    "worker_group": "local", "actor_rollout_ref.rollout.name": "hf", "actor_rollout_ref.actor.fsdp_config.dtype": "fp32",
    "teacher.fsdp_config.dtype": "fp32", "trainer.track_memory_every_steps": 0, "max_steps": 1, "use_cpu": True,
    "per_device_train_batch_size": 4,
}  # fmt: skip
ROWS = [{"prompt": f"{a}+{b}=", "privileged_context": str(a + b)} for a in range(2) for b in range(4)]


def of_trl(student, teacher, beta):
    """``generalized_jsd_loss`` of TRL's GKDTrainer: the sum over the vocabulary for each token, of log-probs [tokens, V]."""
    if beta == 0:
        jsd = F.kl_div(student, teacher, reduction="none", log_target=True)
    elif beta == 1:
        jsd = F.kl_div(teacher, student, reduction="none", log_target=True)
    else:
        mixture = torch.logsumexp(torch.stack([student + math.log(1 - beta), teacher + math.log(beta)]), dim=0)
        of_teacher = F.kl_div(mixture, teacher, reduction="none", log_target=True)
        jsd = beta * of_teacher + (1 - beta) * F.kl_div(mixture, student, reduction="none", log_target=True)
    return jsd.sum(-1)


def log_probs_of(folder, prompt, response, temperature=1.0):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


def trained(trainer, tmp_path):
    trainer.train()
    (entry, *_), samples = trainer.state.log_history, lines_of(tmp_path / "rollouts" / "1.jsonl")
    assert len(samples) == 4
    return entry["loss"], samples


def given(tmp_path, **settings):
    return {"output_dir": str(tmp_path / "run"), "trainer.rollout_data_dir": str(tmp_path / "rollouts"), **SMALL, **settings}


@pytest.mark.parametrize(
    ("kind", "beta", "temperature"),
    [
        ("Distillation", 0.0, 0.8), ("Distillation", None, 1.0), ("GKD", 0.3, 1.0), ("GKD", None, 1.0), ("GOLD", 0.3, 0.8),
    ],
)  # fmt: skip
def test_the_loss_of_a_run_is_trls_divergence_of_its_own_answers(kind, beta, temperature, toy, teacher, tmp_path):
    length = "max_new_tokens" if kind == "GKD" else "max_completion_length"
    named = {} if beta is None else {"beta": beta}
    named |= {} if kind == "Distillation" else {"lmbda": 1.0}
    args = given(tmp_path, temperature=temperature, **{length: 4}, **named)
    trainer = getattr(trl, f"{kind}Trainer")(str(toy / "model"), str(teacher), args=args, train_dataset=ROWS)
    loss, samples = trained(trainer, tmp_path)
    beta, divergences = {"Distillation": 1.0, "GKD": 0.5}[kind] if beta is None else beta, []
    for sample in samples:
        ids = sample["prompt_ids"], sample["response_ids"], temperature
        divergences.append(of_trl(log_probs_of(toy / "model", *ids), log_probs_of(teacher, *ids), beta))
    assert loss == pytest.approx(torch.cat(divergences).mean().item(), rel=1e-5)


@pytest.mark.parametrize("teacher_kind", ["base", "live", "ema"])
def test_self_distillation_reads_the_privileged_context_and_averages_responses(teacher_kind, toy, tmp_path):
    asked = {"distillation_mode": "full_logits", "distillation_alpha": 0.3, "teacher_model_kind": teacher_kind}
    exact = {"actor_rollout_ref.ref.fsdp_config.dtype": "fp32"}
    args = given(tmp_path, num_generations=2, max_completion_length=4, **asked, **exact)
    trainer = trl.SDFTTrainer(str(toy / "model"), trl.SDFTConfig(args), ROWS)
    assert trainer.args.teacher_prompt_template == "{prompt}\n\n{privileged_context}"
    loss, samples = trained(trainer, tmp_path)
    tokenizer, means = AutoTokenizer.from_pretrained(toy / "model"), []
    for sample in samples:
        prompt = tokenizer.decode(sample["prompt_ids"])
        row = next(row for row in ROWS if row["prompt"] == prompt)
        told = tokenizer(f"{prompt}\n\n{row['privileged_context']}").input_ids
        student = log_probs_of(toy / "model", sample["prompt_ids"], sample["response_ids"])
        means.append(of_trl(student, log_probs_of(toy / "model", told, sample["response_ids"]), 0.3).mean().item())
    assert loss == pytest.approx(sum(means) / len(means), rel=1e-5)


def test_a_model_object_a_teacher_object_and_rows_of_messages_train(toy, teacher, tmp_path, caplog):
    """As on TRL's page of GKD, on which dataset rows are conversations and the prompt is all but the last message."""
    messages = [[{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": "1"}] for row in ROWS]
    rows = [{"messages": each} for each in messages]
    model, judge = (AutoModelForCausalLM.from_pretrained(folder) for folder in (toy / "model", teacher))
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}
    trainer = trl.GKDTrainer(
        model=model, teacher_model=judge,
        args=trl.GKDConfig(given(tmp_path, lmbda=1.0, temperature=1.0, max_new_tokens=4, **evaluated)),
        processing_class=AutoTokenizer.from_pretrained(toy / "model"), train_dataset=rows, eval_dataset=rows[:2],
    )  # fmt: skip
    assert trainer.teacher_model is judge
    assert trainer.ref_model is None
    before = model.get_input_embeddings().weight.detach().clone()
    trainer.train()
    assert not torch.equal(model.get_input_embeddings().weight, before)
    first, evaluation, *_ = trainer.state.log_history
    assert "reward" not in first
    assert evaluation["eval_completions/mean_length"] > 0
    assert "eval_loss" not in evaluation  # held-out answers have no scores, and no teacher
    assert "so nothing is learned from them" not in caplog.text


@pytest.mark.parametrize("name", ["MiniLLMTrainer", "SDPOConfig", "ServerDistillationTrainer"])
def test_a_trainer_that_is_not_here_is_named_with_the_nearest(name):
    with pytest.raises(ImportError, match=rf"^{name}: .*Use (Distillation|SDFT)Trainer"):
        getattr(trl, name)


@pytest.mark.parametrize(
    ("kind", "settings", "name", "way_out"),
    [
        ("GKD", {"temperature": 1.0}, "lmbda=0.5", "Set lmbda=1.0"),
        ("GKD", {"lmbda": 1.0}, "temperature=0.9", "Set temperature=1.0"),
        ("GOLD", {}, "lmbda=0.5", "Set lmbda=1.0"),
        ("GOLD", {"lmbda": 1.0, "use_uld_loss": True}, "use_uld_loss=true", "distill.align=text"),
        ("Distillation", {"beta": 1.5}, "beta=1.5", "Choose one"),
        ("Distillation", {"teacher_model_init_kwargs": {"attn_implementation": "sdpa"}}, "teacher_model_init_kwargs", "Remove"),
        ("Distillation", {"loss_top_k": 8, "beta": 1.0}, "loss_top_k=8", "Set beta=0"),
        ("Distillation", {"loss_top_k": 8, "beta": 0.0, "loss_add_tail": False}, "loss_top_k=8, loss_add_tail=false", "=true"),
        ("Distillation", {"seq_kd": True}, "seq_kd=true", "docs/sft.md"),
        ("SDFT", {}, "distillation_mode=topk_logits", "Set distillation_mode=full_logits"),
        ("SDFT", {"distillation_mode": "sampled_token"}, "distillation_alpha=0.5", "Set distillation_alpha=1.0"),
        ("SDFT", {"distillation_mode": "full_logits", "teacher_model_kind": "old"}, "teacher_model_kind=old", "Choose one"),
        ("SDFT", {"distillation_mode": "full_logits", "num_iterations": 2}, "distillation_is_clip=2.0", "Set it to null"),
    ],
)  # fmt: skip
def test_what_has_no_equal_is_refused_by_name_with_the_way_out(kind, settings, name, way_out, toy, teacher, tmp_path):
    start = {} if kind == "SDFT" else {"teacher_model": str(teacher)}
    with pytest.raises(ConfigError) as caught:
        getattr(trl, f"{kind}Trainer")(str(toy / "model"), **start, args=given(tmp_path, **settings), train_dataset=ROWS).train()
    assert any(name in line and way_out in line for line in str(caught.value).splitlines()), str(caught.value)
