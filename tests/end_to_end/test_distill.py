"""Runs on the toy task whose policy learns from a teacher."""

import contextlib
import io
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import verl_memopt
from tests.end_to_end.runs import LOCAL, assert_equal_runs, lines_of, metrics, start, steps_here, succeeded, train, wait_for_step
from verl_memopt import trl
from verl_memopt.cli import main
from verl_memopt.config.values_of_python import as_override
from verl_memopt.data.toy import SHAPE
from verl_memopt.errors import UserError
from verl_memopt.model.tiny import TinyShape, make_tiny_model

AR = "actor_rollout_ref"
SHORT = [
    *LOCAL, "algorithm.adv_estimator=distill", f"{AR}.actor.policy_loss.loss_mode=vanilla", "trainer.total_training_steps=2",
    "trainer.test_freq=-1", "trainer.val_before_train=false", "data.train_batch_size=4", f"{AR}.rollout.n=4",
    f"{AR}.actor.ppo_mini_batch_size=4", "teacher.fsdp_config.dtype=fp32",
]  # fmt: skip


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


SPREAD = [f"{AR}.actor.ppo_max_token_len_per_gpu=40", "teacher.log_prob_max_token_len_per_gpu=64"]


def test_rows_learn_from_the_teacher_that_they_name_with_its_weight(toy, tmp_path, teacher):
    rows = [{"prompt": f"{a}+{a}=", "answer": str(2 * a), "weight": 3 - a % 2} for a in range(1, 9)]
    rows = [row | ({"teacher": "own"} if number % 2 == 0 else {}) for number, row in enumerate(rows)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    given = [*SHORT, *SPREAD, f"data.train_files={tmp_path}/rows.jsonl", "data.val_files=null", f"teacher.model.path={teacher}"]
    given += [f"teacher.further_models={{own:{toy}/model}}", "distill.weight_key=weight"]
    for form in ("reverse_kl", "sampled"):
        more = [f"distill.divergence={form}", f"trainer.rollout_data_dir={tmp_path}/{form}"]
        found = steps_here(toy, tmp_path / f"run_{form}", *given, *more)[1]
        total, tokens = 0.0, 0
        for sample in lines_of(tmp_path / form / "1.jsonl"):
            ids, odd = (sample["prompt_ids"], sample["response_ids"]), int(sample["input"].split("+")[0].split()[-1]) % 2
            a, b = log_probs_of(toy / "model", *ids), log_probs_of(toy / "model" if odd else teacher, *ids)
            sampled = (a - b).gather(-1, torch.tensor(ids[1])[:, None]).sum()
            total += (3 - odd) * (sampled if form == "sampled" else (a.exp() * (a - b)).sum()).item()
            tokens += len(ids[1])
        name = "distill/kl_mean" if form == "sampled" else "actor/distill_loss"
        assert found[name] == pytest.approx(total / tokens, rel=1e-4)


def test_a_reference_that_follows_the_policy_at_once_teaches_as_the_policy_does(toy, tmp_path):
    """And one that stays teaches what the policy knew at the start."""
    told = ['distill.teacher_prompt="{answer} {prompt}"', "data.max_prompt_length=24", f"{AR}.ref.fsdp_config.dtype=fp32"]
    reference = [*told, "teacher.weights=reference", f"{AR}.ref.fsdp_config.param_offload=true"]
    follows = [f"{AR}.ref.sync_every_steps=1", f"{AR}.ref.sync_mixup_alpha=1.0"]
    own, stays, lagged = (
        steps_here(toy, tmp_path / name, *SHORT[:-1], f"{AR}.actor.optim.lr=1e-3", *more)
        for name, more in (("own", told), ("stays", reference), ("lagged", [*reference, *follows]))
    )
    for step in (1, 2):
        assert lagged[step]["actor/distill_loss"] == pytest.approx(own[step]["actor/distill_loss"], rel=1e-6)
    assert stays[1]["actor/distill_loss"] == pytest.approx(own[1]["actor/distill_loss"], rel=1e-6)
    assert abs(stays[2]["actor/distill_loss"] / own[2]["actor/distill_loss"] - 1) > 1e-4


def test_adapters_teach_as_the_model_that_they_are_merged_into(toy, tmp_path):
    """Over a base of their own, and over the base of a policy with adapters on more layers."""
    draw, scale, adapter, base = torch.Generator().manual_seed(3), 3.0, tmp_path / "adapter", toy / "model"
    merged = shutil.copytree(base, tmp_path / "merged")
    weights, tensors = load_file(base / "model.safetensors"), {}
    for name in [name for name in weights if name.endswith(("q_proj.weight", "down_proj.weight"))]:
        down, up = (
            0.05 * torch.randn(*shape, generator=draw) for shape in ((4, weights[name].shape[1]), (len(weights[name]), 4))
        )
        weights[name] = weights[name] + scale * up @ down
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        tensors |= {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up}
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    adapter.mkdir()
    save_file(tensors, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "down_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    named, low = f"teacher.model.lora_adapter_path={adapter}", f"{AR}.model.lora_rank=2"
    ways = {
        "merged": [f"teacher.model.path={merged}"],
        "own": [f"teacher.model.path={base}", named, "teacher.fsdp_config.param_offload=true"],
        "swapped": [named, low],
    }
    found = {}
    for way, more in ways.items():
        given = SHORT if "teacher.model.path" in more[0] else SHORT[:-1]
        found[way] = steps_here(toy, tmp_path / way, *given, *more)[1]["actor/distill_loss"]
    assert found["own"] == pytest.approx(found["merged"], rel=1e-5)
    assert found["swapped"] == pytest.approx(found["merged"], rel=1e-5)
    assert found["merged"] > 1e-3


def test_after_kill_9_the_rerun_ends_as_an_uninterrupted_run(toy, tmp_path, teacher):
    given = [
        *SHORT, "trainer.total_training_steps=6", "trainer.save_freq=2", "algorithm.adv_estimator=rloo", "distill.coef=0.5",
        f"{AR}.actor.policy_loss.loss_mode=sequence", f"teacher.model.path={teacher}", f"{AR}.actor.optim.lr=1e-3",
    ]  # fmt: skip
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    succeeded(train(toy, whole, *given))
    process = start(toy, killed, *given)
    wait_for_step(process, killed, 3)
    process.kill()
    process.wait()
    assert max(metrics(killed)) < 6
    succeeded(train(toy, killed, *given))
    assert_equal_runs(killed, whole)


TWO = ["trainer.n_gpus_per_node=2"]
PLACES = {
    "reverse_kl": ([], TWO),
    "jsd": ([], TWO),
    "sampled": ([], TWO),
    # Teachers on devices of their own.
    "forward_kl": (["distill.top_k=8"], [*TWO, "teacher.enable_resource_pool=true"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", PLACES)
def test_workers_learn_what_one_worker_learns(toy, tmp_path, teacher, form):
    found, (of_both, of_second) = [], PLACES[form]
    for number, places in enumerate(([], of_second)):
        run_dir = tmp_path / str(number)
        more = ["trainer.worker_group=ray", f"{AR}.rollout.name=hf", f"distill.divergence={form}", *SPREAD, *of_both, *places]
        more += [f"teacher.model.path={teacher}", f"teacher.further_models={{own:{toy}/model}}"]
        succeeded(train(toy, run_dir, *SHORT, *more))
        found.append(metrics(run_dir)[1])
    for name in ("actor/loss", "actor/grad_norm"):
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-4), name


# A mistake is one line that names the key and the way out, whatever door it comes through.


def by_train(toy, folder, teacher, settings):
    verl_memopt.train(str(toy / "model"), ROWS, teacher=teacher, algorithm="distill", run_dir=folder / "run", **HERE, **settings)


def by_session(toy, folder, teacher, settings):
    given = {**HERE, **settings}
    with verl_memopt.session(str(toy / "model"), ROWS, teacher=teacher, algorithm="distill", run_dir=folder / "run", **given):
        pass


def by_trl(toy, folder, teacher, settings):
    args = {"output_dir": str(folder / "run"), "max_steps": 1, "per_device_train_batch_size": 2, **HERE, **settings}
    trl.DistillationTrainer(str(toy / "model"), teacher, args, ROWS).train()


def by_command(toy, folder, teacher, settings):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    given = [
        f"data.train_files={folder}/rows.jsonl", "data.val_files=null", f"{AR}.model.path={toy}/model", *LOCAL,
        f"trainer.default_local_dir={folder}/run", f"{AR}.actor.use_dynamic_bsz=true",
        "data.train_batch_size=2", f"{AR}.actor.ppo_mini_batch_size=2",
        *([] if teacher is None else [f"teacher.model.path={teacher}"]),
        *(f"{key}={as_override(value)}" for key, value in settings.items()),
    ]  # fmt: skip
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        assert main(["train", "--config-name", "distill_trainer", *given]) == 2
    lines = [line for line in said.getvalue().splitlines() if line.strip() and " driver " not in line]  # without the log
    raise UserError("\n".join(lines))


ROWS = [{"prompt": f"{number}+1=", "hint": str(number + 1)} for number in range(2)]
HERE = {"worker_group": "local", f"{AR}.rollout.name": "hf"}
PATH, PROMPT, FORM = "teacher.model.path", "distill.teacher_prompt", "distill.divergence"
MISTAKES = {
    "another tokenizer": ("other", {}, f"{PATH}=", "its tokenizer is another", "give a teacher of the policy's family"),
    "no such folder": ("./nowhere", {}, f"{PATH}=./nowhere: no such folder", "Give a model folder", ""),
    "no model": ("empty", {}, f"{PATH}=", "has no config.json", "Give a model folder"),
    "no teacher": (None, {}, f"{PATH}=null", f"{PROMPT}=null", f"Set {PATH}"),
    "no such column": (
        None,
        {PROMPT: "{prompt} {solution}"},
        "the row has no solution",
        PROMPT,
        "Change the template or the row",
    ),
    "no server": (
        None, {"teacher.endpoint.url": "http://127.0.0.1:9/v1", "teacher.endpoint.timeout_seconds": 0.1, FORM: "sampled"},
        "teacher.endpoint.url: the teacher at http://127.0.0.1:9/v1 gave no answer", "raise teacher.endpoint.timeout_seconds",
    ),
    "a server has no states": (None, {"teacher.endpoint.url": "http://host/v1"}, "teacher.endpoint.url", "Set distill.top_k=20"),
    "no such adapters": (
        None, {"teacher.model.lora_adapter_path": "./nowhere", f"{AR}.model.lora_rank": 2},
        "teacher.model.lora_adapter_path=./nowhere: it has no adapter_config.json", "Give a folder in the peft format",
    ),
    "no name in braces": (None, {PROMPT: "{prompt"}, f"{PROMPT}=", "braces", "Write {prompt}"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teachers")
    other = make_tiny_model(folder / "other", TinyShape(vocab_size=SHAPE.vocab_size), seed=1)
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"z":', '"ZZ":'))
    (folder / "empty").mkdir()
    return folder


@pytest.mark.parametrize("door", [by_train, by_session, by_trl, by_command])
@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_one_line_through_every_door(what, door, toy, tmp_path, folders):
    name, settings, *said = MISTAKES[what]
    teacher = str(folders / name) if name in ("other", "empty") else name
    with pytest.raises(UserError) as caught:
        door(toy, tmp_path, teacher, settings)
    (line,) = str(caught.value).splitlines()
    for part in said:
        assert part in line
    assert not (tmp_path / "run").exists()
