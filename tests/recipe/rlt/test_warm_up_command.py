"""The supervised warm-up of a teacher: supervised fine-tuning on the lessons of RLT's dataset."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_memopt.cli import sft, train
from verl_memopt.config.loader import load_settings, settings_from_mapping
from verl_memopt.data.encoder import tokenize
from verl_memopt.recipes.rlt.dataset import FORMATS, RltPrompts
from verl_memopt.recipes.rlt.lessons import Lesson, lesson_loss, teacher_rows

AR = "actor_rollout_ref"
TWO_STEPS = {"trainer.total_training_steps": 2}


@pytest.fixture(scope="session")
def warm_up_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lessons")
    for name, numbers in (("train", range(12)), ("val", range(20, 25))):
        rows = [
            {"question": f"{n}+1=", "solution": str(n + 1), "reasoning_trace": f"{n} and one" + " more" * (n % 4)}
            for n in numbers
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def warming(warm_up_files, tiny_folder, tmp_path):
    """Return settings of a small warm-up with some keys changed."""
    least = {
        "data.train_files": str(warm_up_files / "train.jsonl"),
        "data.val_files": str(warm_up_files / "val.jsonl"),
        "data.train_batch_size": 4,
        "data.max_prompt_length": 80,
        "data.max_response_length": 60,
        "data.seed": 3,
        f"{AR}.model.path": str(tiny_folder),
        f"{AR}.model.logprob_chunk_tokens": 16,
        f"{AR}.actor.ppo_mini_batch_size": 4,
        f"{AR}.actor.use_dynamic_bsz": True,
        f"{AR}.actor.ppo_max_token_len_per_gpu": 400,
        f"{AR}.actor.policy_loss.loss_mode": "gpg",
        f"{AR}.actor.optim.lr": 3e-3,
        f"{AR}.actor.fsdp_config.dtype": "fp32",
        f"{AR}.actor.checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"],
        f"{AR}.rollout.name": "hf",
        "algorithm.adv_estimator": "sft",
        "reward_model.enable": True,
        "reward_model.reward_manager": "rlt",
        "reward_model.model.path": str(tiny_folder),
        "reward_model.rlt.tag_format": "short",
        "trainer.device": "cpu",
        "trainer.worker_group": "local",
        "trainer.logger": ["jsonl"],
        "trainer.total_training_steps": 4,
        "trainer.save_freq": 100,
        "trainer.default_local_dir": str(tmp_path / "run"),
    }

    def settle(more=None):
        return settings_from_mapping(least | (more or {}))

    return settle


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_loss_falls_and_the_folder_has_the_loss_that_was_logged(warming, tmp_path) -> None:
    settings = warming({"trainer.total_training_steps": 30, "trainer.test_freq": 10})
    assert train(settings) == 0
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows if "val/loss" in row] == [0, 10, 20, 30]
    assert rows[-1]["val/loss"] < 0.6 * rows[0]["val/loss"]
    assert rows[-1]["train/loss"] < 0.6 * rows[1]["train/loss"]
    folder = tmp_path / "run" / "global_step_30" / "actor" / "huggingface"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    held_out = teacher_rows(settings.data.val_files, settings.data, tokenizer, "val", "short")
    prompts = tokenize(tokenizer, [row.text for row in held_out])
    lessons = [Lesson(prompt, list(row.response)) for prompt, row in zip(prompts, held_out, strict=True)]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert lesson_loss(model, lessons).item() == pytest.approx(rows[-1]["val/loss"], abs=1e-5)


def test_the_peak_follows_the_token_budget_and_not_the_batch(warming, tmp_path) -> None:
    peaks = {}
    for rows in (4, 12):
        run_dir = tmp_path / f"rows{rows}"
        more = {
            "data.train_batch_size": rows,
            "data.val_files": None,
            f"{AR}.actor.ppo_mini_batch_size": rows,
            f"{AR}.actor.ppo_max_token_len_per_gpu": 140,
            f"{AR}.actor.checkpoint.save_contents": ["model"],
            "trainer.total_training_steps": 1,
            "trainer.default_local_dir": str(run_dir),
        }
        assert train(warming(more)) == 0
        peaks[rows] = metrics(run_dir)[-1]["memory/update_actor/peak_allocated_gb"]
    assert peaks[12] == pytest.approx(peaks[4], rel=0.1)


def test_synthetic_rows_meet_the_memory_of_a_warm_up_without_a_student(warming, tmp_path) -> None:
    settings = warming({"debug.mode": "forge", "data.train_files": None, "data.val_files": None, **TWO_STEPS})
    assert train(settings) == 0
    assert [row["prompt_length/min"] for row in metrics(tmp_path / "run" / "forge")] == [80.0] * 2


def test_the_recipe_composes_and_a_dry_run_prints_it(warm_up_files, tiny_folder, capsys) -> None:
    overrides = [f"data.train_files={warm_up_files}/train.jsonl", f"{AR}.model.path={tiny_folder}", "memory=24g"]
    settings = load_settings("warm_up", overrides, "recipe/rlt/config")
    assert settings.reward_model.recipe is not None
    assert sft([*overrides, "--cfg", "job"], "warm_up.py", "warm_up", "recipe/rlt/config") == 0
    assert "adv_estimator: sft" in capsys.readouterr().out


def test_the_lessons_prompt_is_the_one_that_rl_gives_the_teacher(warming, tiny_folder) -> None:
    """A warmed-up teacher continues exactly the prompts that RL shows it."""
    settings, tokenizer = warming(), AutoTokenizer.from_pretrained(tiny_folder)
    rows = teacher_rows(settings.data.train_files, settings.data, tokenizer, "train", "short")
    assert (rows[0].text, rows[0].plain) == RltPrompts(tokenizer, FORMATS["short"]).teacher("0+1=", "1")
