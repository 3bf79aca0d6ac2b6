"""The parent's side of one reward process: start it, hand it rows, read scores, find out where it stands, end it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from verl_memopt.errors import RewardError
from verl_memopt.rewards.rows import RewardRow
from verl_memopt.rewards.scorer import PROGRESS, Outcome

LOAD_SECONDS = 120.0
"""Longest time the file with the reward function may take to import."""


class RewardProcess:
    """A fresh interpreter that runs one reward function; it starts in the background.

    It has its own session, so that Ctrl-C does not reach it, and ends with this process however that ends.
    """

    def __init__(self, path: str | None, name: str, reward_kwargs: Mapping[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        lifeline_end, self._lifeline = os.pipe()
        self._progress = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        fds = (theirs.fileno(), lifeline_end, self._progress.fileno())
        program = f"import sys; sys.path[:] = {sys.path!r}; from verl_memopt.rewards.scorer import main; main{fds!r}"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program], pass_fds=fds, stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()
        os.close(lifeline_end)
        self.connection = Connection(ours.detach())
        self.connection.send((path, name, dict(reward_kwargs)))
        self._started = time.monotonic()
        self._loaded = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_loaded(self) -> None:
        """Returns once the function is imported. Raises RewardError with the reason when it is not."""
        if self._loaded:
            return
        if not self.connection.poll(max(0.0, self._started + LOAD_SECONDS - time.monotonic())):
            raise RewardError(
                f"custom_reward_function.path: the file did not finish importing in {LOAD_SECONDS:.0f} s. "
                "Move long work out of its top level."
            )
        try:
            problem = self.connection.recv()
        except (EOFError, ConnectionError):
            problem = (
                f"custom_reward_function.path: the process that imports the file {self.ending()}. Import it alone to see why."
            )
        if problem is not None:
            raise RewardError(problem)
        self._loaded = True

    def send(self, first: int, rows: Sequence[RewardRow]) -> None:
        """Hands over rows; their indices count from ``first``. That the process is dead shows in ``receive``."""
        self.wait_until_loaded()
        with contextlib.suppress(ConnectionError):
            self.connection.send((first, [(row.data_source, row.solution, row.ground_truth, row.extra_info) for row in rows]))

    def receive(self) -> list[Outcome] | None:
        """The outcomes that have arrived; None when the process has died."""
        try:
            return self.connection.recv() if self.connection.poll() else []
        except (EOFError, ConnectionError):
            return None

    def position(self) -> tuple[int, float]:
        """Index of the row the process is at (-1 = none) and the seconds it has been there."""
        record = os.pread(self._progress.fileno(), PROGRESS.size, 0)
        if not record:
            return -1, 0.0
        index, since = PROGRESS.unpack(record)
        return index, time.monotonic() - since if index >= 0 else 0.0

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ending(self) -> str:
        """How the process ended, in words."""
        code = self._process.wait()
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def close(self) -> None:
        """Ends the process and what it may have started. May be called twice."""
        if self.connection.closed:
            return
        if self.is_alive():
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.connection.close()
        os.close(self._lifeline)
        self._progress.close()
