"""How a rollout learns that it must end early: a small file in the run folder, which each worker looks for.

A worker that generates answers no calls, and may run on another node. The run folder is the one place that all of them see.
"""

from __future__ import annotations

import time
from pathlib import Path

POLL_SECONDS = 1.0
"""A worker looks for the file at most this often."""


class StopFile:
    """The moment after which rollouts are given up; no file means never.

    Args:
        path: the file, in a folder that the driver and all workers see.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._looks_again = 0.0
        self._moment: float | None = None

    def write(self, moment: float) -> None:
        """Ask all rollouts to end at ``moment`` (seconds of the epoch)."""
        aside = self._path.with_name(self._path.name + ".new")
        aside.write_text(f"{moment}\n")
        aside.replace(self._path)

    def remove(self) -> None:
        """Take the request back."""
        self._path.unlink(missing_ok=True)

    def passed(self) -> bool:
        """Say whether the moment was set and is over. It looks at the disk at most once a second."""
        now = time.monotonic()
        if self._moment is None and now >= self._looks_again:
            self._looks_again = now + POLL_SECONDS
            self._moment = self._read()
        return self._moment is not None and time.time() >= self._moment

    def _read(self) -> float | None:
        try:
            return float(self._path.read_text())
        except FileNotFoundError:
            return None


def never() -> bool:
    """Say that nobody asks for a stop."""
    return False
