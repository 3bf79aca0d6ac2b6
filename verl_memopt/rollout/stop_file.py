"""How workers learn that a rollout must end early: a small file in the run folder, which each worker checks.

A worker that generates answers no calls, and may run on another node. The run folder is the one place that all of them see.
"""

from __future__ import annotations

import time
from pathlib import Path

POLL_SECONDS = 1.0
"""Shortest time between two checks of the file."""


class StopFile:
    """The time after which rollouts are abandoned. No file means never.

    Args:
        path: The file, in a folder that the driver and all workers see.
    """

    def __init__(self, path: Path) -> None:
        """Remember the path; nothing is read yet."""
        self._path = path
        self._next_check = 0.0
        self._moment: float | None = None

    def write(self, moment: float) -> None:
        """Ask all rollouts to end at ``moment`` (seconds since 1970)."""
        aside = self._path.with_name(self._path.name + ".new")
        aside.write_text(f"{moment}\n")
        aside.replace(self._path)

    def remove(self) -> None:
        """Withdraw the request."""
        self._path.unlink(missing_ok=True)

    def passed(self) -> bool:
        """Return whether a time was set and is over. The disk is checked at most once a second."""
        now = time.monotonic()
        if self._moment is None and now >= self._next_check:
            self._next_check = now + POLL_SECONDS
            self._moment = self._read()
        return self._moment is not None and time.time() >= self._moment

    def _read(self) -> float | None:
        try:
            return float(self._path.read_text())
        except FileNotFoundError:
            return None


def never() -> bool:
    """Return False: no stop is requested."""
    return False
