"""Rows of dataset files: parquet, JSON and JSON lines, each row with the address that errors name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from verl_memopt.errors import DataError

RawRow = tuple[str, dict[str, Any]]
"""Address (``file:row``, counted from 1) and the row's columns."""


def read_rows(files: Any, key: str) -> list[RawRow]:
    """All rows of a file or a list of files, in order.

    ``key`` is the setting that names the files. Raises DataError for a missing, unreadable, malformed or empty file.
    """
    paths = [files] if isinstance(files, str | Path) else list(files)
    if not paths:
        raise DataError(f"{key}: the list of files is empty. Name a .parquet, .json or .jsonl file.")
    return [row for path in paths for row in _read_file(Path(path).expanduser(), key)]


def _read_file(path: Path, key: str) -> list[RawRow]:
    if path.suffix not in READERS:
        raise DataError(f"{key}: {path}: the suffix {path.suffix!r} is unknown. Use one of {', '.join(READERS)}.")
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
        table = parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as problem:
        raise DataError(f"{path}: not a parquet file that can be read ({problem}). Prepare the data again.") from problem
    for number, row in enumerate(table.to_pylist(), start=1):
        yield f"{path}:{number}", row


def _lines(path: Path) -> Iterator[RawRow]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"{path}:{number}", _object(f"{path}:{number}", line.strip())


def _json(path: Path) -> Iterator[RawRow]:
    """A .json file holds one array of objects, or one object per line."""
    with path.open("rb") as file:
        is_array = file.read(256).lstrip().startswith(b"[")
    if not is_array:
        yield from _lines(path)
        return
    for number, row in enumerate(_parse(str(path), path.read_bytes()), start=1):
        yield f"{path}:{number}", _is_object(f"{path}:{number}", row)


def _object(address: str, line: bytes) -> dict[str, Any]:
    return _is_object(address, _parse(address, line))


def _parse(address: str, text: bytes) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as problem:
        line = f"line {problem.lineno}, " if problem.lineno > 1 else ""
        where = f"{problem.msg} at {line}column {problem.colno}"
        raise DataError(f"{address}: not valid JSON ({where}). Mend it or drop it.") from problem
    except UnicodeDecodeError as problem:
        raise DataError(f"{address}: not valid UTF-8 ({problem.reason}). Save the file as UTF-8.") from problem


def _is_object(address: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{address}: a row must be a JSON object, this is a {type(value).__name__}. Mend it or drop it.")
    return value


READERS: dict[str, Callable[[Path], Iterable[RawRow]]] = {".parquet": _parquet, ".json": _json, ".jsonl": _lines}
"""Readers by file suffix."""
