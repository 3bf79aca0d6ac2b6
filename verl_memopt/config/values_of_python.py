"""Convert values that a caller gives from Python, to values of settings and to overrides of a command line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from verl_memopt.errors import ConfigError


class NoValueError(ConfigError):
    """An object cannot be the value of a setting. ``place``: where it is in the given value, such as ``.name`` or ``[3]``."""

    def __init__(self, value: Any, place: str = "") -> None:
        super().__init__(f"{value!r:.100} of type {type(value).__name__} cannot be the value of a setting. Give {PLAIN}.")
        self.value, self.place = value, place


PLAIN = "a number, a text, a list or a dict"


def plain_value(value: Any, place: str = "") -> Any:
    """Convert a Python value to a number, a text, None, a list or a dict, as settings hold them.

    Raises:
        NoValueError: The value, or something inside it, cannot be converted.
    """
    if isinstance(value, Enum):
        return plain_value(value.value, place)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    if hasattr(value, "to_dict"):  # a config object of transformers
        value = {name: entry for name, entry in value.to_dict().items() if not name.startswith("_")}
    if isinstance(value, Mapping):
        return {str(key): plain_value(item, f"{place}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(entry, f"{place}[{number}]") for number, entry in enumerate(value)]
    raise NoValueError(value, place)


def as_override(value: Any) -> str:
    """Return a value in the form in which Hydra reads it on a command line.

    Raises:
        NoValueError: The value cannot be converted.
    """
    value = plain_value(value)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{as_override(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(as_override, value)) + "]"
    plain = re.fullmatch(r"[\w./:@-]+", value, re.ASCII) and value.lower() not in ("null", "true", "false", "nan", "inf")
    is_number = re.fullmatch(r"[-+.\d_]+([eE][-+]?\d+)?", value)
    return value if plain and not is_number else quoted(value)


def quoted(text: str) -> str:
    """Return a text in single quotes, such that Hydra reads the same text back. An interpolation in it is not resolved."""
    return "'" + re.sub(r"(\\*)('|\$\{|$)", _escaped, text) + "'"


def _escaped(found: re.Match[str]) -> str:
    # Hydra halves the backslashes before a quote, before an interpolation and at the end of the text. So they are doubled here.
    slashes, what = found.groups()
    return slashes * 2 + {"": "", "'": "\\'"}.get(what, f"\\{what}")


def with_quotes(override: str) -> str:
    """Put quotes around the value of an override if it has letters beyond ASCII, which Hydra does not accept unquoted.

    A value that already has quotes, or is a list, a dict or an interpolation, is left as it is.
    """
    key, sign, value = override.partition("=")
    if not sign or value.isascii() or not key.isascii() or re.match(r"[\s'\"\[{(]", value) or "${" in value:
        return override
    return f"{key}={quoted(value)}"
