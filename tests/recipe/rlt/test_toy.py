"""The toy task: true sums, true explanations, datasets of RLT, and a student that reads explanations."""

import json
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.recipe.rlt import naive
from verl_memopt.config.schema import Data
from verl_memopt.data.toy import ToyRecipe, split_problems
from verl_memopt.errors import DataError
from verl_memopt.recipes.rlt.dataset import FORMATS, RltDataset, RltPrompts
from verl_memopt.recipes.rlt.lessons import RltToyRecipe, RltWarmUp, explanation, make_rlt_toy, solution, teacher_lessons

BRIEF = RltWarmUp(steps=1, batch_size=2)
RECIPE = RltToyRecipe(num_validation=64, student=RltWarmUp(steps=150), teacher=BRIEF)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_rlt_toy(tmp_path_factory.mktemp("rlt") / "toy", recipe=RECIPE)


@pytest.mark.parametrize(
    ("problem", "text"),
    [((47, 8), "7+8=15 4+1=5"), ((41, 8), "1+8=9 4+0=4"), ((19, 1), "9+1=10 1+1=2"), ((89, 9), "9+9=18 8+1=9")],
)
def test_an_explanation_adds_the_ones_then_the_tens(problem: tuple[int, int], text: str) -> None:
    assert explanation(problem) == text


def test_the_last_digits_of_the_steps_are_the_solution() -> None:
    for problem in chain(*split_problems(ToyRecipe(), 0)):
        ones, tens = explanation(problem).split(" ")
        assert solution(problem) == tens.partition("=")[2] + ones[-1] == str(sum(problem))
        assert all(eval(left) == int(right) for left, _, right in (step.partition("=") for step in (ones, tens)))


def test_a_careless_explanation_forgets_the_carry_alone() -> None:
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
        data = Data(train_files=None, val_files=None, seed=0, max_prompt_length=64)
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
    brief = replace(RECIPE, student=BRIEF)
    folder = make_rlt_toy(tmp_path / "toy", seed=1, recipe=brief)
    model, stamp = (folder / "teacher" / "model.safetensors").read_bytes(), (folder / "val.parquet").stat().st_ino
    assert (make_rlt_toy(folder, seed=1, recipe=brief) / "val.parquet").stat().st_ino == stamp
    assert (make_rlt_toy(tmp_path / "again", seed=1, recipe=brief) / "teacher" / "model.safetensors").read_bytes() == model
    make_rlt_toy(folder, seed=2, recipe=brief)
    record = json.loads((folder / "rlt_toy.json").read_text())
    assert (record["seed"], record["recipe"]["num_validation"]) == (2, 64)
    assert (folder / "teacher" / "model.safetensors").read_bytes() != model
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "toy"]


def test_a_folder_of_something_else_is_kept(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(DataError, match="is no toy task of RLT"):
        make_rlt_toy(tmp_path)
    assert (tmp_path / "mine").read_text() == "x"
