"""The configuration page, written from the schema: ``python -m tools.settings_page > docs/configuration.md``."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import types
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from verl_memopt.config import schema
from verl_memopt.config.aliases import (
    GLOBAL_MICRO_BATCHES,
    MET_BY_CHUNKING,
    PRESET,
    REMOVE_PREVIOUS,
    RENAMED,
    RENAMED_SECTIONS,
    VALUES,
)
from verl_memopt.config.keys import field_types, shown, value_at, walk
from verl_memopt.config.unused_keys import REFUSED
from verl_memopt.config.values import DERIVED, LINKS
from verl_memopt.memory.knob import Meanings

_HEAD = """# Configuration

<!-- Written by `python -m tools.settings_page` from `verl_memopt/config/` and `verl_memopt/memory/`; edit those. -->

This page is for you if you know the name of a key, or look for one: it lists every key with its type, default and meaning. Keys
carry verl's names. You give a key on the command line (`key=value`) or in a YAML file; every other key has the default below.
`<- key` means that a key has the value of that other key unless you give it, and `required` that it has no default.
"""

_ALIASES = """## Other spellings

Each spelling is read as the key on the right. Two spellings of one key with different values are an error.
"""

_VALUES = """## Other spellings of values

The word on the left is read as the one on the right, for that key only.
"""

_REFUSED = """## verl keys without effect

A value is accepted with one warning if it changes nothing, or only how the same numbers are computed: the last column says what
happens instead. Any other value asks for something that does not exist here, and is an error. `null` is always accepted. `.*`
means every key below.
"""


def page() -> str:
    parts = [_HEAD, *_key_tables(), _ALIASES, *_spellings(), _VALUES, *_value_spellings(), _REFUSED, *_refusals()]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


@cache
def meanings(section: type) -> dict[str, str]:
    """Return field -> docstring under the field, for one section class, read from the sources of its bases."""
    rows: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if base is not object:
            rows |= _fields(inspect.getmodule(base)).get(base.__name__, {})
    for name, kind in field_types(section, annotated=True).items():
        for mark in getattr(kind, "__metadata__", ()):
            if isinstance(mark, Meanings):
                rows[name] += " " + "; ".join(f"{word} = {meaning}" for word, meaning in mark.of) + "."
    return rows


@cache
def _fields(module: Any) -> dict[str, dict[str, str]]:
    fields: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ClassDef):
            for field, below in zip(node.body, [*node.body[1:], None], strict=True):
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    fields.setdefault(node.name, {})[field.target.id] = _docstring(below)
    return fields


def _docstring(node: ast.stmt | None) -> str:
    value = node.value if isinstance(node, ast.Expr) else None
    return " ".join(value.value.split()) if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""


def _key_tables() -> Iterator[str]:
    for section, kind in walk():
        if not dataclasses.is_dataclass(kind):
            continue
        assert isinstance(kind, type)
        rows = [_row(section, kind, name) for name, below in field_types(kind).items() if not dataclasses.is_dataclass(below)]
        if rows:
            yield f"## `{section}`\n"
            yield table(("key", "type", "default", "meaning"), rows)


def _row(section: str, kind: type, name: str) -> tuple[str, str, str, str]:
    return f"`{name}`", _type(field_types(kind)[name]), _default(f"{section}.{name}"), meanings(kind)[name]


def _type(kind: Any) -> str:
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return "text or list of text"
    if origin is Literal:
        return ", ".join(f"`{word}`" for word in parts)
    if origin in (Union, types.UnionType):
        return " or ".join(map(_type, parts))
    if origin in (list, tuple, dict):
        return f"{origin.__name__}[{', '.join('any' if part is Any else _type(part) for part in parts)}]"
    return {type(None): "null"}.get(kind, kind.__name__)


def _default(key: str) -> str:
    value = value_at(schema.Settings(), key)
    if key in LINKS:
        return f"`<- {LINKS[key]}`"
    if key in DERIVED:
        return f"`<- {', '.join(DERIVED[key])}`"
    return "required" if value == schema.REQUIRED else f"`{shown(value)}`"


def spelled() -> Iterator[tuple[str, str]]:
    """Yield every (spelling, our key)."""
    yield from RENAMED.items()
    yield from ((f"{section}*", f"{ours}*") for section, ours in RENAMED_SECTIONS.items())
    yield from GLOBAL_MICRO_BATCHES.items()
    yield from ((key, "actor_rollout_ref.model.logprob_chunk_tokens") for key in sorted(MET_BY_CHUNKING))
    yield REMOVE_PREVIOUS, "trainer.max_actor_ckpt_to_keep"
    yield PRESET, "algorithm.rollout_correction.*"


def _spellings() -> Iterator[str]:
    yield table(("spelling", "key"), [(f"`{alias}`", f"`{key}`") for alias, key in spelled()])


def _value_spellings() -> Iterator[str]:
    rows = [(f"`{key}`", f"`{word}`", f"`{ours}`") for key, words in VALUES.items() for word, ours in words.items()]
    rows.append(("`actor_rollout_ref.actor.policy_loss.loss_mode`", "hyphens", "underscores"))
    yield table(("key", "word", "read as"), rows)


def _refusals() -> Iterator[str]:
    rows = []
    for key, refusal in REFUSED.items():
        passes = "any" if refusal.inert is None else ", ".join(f"`{shown(value)}`" for value in refusal.inert) or "`null`"
        rows.append((f"`{key}`", passes, f"{refusal.reason}."))
    yield table(("key", "passes", "why, and what to do"), rows)


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return a Markdown table. ``rows`` holds the cells of each row."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


if __name__ == "__main__":
    sys.stdout.write(page())
