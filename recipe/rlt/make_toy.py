"""Make RLT's toy task: a tiny warmed-up teacher, a tiny student, and sums with explanations.

python recipe/rlt/make_toy.py runs/rlt_toy_seed0 --seed 0

The toy task has sums, each with an explanation that first adds the ones and then the tens. Without an explanation, the student
must do two additions at once. With an explanation, each step adds two digits, and the student only copies the solution. So the
right explanation raises the log-prob of the solution, and each of its tokens follows from the question.

The student is warmed up on right explanations. The teacher is warmed up on explanations that often forget the carry and sometimes
do not end, although its prompt contains the solution. RL only has to prefer the explanations that lead to the solution.
"""

import argparse
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from verl_memopt.data.encoder import tokenize
from verl_memopt.data.sources import write_parquet
from verl_memopt.data.toy import SHAPE, Descent, Problem, ToyRecipe, identity_of, made_whole, question, split_problems
from verl_memopt.data.warm_up import Lesson, warm_up_on_lessons
from verl_memopt.errors import UserError
from verl_memopt.model.tiny import make_tiny_model
from verl_memopt.observe.log_setup import setup_logging
from verl_memopt.recipes.rlt.dataset import FORMATS, RltPrompts, RltRecord

logger = logging.getLogger("verl_memopt.recipes.rlt")  # a name for which setup_logging shows progress messages


def teacher_lesson(prompts: RltPrompts, record: RltRecord, ends: bool = True) -> Lesson:
    """Return a lesson of a teacher: it continues its prompt with the reasoning trace, the end tag, and the end of the turn.

    The prompt, which ends with the forced prefix, is not learned. If a record has no trace, the solution is learned instead.
    Without ``ends`` there is no end tag, and the explanation ends with the turn.
    """
    text, plain = prompts.teacher(record.question, record.solution)
    end = prompts.rlt_format.explanation.end if ends else ""
    parts = [text, _trace(prompts, record), end + prompts.end_of_turn()]
    prompt, trace, end_ids = tokenize(prompts.tokenizer, parts, [plain, prompts.plain(parts[1]), ()])
    return Lesson(prompt, trace + end_ids)


def student_lesson(prompts: RltPrompts, record: RltRecord) -> Lesson:
    """Return a lesson of a student: it answers a question with the reasoning trace as its thought, and then the solution.

    The parts are tokenized separately, as in the reward.
    """
    text, plain = prompts.student(record.question)
    rlt_format = prompts.rlt_format
    parts = [text, _trace(prompts, record), rlt_format.bridge, record.solution, rlt_format.solution.end + prompts.end_of_turn()]
    spans = [plain, prompts.plain(parts[1]), (), prompts.plain(record.solution), ()]
    prompt, *answer = tokenize(prompts.tokenizer, parts, spans)
    return Lesson(prompt, [token for part in answer for token in part])


def _trace(prompts: RltPrompts, record: RltRecord) -> str:
    """Return the reasoning trace, or else the solution, without the padding, because both prompts end with the padding."""
    trace = record.solution if record.reasoning_trace is None else record.reasoning_trace
    return trace.removeprefix(prompts.rlt_format.padding)


TRAIN, VALIDATION, TEACHER, STUDENT, RECORD = "train.parquet", "val.parquet", "teacher", "student", "rlt_toy.json"
TAG_FORMAT = "short"
"""The format of the toy task: its prompts have 30 to 40 tokens."""


@dataclass(frozen=True)
class RltToyRecipe:
    """Settings of the toy task."""

    num_validation: int = 128
    """Number of held-out sums. All others are for training."""
    carelessness: float = 0.65
    """Fraction of the teacher's lessons that forget the carry. Above one half, this becomes its most likely explanation."""
    endlessness: float = 0.2
    """Fraction of the teacher's lessons that have no end tag."""
    student: Descent = field(default_factory=lambda: Descent(steps=300, batch_size=32))
    """The student's warm-up."""
    teacher: Descent = field(default_factory=lambda: Descent(steps=300, batch_size=32))
    """The teacher's warm-up."""


