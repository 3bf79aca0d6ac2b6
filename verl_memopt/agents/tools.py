"""Tools and environments as objects of the user: where they come from, which methods are tools, and the schema of a tool."""

from __future__ import annotations

import inspect
import io
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from verl_memopt.data.plugin import load_from_file
from verl_memopt.errors import AgentError
from verl_memopt.observe.own_files import differs_from_name

Tool = Callable[..., Any]
"""A function, or a bound method of an environment. It may be ``async def``."""

NOT_TOOLS = ("reset", "get_reward")
"""Public methods of an environment that the model cannot call."""


class Loads(Protocol):
    """Where the class of an environment comes from, or a function that makes environments."""

    @property
    def path(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def key(self) -> str: ...

    def load(self) -> Any: ...


@dataclass(frozen=True)
class Source:
    """A class or function of the user: in a Python file, or pickled by :func:`save_objects`."""

    path: str
    name: str
    key: str = "environments"
    """Setting that named it, for errors."""

    def load(self) -> Any:
        if not self.path.endswith(PICKLES):
            found = load_from_file(self.path, self.name, key=self.key, error=AgentError)
        else:
            found = _unpickled(self.path)[self.name]
        if not callable(found):
            raise AgentError(f"{self.key}={self.path}: {self.name} is neither a class nor a function. Name one of these.")
        return found


PICKLES = ".pkl"


def save_objects(objects: Mapping[str, Any], path: Path, key: str) -> dict[str, Source]:
    """Pickle classes and functions into a file for the processes of environments. Return the source of each, by name.

    ``path``: ends in ``.pkl``. ``key``: the argument that gave the objects, for errors.
    """
    import cloudpickle

    from verl_memopt.rewards.python_functions import say_secrets

    path.parent.mkdir(parents=True, exist_ok=True)
    for name, given in objects.items():
        try:
            pickled = cloudpickle.dumps(given)
        except Exception as problem:  # objects pickle themselves, and may raise anything
            raise AgentError(
                f"{key}: {name} cannot be sent to another process, because something that it uses cannot be pickled "
                f"({type(problem).__name__}: {problem}). Create it inside the class or function, or put that into a Python file."
            ) from problem
        say_secrets(f"{key}: {name}", given, pickled, path)
    buffer = io.BytesIO()
    cloudpickle.dump(dict(objects), buffer)
    path.write_bytes(buffer.getvalue())
    return {name: Source(str(path), name, key) for name in objects}


@cache
def _unpickled(path: str) -> dict[str, Any]:
    import pickle

    if differs_from_name(Path(path)):
        raise AgentError(f"{path} has other contents than were written. Start the run from Python again.")
    try:
        return dict(pickle.loads(Path(path).read_bytes()))
    except Exception as problem:  # it imports what the objects use
        raise AgentError(
            f"{path} cannot be read ({type(problem).__name__}: {problem}). Start the run from Python again."
        ) from problem


class OwnTools:
    """An environment of one conversation that lists its tools itself. They carry their schemas."""

    @property
    def users(self) -> list[str]:
        """Names of those who may answer a turn of the model without calls. A row chooses one."""
        return []

    def listed(self) -> dict[str, Tool]:
        raise NotImplementedError

    async def respond(self, messages: list[dict[str, Any]]) -> tuple[str, bool]:
        """Return what the user says next, and whether the conversation ends."""
        raise NotImplementedError

    async def end(self) -> None:
        """Called after the conversation, however it ended."""


def tools_of(environment: Any) -> dict[str, Tool]:
    """Return the methods of an environment that the model may call, by name and in TRL's order: all public ones but two."""
    if isinstance(environment, OwnTools):
        return environment.listed()
    names = (name for name in dir(environment) if not name.startswith("_") and name not in NOT_TOOLS)
    # A property is not read, because it may need what only `reset` creates.
    found = {
        name: getattr(environment, name)
        for name in names
        if not isinstance(inspect.getattr_static(environment, name, None), property)
    }
    return {name: member for name, member in found.items() if inspect.ismethod(member)}


def schema_of(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool that a chat template gets, made by transformers from its type hints and docstring.

    Raises:
        AgentError: An argument has no type or no description, or there is no docstring.
    """
    if isinstance(schema := getattr(tool, "schema", None), dict):
        return schema
    from transformers.utils import chat_template_utils

    # transformers would import torch here, to compare each type with torch.Tensor. No type can be one if nothing has imported it.
    vars(chat_template_utils)["is_torch_available"] = lambda: "torch" in sys.modules
    try:
        return dict(chat_template_utils.get_json_schema(tool))
    except Exception as problem:  # a type hint is evaluated, and may raise anything
        text = " ".join(" ".join(map(str, problem.args)).split())
        raise AgentError(
            f"{address_of(tool)}: this tool cannot be described to the model: {text}. Give each argument a type and a line below "
            "'Args:' in a Google docstring; a method that is no tool has a name that begins with an underscore."
        ) from problem


def address_of(tool: Tool) -> str:
    code = getattr(inspect.unwrap(getattr(tool, "__func__", tool)), "__code__", None)
    place = f"{code.co_filename}:{code.co_firstlineno}: " if code is not None else ""
    owner = f"{type(tool.__self__).__name__}." if inspect.ismethod(tool) else ""
    return f"{place}{owner}{getattr(tool, '__name__', tool)}"


PICKLED = {"environment": "environments.pkl", "tools": "tools.pkl"}
"""Section of ``rollout.agent`` -> file in a run's folder ``inputs/`` with the objects of Python."""


def agent_settings(tools: Any, environment_factory: Any, inputs: Path) -> dict[str, Any]:
    """Return the settings of tools and environments that a call from Python gives, by key, and write objects into ``inputs``.

    Args:
        tools: Functions, or names of functions in files (``"file.py:function"``). None = there are none.
        environment_factory: A class or a function that makes an environment, or its name in a file, or a dict of these.
        inputs: Folder of a run for inputs from Python.

    Raises:
        AgentError: An entry is neither a function nor a class, or cannot be sent to another process.
    """
    functions = _with_names(tools)
    environments = environment_factory
    if environments is not None and not isinstance(environments, Mapping):
        environments = {None: environments}
    return {
        **_section("tools", "tools", functions, inputs),
        **_section("environment", "environment_factory", environments or {}, inputs),
    }


def _with_names(tools: Any) -> dict[Any, Any]:
    if tools is None:
        return {}
    listed = list(tools) if isinstance(tools, list | tuple) else [tools]
    return {tool if isinstance(tool, str) else getattr(tool, "__name__", str(tool)): tool for tool in listed}


def _section(section: str, argument: str, given: Mapping[Any, Any], inputs: Path) -> dict[str, Any]:
    if not given:
        return {}
    key = f"actor_rollout_ref.rollout.agent.{section}"
    files = {name: str(entry).partition(".py:") for name, entry in given.items() if isinstance(entry, str | Path)}
    if files:
        paths = {f"{file}.py" for file, _, _ in files.values()}
        if len(files) < len(given) or len(paths) > 1 or not all(own for _, _, own in files.values()):
            raise AgentError(f"{argument}: name everything in one file as file.py:name, or give objects of Python.")
        names: dict[Any, str] = {name: own for name, (_, _, own) in files.items()}
        (path,) = paths
    else:
        for name, entry in given.items():
            if not callable(entry):
                raise AgentError(f"{argument}: {name or entry!r} is neither a class nor a function. Give one of these.")
        names = {name: ONLY if name is None else str(name) for name in given}
        path = str(inputs / PICKLED[section])
        save_objects({names[name]: entry for name, entry in given.items()}, Path(path), argument)
    if section == "tools":
        return {f"{key}.path": path, f"{key}.name": list(names.values())}
    return {f"{key}.path": path, f"{key}.name": names.get(None, names)}


ONLY = "environment"
"""Name of the only environment in its file."""
