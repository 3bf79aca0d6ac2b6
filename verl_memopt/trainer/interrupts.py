"""A request to stop a run: which signal made it, how much time is left, and the exit code.

This file imports only the standard library, so that the command line can watch for signals before it loads anything heavy.
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
"""Least share of the deadline that is kept for saving."""

SAVES_RESERVED = 2.0
"""How many saves as long as the last one must fit into the time that is kept for saving."""

ONCE_MORE = "once more stops at once"


class Interrupts:
    """A request to stop, and the time that is left for it.

    Used as a context manager, it handles SIGINT, SIGTERM and SIGHUP itself: the first signal requests a stop, the second
    raises KeyboardInterrupt. This is for processes without a :class:`~verl_memopt.trainer.signal_watch.SignalWatch`. Outside
    the main thread Python allows no signal handlers, so none are set there.
    """

    def __init__(self, at_once: bool = False, watched: bool = False) -> None:
        """Set no handlers yet.

        Args:
            at_once: The first signal raises KeyboardInterrupt too, for work that has nothing to finish.
            watched: A SignalWatch handles the signals, so entering sets no handlers.
        """
        self._at_once = at_once
        self._watched = watched
        self._before: dict[int, Any] = {}
        self._wakeup = -1
        self._on_request: Callable[[float], None] = lambda moment: None
        self.exit_code: int | None = None
        self.requested_at = 0.0
        """Seconds of the monotonic clock."""
        self.in_steps = False
        """The run takes steps, so a stop has something to finish and to save."""
        self.deadline_seconds = 0.0
        self.save_seconds = 0.0
        """Time of the last save."""
        self.last_saved = "No checkpoint was saved"
        """A sentence that says from where a new start would continue."""

    @property
    def requested(self) -> bool:
        """Whether a stop was requested."""
        return self.exit_code is not None

    def begin_steps(self, deadline_seconds: float, on_request: Callable[[float], None]) -> None:
        """Note that from now on a stop has something to finish.

        Args:
            deadline_seconds: Time from the signal to the end of the process, in seconds.
            on_request: Called once, when a stop is requested, with the moment (seconds since the epoch) to abandon a rollout.
        """
        self.deadline_seconds = deadline_seconds
        self._on_request = on_request
        self.in_steps = True
        if self.requested:
            self._call_on_request()

    def request(self, number: int) -> str:
        """Request a stop because of signal ``number``, and return the line to show for it."""
        name = signal.Signals(number).name
        self.requested_at = time.monotonic()
        self.exit_code = EXIT_CODES[signal.Signals(number)]
        if self.in_steps:
            self._call_on_request()
        return f"{name}: stopping after this step, then saving; {ONCE_MORE}"

    def seconds_left(self) -> float:
        """Return the seconds until the deadline of a requested stop."""
        return self.requested_at + self.deadline_seconds - time.monotonic()

    @property
    def reserve_seconds(self) -> float:
        """Return the seconds to keep for saving, with room to spare."""
        return max(self.save_seconds * SAVES_RESERVED, self.deadline_seconds * RESERVE_SHARE)

    def too_late_for(self, seconds: float) -> bool:
        """Return whether a stop was requested and work of ``seconds`` would leave too little time to save."""
        return self.requested and self.seconds_left() - seconds < self.reserve_seconds

    def out_of_time(self) -> bool:
        """Return whether a stop was requested and it is time to abandon what is not finished."""
        return self.too_late_for(0.0)

    def _call_on_request(self) -> None:
        on_request, self._on_request = self._on_request, lambda moment: None
        on_request(time.time() + max(0.0, self.seconds_left() - self.reserve_seconds))

    def __enter__(self) -> Interrupts:
        """Set handlers, unless a SignalWatch handles the signals."""
        if not self._watched and threading.current_thread() is threading.main_thread():
            self._wakeup = signal.set_wakeup_fd(-1)
            self._before = {number: signal.getsignal(number) for number in EXIT_CODES}
            for number, handler in self._before.items():
                if not (number == signal.SIGHUP and handler is signal.SIG_IGN):  # nohup: the run outlives its terminal
                    signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Restore the handlers of before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._before:
            signal.set_wakeup_fd(self._wakeup)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._at_once or self.requested:
            self.exit_code = self.exit_code or EXIT_CODES[signal.Signals(number)]
            raise KeyboardInterrupt
        logger.warning("%s", self.request(number))


_of_process = Interrupts()


def of_process() -> Interrupts:
    """Return the watched interrupts of this process; without a SignalWatch new ones, which set their own handlers."""
    return _of_process if _of_process._watched else Interrupts()


def set_of_process(interrupts: Interrupts) -> None:
    """Make ``interrupts`` those of the whole process."""
    global _of_process
    _of_process = interrupts
