"""What reward functions can read of an environment after its conversation: its attributes, without the environment itself."""

from __future__ import annotations

import base64
import inspect
import pickle
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from verl_memopt.agents.tools import OwnTools
from verl_memopt.rewards.score import LARGEST_MESSAGE

LARGEST_SNAPSHOT = LARGEST_MESSAGE // 16
"""Largest size in bytes of the attributes of one environment."""


class Snapshot:
    """The attributes that an environment had when its conversation ended, for reward functions that read them.

    They stay pickled until a reward function reads them, because unpickling runs code of the user.

    Args:
        owner: Name of the environment's class.
        pickles: The pickled value of each attribute.
        missing: Why the other attributes are not there.
    """

    def __init__(self, owner: str, pickles: Mapping[str, bytes], missing: Mapping[str, str]) -> None:
        self.__dict__.update(_owner=owner, _pickles=dict(pickles), _missing=dict(missing))

    def __getattr__(self, name: str) -> Any:
        state = self.__dict__
        why = state.get("_missing", {}).get(name, "the environment has no such attribute, or it is a method")
        if name in state.get("_pickles", {}):
            try:
                value = state[name] = pickle.loads(state["_pickles"][name])
                return value
            except Exception as problem:  # noqa: BLE001 - code of the user
                why = f"its value cannot be restored here ({type(problem).__name__}: {problem})"
        raise AttributeError(
            f"{state.get('_owner')}.{name} cannot be read by a reward function: {why}. A reward function gets the values that "
            "the environment's attributes had when the conversation ended."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return Snapshot, (self._owner, self._pickles, self._missing)


def pickle_by_value() -> None:
    # The modules of the user's files exist only in this process, so the classes of attributes must travel with them.
    import cloudpickle

    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and module.__name__.startswith("verl_memopt_plugin_"):
            cloudpickle.register_pickle_by_value(module)


def snapshot_of(instance: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Return the pickled attributes of an environment in base64, and why the others are missing."""
    import cloudpickle

    pickles: dict[str, str] = {}
    missing: dict[str, str] = {}
    left = LARGEST_SNAPSHOT
    for name in dir(instance) if instance is not None else ():
        if name.startswith("_" if isinstance(instance, OwnTools) else "__"):
            continue
        try:
            value = getattr(instance, name)
            if inspect.isroutine(value):
                continue
            data = base64.b64encode(cloudpickle.dumps(value)).decode()
        except BaseException as problem:  # noqa: BLE001 - code of the user
            missing[name] = f"it cannot leave the environment's process ({type(problem).__name__})"
            continue
        if len(data) > left:
            missing[name] = f"it has {len(data)} bytes, and {LARGEST_SNAPSHOT} bytes can leave the environment's process"
            continue
        left -= len(data)
        pickles[name] = data
    return pickles, missing
