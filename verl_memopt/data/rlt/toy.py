"""A toy task for RLT that tiny models can learn: sums, each with an explanation that adds the ones first and then the tens.

Without an explanation the solution takes two additions at once. With it, each step adds two digits, and the solution is read off.
So the right explanation raises the log-prob of the solution, and each of its tokens follows from the question.

The student is warmed up on right explanations. The teacher is warmed up on explanations that often forget the carry and sometimes
do not end, although its prompt holds the solution. RL only has to prefer the explanations that lead to it.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from verl_memopt.data.rlt.format import FORMATS
from verl_memopt.data.rlt.lessons import Lesson, student_lesson, teacher_lesson
from verl_memopt.data.rlt.prompts import RltPrompts
from verl_memopt.data.rlt.records import RltRecord
from verl_memopt.data.rlt.warm_up import RltWarmUp, warm_up_on_lessons
from verl_memopt.data.toy import SHAPE, ToyRecipe, question, split_problems
from verl_memopt.data.warm_up import Problem
from verl_memopt.errors import DataError
from verl_memopt.models.tiny import make_tiny_model

logger = logging.getLogger(__name__)

TRAIN, VALIDATION, TEACHER, STUDENT, RECORD = "train.parquet", "val.parquet", "teacher", "student", "rlt_toy.json"
TAG_FORMAT = "short"
"""The format of the toy task: its prompts have 30 to 40 tokens."""


@dataclass(frozen=True)
class RltToyRecipe:
    """Settings of the toy task."""

    num_validation: int = 128
    """Number of held-out sums. All others are for training."""
    carelessness: float = 0.65
    """How often the teacher's lesson forgets the carry. Above one half that becomes its most likely explanation."""
    endlessness: float = 0.2
    """How often the teacher's lesson has no end tag."""
    student: RltWarmUp = field(default_factory=lambda: RltWarmUp(steps=300))
    """The student's warm-up."""
    teacher: RltWarmUp = field(default_factory=lambda: RltWarmUp(steps=300))
    """The teacher's warm-up."""


def solution(problem: Problem) -> str:
    """Return the sum as a text."""
    return str(sum(problem))


def explanation(problem: Problem, carries: bool = True) -> str:
    """Return the steps to the sum: the ones, then the tens with the carry. For 47 + 8: ``7+8=15 4+1=5``.

    Args:
        problem: The two numbers.
        carries: Carry the one. False = forget it, which gives a wrong number of tens where there is one.
    """
    tens, ones = divmod(problem[0], 10)
    carry = (ones + problem[1]) // 10 if carries else 0
    return f"{ones}+{problem[1]}={ones + problem[1]} {tens}+{carry}={tens + carry}"


def as_row(problem: Problem) -> dict[str, Any]:
    """Return the dataset row of a sum, with the columns of RLT."""
    return {"question": question(problem), "solution": solution(problem), "reasoning_trace": explanation(problem)}


def make_rlt_toy(folder: str | Path, seed: int = 0, recipe: RltToyRecipe | None = None) -> Path:
    """Create the toy task in a folder and return the folder.

    It holds ``train.parquet``, ``val.parquet``, ``teacher/`` and ``student/`` (models), and ``rlt_toy.json`` (the recipe and the
    losses of both warm-ups). It is built in a temporary folder, which is then renamed, so the result is always complete. A folder
    with the same seed and recipe is kept.

    Args:
        folder: Where to put the task.
        seed: Decides the held-out sums, the initial weights and the lessons.
        recipe: Settings of the task. None = the defaults.

    Raises:
        DataError: The folder exists and holds something else.
    """
    recipe = RltToyRecipe() if recipe is None else recipe
    folder = Path(folder)
    identity = {"seed": seed, "recipe": asdict(recipe), "shape": asdict(SHAPE)}
    if (folder / RECORD).is_file():
        record = json.loads((folder / RECORD).read_text())
        if {name: record.get(name) for name in identity} == identity:
            logger.info("toy task of RLT: %s is ready", folder)
            return folder
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder}: it exists and is no toy task of RLT, so it is not replaced. Choose another, or remove it.")
    aside = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    try:
        aside.mkdir(parents=True)
        losses = _build(aside, seed, recipe)
        (aside / RECORD).write_text(json.dumps({**identity, **losses}, indent=2) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def teacher_lessons(prompts: RltPrompts, problems: Sequence[Problem], recipe: RltToyRecipe, seed: int) -> Iterator[Lesson]:
    """Yield a lesson of the careless teacher for each problem.

    Args:
        prompts: Renders the prompts.
        problems: The sums.
        recipe: How careless the lessons are.
        seed: Decides which lessons are.
    """
    draw = random.Random(seed)
    for problem in problems:
        trace = explanation(problem, carries=draw.random() >= recipe.carelessness)
        yield teacher_lesson(prompts, _record(problem, trace), ends=draw.random() >= recipe.endlessness)


def _build(folder: Path, seed: int, recipe: RltToyRecipe) -> dict[str, float]:
    """Write data and models, and return the loss of each warm-up."""
    from transformers import AutoTokenizer

    train, validation = split_problems(ToyRecipe(num_validation=recipe.num_validation), seed)
    logger.info("toy task of RLT: %d training and %d held-out sums, warming up two models", len(train), len(validation))
    _write(folder / TRAIN, train)
    _write(folder / VALIDATION, validation)
    folders = {name: make_tiny_model(folder / name, SHAPE, seed=seed + place) for place, name in enumerate((STUDENT, TEACHER))}
    prompts = RltPrompts(AutoTokenizer.from_pretrained(folders[STUDENT]), FORMATS[TAG_FORMAT])
    lessons = {
        STUDENT: [student_lesson(prompts, _record(problem, explanation(problem))) for problem in train],
        # Each sum appears several times, because chance decides how careless a lesson is.
        TEACHER: list(teacher_lessons(prompts, train * 4, recipe, seed)),
    }
    recipes = {STUDENT: recipe.student, TEACHER: recipe.teacher}
    return {f"{name}_loss": warm_up_on_lessons(folders[name], lessons[name], recipes[name], seed) for name in folders}


def _record(problem: Problem, trace: str) -> RltRecord:
    return RltRecord(question(problem), solution(problem), trace, address=question(problem))


def _write(path: Path, problems: Sequence[Problem]) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist([as_row(problem) for problem in problems]), path)
