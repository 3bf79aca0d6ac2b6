"""Read files that nobody vouches for: only regular files of limited size, and JSON only after a check of its types.

Valid checksums do not make a checkpoint trustworthy, because anybody can write them. The same holds for the folder of a run and
the record of a model.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path, PurePosixPath
from types import NoneType, UnionType
from typing import Any, BinaryIO, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

from verl_memopt.errors import UserError

RECORD_BYTES = 64 * 2**20
"""Largest record in bytes. A record is read into memory as a whole."""
LARGEST = 2**63 - 1
"""Largest whole number in a record."""


class RecordError(ValueError):
    """A record is too large, is not JSON, or has unexpected types. The message names the fault, but not the path."""


def opened(path: Path, follow: bool = False) -> BinaryIO:
    """Open a regular file for reading. Reading a pipe could block for ever, and a device may never end.

    ``follow`` allows a link to a regular file. Without it every link is refused, because a link may lead anywhere.

    Raises:
        OSError: The path is not a regular file, or cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW))
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(error.errno, "a link") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no regular file")
    return os.fdopen(descriptor, "rb")


def read_record(path: Path, most: int = RECORD_BYTES, follow: bool = False) -> bytes:
    """Return the contents of a regular file of at most ``most`` bytes. For ``follow`` see :func:`opened`.

    Raises:
        OSError: As in :func:`opened`.
        RecordError: The file is larger.
    """
    with opened(path, follow) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise RecordError(f"it has {size:,} bytes, and such a file has at most {most:,}")
        return file.read(size)


def path_fault(path: str | Path) -> str | None:
    """Return why no file can have this path. None = the path is possible.

    Python reports an impossible path in several ways: as a ValueError, as an OSError, or as a missing file.
    """
    try:
        data = os.fsencode(path)
    except UnicodeEncodeError:
        return "it contains half of a character"
    longest = max(map(len, data.split(b"/")))
    if b"\0" in data:
        return "it contains a NUL byte"
    if longest > LONGEST_NAME or len(data) > LONGEST_PATH:
        return f"its longest name has {longest} bytes (at most {LONGEST_NAME}), all of it {len(data)} (at most {LONGEST_PATH})"
    return None


LONGEST_NAME, LONGEST_PATH = 255, 4095


def usable_path(path: str | Path, address: str, kind: type[UserError] = UserError) -> Path:
    """Check and return a path that the user gave.

    Raises:
        UserError: No file can have this path. The error has class ``kind``, and its message begins with ``address``.
    """
    if fault := path_fault(path):
        raise kind(f"{address}={str(path)!r:.100}: this is no path of a file: {fault}. Correct it.")
    return Path(path)


def odd_entry(root: Path, follow: bool = False) -> str | None:
    """Describe the first entry below a folder that is neither a folder nor a regular file. None = all entries are.

    With ``follow``, a link counts as the file or folder that it leads to, as in the hub's cache, and a broken link is ignored.
    Without it, the first link is described.
    """
    for folder, folders, files in os.walk(root):
        for name in sorted((*folders, *files)):
            try:
                mode = (os.stat if follow else os.lstat)(os.path.join(folder, name)).st_mode
            except OSError:
                if follow:
                    continue
                raise
            if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
                what = "a link" if stat.S_ISLNK(mode) else "no regular file"
                return f"{Path(folder, name).relative_to(root).as_posix()} is {what}"
    return None


def is_inside(name: str) -> bool:
    """Return whether a file name in a record is a plain relative path inside the record's folder."""
    path = PurePosixPath(name)
    return bool(name) and "\0" not in name and not path.is_absolute() and ".." not in path.parts and str(path) == name


def parse_json(data: str | bytes, form: Any) -> Any:
    """Parse JSON and check its types with :func:`checked`.

    Raises:
        RecordError: The text is not JSON, or its types are wrong.
    """
    try:
        value = json.loads(data.decode() if isinstance(data, bytes) else data)
    except (ValueError, RecursionError) as error:
        reason = (
            error.msg if isinstance(error, json.JSONDecodeError) else "too deep" if isinstance(error, RecursionError) else error
        )
        raise RecordError(f"not JSON ({reason})") from error
    return checked(value, form)


def read_json(path: Path, form: Any, follow: bool = False) -> Any:
    """Parse a JSON file with :func:`parse_json`. For ``follow`` see :func:`opened`.

    Raises:
        OSError, RecordError: As in :func:`read_record` and :func:`parse_json`.
    """
    return parse_json(read_record(path, follow=follow), form)


