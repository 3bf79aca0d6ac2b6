"""Lets verl be imported where Ray is not installed: its functions name Ray's types, and what is measured here starts no Ray."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def ray_or_stand_in(installed: bool | None = None) -> Iterator[None]:
    """Lets ``import ray`` succeed inside: with Ray where it is installed, else with a module that has one type and no functions.

    Afterwards the stand-in is no module any more, so that nobody takes it for Ray. installed: None = look.
    """
    if installed or (installed is None and importlib.util.find_spec("ray") is not None):
        yield
        return
    sys.modules["ray"] = _StandIn("ray")
    try:
        yield
    finally:
        del sys.modules["ray"]


class _StandIn(types.ModuleType):
    """Ray without Ray. Errors: ModuleNotFoundError for all but the one type that annotations of verl name."""

    ObjectRef = object

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ModuleNotFoundError(f"ray.{name}: Ray is not installed", name="ray")
