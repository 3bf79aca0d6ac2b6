"""What reward functions print, in files of the run folder that stay small."""

from __future__ import annotations

import os
from pathlib import Path

LOG_BYTES = 1 << 20
"""Largest size of one file; past it the older half is dropped."""

QUOTED_LINES = 5
QUOTED_BYTES = 2000


class OutputLog:
    """A file that keeps the end of what is written to it. It is made at the first write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._told = False

    def write(self, data: bytes) -> None:
        """Append ``data``. A disk that refuses loses the output and nothing else."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.write(data)
                size = file.tell()
            if size > LOG_BYTES:
                self._drop_older_half()
        except OSError as error:
            if self._told:
                return
            self._told = True
            os.write(2, f"{self.path}: the output of a reward function cannot be kept ({error.strerror}).\n".encode())

    def _drop_older_half(self) -> None:
        kept = _end_of(self.path, LOG_BYTES // 2)
        aside = self.path.with_name(f".{self.path.name}.partial")
        aside.write_bytes(kept.partition(b"\n")[2] or kept)
        aside.replace(self.path)


def last_lines(path: Path | None, since: int = 0) -> str:
    """Return the last few lines of a log, indented, under a line that names it; nothing where there are none.

    since: bytes at the beginning that are of no interest; a log that is shorter has been cut, and all of it counts.
    """
    if path is None or not path.is_file():
        return ""
    size = path.stat().st_size
    text = _end_of(path, min(QUOTED_BYTES, size - since if size >= since else size)).decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()][-QUOTED_LINES:]
    return "".join(f"\n  {line}" for line in [f"its last output ({path}):", *lines]) if lines else ""


def _end_of(path: Path, most: int) -> bytes:
    with path.open("rb") as file:
        file.seek(-min(most, path.stat().st_size), os.SEEK_END)
        return file.read()
