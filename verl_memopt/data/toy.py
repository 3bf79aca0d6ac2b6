"""A toy task that a laptop can train: sums of a two-digit and a one-digit number, with a tiny model that adds carelessly.

The model is warmed up (trained for a short time) on the answers of a teacher that usually forgets the carry. After that it can
add, but its most likely answer is wrong whenever there is a carry. So greedy accuracy starts near the share of sums without a
carry. Reinforcement learning only has to prefer the answer that earns the reward. The held-out sums show that it does.
"""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from verl_memopt.errors import DataError
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.observe.files import written_aside
from verl_memopt.records import RecordError, read_json

logger = logging.getLogger(__name__)

DATA_SOURCE = "toy/arithmetic"
SHAPE = TinyShape(initializer_range=0.06)
"""The tiny model with weights large enough to learn within seconds."""

MODEL, TRAIN, VALIDATION, RECORD = "model", "train.parquet", "val.parquet", "toy.json"

Problem = tuple[int, int]
"""The two numbers of a sum."""


@dataclass(frozen=True)
class Descent:
    steps: int = 500
    """Optimizer steps."""
    batch_size: int = 64
    """Examples per step."""
    lr: float = 3e-3
    """Peak learning rate, reached after 20 steps. It then falls linearly to a twentieth."""
    weight_decay: float = 0.1
    """Decoupled weight decay."""


@dataclass(frozen=True)
class WarmUp(Descent):
    carelessness: float = 0.65
    """Probability that the teacher gives the careless answer. Above one half it becomes the model's greedy answer."""


@dataclass(frozen=True)
class ToyRecipe:
    num_validation: int = 128
    """Number of held-out sums. All others are for training."""
    carry_share: float = 0.625
    """Share of held-out sums with a carry. Among all sums it is one half."""
    warm_up: WarmUp = field(default_factory=WarmUp)
    """The supervised warm-up."""


def make_toy(folder: str | Path, seed: int = 0, recipe: ToyRecipe | None = None) -> Path:
    """Create the toy task in a folder and return the folder.

    The folder has ``model/`` (warmed up), ``train.parquet``, ``val.parquet`` and ``toy.json`` (recipe and accuracy). It is built
    under a temporary name and then renamed, so the result is always complete. A folder with the same seed and recipe is kept.

    Args:
        folder: Where to put the task.
        seed: Decides the held-out sums, the initial weights and the warm-up.
        recipe: Settings of the task. None = the defaults.

    Raises:
        DataError: The folder exists and has other contents.
    """
    recipe = ToyRecipe() if recipe is None else recipe
    occupied = "it exists and is not a toy task, so it is not replaced. Choose another folder, or remove it."
    build = partial(_build, seed=seed, recipe=recipe)
    return made_whole(Path(folder) / RECORD, identity_of(seed, recipe), build, "toy task", occupied)


def made_whole(
    record: Path, identity: Mapping[str, Any], build: Callable[[Path], Mapping[str, float]], title: str, occupied: str
) -> Path:
    """Return the folder of a record. If it does not exist yet, build it under a temporary name, and then rename it.

    Args:
        record: The file that describes the folder. It is written last, so a folder with a record is complete.
        identity: The folder is kept if its record has these entries.
        build: Fills a new folder, and returns further entries for the record.
        title: Name of the folder in logs.
        occupied: Text of the error if the folder has other contents.

    Raises:
        DataError: The folder has other contents, or a file that its record does not list.
    """
    folder, made = record.parent, _record_of(record)
    if made is not None and identity.items() <= made.items():
        logger.info("%s: %s is ready", title, folder)
        return folder
    own_files = {*(made or {}).get(_FILES, ()), record.name}
    if folder.exists() and (
        not folder.is_dir() or not own_files.issuperset(_files(folder)) or (made is None and any(folder.iterdir()))
    ):
        raise DataError(f"{folder}: {occupied}")
    with written_aside(folder, several_write=True) as aside:
        aside.mkdir(parents=True)
        results = build(aside)
        (aside / record.name).write_text(json.dumps({**identity, **results, _FILES: _files(aside)}, indent=2) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
    return folder


_FILES = "files"
"""Entry of a record that lists the files of the folder. They are replaced when the folder is built again."""


def _record_of(record: Path) -> dict[str, Any] | None:
    try:
        made: dict[str, Any] = read_json(record, dict[str, Any])
    except (OSError, RecordError):
        return None
    return made


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())


def split_problems(recipe: ToyRecipe, seed: int) -> tuple[list[Problem], list[Problem]]:
    draw = random.Random(seed)
    sums = [(a, b) for a in range(10, 90) for b in range(1, 10)]
    draw.shuffle(sums)
    num_carry = round(recipe.num_validation * recipe.carry_share)
    with_carry = [problem for problem in sums if carries(problem)][:num_carry]
    without = [problem for problem in sums if not carries(problem)][: recipe.num_validation - num_carry]
    held_out = {*with_carry, *without}
    return [problem for problem in sums if problem not in held_out], [problem for problem in sums if problem in held_out]


def carries(problem: Problem) -> bool:
    return problem[0] % 10 + problem[1] >= 10


def careless_answer(problem: Problem) -> int:
    # The mistake that training has to unlearn: the carry is forgotten.
    return sum(problem) - (10 if carries(problem) else 0)


def question(problem: Problem) -> str:
    return f"{problem[0]}+{problem[1]}="


def as_row(problem: Problem, split: str, index: int) -> dict[str, Any]:
    from verl_memopt.data.sources import math_row

    answer = str(sum(problem))
    return math_row(DATA_SOURCE, question(problem), answer, split=split, index=index, answer=answer, question=question(problem))


def _build(folder: Path, seed: int, recipe: ToyRecipe) -> dict[str, float]:
    from verl_memopt.data.sources import write_parquet
    from verl_memopt.data.warm_up import greedy_accuracy, warm_up  # imports PyTorch, which an existing task does not need

    train, validation = split_problems(recipe, seed)
    logger.info("toy task: %d training and %d held-out sums, warming up a tiny model", len(train), len(validation))
    for path, problems, split in ((TRAIN, train, "train"), (VALIDATION, validation, "val")):
        write_parquet(folder / path, [as_row(problem, split, index) for index, problem in enumerate(problems)])
    model = make_tiny_model(folder / MODEL, SHAPE, seed=seed)
    loss = warm_up(model, [(question(p), str(careless_answer(p)), str(sum(p))) for p in train], recipe.warm_up, seed)
    accuracy = greedy_accuracy(model, [(question(p), str(sum(p))) for p in validation])
    logger.info("toy task: warmed up to loss %.3f; greedy answers are right on %.0f%% of held-out sums", loss, 100 * accuracy)
    return {"loss": loss, "greedy_accuracy": accuracy}


def identity_of(seed: int, recipe: Any) -> dict[str, Any]:
    return {"seed": seed, "recipe": asdict(recipe), "shape": asdict(SHAPE)}
