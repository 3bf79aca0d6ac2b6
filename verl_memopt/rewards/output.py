"""The output of reward functions, in small files of the run folder."""

from __future__ import annotations

import os
from pathlib import Path

LOG_BYTES = 1 << 20
"""Largest size of one file. Beyond it the older half is dropped."""

QUOTED_LINES = 5
QUOTED_BYTES = 2000


class OutputLog:
    """A file that keeps the end of its text. The first write creates it."""

    def __init__(self, path: Path) -> None:
        """Remember the path; nothing is created yet."""
        self.path = path
        self._warned = False

    def write(self, data: bytes) -> None:
        """Append ``data``. If the disk refuses, only this output is lost."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.write(data)
                size = file.tell()
            if size > LOG_BYTES:
                self._drop_older_half()
        except OSError as error:
            if self._warned:
                return
            self._warned = True
            os.write(2, f"{self.path}: the output of a reward function cannot be written ({error.strerror}).\n".encode())

    def _drop_older_half(self) -> None:
        newer_half = _end_of(self.path, LOG_BYTES // 2)
        aside = self.path.with_name(f".{self.path.name}.partial")
        aside.write_bytes(newer_half.partition(b"\n")[2] or newer_half)
        aside.replace(self.path)


def last_lines(path: Path | None, since: int = 0) -> str:
    """Return the last few lines of a log, indented, under a line that names the log. Empty where there are none.

    Args:
        path: The log. None = no log.
        since: Bytes at the beginning to leave out. If the log is shorter, it was cut, and all of it counts.
    """
    if path is None or not path.is_file():
        return ""
    size = path.stat().st_size
    text = _end_of(path, min(QUOTED_BYTES, size - since if size >= since else size)).decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()][-QUOTED_LINES:]
    return "".join(f"\n  {line}" for line in [f"its last output ({path}):", *lines]) if lines else ""


def _end_of(path: Path, max_bytes: int) -> bytes:
    with path.open("rb") as file:
        file.seek(-min(max_bytes, path.stat().st_size), os.SEEK_END)
        return file.read()
