"""A request to stop a run: the signal that made it, the time that is left, and the exit code.

This file imports nothing heavy, so that the command line can watch for signals before it loads anything else.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

from verl_memopt.errors import UserError
from verl_memopt.observe.files import written_aside

logger = logging.getLogger(__name__)

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}

RESERVE_SHARE = 0.25
"""Smallest share of the deadline that is reserved for saving."""

SAVES_RESERVED = 2.0
"""The time that is reserved for saving is at least this many times the duration of the last save."""


class Interrupts:
    """A request to stop, and the time that is left for it.

    As a context manager, it handles SIGINT, SIGTERM and SIGHUP itself: the first signal requests a stop, and the second raises
    KeyboardInterrupt. This is for processes without a :class:`~verl_memopt.run.interrupts.SignalWatch`. Python allows signal
    handlers in the main thread only, so none are set in other threads.

    Args:
        at_once: Already the first signal raises KeyboardInterrupt.
        watched: A SignalWatch handles the signals, so this object sets no handlers.
    """

    def __init__(self, at_once: bool = False, watched: bool = False) -> None:
        self._at_once = at_once
        self._watched = watched
        self._before: dict[int, Any] = {}
        self._wakeup = -1
        self._on_request: Callable[[float], None] = lambda moment: None
        self.exit_code: int | None = None
        self.requested_at = 0.0
        """Time of the request, in seconds of the monotonic clock."""
        self.in_steps = False
        """The run makes steps, so a stop must finish and save a step."""
        self.deadline_seconds = 0.0
        self.save_seconds = 0.0
        """Duration of the last save."""
        self.last_saved = "No checkpoint was saved"
        """A sentence that says from where a new start would continue."""

    @property
    def requested(self) -> bool:
        return self.exit_code is not None

    def begin_steps(self, deadline_seconds: float, on_request: Callable[[float], None]) -> None:
        """From now on, a stop must finish and save the step.

        ``deadline_seconds``: time from the signal to the end of the process. ``on_request``: called once, when a stop is
        requested, with the time (seconds since the epoch) when a rollout must be abandoned.
        """
        self.deadline_seconds = deadline_seconds
        self._on_request = on_request
        self.in_steps = True
        if self.requested:
            self._call_on_request()

    def between_runs(self) -> int | None:
        # A run has ended, and another will begin. Return the exit code if a stop was requested, else None.
        self.in_steps = False
        return self.exit_code

    def request(self, number: int) -> str:
        self.requested_at = time.monotonic()
        self.exit_code = EXIT_CODES[signal.Signals(number)]
        if self.in_steps:
            self._call_on_request()
        return f"{signal.Signals(number).name}: stopping after this step, then saving; once more stops at once"

    def seconds_left(self) -> float:
        return self.requested_at + self.deadline_seconds - time.monotonic()

    @property
    def reserve_seconds(self) -> float:
        # This is more than the last save took, because the next save may take longer.
        return max(self.save_seconds * SAVES_RESERVED, self.deadline_seconds * RESERVE_SHARE)

    def too_late_for(self, seconds: float) -> bool:
        return self.requested and self.seconds_left() - seconds < self.reserve_seconds

    def out_of_time(self) -> bool:
        # Whether a stop was requested and unfinished work must be abandoned now.
        return self.too_late_for(0.0)

    def _call_on_request(self) -> None:
        on_request, self._on_request = self._on_request, lambda moment: None
        on_request(time.time() + max(0.0, self.seconds_left() - self.reserve_seconds))

    def __enter__(self) -> Interrupts:
        if not self._watched and threading.current_thread() is threading.main_thread():
            self._wakeup = signal.set_wakeup_fd(-1)
            self._before = _set_handlers(self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
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


def _set_handlers(handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    before: dict[int, Any] = {number: signal.getsignal(number) for number in EXIT_CODES}
    for number, was in before.items():
        if not (number == signal.SIGHUP and was is signal.SIG_IGN):  # nohup: the run outlives its terminal
            signal.signal(number, handler)
    return before


_watched: list[Interrupts] = []


def process_interrupts() -> Interrupts:
    """Return the interrupts of this process's SignalWatch. Without a SignalWatch, return new ones that set their own handlers."""
    return _watched[-1] if _watched else Interrupts()


# Watches for the signals of a process in a thread. So the process reacts at once, even if the main thread is busy.
#
# A Python signal handler runs only when the main thread returns to Python code. During an import, Ray's start or a long kernel
# this may take a minute, and an exception raised there leaves tracebacks or crashes C++ code. So the handlers do nothing: the
# interpreter writes each signal's number to a pipe, and a thread reads it. The reasons are in docs/decisions/start_and_stop.md.
#
# This file imports nothing heavy: watching is the first thing that a command does.


SAME_SECONDS = 0.5
"""A signal so soon after the first one is not a second request: ``timeout`` and service managers send each signal twice."""

FLUSH_SECONDS = 0.5
"""Longest time to write buffered output when the process is ended at once."""

SHOW_CURSOR = b"\r\x1b[2K\x1b[?25h"
"""Clears the line of a progress bar and shows the cursor."""