def solution(problem: Problem) -> str:
    return str(sum(problem))


def explanation(problem: Problem, carries: bool = True) -> str:
    """Return the steps to the sum: the ones, then the tens with the carry. For 47 + 8: ``7+8=15 4+1=5``.

    Without ``carries`` the carry is forgotten, so the tens are wrong if there is one.
    """
    tens, ones = divmod(problem[0], 10)
    carry = (ones + problem[1]) // 10 if carries else 0
    return f"{ones}+{problem[1]}={ones + problem[1]} {tens}+{carry}={tens + carry}"


def as_row(problem: Problem) -> dict[str, Any]:
    return {"question": question(problem), "solution": solution(problem), "reasoning_trace": explanation(problem)}


def make_rlt_toy(folder: str | Path, seed: int = 0, recipe: RltToyRecipe | None = None) -> Path:
    """Create the toy task in a folder and return the folder.

    The folder has ``train.parquet``, ``val.parquet``, ``teacher/`` and ``student/`` (models), and ``rlt_toy.json`` (the recipe
    and the losses of both warm-ups). It is built under a temporary name and then renamed, so it is always complete. An existing
    folder with the same seed and recipe is kept.

    Args:
        folder: The folder to create.
        seed: Decides the held-out sums, the initial weights and the lessons.
        recipe: Settings of the task. None = the defaults.

    Raises:
        DataError: The folder exists and has other contents.
    """
    recipe = RltToyRecipe() if recipe is None else recipe
    occupied = "it exists and is no toy task of RLT, so it is not replaced. Choose another, or remove it."
    build = partial(_build, seed=seed, recipe=recipe)
    return made_whole(Path(folder) / RECORD, identity_of(seed, recipe), build, "toy task of RLT", occupied)


def teacher_lessons(prompts: RltPrompts, problems: Sequence[Problem], recipe: RltToyRecipe, seed: int) -> Iterator[Lesson]:
    """Yield a lesson of the careless teacher for each problem."""
    draw = random.Random(seed)
    for problem in problems:
        trace = explanation(problem, carries=draw.random() >= recipe.carelessness)
        yield teacher_lesson(prompts, _record(problem, trace), ends=draw.random() >= recipe.endlessness)


def _build(folder: Path, seed: int, recipe: RltToyRecipe) -> dict[str, float]:
    from transformers import AutoTokenizer

    train, validation = split_problems(ToyRecipe(num_validation=recipe.num_validation), seed)
    logger.info("toy task of RLT: %d training and %d held-out sums, warming up two models", len(train), len(validation))
    for path, problems in ((TRAIN, train), (VALIDATION, validation)):
        write_parquet(folder / path, [as_row(problem) for problem in problems])
    folders = {name: make_tiny_model(folder / name, SHAPE, seed=seed + place) for place, name in enumerate((STUDENT, TEACHER))}
    prompts = RltPrompts(AutoTokenizer.from_pretrained(folders[STUDENT]), FORMATS[TAG_FORMAT])
    lessons = {
        STUDENT: [student_lesson(prompts, _record(problem, explanation(problem))) for problem in train],
        # Each sum appears several times, because each lesson forgets the carry at random.
        TEACHER: list(teacher_lessons(prompts, train * 4, recipe, seed)),
    }
    recipes = {STUDENT: recipe.student, TEACHER: recipe.teacher}
    return {f"{name}_loss": warm_up_on_lessons(folders[name], lessons[name], recipes[name], seed) for name in folders}


def _record(problem: Problem, trace: str) -> RltRecord:
    return RltRecord(question(problem), solution(problem), trace, address=question(problem))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to put teacher/, student/, train.parquet and val.parquet")
    parser.add_argument("--seed", type=int, default=0, help="seed of data, weights and warm-up (default: 0)")
    arguments = parser.parse_args()
    setup_logging()
    try:
        make_rlt_toy(arguments.folder, seed=arguments.seed)
    except UserError as problem:
        parser.exit(problem.exit_code, f"{problem}\n")


if __name__ == "__main__":
    main()
