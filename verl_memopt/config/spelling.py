"""How a setting under another name is written down: its names, the keys of ours that it sets, and how its value is converted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from verl_memopt.config.keys import value_at
from verl_memopt.config.schema import Settings

ESTIMATOR = "algorithm.adv_estimator"
RLOO, GRPO = ("rloo",), ("grpo",)
ESTIMATORS = (*RLOO, *GRPO)
"""Values of ``algorithm.adv_estimator`` under which the names are read: the algorithms of ``recipe/rloo``."""

TrlSettings = Mapping[str, Any]
"""Name of TRL -> value, of all names that the user wrote."""
Values = Mapping[str, Any]
"""Our key -> value, for all keys that are set so far."""
Convert = Callable[[str, TrlSettings, Values], dict[str, Any]]
"""(name of TRL, all names of TRL, our values so far) -> our keys and values for this name."""


class NotConvertibleError(Exception):
    """A value of TRL has no equal here.

    ``what`` has no full stop. ``names``: the names of TRL that it is about; () = the one that is being read.
    """

    def __init__(self, what: str, way_out: str, names: tuple[str, ...] = ()) -> None:
        super().__init__(what)
        self.what, self.way_out, self.names = what, way_out, names


def effective(key: str, values: Values) -> Any:
    return values.get(key, value_at(Settings(), key))


def copied(*keys: str) -> Convert:
    """Convert a value that means the same here: each of ``keys`` gets it, and our checks apply."""
    return lambda name, trl, values: dict.fromkeys(keys, trl[name])


def words(key: str, meanings: Mapping[str, Any]) -> Convert:
    """Convert a value that is one of a few words.

    ``meanings``: TRL's value, in lower case -> our value.
    """

    def convert(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
        word = str(trl[name]).lower()
        if word not in meanings:
            raise NotConvertibleError("this value has no equal", f"Set {key}.")
        return {key: meanings[word]}

    return convert


def off_at_zero(key: str, off: Any) -> Convert:
    # Convert a number that TRL switches off with 0 or null, and we switch off with the value ``off``.
    return lambda name, trl, values: {key: off if trl[name] in (None, 0) else trl[name]}


def unless_none(*keys: str) -> Convert:
    """Copy a value, and treat null as a name that is not written."""
    return lambda name, trl, values: {} if trl[name] is None else dict.fromkeys(keys, trl[name])


@dataclass(frozen=True)
class Spelling:
    """One setting of TRL."""

    names: tuple[str, ...]
    """Names of the setting, the newest first. Two of them at once are refused."""
    keys: tuple[str, ...]
    """Our keys that it can set. Giving one of them as well is refused."""
    convert: Convert
    """Return keys and values of ours."""
    note: str = ""
    """What differs from TRL, as a sentence without a full stop."""
    estimators: tuple[str, ...] = ESTIMATORS
    """Estimators that have the setting."""


def same(name: str, key: str, *older: str, note: str = "") -> Spelling:
    """Return a spelling that differs in its name alone. ``older``: names of the setting in earlier versions of TRL."""
    return Spelling((name, *older), (key,), copied(key), note)
