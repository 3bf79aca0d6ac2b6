"""Writes train.parquet and test.parquet of GSM8K, from local files or from the hub.

python recipe/rloo/prepare_gsm8k.py --local-dir ~/gsm8k/main --out data/gsm8k
python recipe/rloo/prepare_gsm8k.py --hub openai/gsm8k --out data/gsm8k
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

from verl_memopt.data.sources import READERS, RawRow, math_row, read_rows, write_parquet
from verl_memopt.errors import DataError, UserError

logger = logging.getLogger(__name__)

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Reason step by step, and end with the final number on a line of its own after "####".'
SPLITS = ("train", "test")


def prepare_gsm8k(out: str | Path, *, local_dir: str | Path | None = None, hub_id: str = DATA_SOURCE) -> dict[str, Path]:
    """Write ``train.parquet`` and ``test.parquet`` and return their paths by split.

    Args:
        out: The folder to write to.
        local_dir: Folder with the files ``train*`` and ``test*``. None = download them from the hub.
        hub_id: The dataset on the hub.

    Raises:
        DataError: There are no files, or a row has no question or no final number.
    """
    paths = {}
    for split in SPLITS:
        folder = Path(local_dir).expanduser() if local_dir else _downloaded(hub_id, split)
        records = local_records(folder, split)
        rows = [as_row(address, record, split, index) for index, (address, record) in enumerate(records)]
        paths[split] = write_parquet(Path(out).expanduser() / f"{split}.parquet", rows)
        logger.info("gsm8k: wrote %d rows to %s", len(rows), paths[split])
    return paths


def local_records(folder: Path, split: str) -> list[RawRow]:
    """Return the records of the files in ``folder`` whose names begin with ``split``.

    Raises:
        DataError: There is no such file, or one cannot be read.
    """
    files = sorted(path for path in folder.glob(f"{split}*") if path.suffix in READERS)
    if not files:
        raise DataError(
            f"{folder}: there is no file {split}* that ends in {', '.join(READERS)}. Name the folder that holds the files "
            "of GSM8K (in a clone from the hub it is called main)."
        )
    return read_rows(files, "local_dir")


def _downloaded(hub_id: str, split: str) -> Path:
    """Return the folder ``main`` of a hub dataset, downloaded once or read from the local cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, repo_type="dataset", allow_patterns=[f"main/{split}*"])) / "main"
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as problem:
        raise DataError(
            f"{hub_id}: the hub could not deliver it ({type(problem).__name__}: {problem}). Make the hub reachable, or download "
            "the files and pass their folder."
        ) from problem


def as_row(address: str, record: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """Return the training row of a question and its answer.

    Args:
        address: File and row of the record, for errors.
        record: Holds ``question`` and ``answer``.
        split: ``train`` or ``test``.
        index: Position of the record in its split.

    Raises:
        DataError: The question, the answer or its final number is missing.
    """
    for column in ("question", "answer"):
        if not isinstance(record.get(column), str):
            raise DataError(
                f"{address}: there is no string {column!r}. The row has {', '.join(sorted(record))}. Use files of GSM8K."
            )
    question, answer = record["question"].strip(), record["answer"].strip()
    prompt, truth = f"{question}\n{INSTRUCTION}", final_number(address, answer)
    return math_row(DATA_SOURCE, prompt, truth, split=split, index=index, answer=answer, question=question)


def final_number(address: str, answer: str) -> str:
    """Return the text after the last ``####``, without thousands separators.

    Raises:
        DataError: There is no such text.
    """
    _, mark, number = answer.rpartition("####")
    number = number.strip().replace(",", "")
    if not mark or not number:
        raise DataError(f"{address}: the answer does not end in '#### number'. Correct the row, or remove it.")
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--local-dir", help="folder with train* and test* files (.parquet, .json, .jsonl)")
    source.add_argument("--hub", default=DATA_SOURCE, help="dataset id on the hub (default: %(default)s)")
    parser.add_argument("--out", default="data/gsm8k", help="folder for the two files (default: %(default)s)")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        prepare_gsm8k(arguments.out, local_dir=arguments.local_dir, hub_id=arguments.hub)
    except UserError as problem:
        parser.exit(problem.exit_code, f"{problem}\n")


if __name__ == "__main__":
    main()
