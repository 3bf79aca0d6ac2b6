"""Write train.parquet and val.parquet for RLT, from local files or from the hub.

python recipe/rlt/prepare_rlt.py --files mine.jsonl --out data/rlt
python recipe/rlt/prepare_rlt.py --hub bespokelabs/Bespoke-Stratos-17k --out data/rlt --model Qwen/Qwen2.5-1.5B-Instruct

A row has the columns question and solution, and for the warm-up of a teacher also reasoning_trace. The column question may also
have the name prompt. Or a row has the column conversations, as in Bespoke-Stratos-17k. Unusable rows are left out and counted.
"""

import argparse
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_memopt.data.encoder import tokenize
from verl_memopt.data.sources import hub_rows, read_rows, write_parquet
from verl_memopt.errors import DataError, UserError
from verl_memopt.recipes.rlt.dataset import FORMATS, RltPrompts, RltRecord, read_records

logger = logging.getLogger(__name__)

DATASET = "bespokelabs/Bespoke-Stratos-17k"
"""The dataset of the published recipe."""
SPLITS = ("train", "val")


@dataclass(frozen=True)
class Prepared:
    """The written files, and how many rows were kept and rejected."""

    paths: dict[str, Path]
    """Split -> file."""
    rows: dict[str, list[RltRecord]]
    """Split -> rows of the file."""
    rejected: dict[str, int]
    """Reason -> number of rows that were left out for it."""


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

    Args:
        files: Local files with the rows. Empty = the train split of the dataset ``hub_id`` on the hub.
        val_files: Local files with the validation rows. Empty = hold out ``num_validation`` random rows.
        tag_format: A key of ``FORMATS``. A row that contains one of its tags is rejected.

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
    """Return median, 95 % quantile and maximum of the tokens of the teacher's ``prompt`` and of the ``trace``."""
    prompts = RltPrompts(tokenizer, FORMATS[tag_format])
    texts = {"prompt": [prompts.teacher(record.question, record.solution)[0] for record in records]}
    texts["trace"] = [record.reasoning_trace for record in records if record.reasoning_trace]
    lengths = {name: sorted(len(ids) for ids in tokenize(tokenizer, values)) for name, values in texts.items() if values}
    shares = {"median": 0.5, "95 %": 0.95, "largest": 1.0}
    return {
        name: {word: values[min(int(share * len(values)), len(values) - 1)] for word, share in shares.items()}
        for name, values in lengths.items()
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--files", nargs="+", default=[], help="your files: .parquet, .json, .jsonl")
    source.add_argument("--hub", default=DATASET, help="dataset id on the hub (default: %(default)s)")
    parser.add_argument("--val-files", nargs="+", default=[], help="held-out rows (default: some rows are held out)")
    parser.add_argument("--num-validation", type=int, default=128, help="rows to hold out (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="decides which rows are held out (default: %(default)s)")
    parser.add_argument("--tag-format", choices=list(FORMATS), default="stratos", help="reward_model.rlt.tag_format")
    parser.add_argument("--out", default="data/rlt", help="folder for the two files (default: %(default)s)")
    parser.add_argument("--model", help="print token lengths with this model's tokenizer, to choose the two lengths of data")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        prepared = prepare_rlt(
            arguments.out, arguments.files, arguments.val_files, arguments.hub, arguments.tag_format,
            arguments.num_validation, arguments.seed,
        )  # fmt: skip
        if arguments.model:
            from verl_memopt.model.folder import read_tokenizer, resolve_folder

            tokenizer = read_tokenizer(resolve_folder(arguments.model, "--model"), "--model", False)
            for name, lengths in token_lengths(prepared.rows["train"], tokenizer, arguments.tag_format).items():
                words = ", ".join(f"{word} {length:,}" for word, length in lengths.items())
                logging.info("rlt: tokens of each %s: %s", name, words)
    except UserError as problem:
        parser.exit(problem.exit_code, f"{problem}\n")


if __name__ == "__main__":
    main()
