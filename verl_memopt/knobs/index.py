"""Find the knobs: every file of this room that ends with a ``KNOB``, in the order of their places."""

from __future__ import annotations

import importlib
import pkgutil
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import verl_memopt.knobs
from verl_memopt.knobs.knob import Knob

NOT_KNOBS = (
    "conditions",
    "console",
    "critic_rules",
    "document",
    "example",
    "index",
    "knob",
    "ranges",
    "shapes",
)
"""Files of this room that serve the knobs and are none."""

PARTS = ("Use it when", "Saves", "Costs", "Works with")
"""What the docstring of a knob's file says, after one sentence on what the knob does."""


@cache
def knobs() -> tuple[Knob, ...]:
    """Return every knob, in the order of the lists."""
    return tuple(sorted((module.KNOB for module in _modules()), key=lambda knob: knob.place))


def knob_named(name: str) -> Knob:
    """Return the knob of a name."""
    return next(knob for knob in knobs() if knob.name == name)


def knob_settings(*sections: str) -> Any:
    """Return a class with the fields that knobs add to a section, to derive the section's class from.

    Args:
        sections: names among :data:`verl_memopt.knobs.knob.SECTIONS`.
    """
    parts = [knob.settings[section] for section in sections for knob in knobs() if section in knob.settings]
    names = [name for part in parts for name in part.__annotations__]
    twice = sorted({name for name in names if names.count(name) > 1})
    assert not twice, f"two knobs add the same field to {' and '.join(sections)}: {', '.join(twice)}"
    # Fields of the last base come first.
    return dataclass(frozen=True)(type("KnobSettings", tuple(reversed(parts)), {}))


@cache
def text_of(name: str) -> dict[str, str]:
    """Return the text of a knob: what it does under "", then the parts of :data:`PARTS`."""
    pieces = re.split(rf"^({'|'.join(PARTS)}):", _module(name).__doc__ or "", flags=re.MULTILINE)
    text = {"": pieces[0], **dict(zip(pieces[1::2], pieces[2::2], strict=True))}
    assert tuple(text) == ("", *PARTS), f"knobs/{name}.py: its docstring should say {', '.join(PARTS)}; it says {list(text)[1:]}"
    return {part: " ".join(words.split()) for part, words in text.items()}


def as_json() -> list[dict[str, Any]]:
    """Return every knob as plain values: its name, text, keys with defaults, and what it refuses."""
    return [
        {
            "name": knob.name,
            "does": text_of(knob.name)[""],
            **{part.lower().replace(" ", "_"): text_of(knob.name)[part] for part in PARTS},
            "keys": list(knob.keys),
            "defaults": knob.defaults(),
            "besides": list(knob.besides),
            "refuses": [{"keys": list(refusal.keys), "because": refusal.because} for refusal in knob.refuses],
        }
        for knob in knobs()
    ]


def in_yaml(value: object) -> str:
    """Return a default as a settings file writes it."""
    return {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)


def _modules() -> list[Any]:
    names = sorted(info.name for info in pkgutil.iter_modules(verl_memopt.knobs.__path__) if info.name not in NOT_KNOBS)
    return [_module(name) for name in names]


def _module(name: str) -> Any:
    return importlib.import_module(f"verl_memopt.knobs.{name}")
