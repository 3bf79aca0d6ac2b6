"""Data files for RLT: rows of any accepted form, checked, split into training and validation, and written as parquet."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_memopt.data.dataset import hub_rows, read_rows, write_parquet
from verl_memopt.data.encoder import tokenize
from verl_memopt.errors import DataError
from verl_memopt.recipes.rlt.dataset import FORMATS, RltPrompts, RltRecord, read_records

logger = logging.getLogger(__name__)

DATASET = "bespokelabs/Bespoke-Stratos-17k"
"""The dataset of the published recipe."""
SPLITS = ("train", "val")


@dataclass(frozen=True)
class Prepared:
    """The files, and what became of the rows."""

    paths: dict[str, Path]
    """Split -> file."""
    rows: dict[str, list[RltRecord]]
    """Split -> rows of the file."""
    rejected: dict[str, int]
    """Reason -> number of rows that are in no file."""


def prepare_rlt(
    out: str | Path,
    files: Sequence[str] = (),
    val_files: Sequence[str] = (),
    hub_id: str = DATASET,
    tag_format: str = "stratos",
    num_validation: int = 128,
    seed: int = 0,
) -> Prepared:
    """Write ``train.parquet`` and ``val.parquet`` with the columns question, solution and reasoning_trace.

    ``files``: Local files with the rows. None = the train split of the hub's dataset. ``val_files``: Local files with the held-
    out rows. None = ``num_validation`` rows are held out at random. ``tag_format``: A key of ``FORMATS``. A row that contains
    one of its tags is rejected.

    Raises:
        DataError: A file is wrong, every row is rejected, or there are too few rows to hold some out.
    """
    raw = read_rows(list(files), "--files") if files else hub_rows(hub_id, "train", "--hub")
    records = read_records(raw, FORMATS[tag_format])
    train, rejected = records.rows, dict(records.rejected)
    if val_files:
        held_out = read_records(read_rows(list(val_files), "--val-files"), FORMATS[tag_format])
        val = held_out.rows
        for reason, count in held_out.rejected.items():
            rejected[reason] = rejected.get(reason, 0) + count
    else:
        train, val = _split(train, num_validation, seed)
    folder = Path(out).expanduser()
    rows = dict(zip(SPLITS, (train, val), strict=True))
    paths = {split: write_parquet(folder / f"{split}.parquet", [_columns(row) for row in rows[split]]) for split in SPLITS}
    for split, path in paths.items():
        logger.info("rlt: wrote %d rows to %s", len(rows[split]), path)
    for reason, count in rejected.items():
        logger.info("rlt: rejected %d rows: %s", count, reason)
    return Prepared(paths, rows, rejected)


def token_lengths(records: Sequence[RltRecord], tokenizer: Any, tag_format: str) -> dict[str, dict[str, int]]:
    """Return how many tokens the rows have: ``prompt`` of the teacher, ``trace``, and each one's median, 95 % and maximum."""
    prompts = RltPrompts(tokenizer, FORMATS[tag_format])
    texts = {"prompt": [prompts.teacher(record.question, record.solution)[0] for record in records]}
    texts["trace"] = [record.reasoning_trace for record in records if record.reasoning_trace]
    lengths = {name: sorted(len(ids) for ids in tokenize(tokenizer, each)) for name, each in texts.items() if each}
    shares = {"median": 0.5, "95 %": 0.95, "largest": 1.0}
    return {
        name: {word: each[min(int(share * len(each)), len(each) - 1)] for word, share in shares.items()}
        for name, each in lengths.items()
    }


def _split(records: list[RltRecord], num_validation: int, seed: int) -> tuple[list[RltRecord], list[RltRecord]]:
    """Return the rows to train on and those to hold out, both in file order."""
    if num_validation < 1 or num_validation >= len(records):
        raise DataError(f"--num-validation={num_validation}: choose between 1 and {len(records) - 1}, or give --val-files.")
    held_out = set(random.Random(seed).sample(range(len(records)), num_validation))
    parts: tuple[list[RltRecord], list[RltRecord]] = ([], [])
    for place, record in enumerate(records):
        parts[place in held_out].append(record)
    return parts


def _columns(record: RltRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in ("question", "solution", "reasoning_trace")}
