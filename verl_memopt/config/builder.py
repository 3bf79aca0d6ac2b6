"""The strict builder: dotted keys and values in, frozen dataclasses out, everything wrong named.

Text keys end here: what follows reads the attributes of typed sections.
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from contextlib import suppress
from difflib import SequenceMatcher
from typing import Any, Literal, Union, get_args, get_origin

from verl_memopt.config.debug_modes import DATA_KEYS, WITHOUT_DATA
from verl_memopt.config.keys import Problem, all_keys, leaf_types, leaf_values, problem, section_keys
from verl_memopt.config.schema import REQUIRED, Settings
from verl_memopt.config.trl_names import ESTIMATORS, SPELLINGS
from verl_memopt.config.values import LINKED, with_links
from verl_memopt.memory.knob import knobs
from verl_memopt.recipes.registry import RECIPES

EXPECTED = {str: "text", int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}


class MismatchError(Exception):
    """A value is not of a key's type; the message says what was expected."""


def build(overrides: Mapping[str, Any]) -> tuple[Settings, dict[str, Any], list[Problem]]:
    """Return the typed sections, the value of every key, and what is wrong with the given values.

    A key that is not given has its default, or the value of the key that it follows. A key with a problem counts as not given,
    so that the checks that follow can look at all the others.

    Args:
        overrides: dotted key -> value, under our names. None for a section, an unknown key, a value of a wrong type and a
            missing required key are problems.
    """
    known, values = leaf_types(), leaf_values(Settings())
    problems: list[Problem] = []
    for key, value in overrides.items():
        if key not in known:
            problems.append(_no_such_key(key, value))
            continue
        try:
            values[key] = convert(value, known[key])
        except MismatchError as mismatch:
            problems.append(problem({key: value}, f"expected {mismatch}, got {_kind(value)}", _type_hint(key, value)))
    wrong = {key for each in problems for key in each.keys}
    if values["debug.mode"] in WITHOUT_DATA:
        values |= {key: None for key in DATA_KEYS if values[key] == REQUIRED}
    missing = [key for key, value in values.items() if value == REQUIRED and key not in wrong]
    problems += [Problem((key,), f"{key}: required, and not set. Set {key}=<value>.") for key in missing]
    values |= with_links({key: values[key] for key in LINKED})

    fields: dict[str, dict[str, Any]] = {}  # dotted key of a section -> its fields
    for key, kind in reversed(all_keys()):  # a section comes after all its fields
        section, _, name = key.rpartition(".")
        fields.setdefault(section, {})[name] = values[key] if key in known else kind(**fields[key])
    return Settings(**fields[""]), values, problems


def convert(value: Any, kind: Any) -> Any:
    """Return the value as the type of its key. A float may be text (YAML reads 1e-6 as text).

    Raises:
        MismatchError: the value is of another type.
    """
    kind = _word_type(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        return _one_of(value, arguments)
    if origin is dict:
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            return dict(value)
        raise MismatchError("a mapping with text keys")
    if origin in (list, tuple):
        return _sequence(value, origin, arguments)
    # In Python a bool is an int, and `true` must not pass for the number 1.
    if kind is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):
            number = float(value)
            if math.isfinite(number):
                return number
    elif isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    raise MismatchError(EXPECTED[kind])


def _word_type(kind: Any) -> Any:
    """Return str for a choice of words: which words they may be is checked with the ranges."""
    return str if get_origin(kind) is Literal else kind


def _one_of(value: Any, arguments: tuple[Any, ...]) -> Any:
    if value is None and type(None) in arguments:
        return None
    expected = []
    for argument in arguments:
        try:
            return convert(value, argument)
        except MismatchError as mismatch:
            expected.append(str(mismatch))
    raise MismatchError(" or ".join(expected))


