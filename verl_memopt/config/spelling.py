"""The record of a setting of TRL or of a recipe: its names, the keys of ours that it sets, and the conversion of its value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from verl_memopt.config.keys import value_at
from verl_memopt.config.schema import Settings

ESTIMATOR = "algorithm.adv_estimator"
RLOO, GRPO, DISTILL = ("rloo",), ("grpo",), ("distill",)
ESTIMATORS = (*RLOO, *GRPO, *DISTILL)
"""Values of ``algorithm.adv_estimator`` with which TRL's names are read."""

TrlSettings = Mapping[str, Any]
"""Name of TRL -> value, for all names that the user wrote."""
Values = Mapping[str, Any]
"""Our key -> value, for all keys that are set so far."""
Convert = Callable[[str, TrlSettings, Values], dict[str, Any]]
"""(name of TRL, values of all names of TRL, our values so far) -> our keys and values for this name."""


class NotConvertibleError(Exception):
    """A value of TRL has no equal here.

    Args:
        what: What is wrong, as a sentence without a full stop.
        way_out: What the user can do.
        names: The names of TRL that the error shows; () = the name that is being converted.
    """

    def __init__(self, what: str, way_out: str, names: tuple[str, ...] = ()) -> None:
        super().__init__(what)
        self.what, self.way_out, self.names = what, way_out, names


def effective(key: str, values: Values) -> Any:
    return values.get(key, value_at(Settings(), key))


def copied(*keys: str) -> Convert:
    """Return a conversion that gives the value unchanged to each of ``keys``. Our checks find wrong values later."""
    return lambda name, trl, values: dict.fromkeys(keys, trl[name])


def words(key: str, meanings: Mapping[str, Any]) -> Convert:
    """Return a conversion of a value that is one of a few words. ``meanings``: TRL's word, in lower case -> our value."""

    def convert(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
        word = str(trl[name]).lower()
        if word not in meanings:
            raise NotConvertibleError("this value has no equal", f"Set {key}.")
        return {key: meanings[word]}

    return convert


def off_at_zero(key: str, off: Any) -> Convert:
    # TRL switches the setting off with 0 or null, and our key does so with the value `off`.
    return lambda name, trl, values: {key: off if trl[name] in (None, 0) else trl[name]}


def off_at_null(key: str, off: Any) -> Convert:
    return lambda name, trl, values: {key: off if trl[name] is None else trl[name]}


def unless_none(*keys: str) -> Convert:
    """Return a conversion that copies the value, and sets nothing if it is null."""
    return lambda name, trl, values: {} if trl[name] is None else dict.fromkeys(keys, trl[name])


@dataclass(frozen=True)
class Spelling:
    """One setting of TRL."""

    names: tuple[str, ...]
    """Names of the setting in all versions of TRL, the newest first. A user may give only one of them."""
    keys: tuple[str, ...]
    """Our keys that it can set. The user may not give one of these as well."""
    convert: Convert
    """Returns our keys and values."""
    note: str = ""
    """What differs from TRL, as a sentence without a full stop. The log and the page for users of TRL show it."""
    estimators: tuple[str, ...] = ESTIMATORS
    """Estimators with which the setting is read."""


def same(name: str, key: str, *older: str, note: str = "") -> Spelling:
    """Return the record of a setting whose value needs no conversion. ``older``: its names in earlier versions of TRL."""
    return Spelling((name, *older), (key,), copied(key), note)
