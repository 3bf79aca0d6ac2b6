"""Logging of one process, and the console of a run.

Log lines name the rank and go to standard error. Other packages log only warnings and errors. A file keeps a copy of what the
console shows, and the run continues if the console is lost.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from verl_memopt.errors import UserError
from verl_memopt.observe.secrets import hide_shapes

NOISY = ("transformers", "ray", "matplotlib", "PIL", "urllib3", "httpx", "httpcore", "filelock", "asyncio", "tensorboard")
"""Packages that log warnings and errors only."""


class _StandardError(logging._StderrHandler):  # type: ignore[name-defined]
    """Looks up ``sys.stderr`` for each line, so that a progress bar or a test that replaces it receives the lines."""


def is_set_up() -> bool:
    return any(isinstance(handler, _StandardError) for handler in logging.getLogger().handlers)


def setup_logging(rank: int | None = None, level: int = logging.INFO) -> None:
    """Log to standard error, each line with time, rank and level. A second call replaces the handler of the first.

    ``rank``: None = the driver. Ranks above 0, and other packages, log only warnings and errors.
    """
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _StandardError)]:
        root.removeHandler(handler)
    handler = _StandardError()
    place = "driver" if rank is None else f"rank {rank}"
    handler.setFormatter(logging.Formatter(f"%(asctime)s {place} %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("verl_memopt").setLevel(level if not rank else max(level, logging.WARNING))
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
    # vLLM logs a dozen warnings about intended settings when it starts. Later the engine sets the levels of vLLM's loggers anew.
    logging.getLogger("vllm").setLevel(logging.ERROR)
    # transformers reads these variables when it is imported.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.captureWarnings(True)
    warnings.filterwarnings("ignore", category=FutureWarning)


@contextmanager
def silent() -> Iterator[None]:
    # No warnings in the body. It only tries settings, which no run may ever use.
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


MOST_WAITING = 10_000
"""Largest number of console lines that are kept in memory until the run has a folder."""
CONTROL = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|[@-Z\\-_])")
"""A sequence that moves the cursor or sets a colour."""


class ConsoleLog:
    """Keeps the lines of a console as text: in memory first, and in a file after :meth:`begin`.

    Of a progress bar it keeps only the last state.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self._waiting: list[str] = []
        self._parts: dict[str, str] = {}

    def write(self, stream: str, text: str) -> None:
        *lines, part = (self._parts.get(stream, "") + text).split("\n")
        self._parts[stream] = part.rpartition("\r")[2] if part.rstrip("\r") == part else part
        self.add([hide_shapes(_shown(line)) for line in lines])

    def add(self, lines: list[str]) -> None:
        # A disk error loses lines of this log, but does not stop the run.
        if self.path is None:
            self._waiting = (self._waiting + lines)[-MOST_WAITING:]
        elif lines:
            with suppress(OSError), self.path.open("a", encoding="utf-8", errors="replace") as file:
                file.write("".join(f"{line}\n" for line in lines))

    def begin(self, path: Path) -> None:
        # Append to a file from now on, starting with the lines so far.
        if path != self.path:
            self.path, lines = path, self._waiting
            self.add([f"--- {time.strftime('%Y-%m-%d %H:%M:%S')}", *lines])


def _shown(line: str) -> str:
    # A carriage return overwrites the line, so a terminal shows only the text after the last one.
    return CONTROL.sub("", line.rstrip("\r").rpartition("\r")[2]).rstrip()


def keep_console(path: Path) -> None:
    """Copy to a file all that the console has shown since :func:`lasting_console` was entered, and all that follows."""
    if isinstance(sys.stdout, LastingStream):
        sys.stdout.log.begin(path)


class LastingStream:
    """A standard stream that may be lost: the reader of a pipe ends, the disk of a log is full, or a terminal is closed.

    After the first write that fails, the file descriptor leads to the null device, so that C++ libraries do not fail either. One
    line on ``other`` says that the stream is lost.
    """

    def __init__(self, stream: TextIO, name: str, other: TextIO | None, log: ConsoleLog) -> None:
        self._stream, self._name, self._other, self.log = stream, name, other, log

    def write(self, text: str) -> int:
        self.log.write(self._name, text)
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _lose(self, error: OSError) -> None:
        with suppress(OSError, ValueError):  # a stream without a descriptor cannot be redirected
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        with suppress(OSError, ValueError):
            if self._other is not None:
                self._other.write(f"{self._name} is lost ({error.strerror}). The run goes on and writes its files.\n")
                self._other.flush()


@contextmanager
def lasting_console() -> Iterator[None]:
    """Let the body continue if standard output or standard error is lost. :func:`keep_console` copies both to a file."""
    before = output, errors = sys.stdout, sys.stderr
    log = ConsoleLog()
    if output is not None and errors is not None:  # a process may be started without them
        sys.stdout = LastingStream(output, "Standard output", errors, log)
        sys.stderr = LastingStream(errors, "Standard error", output, log)
    try:
        yield
    except BaseException as error:  # the error is shown only after this block, so the log must get it here
        short = f"{type(error).__name__}: {error}"
        log.add(hide_shapes(short if isinstance(error, UserError) else traceback.format_exc()).splitlines())
        raise
    finally:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, LastingStream):
                stream.flush()
        sys.stdout, sys.stderr = before
