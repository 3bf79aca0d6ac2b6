"""What is wrong with one set of settings, gathered so that everything is reported at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from verl_memopt.errors import ConfigError


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: the keys it is about, and the sentence the user reads."""

    keys: tuple[str, ...]
    text: str


def problem(values: dict[str, Any], what: str, way_out: str) -> Problem:
    """Return a problem whose text opens with ``key=value`` for every key it is about."""
    address = ", ".join(f"{key}={shown(value)}" for key, value in values.items())
    return Problem(tuple(values), f"{address}: {what}. {way_out}".rstrip())


def shown(value: Any) -> str:
    """Return the value as it would be written in YAML or on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(shown(item) for item in value) + "]"
    return repr(value) if isinstance(value, str) and not value.strip() else str(value)


def raise_together(problems: Iterable[Problem]) -> None:
    """Raise one ConfigError with a line for each problem; do nothing when there is none."""
    lines = list(dict.fromkeys(each.text for each in problems))
    if len(lines) == 1:
        raise ConfigError(lines[0])
    if lines:
        raise ConfigError(f"{len(lines)} problems in the settings:\n" + "\n".join(lines))