def _sequence(value: Any, origin: Any, arguments: tuple[Any, ...]) -> Any:
    expected = f"a list of {len(arguments)} numbers" if origin is tuple else f"a list, each {EXPECTED[_word_type(arguments[0])]}"
    if not isinstance(value, list | tuple) or (origin is tuple and len(value) != len(arguments)):
        raise MismatchError(expected)
    try:
        return origin(convert(item, arguments[0]) for item in value)
    except MismatchError:
        raise MismatchError(expected) from None


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a mapping"
    return "a list" if isinstance(value, list | tuple) else EXPECTED.get(type(value), type(value).__name__)


def _type_hint(key: str, value: Any) -> str:
    kinds = {_word_type(kind) for kind in (leaf_types()[key], *get_args(leaf_types()[key]))}
    if str in kinds and not kinds & {int, float} and isinstance(value, int | float):
        return f"Quote it: {key}='\"{value}\"' on a command line."
    if isinstance(value, Mapping):
        return f"{key} takes one value and has no keys below it; give it one value."
    return "Give it a value of that type, or leave it out for the default."


def _no_such_key(key: str, value: Any) -> Problem:
    if key in section_keys():
        first = next(below for below in leaf_types() if below.startswith(f"{key}."))
        return problem({key: value}, "this is a section, not a key", f"Set the keys below it, as in {first}=...")
    return Problem((key,), f"{key}: no such key. {hint(key)}")


# Suggest a key for an unknown one: the nearest known key, or the one that does what a key of TRL or of a recipe does.

_AR = "actor_rollout_ref"


def _of_trl() -> dict[str, str]:
    """Return name of TRL -> our keys, of all names that a recipe of RLOO or GRPO reads."""
    keys: dict[str, list[str]] = {}
    for spelling in SPELLINGS:
        for name in spelling.names:
            keys.setdefault(name, []).append(" with ".join(spelling.keys))
    return {name: ", or ".join(dict.fromkeys(settings)) for name, settings in keys.items()}


READ = _of_trl()
"""The names of TRL that are read as our keys where they stand alone and the estimator is RLOO's or GRPO's."""

FOREIGN = {
    **READ,
    **{name: key for recipe in RECIPES.values() for name, key in recipe.equals.items()},
    "generation_aggregation_steps": "data.train_batch_size (a whole step is generated at once)",
    "missing_eos_penalty": "custom_reward_function.path (the penalty belongs in the reward function)",
    "reward_clip_range": "custom_reward_function.path (the clip belongs in the reward function)",
    "reward_funcs": "custom_reward_function.path",
    "vllm_mode": f"{_AR}.rollout.name (the engine always lives in the worker's process)",
    "use_vllm_server": f"{_AR}.rollout.name (the engine always lives in the worker's process)",
    "use_ray": "trainer.worker_group",
    "save_completions_probability": "trainer.rollout_data_dir",
    **{name: key for knob in knobs() for name, key in knob.known_as.items()},
}
"""Key of TRL or of a recipe -> what to set here."""

_ALIKE = 0.6
"""Share of letters in common, of the last part of a key, from which a key counts as near."""


def hint(key: str) -> str:
    """Return a sentence that names what to use in place of an unknown key."""
    answer = FOREIGN.get(key.rpartition(".")[2]) or nearest(key)
    if not answer:
        return "docs/configuration.md lists every key."
    by_estimator = f" With algorithm.adv_estimator={' or '.join(ESTIMATORS)} this name is read as that." if key in READ else ""
    return f"Did you mean {answer}?{by_estimator}"


def nearest(key: str) -> str | None:
    """Return the known key most like an unknown one, by its last part first, then by the whole, or None."""
    last = key.rpartition(".")[2]
    likeness = {known: _alike(last, known.rpartition(".")[2], _ALIKE) for known in leaf_types()}
    near = [known for known in likeness if likeness[known] >= _ALIKE]
    return max(near, key=lambda known: 2 * likeness[known] + _alike(key, known), default=None)


def _alike(one: str, other: str, least: float = 0.0) -> float:
    """Return the share of letters in common, or 0 where it is below ``least``, which two cheap upper bounds often show."""
    matcher = SequenceMatcher(None, one, other, autojunk=False)
    if matcher.real_quick_ratio() < least or matcher.quick_ratio() < least:
        return 0.0
    return matcher.ratio()
