"""Runs a shell script with stand-ins for its commands and returns the arguments that it would have given to the trainer.

Only bash and a few text tools really run. In place of any other command its arguments are written down, and it succeeds. The
script sees an empty home folder, an empty working folder and none of the caller's environment variables.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from verl_memopt.errors import UserError

STAND_INS = ("python", "python3", "ray", "uv")
"""Commands that are on PATH as files, so that a text tool such as env finds them too."""

TEXT_TOOLS = (
    *("bash", "sh", "env", "basename", "dirname", "cat", "date", "tr", "sed", "head", "tail", "cut", "grep", "seq", "wc"),
    *("realpath", "readlink", "expr", "uname", "mkdir"),
)
"""Commands that really run: what they print goes into the arguments."""

_STAND_IN = r"""#!/bin/bash
printf '%s\0' "$#" "$@" >> "$ARGUMENTS_FILE"
"""
_BEFORE = r"""
command_not_found_handle() { printf '%s\0' "$(($# - 1))" "${@:2}" >> "$ARGUMENTS_FILE"; }
source() { [ ! -f "$1" ] || builtin source "$@"; }
ulimit() { :; }
tee() { cat > /dev/null; }
mkdir() {
    for path; do
        case "$path" in "$HOME"/* | [!/-]*) command mkdir -p "$path" ;; esac
    done
}
"""
"""Read by every bash before a script. A missing command or file, or a limit that cannot be raised, does not end the script.
Folders are made at home and in the working folder only. ``tee`` writes no file, but reads its input to the end, so that nothing
before it in a pipe ends early."""

_MODULE = "main_ppo"


class RecordError(UserError):
    """A script that cannot be recorded."""


def record(script: Path, seconds: float = 20.0, variables: Mapping[str, str] | None = None) -> list[list[str]]:
    """Return the arguments of each call of ``main_ppo`` that a script makes, in their order.

    The script's home folder is written as ``/home``, its working folder as ``/work``.

    Args:
        script: a bash script.
        seconds: time limit.
        variables: environment variables that the script asks its user to set.

    Raises:
        RecordError: the script ran into the time limit.
    """
    with tempfile.TemporaryDirectory(prefix="verl-script-") as name:
        folder = Path(name)
        arguments = folder / "arguments"
        arguments.touch()
        environment = {
            "PATH": str(_make_commands(folder / "bin")),
            "HOME": str(_make(folder / "home")),
            "USER": "user",
            "ARGUMENTS_FILE": str(arguments),
            "BASH_ENV": str(folder / "before.sh"),
            **(variables or {}),
        }
        (folder / "before.sh").write_text(_BEFORE)
        process = subprocess.Popen(
            ["bash", str(script.resolve())],
            executable=shutil.which("bash"),
            cwd=_make(folder / "work"),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise RecordError(f"{script}: it ran longer than {seconds:g} seconds. Raise --seconds.") from None
        finally:
            _end_group(process)
        calls = [_of_trainer(call) for call in _calls(arguments.read_text().replace(name, ""))]
    return [call for call in calls if call is not None]


def _make(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _make_commands(folder: Path) -> Path:
    """Return a new folder that holds the stand-ins and links to the text tools."""
    folder.mkdir()
    for name in STAND_INS:
        file = folder / name
        file.write_text(_STAND_IN)
        file.chmod(0o755)
    for name in TEXT_TOOLS:
        found = shutil.which(name)
        if found is not None:
            (folder / name).symlink_to(found)
    return folder


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a script and of what it started in the background."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _calls(text: str) -> list[list[str]]:
    """Return the argument lists that the stand-ins wrote: for each call a count and its arguments, each ended by a zero byte."""
    words = text.split("\0")[:-1]
    calls = []
    position = 0
    while position < len(words):
        count = int(words[position])
        calls.append(words[position + 1 : position + 1 + count])
        position += 1 + count
    return calls


def _of_trainer(call: list[str]) -> list[str] | None:
    """Return what follows ``-m ...main_ppo`` or ``.../main_ppo.py`` in a call, or None if the call does not start the trainer."""
    for position, word in enumerate(call):
        if word.removesuffix(".py").replace("/", ".").split(".")[-1] == _MODULE:
            return call[position + 1 :]
    return None
