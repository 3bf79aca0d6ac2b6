"""The user's own classes and functions, loaded from a Python file by name."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl_memopt.errors import DataError, UserError

_MODULES = "verl_memopt_plugin_"
_NOT_THEIRS = (str(Path(__file__).parents[1]), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
"""Where no user's code lies: this package, Python's own library, and what is installed."""


def load_from_file(path: str, name: str | None, *, key: str, error: type[UserError]) -> Any:
    """Return the object called ``name`` in the Python file ``path``. A file is run once in a run, even if it is loaded again.

    ``key`` is the setting that named the file, for errors. They are of the class ``error``: the file is missing, does not run, or
    lacks the name.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise error(f"{key}={path}: there is no such file. Set the path of a Python file.")
    file = file.resolve()
    module_name = f"{_MODULES}{file.stem}_{abs(hash(str(file))):x}"
    module = sys.modules.get(module_name) or _run_module(module_name, file, key, error)
    if name is None or not hasattr(module, name):
        public = sorted(entry for entry in vars(module) if not entry.startswith("_"))
        there = f"It defines {', '.join(public) or 'nothing'}"
        raise error(f"{key}={path}: the file has no {name!r}. {there}. Name one of these in {key.replace('path', 'name')}.")
    return getattr(module, name)


def forget_files() -> None:
    """Run every file again where it is next loaded: between two runs of one process, its owner may have edited it."""
    for name in [name for name in sys.modules if name.startswith(_MODULES)]:
        del sys.modules[name]


def refuse_verls_arguments(made: Any, theirs: Sequence[str], ours: str, address: str) -> None:
    """Refuse a class that was written for verl, whose arguments have other names and another order.

    ``theirs`` are arguments by which verl's classes are known, and ``ours`` those that a class gets here. ``address`` is setting
    and class, for the error.
    """
    try:
        names = inspect.signature(made).parameters
    except (TypeError, ValueError):  # no class, or one without a signature: calling it shows what is wrong
        return
    if set(theirs) <= names.keys():
        raise DataError(
            f"{address}: the class takes verl's arguments ({', '.join(names)}); here it is called with ({ours}). "
            "Write one for these arguments: docs/extend.md has an example."
        )


def raised(problem: BaseException) -> str:
    """Return what a user's code raised, and at which line of theirs, in one line."""
    places = traceback.extract_tb(problem.__traceback__)
    place = next((place for place in reversed(places) if not place.filename.startswith(_NOT_THEIRS)), places[-1])
    return f"{' '.join(f'{type(problem).__name__}: {problem}'.split())} in {place.filename}:{place.lineno}"


@contextmanager
def users_code(what: str, error: type[UserError]) -> Iterator[None]:
    """Turn whatever a user's code raises into one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as problem:
        raise error(f"{what} raised {raised(problem)}. Correct it.") from problem


def _run_module(module_name: str, file: Path, key: str, error: type[UserError]) -> Any:
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise error(f"{key}={file}: this is not a Python file. Use a file that ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as problem:  # a user's file may raise anything
        del sys.modules[module_name]
        raise error(f"{key}={file}: the file does not run. Correct it:\n{_trace_within(problem, str(file))}") from problem
    return module


def _trace_within(problem: BaseException, file: str) -> str:
    """Return the traceback from the first frame in ``file`` on: the user needs only the part about their own code."""
    trace = problem.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != file:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(problem), problem, trace)).rstrip()
