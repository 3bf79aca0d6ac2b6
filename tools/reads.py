"""Records which settings a piece of code reads, so that a test can show that every key has a reader."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from verl_memopt.config.keys import leaf_types
from verl_memopt.memory.knob import KNOBS

__all__ = ["leaf_types", "record_reads"]

_SILENT_CALLERS = {
    *("dataclasses", "verl_memopt.config.schema", "verl_memopt.config.role_settings"),
    *(f"verl_memopt.memory.{name}" for name in (*KNOBS, "knob", "critic_rules", "formulas", "ranges")),
}
"""Modules that copy or declare settings. Their reads do not count, because they use no value."""


@contextmanager
def record_reads(settings: Any) -> Iterator[set[str]]:
    """Yield a set that collects the dotted key of each leaf that this process reads from ``settings`` inside the ``with`` block.

    Sections are distinguished by identity, so an equal section under another key is not confused with the section that was read.
    One object under two keys is an AssertionError. Reads from copies (``dataclasses.replace``, pickling) are not recorded.
    """
    sections = dict(_sections(settings, ""))
    prefixes = {id(section): prefix for prefix, section in sections.items()}
    assert len(prefixes) == len(sections), "one section object stands under two keys"
    read_keys: set[str] = set()
    with ExitStack() as undo:
        for kind in {type(section) for section in sections.values()}:
            setattr(kind, "__getattribute__", _recording(prefixes, read_keys))  # noqa: B010 - on the class, until the block ends
            undo.callback(delattr, kind, "__getattribute__")
        yield read_keys


def _recording(prefixes: dict[int, str], read_keys: set[str]) -> Callable[[Any, str], Any]:
    def read(self: Any, name: str) -> Any:
        value = object.__getattribute__(self, name)
        prefix = prefixes.get(id(self))
        caller = sys._getframe(1)
        # The generated ``==`` and ``repr`` of a dataclass have the file name "<string>".
        silent = caller.f_code.co_filename == "<string>" or caller.f_globals["__name__"] in _SILENT_CALLERS
        if prefix is not None and not silent and not name.startswith("_") and not dataclasses.is_dataclass(value):
            read_keys.add(prefix + name)
        return value

    return read


def _sections(section: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    yield prefix, section
    for name, value in vars(section).items():
        if dataclasses.is_dataclass(value):
            yield from _sections(value, f"{prefix}{name}.")
