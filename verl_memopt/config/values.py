"""Check and build values: the choices and range of each key, the keys that follow other keys, and the typed sections."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from verl_memopt.algorithms.records import DISTILL
from verl_memopt.config.debug_modes import DATA_KEYS, REPLAYING, WITHOUT_DATA
from verl_memopt.config.keys import (
    MAIN,
    Problem,
    all_keys,
    leaf_types,
    leaf_values,
    problem,
    raise_together,
    section_keys,
    shown,
    walk,
)
from verl_memopt.config.schema import REQUIRED, Settings
from verl_memopt.config.spelling import ESTIMATORS
from verl_memopt.config.trl_names import SPELLINGS
from verl_memopt.config.unused_keys import NO_EQUAL
from verl_memopt.config.values_of_python import PLAIN, NoValueError, plain_value
from verl_memopt.memory.knob import Range, Words, knobs
from verl_memopt.recipes import RECIPES
from verl_memopt.records import path_fault

_AR = "actor_rollout_ref"

_FSDP_ONLY = "the only sharding backend here is fsdp2"
WHY_NOT: dict[tuple[str, str], str] = {
    **{(f"{role}.strategy", name): _FSDP_ONLY for role in (f"{_AR}.actor", "critic") for name in ("megatron", "veomni")},
    (f"{_AR}.rollout.name", "trtllm"): "this engine is not available",
    (f"{_AR}.rollout.mode", "sync"): "the engine runs in the worker's process and has no other mode",
    (f"{_AR}.actor.kl_loss_type", "full"): "a KL over the whole vocabulary would need all logits in memory",
    **{
        (f"{role}.fsdp_config.{key}", name): "half precision needs loss scaling, which is not available"
        for role in (f"{_AR}.actor", f"{_AR}.ref", "critic.model", "reward_model.model", "teacher")
        for key in ("model_dtype", "dtype", "mixed_precision.reduce_dtype")
        for name in ("fp16", "float16")
    },
}
"""(key, word) -> why a word of verl is not a choice here."""

LARGEST = 2**63 - 1
"""Largest whole number that random generators, tensors and files can hold."""


@cache
def choices() -> dict[str, tuple[str, ...]]:
    typed = {key: words for key, kind in leaf_types().items() if (words := _words(kind))}
    return typed | {key: mark.words for key, mark in _marks() if isinstance(mark, Words)}


@cache
def ranges() -> dict[str, Range]:
    return {key: mark for key, mark in _marks() if isinstance(mark, Range)}


def _words(kind: Any) -> tuple[str, ...]:
    if get_origin(kind) is Literal:
        return get_args(kind)
    return tuple(dict.fromkeys(word for part in get_args(kind) for word in _words(part)))


def _marks() -> Iterator[tuple[str, Any]]:
    for key, kind in walk(annotated=True):
        for mark in getattr(kind, "__metadata__", ()):
            yield key, mark


def check_values(values: Mapping[str, Any]) -> list[Problem]:
    """Return a problem for each value that is no choice of its key, is out of range, or has a character that files cannot hold.

    The type check has decided already where null is allowed. A key that follows another key and has the same wrong value is not
    reported again.

    ``values``: the value of every key, after :func:`with_links`.
    """
    way_out = "Change the value, or leave it out for the default."
    problems: list[Problem] = []
    for key, value in values.items():
        if isinstance(value, int) and value > LARGEST:
            problems.append(problem({key: value}, f"must be at most {LARGEST}", way_out))
    for key, words in choices().items():
        value = values[key]
        for item in value if isinstance(value, list | tuple) else [value]:
            if item is not None and item not in words:
                why = WHY_NOT.get((key, item) if isinstance(item, str) else (key, ""), f"{shown(item)} is no choice")
                problems.append(problem({key: value}, why, f"Set {' or '.join(words)}."))
    for key, limits in ranges().items():
        value = values[key]
        if value is not None and not limits.holds(value):
            problems.append(problem({key: value}, limits.text, way_out))
    wrong = {key for found in problems for key in found.keys}
    for key, value in values.items():
        is_text = isinstance(value, str | list | tuple | dict) and key not in wrong
        if is_text and not all(map(_is_writable, _texts(value))):
            problems.append(problem({key: ascii(value)}, "it holds a character that no file can hold", "Remove it."))
    wrong = {key for found in problems for key in found.keys}
    repeated = {key for key, target in LINKS.items() if target in wrong and values[key] == values[target]}
    repeated |= {key for key, parts in DERIVED.items() if wrong.intersection(parts) and values[key] == derived(key, values)}
    return [found for found in problems if repeated.isdisjoint(found.keys)]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _is_writable(text: str) -> bool:
    try:
        return "\0" not in text and text.encode("utf-8") is not None
    except UnicodeEncodeError:
        return False


# Keys that follow another key: while they are null, they have the value of that key.

_CRITIC = "critic"

LINKS = {
    "data.gen_batch_size": "data.train_batch_size",
    f"{_AR}.actor.clip_ratio_low": f"{_AR}.actor.clip_ratio",
    f"{_AR}.actor.clip_ratio_high": f"{_AR}.actor.clip_ratio",
    f"{_AR}.actor.loss_scale_factor": "data.max_response_length",
    f"{_AR}.actor.optim.state_dtype": f"{_AR}.actor.fsdp_config.model_dtype",
    f"{_AR}.actor.checkpoint.load_contents": f"{_AR}.actor.checkpoint.save_contents",
    f"{_AR}.ref.model.path": f"{_AR}.model.path",
    f"{_AR}.ref.log_prob_micro_batch_size_per_gpu": f"{_AR}.actor.ppo_micro_batch_size_per_gpu",
    f"{_AR}.ref.log_prob_use_dynamic_bsz": f"{_AR}.actor.use_dynamic_bsz",
    f"{_AR}.ref.log_prob_max_token_len_per_gpu": f"{_AR}.actor.ppo_max_token_len_per_gpu",
    f"{_AR}.ref.log_prob_adaptive_token_budget": f"{_AR}.actor.adaptive_token_budget",
    f"{_AR}.rollout.log_prob_adaptive_token_budget": f"{_AR}.actor.adaptive_token_budget",
    f"{_AR}.ref.fsdp_config.ulysses_sequence_parallel_size": f"{_AR}.actor.fsdp_config.ulysses_sequence_parallel_size",
    f"{_AR}.ref.use_torch_compile": f"{_AR}.actor.use_torch_compile",
    f"{_AR}.rollout.log_prob_micro_batch_size_per_gpu": f"{_AR}.actor.ppo_micro_batch_size_per_gpu",
    f"{_AR}.rollout.log_prob_use_dynamic_bsz": f"{_AR}.actor.use_dynamic_bsz",
    f"{_AR}.rollout.log_prob_max_token_len_per_gpu": f"{_AR}.actor.ppo_max_token_len_per_gpu",
    f"{_AR}.rollout.prompt_length": "data.max_prompt_length",
    f"{_AR}.rollout.response_length": "data.max_response_length",
    f"{_AR}.rollout.seed": "data.seed",
    f"{_AR}.rollout.skip_dump_dir": "trainer.rollout_data_dir",
    **{
        f"{_CRITIC}.model.{key}": f"{_AR}.model.{key}"
        for key in ("path", "tokenizer_path", "trust_remote_code", "external_lib", "attn_implementation")
    },
    **{
        f"{_CRITIC}.{key}": f"{_AR}.actor.{key}"
        for key in ("ppo_mini_batch_size", "ppo_epochs", "shuffle", "use_dynamic_bsz", "loss_agg_mode", "loss_scale_factor")
    },
    f"{_CRITIC}.adaptive_token_budget": f"{_AR}.actor.adaptive_token_budget",
    **{f"{_CRITIC}.forward_{key}": f"{_CRITIC}.ppo_{key}" for key in ("micro_batch_size_per_gpu", "max_token_len_per_gpu")},
    "trainer.max_critic_ckpt_to_keep": "trainer.max_actor_ckpt_to_keep",
    f"{_CRITIC}.optim.state_dtype": f"{_CRITIC}.model.fsdp_config.model_dtype",
    f"{_CRITIC}.checkpoint.load_contents": f"{_CRITIC}.checkpoint.save_contents",
    "teacher.model.external_lib": f"{_AR}.model.external_lib",
    "teacher.log_prob_micro_batch_size_per_gpu": f"{_AR}.rollout.log_prob_micro_batch_size_per_gpu",
    "teacher.log_prob_use_dynamic_bsz": f"{_AR}.rollout.log_prob_use_dynamic_bsz",
    "teacher.log_prob_max_token_len_per_gpu": f"{_AR}.rollout.log_prob_max_token_len_per_gpu",
    "teacher.log_prob_adaptive_token_budget": f"{_AR}.rollout.log_prob_adaptive_token_budget",
    "reward_model.reward_kwargs.max_resp_len": "data.max_response_length",
    "reward_model.model.external_lib": f"{_AR}.model.external_lib",
    "reward_model.micro_batch_size_per_gpu": f"{_AR}.rollout.log_prob_micro_batch_size_per_gpu",
    "reward_model.use_dynamic_bsz": f"{_CRITIC}.use_dynamic_bsz",
    "reward_model.adaptive_token_budget": f"{_CRITIC}.adaptive_token_budget",
    "reward_model.forward_max_token_len_per_gpu": f"{_CRITIC}.forward_max_token_len_per_gpu",
}
"""Follower -> the key whose value it has while it is null. Rows are in order: a follower can follow a follower above it."""

DERIVED = {
    f"{_AR}.rollout.max_model_len": (f"{_AR}.rollout.prompt_length", f"{_AR}.rollout.response_length"),
    f"{_AR}.rollout.val_kwargs.do_sample": (f"{_AR}.rollout.val_kwargs.temperature",),
    "trainer.default_local_dir": ("trainer.project_name", "trainer.experiment_name"),
    "custom_reward_function.on_error": ("reward_model.reward_manager",),
    f"{_AR}.rollout.skip_rollout": ("debug.mode",),
    "distill.coef": ("algorithm.adv_estimator",),
}
"""Follower -> the keys from which :func:`derived` computes its value while it is null."""


LINKED = frozenset({*LINKS, *LINKS.values(), *DERIVED, *(part for parts in DERIVED.values() for part in parts)})
"""All followers, and all keys that they follow."""


def with_links(values: Mapping[str, Any]) -> dict[str, Any]:
    linked = dict(values)
    for follower, target in LINKS.items():
        if linked[follower] is None:
            value = linked[target]
            linked[follower] = list(value) if isinstance(value, list) else value
    for follower in DERIVED:
        if linked[follower] is None:
            linked[follower] = derived(follower, linked)
    return linked


def derived(key: str, values: Mapping[str, Any]) -> Any:
    parts = [values[part] for part in DERIVED[key]]
    if key.endswith("do_sample"):
        return parts[0] > 0
    if key == "distill.coef":
        return float(parts[0] == DISTILL)
    if key.endswith("skip_rollout"):
        return parts[0] in REPLAYING
    if key.endswith("on_error"):
        return "score" if parts[0] == "prime" else "raise"
    return sum(parts) if key.endswith("max_model_len") else "/".join(["checkpoints", *parts])


def followers_of(keys: Iterable[str]) -> set[str]:
    dependent = set(keys)
    for follower, target in LINKS.items():
        if target in dependent:
            dependent.add(follower)
    for follower, parts in DERIVED.items():
        if dependent.intersection(parts):
            dependent.add(follower)
    return dependent


# The strict builder: it turns dotted keys and values into frozen dataclasses, and reports every unknown key and wrong type.

EXPECTED = {str: "text", int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}


class MismatchError(Exception):
    """A value does not have the type of its key. The message says which type was expected."""


def build(overrides: Mapping[str, Any]) -> tuple[Settings, dict[str, Any], list[Problem]]:
    """Build the typed sections. Return (settings, value of every key, problems).

    A key that is not given has its default, or the value of the key that it follows. A key with a problem also has its default,
    so that later checks can find further problems. Problems are an unknown key, a wrong type, null for a section, and a required
    key that is missing.

    ``overrides``: our key -> value.
    """
    types_of_keys, values = leaf_types(), leaf_values(Settings())
    problems: list[Problem] = []
    for key, value in overrides.items():
        if key not in types_of_keys:
            problems.append(_no_such_key(key, value))
            continue
        if fault := _fault_of_path(key, value):
            problems.append(problem({key: f"{value!r:.100}"}, f"this is no path of a file: {fault}", "Correct the path."))
            continue
        try:
            values[key] = convert(value, types_of_keys[key])
        except MismatchError as mismatch:
            problems.append(problem({key: value}, f"expected {mismatch}, got {_kind(value)}", _type_hint(key, value)))
    wrong = {key for found in problems for key in found.keys}
    if values["debug.mode"] in WITHOUT_DATA:
        values |= {key: None for key in DATA_KEYS if values[key] == REQUIRED}
    missing = [key for key, value in values.items() if value == REQUIRED and key not in wrong]
    problems += [Problem((key,), f"{key}: required, and not set. Set {key}=<value>.") for key in missing]
    values |= with_links({key: values[key] for key in LINKED})

    fields: dict[str, dict[str, Any]] = {}  # dotted key of a section -> its fields
    for key, kind in reversed(all_keys()):  # a section comes after all its fields
        section, _, name = key.rpartition(".")
        fields.setdefault(section, {})[name] = values[key] if key in types_of_keys else kind(**fields[key])
    return Settings(**fields[""]), values, problems


_PATH = re.compile(r"(_|\.)(path|dir|files|file)$")


def _fault_of_path(key: str, value: Any) -> str | None:
    if _PATH.search(key) is None:
        return None
    paths = [value] if isinstance(value, str) else value if isinstance(value, list | tuple) else []
    return next((fault for path in paths if isinstance(path, str) and (fault := path_fault(path))), None)


def plain_values(given: Mapping[str, Any], keys: Mapping[str, Iterable[str]]) -> dict[str, Any]:
    """Convert values that were given from Python, see :func:`verl_memopt.config.values_of_python.plain_value`.

    Args:
        given: Name or key -> value.
        keys: Name -> the keys that it sets. A name that is missing here is a key.

    Raises:
        ConfigError: Some values cannot be values of settings. The message lists all of them.
    """
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, value in given.items():
        try:
            values[name] = plain_value(value)
        except NoValueError as error:
            problems += [_no_value(key, error) for key in sorted(keys.get(name) or {name})]
        except RecursionError:  # a list that holds itself
            problems.append(problem({name: f"{value!r:.100}"}, "it is too deep, or it contains itself", f"Give {PLAIN}."))
    raise_together(problems)
    return values


def _no_value(key: str, error: NoValueError) -> Problem:
    whole, shown_value = key + error.place, f"{error.value!r:.100}"
    if whole not in (known := leaf_types()) and key not in known:
        return _no_such_key(whole, shown_value)
    expected = PLAIN
    if whole in known:
        try:
            convert(error.value, known[whole])
        except MismatchError as mismatch:
            expected = str(mismatch)
    return problem({whole: shown_value}, f"expected {expected}, got {_kind(error.value)}", "Give a value of that type.")


def convert(value: Any, kind: Any) -> Any:
    """Convert a value to the type of its key. A float may be given as a string, because YAML parses ``1e-6`` as a string."""
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
    # In Python a bool is an int, but `true` must not be accepted as the number 1.
    if kind is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):
            number = float(value)
            if math.isfinite(number):
                return number
    elif isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    raise MismatchError(EXPECTED[kind])


def _word_type(kind: Any) -> Any:
    # A Literal is any text here. `check_values` checks its words, together with the ranges.
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
        return f"{key} takes one value and has no keys below it. Give one value."
    return "Give it a value of that type, or leave it out for the default."


def _no_such_key(key: str, value: Any) -> Problem:
    if key in section_keys():
        first = next(below for below in leaf_types() if below.startswith(f"{key}."))
        return problem({key: value}, "this is a section, not a key", f"Set the keys below it, as in {first}=...")
    return Problem((key,), f"{key}: no such key. {hint(key)}")


# Suggest a key for an unknown key: the most similar key, or the key that does the same as a known name of TRL or of a recipe.


def _keys_of_trl_names() -> dict[str, str]:
    keys: dict[str, list[str]] = {}
    for spelling in (row for row in SPELLINGS if row.keys):
        for name in spelling.names:
            keys.setdefault(name, []).append(" with ".join(spelling.keys))
    return {name: ", or ".join(dict.fromkeys(settings)) for name, settings in keys.items()}


READ = _keys_of_trl_names()
"""Name of TRL -> our keys. These names are read outside of all sections, with the estimators of ``ESTIMATORS``."""

FOREIGN = {
    **READ,
    **{name: key for recipe in RECIPES.values() for name, key in recipe.equals.items()},
    **{name: key for knob in knobs() for name, key in knob.known_as.items()},
}
"""Key of TRL or of a recipe -> what to set here."""

_ALIKE = 0.6
"""Least similarity (``SequenceMatcher.ratio``) between the last parts of two keys with which a key is suggested."""


def hint(key: str) -> str:
    name = key.rpartition(".")[2]
    if name in NO_EQUAL:
        return f"It has no equal here: {NO_EQUAL[name].reason}."
    answer = FOREIGN.get(name) or nearest(key)
    like = [] if "." in key or name in FOREIGN else get_close_matches(key, FOREIGN, 1, 0.8)
    if like and _alike(key, like[0]) > _alike(key, (answer or "").rpartition(".")[2]):
        answer = like[0]
    if not answer:
        return "docs/configuration.md lists every key."
    by_estimator = f" With algorithm.adv_estimator={' or '.join(ESTIMATORS)} this name is accepted." if key in READ else ""
    return f"Did you mean {answer}?{by_estimator}"


def nearest(key: str) -> str | None:
    """Return the key that is most similar to an unknown key; None if no key is similar.

    The last part counts twice, and a key with a dot is also compared as a whole.
    """
    last = key.rpartition(".")[2]
    likeness = {candidate: _alike(last, candidate.rpartition(".")[2], _ALIKE) for candidate in leaf_types()}
    near = [candidate for candidate in likeness if likeness[candidate] >= _ALIKE]
    # Among equally similar keys the policy's key wins, because `max` returns the first of them.
    near.sort(key=lambda candidate: not candidate.startswith(MAIN))
    return max(near, key=lambda candidate: 2 * likeness[candidate] + ("." in key) * _alike(key, candidate), default=None)


def _alike(word: str, other: str, at_least: float = 0.0) -> float:
    # The two quick ratios are upper bounds of the ratio. They often show without the slow comparison that it is below `at_least`.
    matcher = SequenceMatcher(None, word, other, autojunk=False)
    if matcher.real_quick_ratio() < at_least or matcher.quick_ratio() < at_least:
        return 0.0
    return matcher.ratio()
