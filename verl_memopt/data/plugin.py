"""Load classes and functions of the user from a Python file by name, and contain what their code does to the process."""

from __future__ import annotations

import importlib.util
import inspect
import logging
import os
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from verl_memopt.errors import DataError, UserError

logger = logging.getLogger(__name__)

_MODULES = "verl_memopt_plugin_"
_NOT_THEIRS = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"))
"""Folders that contain no code of the user: this package and Python's standard library."""

_INSTALLED = {"site-packages", "dist-packages"}
"""Names of the folders of installed packages, wherever they are: in Python's, the user's or the system's folders."""


def load_from_file(path: str, name: str | None, *, key: str, error: type[UserError]) -> Any:
    """Return the object called ``name`` in the Python file ``path``. A file runs once per run, even if it is loaded again.

    ``key``: the setting that named the file, for errors. ``error``: class of the error. It is raised if the file is missing, does
    not run, or lacks the name.
    """
    file = Path(path).expanduser()
    try:
        is_file = file.is_file()
    except (OSError, ValueError):  # a name that no file can have
        is_file = False
    if not is_file:
        raise error(f"{key}={path}: there is no such file. Set the path of a Python file.")
    file = file.resolve()
    module_name = f"{_MODULES}{file.stem}_{abs(hash(str(file))):x}"
    module = sys.modules.get(module_name) or _run_module(module_name, file, key, error)
    if name is None or not hasattr(module, name):
        public = sorted(entry for entry in vars(module) if not entry.startswith("_"))
        definitions = f"It defines {', '.join(public) or 'nothing'}"
        raise error(f"{key}={path}: the file has no {name!r}. {definitions}. Name one of these in {key.replace('path', 'name')}.")
    return getattr(module, name)


def forget_files() -> None:
    # Make every file run again when it is next loaded. The user may edit it between two runs of one process.
    for name in [name for name in sys.modules if name.startswith(_MODULES)]:
        del sys.modules[name]


def refuse_verls_arguments(made: Any, verl_arguments: Sequence[str], our_arguments: str, address: str) -> None:
    """Refuse a class that was written for verl, whose arguments have other names and another order.

    Args:
        made: The class.
        verl_arguments: Arguments by which verl's classes are recognised.
        our_arguments: Arguments that a class gets here, for the error.
        address: Setting and class, for the error.
    """
    try:
        names = inspect.signature(made).parameters
    except (TypeError, ValueError):  # not a class, or a class without a signature; the later call reports what is wrong
        return
    if set(verl_arguments) <= names.keys():
        raise DataError(
            f"{address}: the class takes verl's arguments ({', '.join(names)}); here it is called with ({our_arguments}). "
            "Write a class for these arguments: docs/extend.md has an example."
        )


def _is_theirs(file: str) -> bool:
    return not file.startswith(_NOT_THEIRS) and _INSTALLED.isdisjoint(Path(file).parts)


def raised(problem: BaseException) -> str:
    own = problem.__cause__ if isinstance(problem, EndsProcessError) else problem
    assert own is not None
    places = traceback.extract_tb(own.__traceback__)
    place = next((place for place in reversed(places) if _is_theirs(place.filename)), places[-1])
    text = str(problem) if own is not problem else f"{type(problem).__name__}: {problem}"
    return f"{' '.join(text.split())} in {place.filename}:{place.lineno}"


# Containment of a user's code: it may try to end the process, fork it, or change state of the whole process.


class EndsProcessError(Exception):
    """A user's code tried to end the process. ``__cause__`` is the exception that the code raised."""


@contextmanager
def contained(what: str, environment: bool = True) -> Iterator[None]:
    """Run a user's code in the ``with`` block. It can neither end nor fork this process, and changes to the process are undone.

    ``what``: names the code in warnings. ``environment``: also warn about changed environment variables. An exception of a signal
    handler passes unchanged, because Ctrl-C is not a fault of the code.

    Raises:
        EndsProcessError: The code tried to end the process.
    """
    with _noted_signals() as by_signals:
        pid, shared, outer = os.getpid(), _shared(environment), getattr(_inside, "pid", None)
        vars(os)["_exit"] = _exit
        _inside.pid = pid
        try:
            yield
        except BaseException as problem:
            if isinstance(problem, Exception) or os.getpid() != pid or by_signals:
                raise
            text = str(problem) if isinstance(problem, _ExitError) else f"{type(problem).__name__}: {problem}"
            raise EndsProcessError(text) from problem
        finally:
            _inside.pid = outer
            if os.getpid() != pid:  # a child that the code has forked must not continue as a second run
                os.write(2, f"{what} has forked this process, and the child returned to the run: the child ends here.\n".encode())
                _EXIT(0)
            _put_back(shared, _shared(environment), what.partition("(")[0])


