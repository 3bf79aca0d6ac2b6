"""What a run knows of a request to stop: which signal, how much time is left, and how it will end.

Only the standard library is imported, so that the command line can watch for signals before anything heavy is loaded.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

logger = logging.getLogger(__name__)

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}

RESERVE_SHARE = 0.25
"""The part of the deadline that is kept for saving, at least."""

SAVES_RESERVED = 2.0
"""Saves as long as the last one that must fit into the reserve."""

ONCE_MORE = "once more stops at once"


class Interrupts:
    """A request to stop, and the time that is left for it.

    As a context manager it handles SIGINT, SIGTERM and SIGHUP itself, for a caller whose process has no
    :class:`~verl_memopt.trainer.signal_watch.SignalWatch`: the first signal asks for a stop, the second raises
    KeyboardInterrupt. Outside the main thread Python allows no handlers, and none are set.

    Args:
        at_once: the first signal raises too, for work that has nothing to finish.
        watched: a SignalWatch handles the signals, and entering sets no handlers.
    """

    def __init__(self, at_once: bool = False, watched: bool = False) -> None:
        self._at_once = at_once
        self._watched = watched
        self._before: dict[int, Any] = {}
        self._wakeup = -1
        self._told: Callable[[float], None] = lambda moment: None
        self.exit_code: int | None = None
        self.asked_at = 0.0
        """Seconds of the monotonic clock."""
        self.in_steps = False
        """Steps are being taken: a stop has something to finish and to save."""
        self.deadline_seconds = 0.0
        self.save_seconds = 0.0
        """What the last save took."""
        self.last_saved = "No checkpoint was saved"
        """Where a new start would go on, in words."""

    @property
    def asked(self) -> bool:
        return self.exit_code is not None

    def begin_steps(self, deadline_seconds: float, told: Callable[[float], None]) -> None:
        """Say that from now on a stop has something to finish, and how long it may take.

        Args:
            deadline_seconds: from the signal to the end of the process.
            told: called once when a stop is asked for, with the moment (seconds of the epoch) to give up a rollout.
        """
        self.deadline_seconds = deadline_seconds
        self._told = told
        self.in_steps = True
        if self.asked:
            self._tell()

    def ask(self, number: int) -> str:
        """Ask for a stop because of signal ``number``, and return the line to show for it."""
        name = signal.Signals(number).name
        self.asked_at = time.monotonic()
        self.exit_code = EXIT_CODES[signal.Signals(number)]
        if self.in_steps:
            self._tell()
        return f"{name}: stopping after this step, then saving; {ONCE_MORE}"

    def seconds_left(self) -> float:
        """Return what is left until the deadline, after a stop was asked for."""
        return self.asked_at + self.deadline_seconds - time.monotonic()

    @property
    def reserve_seconds(self) -> float:
        """What saving is expected to need, with room to spare."""
        return max(self.save_seconds * SAVES_RESERVED, self.deadline_seconds * RESERVE_SHARE)

    def too_late_for(self, seconds: float) -> bool:
        """Say whether a stop was asked for, and work of ``seconds`` would leave too little time to save."""
        return self.asked and self.seconds_left() - seconds < self.reserve_seconds

    def out_of_time(self) -> bool:
        """Say whether a stop was asked for, and the time has come to give up what is not finished."""
        return self.too_late_for(0.0)

    def _tell(self) -> None:
        told, self._told = self._told, lambda moment: None
        told(time.time() + max(0.0, self.seconds_left() - self.reserve_seconds))

    def __enter__(self) -> Interrupts:
        if not self._watched and threading.current_thread() is threading.main_thread():
            self._wakeup = signal.set_wakeup_fd(-1)
            self._before = {number: signal.getsignal(number) for number in EXIT_CODES}
            for number, handler in self._before.items():
                if not (number == signal.SIGHUP and handler is signal.SIG_IGN):  # nohup: the run outlives its terminal
                    signal.signal(number, self._caught)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._before:
            signal.set_wakeup_fd(self._wakeup)
        self._before = {}

    def _caught(self, number: int, frame: FrameType | None) -> None:
        if self._at_once or self.asked:
            self.exit_code = self.exit_code or EXIT_CODES[signal.Signals(number)]
            raise KeyboardInterrupt
        logger.warning("%s", self.ask(number))


_of_process = Interrupts()


def of_process() -> Interrupts:
    """Return the watched interrupts of this process where its entry set some; else new ones, which set handlers themselves."""
    return _of_process if _of_process._watched else Interrupts()


def set_of_process(interrupts: Interrupts) -> None:
    """Make these the interrupts of the whole process."""
    global _of_process
    _of_process = interrupts
