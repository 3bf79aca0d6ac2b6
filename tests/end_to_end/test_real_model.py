"""What a toy cannot show, with a real instruct model: chat template, end of turn, real lengths, and 30 layers in bfloat16.

The model is that of recipe/real_model, made by its set-up step. Another place of it is named by REAL_MODEL.
"""

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe.real_model.make_model import RECORD
from recipe.real_model.prepare_arithmetic import prepare_arithmetic
from tests.end_to_end.runs import ROOT, lines_of, steps_here
from verl_memopt.data.sources import math_row, write_parquet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
AR = "actor_rollout_ref"
MODEL = Path(os.environ.get("REAL_MODEL", ROOT / "runs" / "smollm2_135m"))
RECIPE = ("arithmetic", str(ROOT / "recipe" / "real_model"))
LONGEST = 16
"""Tokens of an answer in the recipe."""


DIFFERENCE = {"fp32": 2e-5, "bfloat16": 0.1}
"""Largest mean difference of log-probs between engine and trainer in a step, nats a token."""


def dtype(name):
    """Gives the settings of a precision. A run stops when the difference is larger than it allows."""
    limit = f"{AR}.rollout.max_logprob_diff={DIFFERENCE[name]}"
    return [f"{AR}.rollout.dtype={name}", f"{AR}.actor.fsdp_config.dtype={name}", limit]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """A folder with the recipe's data and its model."""
    if not (MODEL / RECORD).exists():
        pytest.skip(f"{MODEL}: the real model has not been made. python -m recipe.real_model.make_model {MODEL}")
    folder = tmp_path_factory.mktemp("task")
    prepare_arithmetic(folder)
    (folder / "model").symlink_to(MODEL)
    return folder


@pytest.fixture(scope="module")
def tokenizer(task):
    return AutoTokenizer.from_pretrained(task / "model")


TWO_PROMPTS = ["data.train_batch_size=2", f"{AR}.actor.ppo_mini_batch_size=2", f"{AR}.rollout.n=4"]
"""Each step has two prompts with four answers each."""
WITHOUT_VALIDATION = ["trainer.val_before_train=false", "trainer.test_freq=-1"]


@pytest.mark.parametrize("precision", DIFFERENCE)
def test_engine_and_trainer_agree_over_twenty_steps(task, tmp_path, precision):
    rows = steps_here(
        task, tmp_path, *TWO_PROMPTS, *WITHOUT_VALIDATION, *dtype(precision), "trainer.total_training_steps=20", config=RECIPE
    )
    differences = [rows[step]["rollout/logprob_diff_mean"] for step in range(1, 21)]
    assert max(differences) <= DIFFERENCE[precision]
    # The difference is rounding: the steps that change the weights do not make it grow.
    assert sum(differences[15:]) <= 2 * sum(differences[:5]) + 5e-6
    assert all(rows[step]["actor/skipped_updates"] == 0 for step in range(1, 21))
    assert max(rows[step]["actor/grad_norm"] for step in range(1, 21)) > 0


ENGINES = {"vllm": [], "hf": [f"{AR}.rollout.name=hf"]}


@pytest.mark.parametrize("engine", ENGINES)
def test_greedy_answers_are_those_of_transformers_and_end_with_the_end_of_turn(task, tokenizer, tmp_path, engine):
    one_step = [*TWO_PROMPTS, "trainer.total_training_steps=1", "trainer.test_freq=-1", "data.val_max_samples=12"]
    steps_here(task, tmp_path, *dtype("fp32"), *one_step, *ENGINES[engine], config=RECIPE)
    rows = [row for row in lines_of(tmp_path / "generations.jsonl") if row["step"] == 0]
    assert len(rows) == 12
    model = AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float32)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end == tokenizer.eos_token_id == tokenizer.pad_token_id  # padding could be taken for an end, and an end for padding
    ended = 0
    for row in rows:
        asked = row["input"].rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
        messages = [{"role": "user", "content": asked}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert row["prompt_ids"] == prompt
        with torch.inference_mode():
            ids = torch.tensor([prompt])
            made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=LONGEST, do_sample=False)
        assert row["response_ids"] == made[0, len(prompt) :].tolist()
        ends = row["response_ids"].index(end) if end in row["response_ids"] else None
        assert ends == len(row["response_ids"]) - 1 or (ends is None and len(row["response_ids"]) == LONGEST)
        assert "<|" not in row["output"]
        ended += ends is not None
    assert 0 < ended < 12


def test_long_prompts_and_answers_of_several_lengths_give_one_gradient_however_they_are_computed(task, tmp_path):
    """Prompts of about 900 and of about 40 tokens, four answers of up to 160 tokens to each. The prompt is shared, or not."""
    story = " ".join(f"On day {day} the farmer counted {3 * day + 1} sheep and {day % 5} goats." for day in range(60))
    prompts = [f"{story} Tell me about the farm.", "Why is the sky blue?"]
    folder = tmp_path / "long"
    for split in ("train", "val"):
        write_parquet(
            folder / f"{split}.parquet", [math_row("recipe/arithmetic", prompt, "7", split=split) for prompt in prompts]
        )
    (folder / "model").symlink_to(MODEL)
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return len(solution_str)\n"
    )
    rows = [
        steps_here(
            folder, tmp_path / str(shared), *dtype("fp32"), *WITHOUT_VALIDATION, *TWO_PROMPTS, "data.max_prompt_length=2048",
            "data.max_response_length=160", f"custom_reward_function.path={reward}", f"{AR}.actor.use_prefix_grouper={shared}",
            f"{AR}.actor.ppo_max_token_len_per_gpu=4096", "trainer.total_training_steps=1", config=RECIPE,
        )[1]
        for shared in (True, False)
    ]  # fmt: skip
    for row in rows:
        assert row["prompt_length/max"] > 800 > 100 > row["prompt_length/min"]
        assert row["response_length/min"] < row["response_length/max"]
        assert row["rollout/logprob_diff_mean"] <= DIFFERENCE["fp32"]
        assert row["actor/grad_norm"] == pytest.approx(rows[0]["actor/grad_norm"], rel=1e-3)
