"""Make the toy task of distillation: a tiny student that adds carelessly, and a wider teacher that adds well.

python recipe/distill/make_toy.py runs/distill_toy_seed0 --seed 0

The student has also learned to copy a hint: if the prompt begins with the sum, it usually writes the sum. So it can be its own
teacher, if the teacher's prompt has the sum.
"""

import argparse
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from verl_memopt.data.encoder import tokenize
from verl_memopt.data.sources import write_parquet
from verl_memopt.data.toy import (
    SHAPE,
    Descent,
    Problem,
    ToyRecipe,
    as_row,
    careless_answer,
    identity_of,
    made_whole,
    question,
    split_problems,
)
from verl_memopt.data.warm_up import Lesson, greedy_accuracy, load_model, warm_up_on_lessons
from verl_memopt.errors import UserError
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.observe.log_setup import setup_logging

logger = logging.getLogger("verl_memopt.data.distill_toy")  # a name for which setup_logging shows progress messages

STUDENT, TEACHER, TRAIN, VALIDATION, RECORD = "student", "teacher", "train.parquet", "val.parquet", "distill_toy.json"
DRAWS = 32
"""Lessons of each sum. With few of them the student would learn by heart which answers were careless."""
TEACHER_SHAPE = TinyShape(hidden_size=128, intermediate_size=256, num_layers=3, num_heads=4, initializer_range=0.06)


@dataclass(frozen=True)
class DistillToyRecipe:
    """Settings of the toy task."""

    carelessness: float = 0.65
    """Share of the student's lessons without a hint whose answer forgets the carry."""
    student: Descent = field(default_factory=lambda: Descent(steps=500))
    """The warm-up of the student."""
    teacher: Descent = field(default_factory=lambda: Descent(steps=500))
    """The training of the teacher."""


def hinted(problem: Problem) -> str:
    """Return the question with its answer in front: what ``distill.teacher_prompt="{answer} {prompt}"`` makes of it."""
    return f"{sum(problem)} {question(problem)}"


def lesson(tokenizer: Any, asked: str, answer: int) -> Lesson:
    messages = [{"role": "user", "content": asked}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return Lesson(*tokenize(tokenizer, [prompt, f"{answer}{tokenizer.eos_token}"]))


def make_distill_toy(folder: str | Path, seed: int = 0, recipe: DistillToyRecipe | None = None) -> Path:
    """Create the toy task in a folder and return the folder.

    The folder has ``student/``, ``teacher/``, ``train.parquet``, ``val.parquet`` and ``distill_toy.json``. It is built under a
    temporary name and then renamed, so it is always complete. A folder with the same seed and recipe is kept.

    Raises:
        DataError: The folder exists and has other contents.
    """
    recipe = DistillToyRecipe() if recipe is None else recipe
    occupied = "it exists and is no toy task of distillation, so it is not replaced. Choose another, or remove it."
    build = partial(_build, seed=seed, recipe=recipe)
    return made_whole(Path(folder) / RECORD, identity_of(seed, recipe), build, "toy task of distillation", occupied)


def _build(folder: Path, seed: int, recipe: DistillToyRecipe) -> dict[str, float]:
    draw = random.Random(seed)
    train, validation = split_problems(ToyRecipe(), seed)
    logger.info("toy task of distillation: %d training and %d held-out sums", len(train), len(validation))
    for path, problems, split in ((TRAIN, train, "train"), (VALIDATION, validation, "val")):
        write_parquet(folder / path, [as_row(problem, split, index) for index, problem in enumerate(problems)])
    student = make_tiny_model(folder / STUDENT, SHAPE, seed=seed)
    teacher = make_tiny_model(folder / TEACHER, TEACHER_SHAPE, seed=seed + 1)
    _, tokenizer = load_model(student)
    right = [lesson(tokenizer, question(each), sum(each)) for each in train]
    careless = [lesson(tokenizer, question(each), careless_answer(each)) for each in train]
    hints = [lesson(tokenizer, hinted(each), sum(each)) for each in train]
    drawn = [(careless if draw.random() < recipe.carelessness else right)[place] for place in list(range(len(train))) * DRAWS]
    warm_up_on_lessons(student, [*drawn, *hints * DRAWS], recipe.student, seed)
    warm_up_on_lessons(teacher, right, recipe.teacher, seed)
    accuracy = {
        "student": greedy_accuracy(student, [(question(each), str(sum(each))) for each in validation]),
        "student_with_hint": greedy_accuracy(student, [(hinted(each), str(sum(each))) for each in validation]),
        "teacher": greedy_accuracy(teacher, [(question(each), str(sum(each))) for each in validation]),
    }
    logger.info("greedy answers to held-out sums that are right: %s", accuracy)
    return accuracy


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to put student/, teacher/, train.parquet and val.parquet")
    parser.add_argument("--seed", type=int, default=0, help="seed of data, weights and warm-up (default: 0)")
    parsed = parser.parse_args(arguments)
    setup_logging()
    try:
        make_distill_toy(parsed.folder, seed=parsed.seed)
    except UserError as problem:
        parser.exit(problem.exit_code, f"{problem}\n")


if __name__ == "__main__":
    main()
