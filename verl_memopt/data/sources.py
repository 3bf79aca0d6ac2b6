"""Read rows from parquet, JSON and JSON Lines files, and from datasets of the Hugging Face hub. Each row gets an address."""

from __future__ import annotations

import json
import logging
import os
import time
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

from verl_memopt.errors import DataError
from verl_memopt.model.folder import fetch
from verl_memopt.observe.files import written_aside

logger = logging.getLogger(__name__)

RawRow = tuple[str, dict[str, Any]]
"""Address (``file:row``, counted from 1) and the row's columns."""
PARQUET_ROWS = 1024
"""Rows of a parquet file that are decoded at once."""
READING_SECONDS = 10.0
"""Time between two warnings that rows are still being read."""


def read_rows(files: Any, key: str) -> list[RawRow]:
    return list(rows_of(checked_files(files, key), key))


def checked_files(files: Any, key: str) -> list[Path]:
    paths = [files] if isinstance(files, str | Path) else list(files)
    if not paths:
        raise DataError(f"{key}: the list of files is empty. Name a .parquet, .json or .jsonl file.")
    return [_checked_file(Path(path).expanduser(), key) for path in paths]


def _checked_file(path: Path, key: str) -> Path:
    if path.suffix not in READERS:
        raise DataError(f"{key}: {path}: the suffix {path.suffix!r} is unknown. Use one of {', '.join(READERS)}.")
    if path.is_dir():
        raise DataError(f"{key}: {path}: this is a folder. Name the files in it.")
    if not path.is_file():
        raise DataError(f"{key}: {path}: there is no such file. Check the path, or prepare the data first.")
    return path


def rows_of(paths: Iterable[Path], key: str) -> Iterator[RawRow]:
    """Yield the rows of files, one file after the other. Only a .json file is read whole; others as rows are requested."""
    for path in paths:
        is_empty = True
        try:
            for row in READERS[path.suffix](path):
                is_empty = False
                yield row
        except OSError as problem:
            raise DataError(
                f"{key}: {path}: the file cannot be read ({problem}). Check its permissions and its disk."
            ) from problem
        if is_empty:
            raise DataError(f"{key}: {path}: the file has no rows. Prepare the data again.")


@contextmanager
def still_reading(what: str, number: Callable[[], int], way_out: str) -> Iterator[None]:
    """Warn at intervals while the ``with`` block reads rows, because the reading may never end.

    Args:
        what: Name of the source that is read.
        number: Returns the number of rows that were read so far.
        way_out: What the user can do if the reading takes too long.
    """
    done, began = Event(), time.monotonic()

    def say() -> None:
        while not done.wait(READING_SECONDS):
            seconds = time.monotonic() - began
            logger.warning("%s: still reading after %.0f s, %s rows so far. %s", what, seconds, f"{number():,}", way_out)

    Thread(target=say, daemon=True, name="still-reading").start()
    try:
        yield
    finally:
        done.set()


def _parquet(path: Path) -> Iterator[RawRow]:
    import pyarrow
    from pyarrow import parquet

    try:
        names = parquet.read_schema(path).names
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise DataError(f"{path}: the column {repeated[0]!r} appears several times. Prepare the data again with one of them.")
        with parquet.ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches(PARQUET_ROWS) for row in batch.to_pylist())
            for number, row in enumerate(rows, start=1):
                yield f"{path}:{number}", row
    except (pyarrow.ArrowException, OSError, ValueError) as problem:
        raise DataError(f"{path}: this is not a readable parquet file ({problem}). Prepare the data again.") from problem


