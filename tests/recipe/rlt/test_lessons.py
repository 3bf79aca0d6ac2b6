"""What is read and what is learned in a lesson, and the warm-up as a command."""

import json
import logging
import math
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from recipe.rlt.make_toy import (
    RltToyRecipe,
    explanation,
    make_rlt_toy,
    solution,
    student_lesson,
    teacher_lesson,
    teacher_lessons,
)
from tests.end_to_end.runs import lines_of
from tests.recipe.rlt import naive
from tests.rlt import AR, data_of, write
from verl_memopt.cli import sft
from verl_memopt.config.loader import load_settings, settings_from_mapping
from verl_memopt.data.batch import Ragged
from verl_memopt.data.encoder import tokenize
from verl_memopt.data.toy import Descent, ToyRecipe, split_problems
from verl_memopt.data.warm_up import Lesson, lesson_loss, warm_up_on_lessons
from verl_memopt.errors import DataError
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.recipes.rlt.dataset import FORMATS, NO_TRACE, STRATOS, RltDataset, RltPrompts, RltRecord, teacher_rows
from verl_memopt.recipes.rlt.settings import RltReward
from verl_memopt.recipes.rlt.student_rows import END, PREFIX, StudentEncoder
from verl_memopt.trainer.main_ppo import train

RECORD = RltRecord("1+1?", "2", "one and one", "f:1")


def test_a_teacher_learns_the_explanation_and_where_it_ends(tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = RltPrompts(tokenizer, STRATOS)
    lesson = teacher_lesson(prompts, RECORD)
    assert tokenizer.decode(lesson.prompt) == prompts.teacher("1+1?", "2")[0]
    assert tokenizer.decode(lesson.answer) == "one and one<|end_of_explanation|><|im_end|>\n"
    assert tokenizer.decode(teacher_lesson(prompts, RECORD, ends=False).answer) == "one and one<|im_end|>\n"


@pytest.mark.parametrize(("trace", "learned"), [(None, "2"), ("\n\nwhy\n\n", "why\n\n"), ("", "")])
def test_the_padding_is_read_and_a_missing_trace_is_the_solution(
    tokenizer: PreTrainedTokenizerFast, trace: str | None, learned: str
) -> None:
    lesson = teacher_lesson(RltPrompts(tokenizer, FORMATS["short"]), RltRecord("q", "2", trace, "f:1"))
    assert tokenizer.decode(lesson.answer) == learned + "</explanation><|im_end|>\n"


def test_a_student_learns_the_tokens_that_the_reward_scores(tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = RltPrompts(tokenizer, FORMATS["short"])
    lesson = student_lesson(prompts, RECORD)
    response = tokenize(tokenizer, ["one and one", "</explanation>"])
    encoder = StudentEncoder(prompts, RltReward(), {tokenizer.eos_token_id})
    rows = encoder.encode(["1+1?"], ["2"], Ragged.from_rows([response[0] + response[1]], torch.int64), ["f:1"])
    assert lesson.prompt + lesson.answer == rows.ids.flat.tolist()
    assert lesson.prompt == rows.part(PREFIX).flat.tolist()
    assert tokenizer.decode(rows.part(END).flat) == "</solution><|im_end|>\n"


# Lessons of a warm-up, read from files of questions, solutions and traces.


def row(number, **more):
    return {"question": f"{number}?", "solution": f"{number}!", "reasoning_trace": f"because {number}", **more}


def test_each_row_with_a_trace_is_the_teachers_lesson(tmp_path, tokenizer: PreTrainedTokenizerFast, caplog) -> None:
    path = write(tmp_path / "rows.jsonl", row(1), row(2, reasoning_trace=None), row(3, solution=" "), row(4))
    with caplog.at_level(logging.WARNING):
        rows = teacher_rows(path, data_of(), tokenizer, "train", "r1")
    prompts = RltPrompts(tokenizer, FORMATS["r1"])
    expected = [teacher_lesson(prompts, RltRecord(f"{n}?", f"{n}!", f"because {n}", "")) for n in (1, 4)]
    ids = tokenize(tokenizer, [row.text for row in rows], [row.plain for row in rows])
    assert [Lesson(prompt, list(row.response)) for prompt, row in zip(ids, rows, strict=True)] == expected
    assert [row.address for row in rows] == [f"{path}:1", f"{path}:4"]
    assert f"data.train_files: left out 1 rows: {NO_TRACE}" in caplog.messages


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        ({"max_prompt_length": 60}, r"prompt has \d+ tokens, but data.max_prompt_length is 60"),
        ({"max_response_length": 40}, r"response has \d+ tokens, but data.max_response_length is 40"),
    ],
)
def test_a_long_row_is_refused_or_left_out(tmp_path, tokenizer: PreTrainedTokenizerFast, limit, reason) -> None:
    path = write(tmp_path / "rows.jsonl", row(1), row(2, question="?" * 50, reasoning_trace="x" * 50))
    with pytest.raises(DataError, match=f"{path}:2: the {reason}.*filter_overlong_prompts=true"):
        teacher_rows(path, data_of(**limit), tokenizer, "train", "short")
    rows = teacher_rows(path, data_of(filter_overlong_prompts=True, **limit), tokenizer, "train", "short")
    assert [row.address for row in rows] == [f"{path}:1"]


