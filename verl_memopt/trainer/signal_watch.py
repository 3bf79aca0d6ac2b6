"""Watches for the signals of a process in a thread, so that it reacts at once, whatever the main thread is doing.

A Python signal handler runs only when the main thread returns to Python code. During an import, Ray's start or a long kernel
this may take a minute, and an exception raised there leaves tracebacks or crashes C++ code. So the handlers do nothing: the
interpreter writes each signal's number to a pipe, and a thread reads it. The reasons are in docs/decisions/stopping.md.

This file imports nothing heavy: watching is the first thing that a command does.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from types import FrameType
from typing import NoReturn

from verl_memopt.trainer.interrupts import EXIT_CODES, Interrupts, set_of_process
from verl_memopt.workers.processes import kill_descendants

SAME_SECONDS = 0.5
"""Signals this soon after the first count as the same: ``timeout`` and service managers send it twice."""

FLUSH_SECONDS = 0.5
"""Most time to write buffered output when the process is ended at once."""

SHOW_CURSOR = b"\r\x1b[2K\x1b[?25h"
"""Clears the line of a progress bar and shows the cursor."""


class SignalWatch:
    """Handles SIGINT, SIGTERM and SIGHUP of this process, from now to its end.

    Before the first step, the first signal ends the process, since there is nothing to save. During the steps the first one
    requests a stop; a second one, or the deadline, ends the process. Ending kills every process that this one started, and
    exits with 130, 143 or 129. Where SIGHUP is ignored, as under nohup, it stays so.

    Use it only in the main thread of a command's own process.
    """

    def __init__(self) -> None:
        """Start to watch."""
        self.interrupts = Interrupts(watched=True)
        set_of_process(self.interrupts)
        self._ending = threading.Event()
        self._read, write = os.pipe()
        # A full pipe must not block the interpreter inside its signal handler.
        os.set_blocking(write, False)
        for number in EXIT_CODES:
            if not (number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN):
                signal.signal(number, _nothing)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_as_if_never_watched)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()

    def hold_while_ending(self) -> None:
        """Return at once, or never if the watch is ending the process, so that no other exit code or message comes after it."""
        while self._ending.is_set():
            time.sleep(FLUSH_SECONDS)

    def _watch(self) -> None:
        # The start of Ray blocks these signals in the main thread; then this thread gets them.
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
        """End this process and all that it started. Python and C++ clean nothing up, so nothing can crash or hang."""
        self._ending.set()
        try:
            _last_words(text)
            kill_descendants()
        finally:
            os._exit(code)


def _last_words(text: str) -> None:
    """Write buffered output and then ``text``. Later output, of libraries whose processes are killed, is discarded."""
    flusher = threading.Thread(target=_flush, daemon=True)
    flusher.start()
    flusher.join(FLUSH_SECONDS)
    for descriptor in (1, 2):
        if os.isatty(descriptor):
            os.write(descriptor, SHOW_CURSOR)
    _write_line(text)
    # On the level of descriptors, so that C++ libraries are silent too.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)


def _flush() -> None:
    # This runs in a thread of its own: the main thread may hold a stream's lock as long as a pipe is full.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _write_line(text: str) -> None:
    """Write a line without Python's streams and loggers, whose locks another thread may hold."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


def _nothing(number: int, frame: FrameType | None) -> None:
    """Do nothing. That a handler is set makes Python write the signal to the pipe, and programs start with the default action."""


def _as_if_never_watched() -> None:
    """Set the default actions in a forked child: it has inherited the pipe, but its signals are its own."""
    signal.set_wakeup_fd(-1)
    for number in EXIT_CODES:
        if signal.getsignal(number) is _nothing:
            signal.signal(number, signal.SIG_DFL)