def json_of(path: Path, form: Any, way_out: str, kind: type[UserError] = UserError) -> Any:
    """Parse a JSON file with :func:`parse_json`. A link is followed.

    Raises:
        UserError: The file cannot be read, or its contents do not match ``form``. The error has class ``kind``, names the file,
            and ends with ``way_out``.
    """
    try:
        return read_json(path, form, follow=True)
    except OSError as error:
        raise kind(f"{path}: cannot be read ({error.strerror}). {way_out}") from error
    except RecordError as error:
        raise kind(f"{path}: {error}. {way_out}") from error


def checked(value: Any, form: Any, place: str = "") -> Any:
    """Check that a value has the types of ``form``, and return it. If ``form`` is a dataclass, build it from the mapping.

    Args:
        value: A value from JSON or ``torch.load``.
        form: ``Any``, bool, int, float, str or None, a ``list`` or ``dict`` of forms, a union, a TypedDict, or a dataclass.
            Integers must fit into 64 bits, and keys must be strings. Unknown keys are kept for a TypedDict, and are an error for
            a dataclass.
        place: Name of the value in errors.

    Raises:
        RecordError: A type is wrong, or an entry is missing.
    """
    if form is Any:
        return value
    origin, arguments = get_origin(form), get_args(form)
    if origin is NotRequired:
        return checked(value, arguments[0], place)
    if origin in (Union, UnionType):
        return _of_union(value, arguments, place)
    if origin is list:
        items = _typed(value, (list, tuple), "a list", place)
        return [checked(item, arguments[0], f"{place}[{number}]") for number, item in enumerate(items)]
    if origin is dict:
        entries = _typed(value, Mapping, "an object", place)
        return {_key(name, place): checked(entry, arguments[1], _below(place, name)) for name, entry in entries.items()}
    if is_typeddict(form) or is_dataclass(form):
        return _of_fields(value, form, place)
    return _plain(value, form, place)


def _of_union(value: Any, forms: tuple[Any, ...], place: str) -> Any:
    if value is None and NoneType in forms:
        return None
    for form in (form for form in forms[:-1] if form is not NoneType):
        try:
            return checked(value, form, place)
        except RecordError:
            continue
    # No form fits. Report the error of the last form, which is the main one.
    return checked(value, next(form for form in reversed(forms) if form is not NoneType), place)


def _of_fields(value: Any, form: Any, place: str) -> Any:
    entries, hints = _typed(value, Mapping, "an object", place), get_type_hints(form, include_extras=True)
    if is_typeddict(form):
        optional = {name for name, hint in hints.items() if get_origin(hint) is NotRequired}
    else:
        optional = {field.name for field in fields(form) if field.default is not MISSING or field.default_factory is not MISSING}
        unknown = [name for name in entries if name not in hints]
        if unknown:
            raise RecordError(f"{_below(place, unknown[0])}: there is no such entry")
    missing = [name for name in hints if name not in entries and name not in optional]
    if missing:
        raise RecordError(f"{_below(place, missing[0])} is missing")
    found = {name: checked(entries[name], hint, _below(place, name)) for name, hint in hints.items() if name in entries}
    return {**entries, **found} if is_typeddict(form) else form(**found)


def _plain(value: Any, form: Any, place: str) -> Any:
    if form is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST:
        return float(value)
    if isinstance(value, bool) and form is not bool:
        raise RecordError(f"{_at(place)}expected {NAMES[form]}, and it is true or false")
    _typed(value, form, NAMES[form], place)
    if form is int and abs(value) > LARGEST:
        raise RecordError(f"{_at(place)}the number is too large")
    return value


NAMES: Mapping[Any, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", NoneType: "null"}


def _typed(value: Any, kind: Any, name: str, place: str) -> Any:
    if not isinstance(value, kind):
        raise RecordError(f"{_at(place)}expected {name}, and it is {_shown(value)}")
    return value


def _key(name: Any, place: str) -> str:
    key: str = _typed(name, str, "a string as a key", place)
    return key


def _at(place: str) -> str:
    return f"{place}: " if place else ""


def _below(place: str, name: Any) -> str:
    shown = f"{name!r:.60}" if not isinstance(name, str) else name[:60]
    return f"{place}.{shown}" if place else shown


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.40}"
