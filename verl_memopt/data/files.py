"""Rows of parquet, JSON and JSON Lines files, each with the address that errors name."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from verl_memopt.errors import DataError

RawRow = tuple[str, dict[str, Any]]
"""Address (``file:row``, counted from 1) and the row's columns."""


def read_rows(files: Any, key: str) -> list[RawRow]:
    """Return all rows of a file or of a list of files, in order.

    Args:
        files: One path or a list of paths.
        key: The setting that names the files, for errors.

    Raises:
        DataError: A file is missing, unreadable, malformed or empty.
    """
    paths = [files] if isinstance(files, str | Path) else list(files)
    if not paths:
        raise DataError(f"{key}: the list of files is empty. Name a .parquet, .json or .jsonl file.")
    return [row for path in paths for row in _read_file(Path(path).expanduser(), key)]


def _read_file(path: Path, key: str) -> list[RawRow]:
    if path.suffix not in READERS:
        raise DataError(f"{key}: {path}: the suffix {path.suffix!r} is unknown. Use one of {', '.join(READERS)}.")
    if path.is_dir():
        raise DataError(f"{key}: {path}: this is a folder. Name the files in it.")
    if not path.is_file():
        raise DataError(f"{key}: {path}: there is no such file. Check the path, or prepare the data first.")
    try:
        rows = list(READERS[path.suffix](path))
    except OSError as problem:
        raise DataError(f"{key}: {path}: the file cannot be read ({problem}). Check its permissions and its disk.") from problem
    if not rows:
        raise DataError(f"{key}: {path}: the file has no rows. Prepare the data again.")
    return rows


def _parquet(path: Path) -> Iterator[RawRow]:
    import pyarrow
    from pyarrow import parquet

    try:
        names = parquet.read_schema(path).names
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise DataError(f"{path}: the column {repeated[0]!r} appears several times. Prepare the data again with one of them.")
        rows = parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as problem:
        raise DataError(f"{path}: this is not a readable parquet file ({problem}). Prepare the data again.") from problem
    for number, row in enumerate(rows, start=1):
        yield f"{path}:{number}", row


def _lines(path: Path) -> Iterator[RawRow]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            text = line.removeprefix(BOM_UTF8).strip() if number == 1 else line.strip()
            if text:
                yield f"{path}:{number}", _object(f"{path}:{number}", text)


def _json(path: Path) -> Iterator[RawRow]:
    """Read a .json file: one array of objects, or one object per line."""
    with path.open("rb") as file:
        is_array = file.read(256).removeprefix(BOM_UTF8).lstrip().startswith(b"[")
    if not is_array:
        yield from _lines(path)
        return
    text = path.read_bytes().removeprefix(BOM_UTF8)
    for number, row in enumerate(_parse(str(path), text), start=1):
        address = f"{path}:{number}"
        if rb"\u" in text:
            _refuse_surrogates(address, row)
        yield address, _is_object(address, row)


def _object(address: str, line: bytes) -> dict[str, Any]:
    row = _is_object(address, _parse(address, line))
    if rb"\u" in line:
        _refuse_surrogates(address, row)
    return row


def _parse(address: str, text: bytes) -> Any:
    try:
        # From bytes, the parser would guess an encoding and accept halves of surrogate pairs.
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
    """Return an object as a dict.

    A name that appears twice is refused: the parser would keep the last value and drop the others.
    """
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} appears twice in one object")
    return row


def _refuse_surrogates(address: str, row: Any) -> None:
    r"""Raise DataError for half of a surrogate pair.

    JSON can spell one (``\ud800``), but no file and no tokenizer accepts it.
    """
    try:
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as problem:
        escape = f"\\u{ord(problem.object[problem.start]):04x}"
        raise DataError(
            f"{address}: a string contains {escape}, half of a surrogate pair, which is not a character. Correct it."
        ) from problem


def _is_object(address: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{address}: a row must be a JSON object, but this is a {type(value).__name__}. Correct it or remove it.")
    return value


READERS: dict[str, Callable[[Path], Iterable[RawRow]]] = {".parquet": _parquet, ".json": _json, ".jsonl": _lines}
"""Readers by file suffix."""
