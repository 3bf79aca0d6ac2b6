"""Translate the names that a user wrote to keys. The command line, YAML files and Python all use this reader.

A name is a whole key of ours, verl's spelling of a key, the last part of a key if only one key ends with it, or, with RLOO, GRPO
and distillation, TRL's name. One log line shows how all names were read. Two spellings of one setting are a problem.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from functools import cache
from typing import Any

from verl_memopt.config.aliases import RENAMED_SECTIONS, VALUES, our_key
from verl_memopt.config.keys import MAIN, Problem, flatten, leaf_types, problem, section_keys, shown
from verl_memopt.config.spelling import ESTIMATOR, ESTIMATORS, NotConvertibleError, Spelling, effective
from verl_memopt.config.trl_names import MANAGER, NAMES, ONE_SETTING, SPELLINGS
from verl_memopt.config.unused_keys import NO_EQUAL, NoEffect, passes
from verl_memopt.recipes import RECIPES

logger = logging.getLogger(__name__)

_DECIDING = {key.rpartition(".")[2]: key for key in (ESTIMATOR, MANAGER)}
"""Last part of a key -> key, for the two keys that decide which names of TRL and of a recipe are read."""


@dataclass(frozen=True)
class KeySources:
    """Which keys the user wrote where. Keys in files that the config file includes are defaults, and these keys win over them."""

    command_line: Set[str]
    file: Set[str] = frozenset()
    """Keys in the config file itself."""

    def beside(self, name: str) -> set[str]:
        """Return the other keys of the user, under our names, that conflict with ``name`` if they mean the same setting.

        A name on the command line conflicts only with keys on the command line, because these win over the file. A name in a
        file conflicts with keys in both places.
        """
        competitors = self.command_line if name in self.command_line else self.command_line | self.file
        return set(map(our_key, competitors - {name}))

    def renamed(self, name: Callable[[str], str]) -> KeySources:
        return KeySources(frozenset(map(name, self.command_line)), frozenset(map(name, self.file)))


@cache
def last_parts() -> dict[str, tuple[str, ...]]:
    """Return last part of a key -> the key that it means, or all candidates if it is ambiguous."""
    ending: dict[str, list[str]] = {}
    for key in leaf_types():
        ending.setdefault(key.rpartition(".")[2], []).append(key)
    heads = {key.partition(".")[0] for key in (*section_keys(), *leaf_types(), *RENAMED_SECTIONS)}
    main = {part: [key for key in keys if key.startswith(MAIN)] for part, keys in ending.items()}
    return {
        part: tuple(keys if len(keys) == 1 or len(main[part]) != 1 else main[part])
        for part, keys in ending.items()
        if part not in heads
    }


def estimator_of(flat: Mapping[str, Any]) -> str | None:
    # Return our name of the estimator, also if the settings have verl's name; None if the value is not a text.
    name = effective(ESTIMATOR, flat)
    return VALUES[ESTIMATOR].get(name, name) if isinstance(name, str) else None


def names_read(flat: Mapping[str, Any]) -> tuple[list[tuple[Spelling, str]], dict[str, NoEffect]]:
    """Return (spellings that a run reads, name -> effect of names that have no equal here).

    The spellings are in the order in which they are read, each with its owner: "TRL", or the title of a recipe. If a recipe
    scores the responses, its names come first. Both are empty unless the estimator is in :data:`ESTIMATORS`.
    """
    if estimator_of(flat) not in ESTIMATORS:
        return [], {}
    recipe = RECIPES.get(str(effective(MANAGER, flat)))
    spellings, no_equal = [(row, "TRL") for row in SPELLINGS], dict(NO_EQUAL)
    if recipe is not None:
        ours = recipe.names()
        spellings = [*((row, recipe.title) for row in ours.spellings), *spellings]
        no_equal |= ours.no_equal
        for name, others in ours.replaced.items():
            no_equal |= others if name in flat else {}
    return [pair for pair in spellings if no_equal.keys().isdisjoint(pair[0].names)], no_equal


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    # Flatten the settings, except a dict that is the value of TRL's name or of the last part of a key.
    names = NAMES | last_parts().keys()
    dicts = {name: value for name, value in tree.items() if name in names and isinstance(value, Mapping)}
    flat = flatten({name: value for name, value in tree.items() if name not in dicts}, our_key) | dicts
    return {_DECIDING.get(name, name): value for name, value in flat.items()}


def keys_set(given: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return name -> the keys that it can set, for each name in ``given``.

    ``given``: the names and values that a user wrote, and the estimator if it is not the default.
    """
    flat = _flat(given)
    spellings, no_equal = names_read(flat)
    keys_of_name: dict[str, set[str]] = {name: set() for name in no_equal}
    for spelling, _ in spellings:
        for name in spelling.names if estimator_of(flat) in spelling.estimators else ():
            keys_of_name.setdefault(name, set()).update(spelling.keys)
    return {name: keys_of_name.get(name, {our_key(_meant(name))}) for name in given}


