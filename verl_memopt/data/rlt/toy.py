"""A toy task for RLT that a tiny model can learn: sums, each with an explanation that adds the ones first and then the tens.

Without an explanation the solution takes two additions at once. With it, each step adds two digits, and the solution is read off:
so the right explanation raises the log-prob of the solution, and each of its tokens follows from the question.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

from verl_memopt.data.toy import ToyRecipe, question, split_problems
from verl_memopt.data.warm_up import Problem
from verl_memopt.errors import DataError

logger = logging.getLogger(__name__)

TRAIN, VALIDATION, RECORD = "train.parquet", "val.parquet", "rlt_toy.json"


def solution(problem: Problem) -> str:
    """Return the sum as a text."""
    return str(sum(problem))


def explanation(problem: Problem) -> str:
    """Return the steps to the sum: the ones, then the tens with the carry. For 47 + 8: ``7+8=15 4+1=5``."""
    tens, ones = divmod(problem[0], 10)
    carry = (ones + problem[1]) // 10
    return f"{ones}+{problem[1]}={ones + problem[1]} {tens}+{carry}={tens + carry}"


def as_row(problem: Problem) -> dict[str, Any]:
    """Return the dataset row of a sum, with the columns of RLT."""
    return {"question": question(problem), "solution": solution(problem), "reasoning_trace": explanation(problem)}


def make_rlt_toy(folder: str | Path, seed: int = 0, num_validation: int = 128) -> Path:
    """Create the toy task in a folder and return the folder: ``train.parquet`` and ``val.parquet``.

    The files are built in a temporary folder, which is then renamed, so the result is always complete.

    Args:
        folder: Where to put the task. An older toy task there is replaced.
        seed: Decides which sums are held out.
        num_validation: Number of held-out sums. All others are for training.

    Raises:
        DataError: The folder exists and holds something else.
    """
    folder = Path(folder)
    if folder.exists() and not (folder / RECORD).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder}: it exists and is no toy task of RLT, so it is not replaced. Choose another, or remove it.")
    aside = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    splits = split_problems(ToyRecipe(num_validation=num_validation), seed)
    for name, problems in zip((TRAIN, VALIDATION), splits, strict=True):
        _write(aside / name, [as_row(problem) for problem in problems])
    (aside / RECORD).write_text(json.dumps({"seed": seed, "num_validation": num_validation}) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
    logger.info("toy task of RLT: %d training and %d held-out sums in %s", *map(len, splits), folder)
    return folder


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
