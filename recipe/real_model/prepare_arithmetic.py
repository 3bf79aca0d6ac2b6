"""Writes train.parquet and val.parquet: sums and products of two digits, asked in words.

python recipe/real_model/prepare_arithmetic.py runs/arithmetic_seed0 --seed 0
"""

from __future__ import annotations

import argparse
import random
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

from verl_memopt.data.sources import math_row, write_parquet
from verl_memopt.errors import UserError

DATA_SOURCE = "recipe/arithmetic"
INSTRUCTION = "Reply with the equation only."
DIGITS = range(2, 10)
NUM_HELD_OUT = 12
"""Number of pairs of digits, out of 36, whose questions are for validation."""


def questions(first: int, second: int) -> dict[str, int]:
    """Return the questions about a pair of digits in both orders, with their answers."""
    orders = ((first, second), (second, first))
    return {f"{a} + {b}": a + b for a, b in orders} | {f"{a} * {b}": a * b for a, b in orders}


def prepare_arithmetic(out: str | Path, seed: int = 0) -> None:
    """Write ``train.parquet`` and ``val.parquet``. They share no pair of digits. ``seed`` decides which pairs are held out."""
    pairs = list(combinations_with_replacement(DIGITS, 2))
    random.Random(seed).shuffle(pairs)
    for split, chosen in (("val", pairs[:NUM_HELD_OUT]), ("train", pairs[NUM_HELD_OUT:])):
        asked = [asking for pair in chosen for asking in questions(*pair).items()]
        rows = [as_row(question, answer, split, index) for index, (question, answer) in enumerate(asked)]
        write_parquet(Path(out) / f"{split}.parquet", rows)


def as_row(question: str, answer: int, split: str, index: int) -> dict[str, Any]:
    return math_row(DATA_SOURCE, f"What is {question}? {INSTRUCTION}", str(answer), split=split, index=index)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="folder for the two files")
    parser.add_argument("--seed", type=int, default=0, help="decides which numbers are held out (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        prepare_arithmetic(arguments.out, arguments.seed)
    except UserError as problem:
        parser.exit(problem.exit_code, f"{problem}\n")


if __name__ == "__main__":
    main()