class SignalWatch:
    """Handles SIGINT, SIGTERM and SIGHUP of this process, from now to its end.

    Before the first step the first signal ends the process, because there is nothing to save. During the steps the first signal
    requests a stop, and a second signal, or the deadline, ends the process. At the end every process that this one has started is
    killed, and the exit code is 130, 143 or 129. If SIGHUP is ignored, as under nohup, it stays ignored.

    Use it only in the main thread of a command's own process.
    """

    def __init__(self) -> None:
        self.interrupts = Interrupts(watched=True)
        _watched.append(self.interrupts)
        self._ending = threading.Event()
        self._read, write = os.pipe()
        # A full pipe must not block the interpreter inside its signal handler.
        os.set_blocking(write, False)
        _set_handlers(_nothing)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_as_if_never_watched)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()

    def hold_while_ending(self, begins_within: float = 0) -> None:
        """Return at once. If the watch is ending the process, never return, so that no other exit code or message follows.

        ``begins_within``: wait up to so many seconds for the watch to begin ending the process.
        """
        self._ending.wait(begins_within)
        while self._ending.is_set():
            time.sleep(FLUSH_SECONDS)

    def _watch(self) -> None:
        # While Ray starts, it blocks these signals in the main thread. Then this thread must get them.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, EXIT_CODES)
        stop = self.interrupts
        while True:
            left = max(0.0, stop.seconds_left()) if stop.requested and stop.in_steps else None
            if select.select([self._read], [], [], left)[0]:
                for number in os.read(self._read, 256):
                    if number in EXIT_CODES:
                        self._handle(number)
            elif stop.seconds_left() <= 0:
                self._end(
                    stop.exit_code or 1,
                    f"the stop was not finished within trainer.stop_deadline_seconds={stop.deadline_seconds:g}; ended at once. "
                    f"{stop.last_saved}.",
                )

    def _handle(self, number: int) -> None:
        stop, name = self.interrupts, signal.Signals(number).name
        if not stop.in_steps:
            self._end(EXIT_CODES[signal.Signals(number)], f"{name}: ended before the first step; there was nothing to save.")
        if not stop.requested:
            _write_line(stop.request(number))
        elif time.monotonic() - stop.requested_at > SAME_SECONDS:
            self._end(stop.exit_code or 1, f"{name}: the second signal; ended at once. {stop.last_saved}.")

    def _end(self, code: int, text: str) -> NoReturn:
        # The process ends by os._exit, without any cleanup of Python or C++ that could crash or hang.
        self._ending.set()
        try:
            _last_words(text)
            from verl_memopt.run.processes import kill_descendants  # imports psutil, which must not delay the watch

            kill_descendants()
        finally:
            os._exit(code)


def guarded(command: Callable[[], int], watched: bool) -> int:
    """Run a command and return its exit code. A user's error is printed without a traceback.

    With ``watched``, signals are watched until the process ends. This call then ends the process, unless its output cannot be
    written.
    """
    watch = SignalWatch() if watched else None
    try:
        _check_directory()
        if watched:
            _write_anything()
        code = command()
    except UserError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        code = error.exit_code
    except SystemExit as error:
        # While Ray starts, it has a signal handler of its own, which may end this thread before the watch ends the process.
        if watch is not None and error.code == signal.SIGTERM:
            watch.hold_while_ending(begins_within=5)
        raise
    finally:
        if watch is not None:
            watch.hold_while_ending()
    if watched:
        end_process(code)
    return code


def _check_directory() -> None:
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise UserError("the working directory was deleted. Change to one that exists.") from error


def _write_anything() -> None:
    # A character that the terminal's encoding does not have is written as an escape sequence.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() not in ("utf-8", "utf8"):
            stream.reconfigure(errors="backslashreplace")


def end_process(code: int) -> None:
    """End this process like Python, but without destroying the imported modules, which takes a second and a half for PyTorch.

    The call returns if the output cannot be written. Python then reports this when it ends the process.
    """
    # The same steps as at the end of a multiprocessing child: wait for threads, and then call the exit functions.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return
    os._exit(code)


def _last_words(text: str) -> None:
    # Write `text` as the last line. All later output, such as that of libraries whose processes are killed next, is discarded.
    flusher = threading.Thread(target=_flush, daemon=True)
    flusher.start()
    flusher.join(FLUSH_SECONDS)
    for descriptor in (1, 2):
        if os.isatty(descriptor):
            os.write(descriptor, SHOW_CURSOR)
    _write_line(text)
    # Redirecting the descriptors also silences C++ libraries.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)


def _flush() -> None:
    # This runs in a thread of its own: the main thread may hold a stream's lock as long as a pipe is full.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _write_line(text: str) -> None:
    # Another thread may hold the locks of Python's streams and loggers.
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


def _nothing(number: int, frame: FrameType | None) -> None:
    """Do nothing. Because this handler is set, Python writes the signal to the pipe, and new programs get the default action."""


def _as_if_never_watched() -> None:
    # A forked child has inherited the pipe, but its signals must not be written to it.
    signal.set_wakeup_fd(-1)
    for number in EXIT_CODES:
        if signal.getsignal(number) is _nothing:
            signal.signal(number, signal.SIG_DFL)


# How workers learn that a rollout must end early: a small file in the run folder, which each worker checks.
#
# While a worker generates, it handles no calls, and it may run on another node. But all workers can read the run folder.


POLL_SECONDS = 1.0
"""Shortest time between two checks of the file."""


@dataclass
class StopFile:
    """The time after which rollouts are abandoned. No file means never.

    Its path is in a folder that the driver and all workers can read.
    """

    path: Path
    _next_check: float = 0.0
    _moment: float | None = None

    def write(self, moment: float) -> None:
        with written_aside(self.path) as aside:
            aside.write_text(f"{moment}\n")

    def remove(self) -> None:
        # An error here is harmless. For example, the folder was made read-only, so that no file was written.
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)

    def passed(self) -> bool:
        """Return whether a time was set and has passed. The disk is read at most once per second."""
        now = time.monotonic()
        if self._moment is None and now >= self._next_check:
            self._next_check = now + POLL_SECONDS
            with contextlib.suppress(FileNotFoundError):
                self._moment = float(self.path.read_text())
        return self._moment is not None and time.time() >= self._moment


def never() -> bool:
    return False