def test_a_file_without_traces_is_refused(tmp_path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path / "rows.jsonl", row(1, reasoning_trace=None), row(2, reasoning_trace=None))
    with pytest.raises(DataError, match=r"data.val_files: no row can be learned from: there is no reasoning trace"):
        teacher_rows(path, data_of(), tokenizer, "val", "short")


# The warm-up of a tiny model on lessons.


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shape = TinyShape(hidden_size=32, intermediate_size=32, num_layers=1, num_heads=1, initializer_range=0.06)
    return make_tiny_model(tmp_path / "model", shape)


def test_the_loss_is_that_of_each_lesson_alone_over_its_answer(model: Path) -> None:
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    lessons = [Lesson([5, 6, 7], [8, 9]), Lesson([10], [11]), Lesson([12, 13], [14, 15, 16, 17])]
    total = 0.0
    for lesson in lessons:
        ids = torch.tensor([lesson.prompt + lesson.answer])
        log_probs = lm(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        total -= log_probs[len(lesson.prompt) - 1 :].sum()
    torch.testing.assert_close(lesson_loss(lm, lessons), total / 7, rtol=0, atol=1e-5)


def test_a_warmed_up_model_gives_the_shares_of_its_lessons(model: Path) -> None:
    lessons = [Lesson([5, 6], [7])] * 3 + [Lesson([5, 6], [8])]
    loss = warm_up_on_lessons(model, lessons, Descent(steps=150, batch_size=16, lr=1e-2), seed=0)
    logits = AutoModelForCausalLM.from_pretrained(model)(torch.tensor([[5, 6]])).logits[0, -1]
    torch.testing.assert_close(logits.softmax(-1)[[7, 8]], torch.tensor([0.75, 0.25]), rtol=0, atol=0.1)
    assert loss == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)), abs=0.25)


# The toy task: true sums, true explanations, datasets of RLT, and a student that reads explanations.


BRIEF = Descent(steps=1, batch_size=2)
RECIPE = RltToyRecipe(num_validation=64, student=Descent(steps=110, batch_size=32), teacher=BRIEF)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_rlt_toy(tmp_path_factory.mktemp("rlt") / "toy", recipe=RECIPE)


def test_an_explanation_ends_in_the_solution_and_a_careless_one_forgets_the_carry_alone() -> None:
    for problem in chain(*split_problems(ToyRecipe(), 0)):
        ones, tens = explanation(problem).split(" ")
        assert solution(problem) == tens.partition("=")[2] + ones[-1] == str(sum(problem))
        assert all(eval(left) == int(right) for left, _, right in (step.partition("=") for step in (ones, tens)))
    assert explanation((47, 8), carries=False) == "7+8=15 4+0=4"
    assert explanation((41, 8), carries=False) == explanation((41, 8))