def math_row(data_source: str, prompt: str, ground_truth: str, **extra_info: Any) -> dict[str, Any]:
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": extra_info,
    }


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows under a temporary name and rename the file, so that an existing file is always complete.

    Raises:
        DataError: ``path`` is a file that this function did not write.
    """
    import pyarrow
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(path) and not _is_own_parquet(path):
        raise DataError(f"{path} is there, and this program did not write it. Give another folder, or move it away.")
    table = pyarrow.Table.from_pylist(rows)
    with written_aside(path) as aside:
        parquet.write_table(table.replace_schema_metadata({**(table.schema.metadata or {}), _MADE_HERE: b"1"}), aside)
    return path


_MADE_HERE = b"verl_memopt"
"""Entry in the metadata of a Parquet file that :func:`write_parquet` has written and may replace."""


def _is_own_parquet(path: Path) -> bool:
    from pyarrow import ArrowException, parquet

    try:
        if path.stat().st_size == 0:
            return True
        return _MADE_HERE in (parquet.read_schema(path).metadata or {})
    except (OSError, ArrowException):
        return False


def _lines(path: Path) -> Iterator[RawRow]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            address, text = f"{path}:{number}", line.removeprefix(BOM_UTF8).strip() if number == 1 else line.strip()
            if text:
                yield address, _checked_object(address, _parse(address, text), text)


def _json(path: Path) -> Iterator[RawRow]:
    with path.open("rb") as file:
        is_array = file.read(256).removeprefix(BOM_UTF8).lstrip().startswith(b"[")
    if not is_array:
        yield from _lines(path)
        return
    text = path.read_bytes().removeprefix(BOM_UTF8)
    for number, row in enumerate(_parse(str(path), text), start=1):
        yield f"{path}:{number}", _checked_object(f"{path}:{number}", row, text)


def _parse(address: str, text: bytes) -> Any:
    try:
        # Decode first, because from bytes the parser would guess an encoding, and accept halves of surrogate pairs.
        return json.loads(text.decode("utf-8"), object_pairs_hook=_once)
    except json.JSONDecodeError as problem:
        line = f"line {problem.lineno}, " if problem.lineno > 1 else ""
        where = f"{problem.msg} at {line}column {problem.colno}"
        raise DataError(f"{address}: not valid JSON ({where}). Correct it or remove it.") from problem
    except UnicodeDecodeError as problem:
        raise DataError(f"{address}: not valid UTF-8 ({problem.reason}). Save the file as UTF-8.") from problem
    except (ValueError, RecursionError) as problem:  # a repeated name, a number with thousands of digits, or too deep nesting
        raise DataError(f"{address}: the JSON cannot be read ({problem}). Correct it or remove it.") from problem


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    # The parser would keep the last value and drop the others.
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} appears twice in one object")
    return row


def _checked_object(address: str, row: Any, text: bytes) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f"{address}: a row must be a JSON object, but this is a {type(row).__name__}. Correct it or remove it.")
    try:
        # JSON can spell half of a surrogate pair, but no file and no tokenizer accepts it.
        if rb"\u" in text:
            json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as problem:
        escape = f"\\u{ord(problem.object[problem.start]):04x}"
        raise DataError(
            f"{address}: a string contains {escape}, half of a surrogate pair, which is not a character. Correct it."
        ) from problem
    return row


READERS: dict[str, Callable[[Path], Iterable[RawRow]]] = {".parquet": _parquet, ".json": _json, ".jsonl": _lines}
"""Readers by file suffix."""


# Sources of rows: local files, and datasets of the Hugging Face hub.


HUB = "hub:"
"""Start of a source on the hub: ``hub:bespokelabs/Bespoke-Stratos-17k``, ``hub:openai/gsm8k:main``, ``hub:owner/name@test``."""
NAMES_OF_SPLITS = {"train": ("train",), "val": ("validation", "val", "test")}
"""Split -> how the names of its files may begin, the best match first."""


def read_source(files: Any, split: str, key: str) -> list[RawRow]:
    """Return the rows of local files or of a hub dataset.

    Args:
        files: One path, a list of paths, or ``hub:`` and the id of a dataset, with ``:config`` and ``@split`` if it has several.
        split: ``train`` or ``val``. It selects the files of a hub dataset whose source names no split.
        key: The setting that named the files, for errors.

    Raises:
        DataError: A file is missing or malformed, or the hub cannot deliver the dataset.
    """
    return list(rows_of(source_files(files, split, key), key))


def source_files(files: Any, split: str, key: str) -> list[Path]:
    if isinstance(files, str) and files.startswith(HUB):
        return hub_files(files.removeprefix(HUB), split, key)
    return checked_files(files, key)


def hub_rows(source: str, split: str, key: str) -> list[RawRow]:
    """Return the rows of one split of a hub dataset. ``source``: ``owner/name[:config][@split]``."""
    return list(rows_of(hub_files(source, split, key), key))


def hub_files(source: str, split: str, key: str) -> list[Path]:
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    place, _, named = source.partition("@")
    hub_id, _, config = place.partition(":")
    names = (named,) if named else NAMES_OF_SPLITS[split]
    starts = (f"{config}/",) if config else STARTS
    patterns = [f"{start}{name}*{suffix}" for start in starts for name in names for suffix in READERS]
    try:
        folder = fetch(hub_id, patterns, repo_type="dataset")
    except (HfHubHTTPError, HFValidationError, OSError) as problem:
        raise DataError(
            f"{key}={HUB}{source}: the hub could not deliver it ({type(problem).__name__}: {problem}). Make the hub reachable, "
            "or download the files and name them."
        ) from problem
    return files_of_split(folder, names, f"{key}={HUB}{source}", starts)


STARTS = ("", "*/")
"""Where the files of a dataset may be: in its folder, or in a subfolder."""


def files_of_split(folder: Path, names: Sequence[str], source: str, starts: Sequence[str] = STARTS) -> list[Path]:
    """Return the files of a split in a folder and its subfolders, sorted.

    Args:
        folder: Folder of the dataset.
        names: How the names of the files may begin, the best match first.
        source: Name of the dataset, for errors.
        starts: Subfolders in which the files may be, as glob patterns.
    """
    for name in names:
        files = sorted(path for start in starts for path in folder.glob(f"{start}{name}*") if path.suffix in READERS)
        configs = sorted({path.parent.relative_to(folder).as_posix() for path in files} - {".", "data"})
        if len(configs) > 1:
            raise DataError(f"{source}: the dataset has several configurations. Add one of :{', :'.join(configs)}.")
        if files:
            return files
    raise DataError(
        f"{source}: there is no file {'*, '.join(names)}* that ends in {', '.join(READERS)}. Download the "
        "dataset and name its files."
    )
