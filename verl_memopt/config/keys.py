"""The dotted keys of the settings tree: which keys exist, their types, and how to read or replace their values.

Below them are the helpers that describe problems and rules of settings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar, get_type_hints

from verl_memopt.algorithms.records import CUSTOM
from verl_memopt.config.schema import Settings
from verl_memopt.errors import ConfigError
from verl_memopt.memory.knob import Predicate, Refusal, Sentence, UnusedKey

Section = TypeVar("Section")


@cache
def field_types(section: type, annotated: bool = False) -> dict[str, Any]:
    """Return field -> type for a section class: first the fields of the class itself, then the fields of its knobs.

    ``annotated``: keep ``Annotated`` types, which hold the ranges.
    """
    hints = get_type_hints(section, include_extras=annotated)
    fields = [field.name for field in dataclasses.fields(section)]
    has_knobs = any(base.__module__.startswith("verl_memopt.memory.") for base in section.__mro__)
    own = [name for name in fields if has_knobs and name in vars(section).get("__annotations__", {})]
    return {name: hints[name] for name in dict.fromkeys([*own, *fields])}


def walk(section: type = Settings, prefix: str = "", annotated: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield every (dotted key, type) below a section. A section comes before its own keys."""
    for name, kind in field_types(section, annotated).items():
        yield prefix + name, kind
        if dataclasses.is_dataclass(kind):
            assert isinstance(kind, type)
            yield from walk(kind, f"{prefix}{name}.", annotated)


@cache
def all_keys() -> tuple[tuple[str, Any], ...]:
    return tuple(walk())


@cache
def leaf_types() -> dict[str, Any]:
    return {key: kind for key, kind in all_keys() if not dataclasses.is_dataclass(kind)}


@cache
def section_keys() -> frozenset[str]:
    return frozenset(key for key, kind in all_keys() if dataclasses.is_dataclass(kind))


MAIN = ("actor_rollout_ref.model.", "actor_rollout_ref.actor.", "data.", "trainer.")
"""Prefixes of preferred keys. If several keys end in the same last part, a short name means the one key among these."""


def leaf_values(settings: Settings) -> dict[str, Any]:
    return dict(zip(leaf_types(), attrgetter(*leaf_types())(settings), strict=True))


def value_at(settings: Any, key: str) -> Any:
    return attrgetter(key)(settings)


def replaced(section: Section, values: Mapping[str, Any]) -> Section:
    own: dict[str, Any] = {}
    below: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        name, _, rest = key.partition(".")
        if rest:
            below.setdefault(name, {})[rest] = value
        else:
            own[name] = value
    own.update({name: replaced(getattr(section, name), part) for name, part in below.items()})
    return dataclasses.replace(section, **own)  # type: ignore[type-var]


def flatten(tree: Mapping[str, Any], name_of: Callable[[str], str] = str, prefix: str = "") -> dict[str, Any]:
    """Return dotted key -> value for a nested mapping.

    A mapping that is the value of a key in the schema is not flattened. Empty sections are dropped.

    ``name_of``: returns the schema's key for another spelling of a dotted key.
    """
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if not isinstance(value, Mapping) or name_of(key) in leaf_types():
            flat[key] = value
        elif value:
            flat.update(flatten(value, name_of, f"{key}."))
        elif key not in section_keys():
            flat[key] = value
    return flat


# Problems of the settings. They are collected, so that one error reports all of them.


@dataclass(frozen=True)
class Problem:
    """One mistake in the settings: the keys that it concerns, and the text that the user reads."""

    keys: tuple[str, ...]
    text: str


def problem(values: dict[str, Any], what: str, way_out: str) -> Problem:
    address = ", ".join(f"{key}={shown(value)}" for key, value in values.items())
    return Problem(tuple(values), f"{address}: {what}. {way_out}".rstrip())


def shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(shown(item) for item in value) + "]"
    return repr(value) if isinstance(value, str) and not value.strip() else str(value)


def raise_together(problems: Iterable[Problem]) -> None:
    """Raise one ConfigError with one line per problem, if there are problems."""
    lines = list(dict.fromkeys(found.text for found in problems))
    if len(lines) == 1:
        raise ConfigError(lines[0])
    if lines:
        raise ConfigError(f"{len(lines)} problems in the settings:\n" + "\n".join(lines))


# Rules as tables: each key that a rule shows, with the value that the rule refuses.

Ask = Callable[[Any], bool]
"""A predicate of one key's value."""


def other_than(*values: Any) -> Ask:
    """Return a predicate that is true for every value except ``values``."""
    return lambda value: value not in values


def above(limit: float) -> Ask:
    """Return a predicate that is true for numbers above ``limit``, and false for null."""
    return lambda value: value is not None and value > limit


IS_SET = other_than(None)


def refused(
    where: Mapping[str, Any], because: str, way_out: str | Sentence, given: Predicate | None = None, here: Sentence | None = None
) -> Refusal:
    """Return a rule that refuses a combination of values.

    Args:
        where: Dotted key -> refused value, or a predicate that is true for refused values. The rule refuses the settings if all
            keys have such values.
        because: Why, as a sentence without a full stop.
        way_out: What the user can set instead.
        given: A further condition that must hold.
        here: Returns the reason with numbers of the settings; see ``because_here`` of :class:`Refusal`.
    """
    assert leaf_types().keys() >= where.keys(), where

    def when(settings: Settings) -> bool:
        values = ((value_at(settings, key), asked) for key, asked in where.items())
        return all(asked(value) if callable(asked) else value == asked for value, asked in values) and (
            given is None or given(settings)
        )

    return Refusal(tuple(where), when, because, way_out, here)


def idle(switch: str, off: Any, *keys: str) -> Iterator[UnusedKey]:
    """Yield the rules that ``keys`` have no effect while ``switch`` has the value ``off``."""
    for key in keys:
        yield UnusedKey(key, lambda settings: value_at(settings, switch) == off, f"{switch} is {shown(off)}")


def belongs(key: str, choice: str, owners: tuple[str, ...], because: str) -> UnusedKey:
    """Return the rule that ``key`` has an effect only if the value of the key ``choice`` is in ``owners`` or is ``custom``."""
    return UnusedKey(key, lambda settings: value_at(settings, choice) not in (*owners, CUSTOM), because)
