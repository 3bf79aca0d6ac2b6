"""Signals of a whole process, seen at once by a thread, whatever the main thread is doing.

A Python signal handler runs when the main thread comes back to Python code. In an import, in Ray's start or in a long kernel
that may take a minute, and an exception raised there leaves tracebacks or crashes C++ code. So the handlers do nothing. The
interpreter writes each signal's number to a pipe, and a thread reads it. Why: docs/decisions/stopping.md.

Only the standard library is imported: this is the first thing that a command does.
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
"""Signals within this time after the first count as the first: ``timeout`` and service managers send it twice."""

FLUSH_SECONDS = 0.5
"""How long buffered output may take at a sudden end."""

SHOW_CURSOR = b"\r\x1b[2K\x1b[?25h"
"""Clears the line of a progress bar and shows the cursor again."""


class SignalWatch:
    """Handles SIGINT, SIGTERM and SIGHUP of this process, from now to its end.

    Before the first step the first signal ends the process: nothing has to be saved. While steps are taken the first asks for
    a stop; a second one, or the deadline, ends the process. Ending kills every process that this one started, and exits with
    130, 143 or 129. SIGHUP stays ignored where it is, as under nohup.

    Only for a command's own process, in its main thread.
    """

    def __init__(self) -> None:
        self.interrupts = Interrupts(watched=True)
        set_of_process(self.interrupts)
        self._ending = threading.Event()
        self._read, write = os.pipe()
        os.set_blocking(write, False)
        for number in EXIT_CODES:
            if not (number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN):
                signal.signal(number, _nothing)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_as_if_never_watched)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()

    def hold_while_ending(self) -> None:
        """Never return once the watch is ending the process, so that its exit code and its message are the last ones."""
        while self._ending.is_set():
            time.sleep(FLUSH_SECONDS)

    def _watch(self) -> None:
        # Whoever blocks these signals in the main thread, as the start of Ray does, leaves them to this thread.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, EXIT_CODES)
        stop = self.interrupts
        while True:
            left = max(0.0, stop.seconds_left()) if stop.asked and stop.in_steps else None
            if select.select([self._read], [], [], left)[0]:
                for number in os.read(self._read, 256):
                    if number in EXIT_CODES:
                        self._seen(number)
            elif stop.seconds_left() <= 0:
                self._end(
                    stop.exit_code or 1,
                    f"the stop was not finished within trainer.stop_deadline_seconds={stop.deadline_seconds:g}; ended at once. "
                    f"{stop.last_saved}.",
                )

    def _seen(self, number: int) -> None:
        stop, name = self.interrupts, signal.Signals(number).name
        if not stop.in_steps:
            self._end(EXIT_CODES[signal.Signals(number)], f"{name}: ended before the first step; there was nothing to save.")
        if not stop.asked:
            _say(stop.ask(number))
        elif time.monotonic() - stop.asked_at > SAME_SECONDS:
            self._end(stop.exit_code or 1, f"{name}: the second signal; ended at once. {stop.last_saved}.")

    def _end(self, code: int, text: str) -> NoReturn:
        """Ends the process and all that it started. Nothing of Python or C++ is torn down, so nothing can crash or hang."""
        self._ending.set()
        try:
            _last_words(text)
            kill_descendants()
        finally:
            os._exit(code)


def _last_words(text: str) -> None:
    """Shows what is still buffered and then ``text``. What follows, of libraries whose processes are killed, goes nowhere."""
    flusher = threading.Thread(target=_flush, daemon=True)
    flusher.start()
    flusher.join(FLUSH_SECONDS)
    for descriptor in (1, 2):
        if os.isatty(descriptor):
            os.write(descriptor, SHOW_CURSOR)
    _say(text)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)


def _flush() -> None:
    # Not in the watch's own thread: the main thread may hold a stream's lock for as long as a full pipe stays full.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _say(text: str) -> None:
    """Writes a line past Python's streams and loggers, whose locks another thread may hold."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


def _nothing(number: int, frame: FrameType | None) -> None:
    """Makes the interpreter write the signal to the pipe, and a started program begin with the default action again."""


def _as_if_never_watched() -> None:
    """Gives a forked child the default actions: its signals are not this process's, though it has inherited the pipe."""
    signal.set_wakeup_fd(-1)
    for number in EXIT_CODES:
        if signal.getsignal(number) is _nothing:
            signal.signal(number, signal.SIG_DFL)