def read_names(
    tree: Mapping[str, Any], written: KeySources | None = None, quiet: Set[str] = frozenset()
) -> tuple[dict[str, Any], KeySources, list[Problem]]:
    """Translate short names and names of TRL or a recipe to keys; return the settings, their sources, and problems.

    Keys that are only in verl's spelling are left for :func:`verl_memopt.config.aliases.translate`, and unknown names are
    returned unchanged. A short name is read only outside of all sections. Names of TRL are read if the estimator is one of
    :data:`ESTIMATORS`, and a recipe's names in runs of this recipe.

    Args:
        tree: The settings as the user wrote them.
        written: Keys that the user wrote; None = all keys of ``tree``.
        quiet: Names whose translation is not logged.
    """
    flat = _flat(tree)
    written = KeySources(frozenset(flat)) if written is None else written.renamed(lambda name: _DECIDING.get(name, name))
    spellings, no_equal = names_read(flat)
    trl_names = {name for spelling, _ in spellings for name in spelling.names} | no_equal.keys()
    values, parts, problems = _whole_keys(flat, written, trl_names)
    trl = {name: values.pop(name) for name in flat if name in trl_names}
    values, readings, trl_problems = _translated(trl, values, written, (spellings, no_equal))
    messages = [text for name, text in {**parts, **readings}.items() if name not in quiet]
    if messages:
        logger.info("names: %s", "; ".join(messages))
    return values, written.renamed(lambda name: name if name in trl_names else _meant(name)), problems + trl_problems


def _meant(name: str) -> str:
    keys = last_parts().get(name, ())
    return keys[0] if len(keys) == 1 else name


def _whole_keys(
    flat: Mapping[str, Any], written: KeySources, trl_names: Set[str]
) -> tuple[dict[str, Any], dict[str, str], list[Problem]]:
    """Replace last parts by whole keys; return (settings, name -> log text of how it was read, problems)."""
    short = {name: value for name, value in flat.items() if name in last_parts() and name not in trl_names}
    values = {name: value for name, value in flat.items() if name not in short}
    readings, problems = {}, []
    for name, value in short.items():
        key, *others = last_parts()[name]
        if others:
            several = f"several settings end in this name: {', '.join((key, *others))}"
            problems.append(problem({name: value}, several, "Write the whole key of one of them."))
        elif key in written.beside(name):
            problems.append(_two_spellings({name: value, key: flat.get(key, "...")}, f"Keep {key}."))
        else:
            values[key], readings[name] = value, f"{name}={shown(value)} is {key}"
    return values, readings, problems


def _two_spellings(both: Mapping[str, Any], way_out: str) -> Problem:
    return problem(dict(both), "two spellings of one setting", way_out)


def _translated(
    trl: Mapping[str, Any],
    values: dict[str, Any],
    written: KeySources,
    names: tuple[list[tuple[Spelling, str]], dict[str, NoEffect]],
) -> tuple[dict[str, Any], dict[str, str], list[Problem]]:
    """Replace names of TRL by our keys; return (settings, name -> log text of how it was read, problems).

    Args:
        trl: Name of TRL or of a recipe -> value.
        values: The other settings, which the translated ones are added to.
        written: Keys that the user wrote.
        names: The result of :func:`names_read`.
    """
    if not trl:
        return values, {}, []
    spellings, no_equal = names
    estimator = str(estimator_of(values))
    readings, problems = _without_equal(trl, no_equal)
    readable = {name: pair for pair in spellings if estimator in pair[0].estimators for name in pair[0].names if name in trl}
    unreadable, twice = _unreadable({name: trl[name] for name in trl.keys() - no_equal.keys()}, readable.keys(), estimator)
    for name, (spelling, owner) in readable.items():
        if name in twice:
            continue
        competitors = [key for key in spelling.keys if key in written.beside(name)]
        if competitors:
            both = {name: trl[name]} | {key: values.get(key, "...") for key in competitors}
            problems.append(_two_spellings(both, f"Keep {competitors[0]}."))
            continue
        try:
            ours = spelling.convert(name, trl, values)
        except NotConvertibleError as error:
            address = {wrong: trl[wrong] for wrong in error.names or (name,)}
            problems.append(problem(address, error.what, error.way_out))
            continue
        meaning = ", ".join(f"{key}={shown(value)}" for key, value in ours.items())
        note = f" ({spelling.note})" if spelling.note else ""
        readings[name] = f"{name}={shown(trl[name])} is {owner}'s spelling, read as {meaning or 'nothing'}{note}"
        values |= ours
    return values, readings, problems + unreadable


def _without_equal(trl: Mapping[str, Any], no_equal: Mapping[str, NoEffect]) -> tuple[dict[str, str], list[Problem]]:
    # Names with the same reason share a log line. A value that would need a missing feature is a problem.
    passing: dict[str, list[str]] = {}
    problems = []
    for name, row in no_equal.items():
        if name in trl and passes(trl[name], row):
            passing.setdefault(row.reason, []).append(name)
        elif name in trl:
            problems.append(problem({name: trl[name]}, row.reason, ""))
    readings = {}
    for reason, names in passing.items():
        address = ", ".join(f"{name}={shown(trl[name])}" for name in names)
        readings[names[0]] = f"{address} {'does' if len(names) == 1 else 'do'} nothing here ({reason})"
    return readings, problems


def _unreadable(trl: Mapping[str, Any], readable: Set[str], estimator: str) -> tuple[list[Problem], set[str]]:
    problems: list[Problem] = []
    twice: set[str] = set()
    for names in ONE_SETTING:
        both = {name: trl[name] for name in names if name in trl}
        if len(both) > 1 and twice.isdisjoint(both):
            twice |= both.keys()
            problems.append(_two_spellings(both, "Keep one."))
    for name in sorted(trl.keys() - readable):
        problems.append(problem({name: trl[name]}, f"{estimator} has no such setting", "Remove it."))
    return problems, twice
