"""Types of command-line arguments. A value that can never be right is refused with one line, before anything is imported."""

from __future__ import annotations

import os
from argparse import ArgumentTypeError
from contextlib import suppress
from pathlib import Path

LONGEST_NAME = 255
"""Largest number of bytes in one part of a path."""
MOST_DIGITS = 19
"""A number must have fewer digits than this: Python raises an error for numbers of thousands of digits."""


def path_of(text: str) -> Path:
    # A script may pass any name. Without this check, the name would fail in a system call with a traceback.
    if "\0" in text or any(len(os.fsencode(part)) > LONGEST_NAME for part in Path(text).parts):
        raise ArgumentTypeError(f"{text[:60]!r}: no file can have this name (at most {LONGEST_NAME} bytes per part)")
    return Path(text)


def new_file_of(text: str) -> Path:
    # An existing file may be the user's, because outputs of commands have no mark. An empty file, as mktemp makes it, may be
    # overwritten.
    path = path_of(text)
    if path.is_dir():
        raise ArgumentTypeError(f"{text} is a folder; give a file")
    if os.path.lexists(path) and not (path.is_file() and path.stat().st_size == 0):
        raise ArgumentTypeError(f"{text} is there already; give another name, or remove it")
    return path


def step_of(text: str) -> str:
    if text != "best" and not (text.isdecimal() and len(text) < MOST_DIGITS):
        raise ArgumentTypeError(f"{text[:60]} is neither a step nor best")
    return text


def size_of(text: str) -> int:
    # isdecimal() is needed, because int() also accepts signs, blanks and underscores.
    if not (text.isdecimal() and len(text) < MOST_DIGITS) or int(text) < 1:
        raise ArgumentTypeError(f"{text[:60]} is not a whole number of at least 1")
    return int(text)


def seconds_of(text: str) -> float:
    with suppress(ValueError):
        if 0 < (number := float(text)) < 1e6:
            return number
    raise ArgumentTypeError(f"{text} is no number of seconds above 0")


def gigabytes_of(text: str) -> float:
    # Reads 24, 24g and 24GB.
    from verl_memopt.memory import cards

    try:
        return cards.gigabytes(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from error