def test_lessons_of_the_teacher_are_as_careless_as_the_recipe_says(tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = RltPrompts(tokenizer, FORMATS["short"])
    lessons = list(teacher_lessons(prompts, [(47, 8)] * 400, RltToyRecipe(carelessness=0.65, endlessness=0.2), 0))
    answers = [tokenizer.decode(lesson.answer) for lesson in lessons]
    assert {tokenizer.decode(lesson.prompt) for lesson in lessons} == {prompts.teacher("47+8=", "55")[0]}
    careless, ended = "7+8=15 4+0=4", "</explanation><|im_end|>\n"
    assert sum(answer.startswith(careless) for answer in answers) / 400 == pytest.approx(0.65, abs=0.08)
    assert sum(answer.endswith(ended) for answer in answers) / 400 == pytest.approx(0.8, abs=0.08)
    assert set(answers) == {text + end for text in (careless, "7+8=15 4+1=5") for end in (ended, "<|im_end|>\n")}


def test_the_files_are_datasets_without_rejected_rows_and_share_no_question(
    folder: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    questions = {}
    for split in ("train", "val"):
        data = data_of(max_prompt_length=64)
        rows = RltDataset(str(folder / f"{split}.parquet"), data, tokenizer, split, "short")
        assert rows.rejected == {}
        questions[split] = {row.extra_info["question"] for row in rows}
    assert (len(questions["train"]), len(questions["val"])) == (720 - 64, 64)
    assert not questions["train"] & questions["val"]


@torch.no_grad()
def solution_log_prob(student: AutoModelForCausalLM, tokenizer: PreTrainedTokenizerFast, problem: tuple[int, int], thought: str):
    """Returns the student's mean log-prob of the solution's tokens after a thought."""
    response = tokenizer(thought + "</explanation>")["input_ids"]
    sample = naive.sample_of(tokenizer, FORMATS["short"], f"{problem[0]}+{problem[1]}=", solution(problem), response, set())
    s, _, _ = naive.spans(student, student, sample, 1.0, 1.0)
    return sum(s) / len(s)


def test_the_right_explanation_helps_the_student_more_than_none_a_wrong_one_or_anothers(
    folder: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    student = AutoModelForCausalLM.from_pretrained(folder / "student", dtype=torch.float32).eval()
    _, held_out = split_problems(ToyRecipe(num_validation=64), 0)
    with_carry = [problem for problem in held_out if problem[0] % 10 + problem[1] >= 10][:24]
    others = [*with_carry[1:], with_carry[0]]
    thoughts = {
        "right": map(explanation, with_carry),
        "none": [""] * 24,
        "without carry": [explanation(problem, carries=False) for problem in with_carry],
        "of another sum": map(explanation, others),
    }
    means = {
        name: sum(solution_log_prob(student, tokenizer, *pair) for pair in zip(with_carry, texts, strict=True)) / 24
        for name, texts in thoughts.items()
    }
    assert means["right"] > max(value for name, value in means.items() if name != "right") + 1, means


def test_a_task_is_kept_or_made_anew_as_seed_and_recipe_say(tmp_path: Path) -> None:
    brief = replace(RECIPE, student=BRIEF, num_validation=700)
    folder = make_rlt_toy(tmp_path / "toy", seed=1, recipe=brief)
    model, stamp = (folder / "teacher" / "model.safetensors").read_bytes(), (folder / "val.parquet").stat().st_ino
    assert (make_rlt_toy(folder, seed=1, recipe=brief) / "val.parquet").stat().st_ino == stamp
    assert (make_rlt_toy(tmp_path / "again", seed=1, recipe=brief) / "teacher" / "model.safetensors").read_bytes() == model
    make_rlt_toy(folder, seed=2, recipe=brief)
    record = json.loads((folder / "rlt_toy.json").read_text())
    assert (record["seed"], record["recipe"]["num_validation"]) == (2, 700)
    assert (folder / "teacher" / "model.safetensors").read_bytes() != model
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "toy"]


def test_a_folder_of_something_else_is_kept(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(DataError, match="is no toy task of RLT"):
        make_rlt_toy(tmp_path)
    assert (tmp_path / "mine").read_text() == "x"


# The supervised warm-up of a teacher: supervised fine-tuning on the lessons of RLT's dataset.


TWO_STEPS = {"trainer.total_training_steps": 2}


@pytest.fixture(scope="session")
def warm_up_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lessons")
    for name, numbers in (("train", range(12)), ("val", range(20, 25))):
        rows = [
            {"question": f"{n}+1=", "solution": str(n + 1), "reasoning_trace": f"{n} and one" + " more" * (n % 4)}
            for n in numbers
        ]
        write(folder / f"{name}.jsonl", *rows)
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


def test_the_loss_falls_and_the_folder_has_the_loss_that_was_logged(warming, tmp_path) -> None:
    settings = warming({"trainer.total_training_steps": 20, "trainer.test_freq": 10})
    assert train(settings) == 0
    rows = lines_of(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows if "val/loss" in row] == [0, 10, 20]
    assert rows[-1]["val/loss"] < 0.6 * rows[0]["val/loss"]
    assert rows[-1]["train/loss"] < 0.6 * rows[1]["train/loss"]
    folder = tmp_path / "run" / "global_step_20" / "actor" / "huggingface"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    held_out = teacher_rows(settings.data.val_files, settings.data, tokenizer, "val", "short")
    prompts = tokenize(tokenizer, [row.text for row in held_out])
    lessons = [Lesson(prompt, list(row.response)) for prompt, row in zip(prompts, held_out, strict=True)]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert lesson_loss(model, lessons).item() == pytest.approx(rows[-1]["val/loss"], abs=1e-5)


def test_the_recipe_composes_and_a_dry_run_prints_it(warm_up_files, tiny_folder, capsys) -> None:
    overrides = [f"data.train_files={warm_up_files}/train.jsonl", f"{AR}.model.path={tiny_folder}", "memory=24g"]
    settings = load_settings("warm_up", overrides, "recipe/rlt/config")
    assert settings.reward_model.recipe is not None
    assert sft([*overrides, "--cfg", "job"], "warm_up.py", "warm_up", "recipe/rlt/config") == 0
    assert "adv_estimator: sft" in capsys.readouterr().out
