"""A toy task that a laptop can train: sums of a two-digit and a one-digit number, with a tiny model that adds carelessly.

The model is warmed up on a teacher that usually forgets the carry. It can add, but its most likely answer is wrong wherever
there is a carry, so greedy accuracy starts near the share of sums without one. Reinforcement learning only has to prefer the
answer that earns the reward. The held-out sums show that it does.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from verl_memopt.data.warm_up import Problem, WarmUp, greedy_accuracy, warm_up
from verl_memopt.errors import DataError
from verl_memopt.models.tiny import TinyShape, make_tiny_model

logger = logging.getLogger(__name__)

DATA_SOURCE = "toy/arithmetic"
SHAPE = TinyShape(initializer_range=0.06)
"""The tiny model with weights large enough to learn within seconds."""

MODEL, TRAIN, VALIDATION, RECORD = "model", "train.parquet", "val.parquet", "toy.json"


@dataclass(frozen=True)
class ToyRecipe:
    """Settings of the toy task."""

    num_validation: int = 128
    """Number of held-out sums. All others are for training."""
    carry_share: float = 0.625
    """Share of held-out sums with a carry. Among all sums it is one half."""
    warm_up: WarmUp = field(default_factory=WarmUp)
    """The supervised warm-up."""


def make_toy(folder: str | Path, seed: int = 0, recipe: ToyRecipe | None = None) -> Path:
    """Create the toy task in a folder and return the folder.

    It holds ``model/`` (warmed up), ``train.parquet``, ``val.parquet`` and ``toy.json`` (recipe and accuracy). It is
    built in a temporary folder, which is then renamed, so the result is always complete. A folder with the same seed and
    recipe is kept.

    Args:
        folder: Where to put the task.
        seed: Decides the held-out sums, the initial weights and the warm-up.
        recipe: Settings of the task. None = the defaults.

    Raises:
        DataError: The folder exists and holds something else.
    """
    recipe = ToyRecipe() if recipe is None else recipe
    folder = Path(folder)
    if _holds(folder, seed, recipe):
        logger.info("toy task: %s is ready", folder)
        return folder
    _refuse_foreign(folder)
    aside = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    try:
        _build(aside, seed, recipe)
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def split_problems(recipe: ToyRecipe, seed: int) -> tuple[list[Problem], list[Problem]]:
    """Return the training sums and the held-out sums, disjoint and in random order."""
    draw = random.Random(seed)
    sums = [(a, b) for a in range(10, 90) for b in range(1, 10)]
    draw.shuffle(sums)
    num_carry = round(recipe.num_validation * recipe.carry_share)
    with_carry = [problem for problem in sums if carries(problem)][:num_carry]
    without = [problem for problem in sums if not carries(problem)][: recipe.num_validation - num_carry]
    held_out = {*with_carry, *without}
    return [problem for problem in sums if problem not in held_out], [problem for problem in sums if problem in held_out]


def carries(problem: Problem) -> bool:
    """Return whether adding the ones digits gives 10 or more."""
    return problem[0] % 10 + problem[1] >= 10


def careless_answer(problem: Problem) -> int:
    """Return the answer without the carry."""
    return sum(problem) - (10 if carries(problem) else 0)


def question(problem: Problem) -> str:
    """Return the sum as the prompt text."""
    return f"{problem[0]}+{problem[1]}="


def as_row(problem: Problem, split: str, index: int) -> dict[str, Any]:
    """Return the dataset row of a sum."""
    answer = str(sum(problem))
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": question(problem)}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question(problem)},
    }


def _build(folder: Path, seed: int, recipe: ToyRecipe) -> None:
    train, validation = split_problems(recipe, seed)
    logger.info("toy task: %d training and %d held-out sums, warming up a tiny model", len(train), len(validation))
    folder.mkdir(parents=True)
    _write_rows(folder / TRAIN, train, "train")
    _write_rows(folder / VALIDATION, validation, "val")
    model = make_tiny_model(folder / MODEL, SHAPE, seed=seed)
    loss = warm_up(model, [(question(p), str(careless_answer(p)), str(sum(p))) for p in train], recipe.warm_up, seed)
    accuracy = greedy_accuracy(model, [(question(p), str(sum(p))) for p in validation])
    logger.info("toy task: warmed up to loss %.3f; greedy answers are right on %.0f%% of held-out sums", loss, 100 * accuracy)
    record = {**_identity(seed, recipe), "loss": loss, "greedy_accuracy": accuracy}
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n")


def _write_rows(path: Path, problems: list[Problem], split: str) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = [as_row(problem, split, index) for index, problem in enumerate(problems)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def _identity(seed: int, recipe: ToyRecipe) -> dict[str, Any]:
    return {"seed": seed, "recipe": asdict(recipe), "shape": asdict(SHAPE)}


def _holds(folder: Path, seed: int, recipe: ToyRecipe) -> bool:
    """Return whether the folder holds this task. The record is written last, so a folder with a record is complete."""
    if not (folder / RECORD).is_file():
        return False
    record = json.loads((folder / RECORD).read_text())
    return {name: record[name] for name in ("seed", "recipe", "shape") if name in record} == _identity(seed, recipe)


def _refuse_foreign(folder: Path) -> None:
    if folder.exists() and not (folder / RECORD).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder}: it exists and is not a toy task, so it is not replaced. Choose another folder, or remove it.")