class _ExitError(BaseException):
    """A call of ``os._exit`` inside a user's code."""


_EXIT = os._exit
_inside = threading.local()


def _exit(status: int) -> NoReturn:
    # A forked child of the user's code may still end itself.
    if getattr(_inside, "pid", None) == os.getpid():
        raise _ExitError(f"os._exit({status})")
    _EXIT(status)


@contextmanager
def _noted_signals() -> Iterator[list[BaseException]]:
    """Yield a list, to which each exception is added that a signal handler raises in the ``with`` block.

    A KeyboardInterrupt alone does not show who raised it: Python's own handler of Ctrl-C, which notebooks and Ray's workers have,
    leaves no frame in the traceback.
    """
    raised_by_handlers: list[BaseException] = []
    before: dict[int, Callable[[int, FrameType | None], Any]] = {}
    if threading.current_thread() is threading.main_thread():
        found = {number: signal.getsignal(number) for number in SIGNALS}
        before = {number: handler for number, handler in found.items() if callable(handler)}

    def noted(number: int, frame: FrameType | None) -> None:
        try:
            before[number](number, frame)
        except BaseException as error:
            raised_by_handlers.append(error)
            raise

    for number in before:
        signal.signal(number, noted)
    try:
        yield raised_by_handlers
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a process to end."""


Shared = dict[str, tuple[Any, Callable[[Any], object] | None]]
"""Name -> value, and the function that restores it. None = a change is only reported."""


def _shared(environment: bool) -> Shared:
    # Restore nothing in another thread, because the main thread may have made the change.
    if threading.current_thread() is not threading.main_thread():
        return {}
    found: Shared = {"the environment": (dict(os.environ), None)} if environment else {}
    with suppress(OSError):  # the folder may have been removed
        found["the working directory"] = (os.getcwd(), os.chdir)
    for number in SIGNALS:
        found[f"the handler of {number.name}"] = (signal.getsignal(number), partial(signal.signal, number))
    if (torch := sys.modules.get("torch")) is not None and hasattr(torch, "get_default_dtype"):
        found["whether gradients are computed"] = (torch.is_grad_enabled(), torch.set_grad_enabled)
        found["torch's default dtype"] = (torch.get_default_dtype(), torch.set_default_dtype)
        found["torch's number of threads"] = (torch.get_num_threads(), torch.set_num_threads)
        state = torch.get_rng_state()  # restored only if the seed changed, because the code may draw numbers
        found["torch's seed"] = (torch.initial_seed(), lambda seed: torch.set_rng_state(state))
    return found


def _put_back(before: Shared, now: Shared, what: str) -> None:
    for name, (value, set_back) in before.items():
        if name not in now or now[name][0] == value:
            continue
        if set_back is not None:
            set_back(value)
        if (what, name) not in _told:
            _told.add((what, name))
            did = "and the change stays" if set_back is None else "and it is restored after each call"
            logger.warning("%s changed %s for the whole process, %s", what, name, did)


_told: set[tuple[str, str]] = set()


@contextmanager
def users_code(what: str, error: type[UserError]) -> Iterator[None]:
    """Turn any exception of a user's code into an ``error`` whose message is one line."""
    try:
        with contained(what):
            yield
    except UserError:
        raise
    except Exception as problem:  # a user's code may raise anything
        raise error(f"{what} raised {raised(problem)}. Correct it.") from problem


def _run_module(module_name: str, file: Path, key: str, error: type[UserError]) -> Any:
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise error(f"{key}={file}: this is not a Python file. Use a file that ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        with contained(f"{key}={file}", environment=False):  # imports may set environment variables
            spec.loader.exec_module(module)
    except Exception as problem:  # a user's file may raise anything
        del sys.modules[module_name]
        own = problem.__cause__ if isinstance(problem, EndsProcessError) else None
        trace = _trace_within(own or problem, str(file))
        raise error(f"{key}={file}: the file does not run. Correct it:\n{trace}") from problem
    return module


def _trace_within(problem: BaseException, file: str) -> str:
    # The traceback from the first frame in ``file`` on, because the user only needs the part about their code.
    trace = problem.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != file:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(problem), problem, trace)).rstrip()
