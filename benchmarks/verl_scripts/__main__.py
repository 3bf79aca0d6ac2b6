"""``python -m benchmarks.verl_scripts FOLDER``: which of verl's example scripts compose with this command line as they are.

    python -m benchmarks.verl_scripts verl/examples [--source TEXT] [--set NAME=VALUE ...] [--text FILE] [--json FILE]

Exit codes: 0 the table is written, 2 the folder has no script that calls the trainer, or a script cannot be recorded.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.verl_scripts.recorder import record
from benchmarks.verl_scripts.scope import outside
from benchmarks.verl_scripts.table import COMPOSES, NOT_COUNTED, REFUSED, Row, render
from verl_memopt.cli import build_parser
from verl_memopt.config.loader import load_settings
from verl_memopt.errors import ConfigError, UserError

SUFFIXES = (".sh", ".slurm")
CALL = "main_ppo"


def scripts_in(folder: Path) -> list[Path]:
    """Return every shell script below a folder that names the trainer, in the order of their paths."""
    files = sorted(file for file in folder.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    return [file for file in files if CALL in file.read_text(errors="replace")]


def refusals(arguments: Sequence[str]) -> list[str]:
    """Return what the command line says against the arguments of a call; nothing where they compose."""
    parser = build_parser("main_ppo")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parsed = parser.parse_intermixed_args(list(arguments))
        load_settings(parsed.config_name, parsed.overrides, parsed.config_dir)
    except SystemExit:
        return [said.getvalue().strip().splitlines()[-1]]
    except ConfigError as error:
        first, *others = str(error).splitlines()
        return others or [first]
    return []


def row_of(script: Path, folder: Path, seconds: float, variables: Mapping[str, str]) -> Row:
    """Return what becomes of a script: all its calls of the trainer together."""
    name = script.relative_to(folder)
    calls = record(script, seconds, variables)
    if not calls:
        return Row(name.as_posix(), NOT_COUNTED, (f"it makes no call of {CALL}",))
    why = next((reason for call in calls if (reason := outside(name, call))), "")
    if why:
        return Row(name.as_posix(), NOT_COUNTED, (why,))
    problems = tuple(dict.fromkeys(reason for call in calls for reason in refusals(call)))
    return Row(name.as_posix(), REFUSED if problems else COMPOSES, problems)


def main(argv: Sequence[str] | None = None) -> int:
    """Record and compose every script of a folder, print the table and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verl_scripts", description=__doc__)
    parser.add_argument("folder", type=Path, help="verl's examples")
    parser.add_argument("--source", default="verl", help="which state of verl this is, for the head of the table")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="environment variables that scripts ask for")
    parser.add_argument("--seconds", type=float, default=20.0, help="time limit of one script (default: 20)")
    parser.add_argument("--text", type=Path, help="also write the table here")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parsed = parser.parse_args(argv)
    variables = {name: value for name, _, value in (each.partition("=") for each in parsed.set)}
    logging.disable(logging.WARNING)
    try:
        rows = [row_of(script, parsed.folder, parsed.seconds, variables) for script in scripts_in(parsed.folder)]
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        logging.disable(logging.NOTSET)
    if not rows:
        print(f"{parsed.folder}: no script that calls {CALL}. Give verl's examples folder.", file=sys.stderr)
        return 2
    text = render(rows, parsed.source)
    print(text)
    if parsed.text:
        parsed.text.write_text(text + "\n")
    if parsed.json:
        parsed.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
