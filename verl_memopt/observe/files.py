"""Run files that survive a kill: written to a temporary name and renamed, or appended row by row and cut back on resume."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from verl_memopt.errors import CheckpointError, DataError, UserError
from verl_memopt.records import RecordError, opened, parse_json


@contextmanager
def disk_refusals(path: Path) -> Iterator[None]:
    # Turn a disk error for ``path`` into a UserError that states the free space.
    try:
        yield
    except OSError as error:
        free = shutil.disk_usage(path.parent).free / 2**20 if path.parent.is_dir() else 0
        raise UserError(
            f"{path}: cannot be written ({error.strerror}; {free:.0f} MiB free). Free some space, let the run write there or set "
            "another trainer.default_local_dir, then start again to resume."
        ) from error


@contextmanager
def folder_refusals(folder: str) -> Iterator[None]:
    # A run folder may become read-only or vanish during a run. Turn the disk's error for any file in it into a UserError.
    try:
        yield
    except OSError as error:
        path = Path(os.fsdecode(error.filename or "/")).absolute()
        if not path.is_relative_to(Path(folder).expanduser().absolute()):
            raise
        raise UserError(
            f"{path}: {error.strerror}. Let the run read and write its folder, or set another trainer.default_local_dir, then "
            "start again to resume."
        ) from error


def free_space(folder: Path) -> str:
    # The folder need not exist yet.
    return f"{_free_bytes(folder) / 2**20:.0f} MiB free"


def check_space(folder: Path, num_bytes: int) -> None:
    """Check that the disk of a folder has room for ``num_bytes``.

    Raises:
        CheckpointError: There is too little room. The message has both sizes.
    """
    if num_bytes > _free_bytes(folder):
        raise CheckpointError(
            f"{folder}: the model needs {num_bytes / 2**20:.0f} MiB ({free_space(folder)}). Free some space, or give a folder "
            "on another disk."
        )


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())).free


def replace_text(path: Path, text: str) -> None:
    """Write a file so that a reader finds the old text or the new one, never a part."""
    with disk_refusals(path):
        write_whole(path, text)


def write_whole(path: Path, text: str) -> None:
    """Like :func:`replace_text`, but raise a disk error as it is, an OSError."""
    with written_aside(path) as aside, aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        # The rename may reach the disk before the text does. Without this line, a power failure could then leave an empty file.
        os.fsync(file.fileno())


@contextmanager
def written_aside(path: Path, several_write: bool = False) -> Iterator[Path]:
    """Yield a temporary path for a file or a folder. It is renamed to ``path`` if the body succeeds, and removed if it fails.

    ``several_write``: several processes may write ``path`` at the same time, so each gets its own temporary path. If such a
    process is killed, its temporary path stays.
    """
    aside = path.with_name(f".{path.name}{f'.{os.getpid()}' if several_write else ''}.partial")
    try:
        yield aside
        aside.replace(path)
    except BaseException:
        with suppress(OSError):
            shutil.rmtree(aside) if aside.is_dir() else aside.unlink(missing_ok=True)
        raise


def append_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    append_text(path, "".join(json_line(row) for row in rows))


def append_text(path: Path, text: str) -> None:
    # The file is opened and closed each time, so that a kill loses no row that was logged.
    with disk_refusals(path), path.open("a", encoding="utf-8", newline="") as file:
        file.write(text)


def json_line(row: dict[str, Any]) -> str:
    """Return one line of JSON. NaN and infinity are written as ``NaN`` and ``Infinity``, which Python's reader accepts."""
    return json.dumps(row, ensure_ascii=False, default=_plain) + "\n"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file. An incomplete last line, left by a kill, is ignored.

    Raises:
        DataError: Any other line is not a JSON object. The message names file and line.
    """
    return [row for _, row in _parsed_lines(path)]


def keep_rows(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Keep the lines of a JSONL file whose objects ``keep`` accepts, unchanged, in one atomic write."""
    if path.exists():
        replace_text(path, "".join(line for line, row in _parsed_lines(path) if keep(row)))


def read_text(path: Path) -> str:
    """Return the text of a regular file. A named pipe is refused, because reading it would block for ever."""
    with opened(path, follow=True) as file:
        return file.read().decode("utf-8", errors="replace")


def _parsed_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    # Python's splitlines would also cut at characters that JSON leaves unescaped inside a string.
    try:
        lines = read_text(path).split("\n")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}). Move it away, or make it readable.") from error
    for number, line in enumerate(lines, start=1):
        torn_end = number == len(lines)  # a complete line ends in a newline, so the text after the last newline is incomplete
        if torn_end or not line.strip():
            continue
        try:
            row = parse_json(line, dict[str, Any])
        except RecordError as error:
            raise DataError(f"{path}:{number}: {error}. Correct or delete this line.") from error
        yield line + "\n", row


def _plain(value: Any) -> Any:
    # Scalars and arrays of numpy and torch become numbers and lists; anything else becomes text.
    return value.tolist() if hasattr(value, "tolist") else str(value)
