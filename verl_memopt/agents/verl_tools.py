"""verl's tools and interactions as environments: ``tool_config_path``, ``function_tool_path``, ``interaction_config_path``.

Code that was written for verl runs here after a change of its imports: ``from verl_memopt.agents.verl_tools import
BaseInteraction, BaseTool, OpenAIFunctionToolSchema, ToolResponse, function_tool, rollout_trace_op``.

A tool gets one ``create`` per conversation: at the begin if the row's ``extra_info.tools_kwargs`` names the tool, else before its
first call. ``execute`` follows for each call; ``calc_reward`` and ``release`` at the end. An interaction gets one
``start_interaction`` per conversation, a ``generate_response`` for each turn of the model without calls, and
``finalize_interaction`` at the end.

Reward functions read ``tool_rewards`` (the rewards of the calls, in order), ``reward_scores`` (the result of ``calc_reward`` by
tool) and ``turn_scores`` (the scores of the interaction's responses, in order). The score of a conversation contains none of them
by itself, as in verl.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast
from uuid import uuid4

from verl_memopt.agents.tools import OwnTools, Tool, schema_of
from verl_memopt.data.plugin import load_from_file, raised
from verl_memopt.errors import AgentError

# What code of verl imports.


class Schema:
    """A part of a tool's description in OpenAI's form, with its entries as attributes."""

    def __init__(self, **entries: Any) -> None:
        self.__dict__.update({name: _record(name, entry) for name, entry in entries.items()})

    @classmethod
    def model_validate(cls, entries: Any) -> Any:
        return entries if isinstance(entries, cls) else cls(**entries)

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """Return plain data without the entries that are None. All options of pydantic are accepted, and change nothing."""
        return {name: _plain(entry) for name, entry in self.__dict__.items() if entry is not None}


class OpenAIFunctionPropertySchema(Schema): ...


class OpenAIFunctionParametersSchema(Schema): ...


class OpenAIFunctionSchema(Schema): ...


class OpenAIFunctionToolSchema(Schema): ...


_RECORDS: dict[str, type[Schema]] = {"function": OpenAIFunctionSchema, "parameters": OpenAIFunctionParametersSchema}


def _record(name: str, entry: Any) -> Any:
    if name == "properties" and isinstance(entry, Mapping):
        return {key: OpenAIFunctionPropertySchema(**part) if isinstance(part, Mapping) else part for key, part in entry.items()}
    return _RECORDS[name](**entry) if name in _RECORDS and isinstance(entry, Mapping) else entry


def _plain(entry: Any) -> Any:
    if isinstance(entry, Schema):
        return entry.model_dump()
    return {name: _plain(part) for name, part in entry.items()} if isinstance(entry, dict) else entry


@dataclass
class ToolResponse:
    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def is_empty(self) -> bool:
        return not (self.text or self.image or self.video)


class BaseTool:
    """A tool with a state per conversation. Override what it needs."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        self.config = config
        self.tool_schema: Any = tool_schema
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        assert self.tool_schema is not None, "the tool has no schema"
        self.name: str = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> Any:
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Begin a conversation. ``create_kwargs`` in ``kwargs`` are those of the row. Return the id of its state."""
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Return the answer to a call, the reward of the call, and metrics, which are not used."""
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return the reward of the conversation."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End a conversation."""


class BaseInteraction:
    """The user of a conversation, who answers each turn of the model that calls no tool. Override what it needs."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin a conversation. ``kwargs``: the row's ``extra_info.interaction_kwargs``. Return the id of its state."""
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Answer the model's last turn.

        Args:
            instance_id: The id of the state.
            messages: The conversation so far.
            kwargs: As in :meth:`start_interaction`.

        Returns:
            Whether the conversation ends, the user's text, the score of the turn, and metrics, which are not used.
        """
        return False, "Your current result seems acceptable.", 0.8, {}

    async def calculate_score(self) -> float:
        """Not called, as in verl."""
        return 0.0

    async def finalize_interaction(self) -> None:
        """End a conversation. If the method takes an ``instance_id``, it gets that of the conversation."""


def initialize_tools_from_config(tools_config_file: str) -> list[BaseTool]:
    """Return one instance of each tool that a YAML file in verl's form (``tool_config_path``) names."""
    return VerlTools(tool_config_path=tools_config_file).classes()


def initialize_interactions_from_config(interaction_config_file: str) -> dict[str, BaseInteraction]:
    """Return the interactions of an ``interaction_config_path``, by name."""
    return VerlTools(interaction_config_path=interaction_config_file).interactions()


F = TypeVar("F", bound=Callable[..., Any])


def rollout_trace_op(function: F) -> F:
    """Return the function as it is: calls are not traced."""
    return function


@dataclass(frozen=True)
class FunctionTool:
    name: str
    function: Callable[..., Any]
    schema: dict[str, Any] | None
    """None = it is made from the type hints and the docstring."""


_ATTRIBUTE = "_verl_memopt_function_tool"


def function_tool(name: Any = None, *, schema: Any = None) -> Any:
    """Make a function a tool: ``@function_tool``, ``@function_tool("name")``, or with a ``schema`` of its own."""

    def decorate(function: F) -> F:
        given = schema.model_dump() if isinstance(schema, Schema) else schema
        setattr(function, _ATTRIBUTE, FunctionTool(name if isinstance(name, str) else function.__name__, function, given))
        return function

    return decorate(name) if callable(name) else decorate


# The environment of a conversation with such tools.


@dataclass(frozen=True)
class VerlTools:
    """Takes the place of a :class:`~verl_memopt.agents.tools.Source` for the tools and interactions of verl's settings."""

    tool_config_path: str | None = None
    """YAML file with ``tools``, a list of ``class_name``, ``config`` and ``tool_schema``."""
    function_tool_path: str | None = None
    """Python file with functions that have the decorator ``function_tool``."""
    key: str = "actor_rollout_ref.rollout.multi_turn"
    """Section of the settings that has all of them, for errors."""
    interaction_config_path: str | None = None
    """YAML file with ``interaction``, a list of ``class_name``, ``config`` and perhaps ``name``."""

    @property
    def path(self) -> str:
        return " and ".join(filter(None, (self.tool_config_path, self.function_tool_path, self.interaction_config_path)))

    @property
    def name(self) -> str:
        return "the tools and interactions"

    def load(self) -> Callable[[], VerlEnvironment]:
        tools: dict[str, BaseTool | FunctionTool] = {}
        found: list[BaseTool | FunctionTool] = [*self.classes(), *self._functions()]
        for tool in found:
            if tool.name in tools:
                raise AgentError(f"{self.key}: {self.path} has two tools with the name {tool.name}. Rename one.")
            tools[tool.name] = tool
        return partial(VerlEnvironment, tools, self.interactions())

    def interactions(self) -> dict[str, BaseInteraction]:
        if self.interaction_config_path is None:
            return {}
        address, found = f"{self.key}.interaction_config_path={self.interaction_config_path}", dict[str, BaseInteraction]()
        entries = entries_of(address, self.interaction_config_path, "interaction", "Give each class_name and config")
        for index, entry in enumerate(entries):
            place = f"{address}: interaction[{index}]"
            if not isinstance(entry, dict) or not isinstance(entry.get("class_name"), str):
                raise AgentError(f"{place}: class_name is missing. Give each interaction class_name and config.")
            own = re.split(r"[.:]", entry["class_name"])[-1]
            name = str(entry.get("name") or own.removesuffix("Interaction").lower())
            if name in found:
                raise AgentError(f"{place}: two interactions have the name {name}. Rename one.")
            base = "BaseInteraction from verl_memopt.agents.verl_tools"
            made = named_class(f"{place}: class_name", entry["class_name"], base, self.interaction_config_path)
            try:
                found[name] = made(config={**(entry.get("config") or {}), "name": name})
            except Exception as problem:  # code of the user
                raise AgentError(f"{place}: {own} raised {raised(problem)}. Correct it.") from problem
            if not callable(getattr(found[name], "generate_response", None)):
                raise AgentError(f"{place}: class_name={own} is no interaction. Derive the class from BaseInteraction.")
        return found

    def classes(self) -> list[BaseTool]:
        if self.tool_config_path is None:
            return []
        address = f"{self.key}.tool_config_path={self.tool_config_path}"
        entries = entries_of(address, self.tool_config_path, "tools", "Give each tool class_name, config and tool_schema")
        return [self._made(f"{address}: tools[{index}]", entry) for index, entry in enumerate(entries)]

    def _made(self, address: str, entry: Any) -> BaseTool:
        if not isinstance(entry, dict) or not isinstance(entry.get("class_name"), str):
            raise AgentError(f"{address}: class_name is missing. Give each tool class_name, config and tool_schema.")
        config, name = dict(entry.get("config") or {}), entry["class_name"]
        if config.get("type", "native") != "native":
            raise AgentError(f"{address}: config.type={config['type']} is not supported. Use a class of type native.")
        assert self.tool_config_path is not None
        made = named_class(f"{address}: class_name", name, "BaseTool from verl_memopt.agents.verl_tools", self.tool_config_path)
        given = entry.get("tool_schema")
        try:
            tool = made(config=config, tool_schema=None if given is None else OpenAIFunctionToolSchema.model_validate(given))
        except Exception as problem:  # code of the user
            raise AgentError(f"{address}: {name} raised {raised(problem)}. Correct it.") from problem
        if not (hasattr(tool, "name") and hasattr(tool, "tool_schema") and callable(getattr(tool, "execute", None))):
            raise AgentError(f"{address}: class_name={name} is no tool. Derive the class from BaseTool.")
        return cast(BaseTool, tool)  # a class of an installed verl does as well

    def _functions(self) -> list[FunctionTool]:
        if self.function_tool_path is None:
            return []
        key = f"{self.key}.function_tool_path"
        names = load_from_file(self.function_tool_path, "__dict__", key=key, error=AgentError)
        found = [getattr(value, _ATTRIBUTE) for value in names.values() if hasattr(value, _ATTRIBUTE)]
        if not found:
            raise AgentError(f"{key}={self.function_tool_path}: no function has the decorator function_tool. Add it.")
        return list(found)


def named_class(address: str, name: str, base: str, path: str) -> Any:
    """Return a class by its name: ``module.Class``, or ``file.py:Class`` with a file beside ``path`` or in the working directory.

    Args:
        address: The setting with the name, for errors.
        name: The name.
        base: What the class is derived from, and where that is, for errors.
        path: The YAML file that has the name.
    """
    if ".py:" in name:
        file, _, attribute = name.rpartition(":")
        beside = Path(path).parent / file
        return load_from_file(str(beside) if beside.is_file() else file, attribute, key=address, error=AgentError)
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as problem:  # the module is code of the user
        raise AgentError(
            f"{address}={name} cannot be imported ({type(problem).__name__}: {problem}). Give module.Class, with the module on "
            f"PYTHONPATH, or file.py:Class. Import {base}."
        ) from problem


def entries_of(address: str, path: str, name: str | None, remedy: str) -> list[Any]:
    """Return a list in a YAML file. ``name``: its key; None = the file is the list."""
    from omegaconf import OmegaConf

    try:
        loaded = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except Exception as problem:  # YAML and interpolations fail in many ways
        raise AgentError(f"{address}: cannot be read ({' '.join(str(problem).split())}). Correct the file.") from problem
    entries: Any = loaded
    if name is not None:
        entries = loaded.get(name) if isinstance(loaded, dict) else None
    if not isinstance(entries, list) or not entries:
        raise AgentError(f"{address}: there is no list{'' if name is None else f' {name!r}'}. {remedy}.")
    return entries


def user_of(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the ``interaction_kwargs`` of a row's columns, or an empty dict."""
    extra = row.get("extra_info")
    found = (extra.get("interaction_kwargs") if isinstance(extra, dict) else None) or row.get("interaction_kwargs")
    return found if isinstance(found, dict) else {}


@dataclass
class VerlEnvironment(OwnTools):
    """The tools of one conversation. The objects of the tools are shared, and tell conversations apart by an id."""

    _tools: Mapping[str, BaseTool | FunctionTool]
    _interactions: Mapping[str, BaseInteraction] = field(default_factory=dict)
    tool_rewards: list[float] = field(default_factory=list)
    reward_scores: dict[str, float] = field(default_factory=dict)
    turn_scores: list[float] = field(default_factory=list)
    _ids: dict[str, str] = field(default_factory=dict)
    _kwargs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    _creates: asyncio.Lock = field(default_factory=asyncio.Lock)
    _interaction: BaseInteraction | None = None
    _interaction_id: str = field(default_factory=lambda: str(uuid4()))
    _interaction_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def users(self) -> list[str]:
        return list(self._interactions)

    def listed(self) -> dict[str, Tool]:
        return {name: self._tool(tool) for name, tool in self._tools.items()}

    def _tool(self, tool: BaseTool | FunctionTool) -> Tool:
        if not isinstance(tool, FunctionTool):
            return _Method(self, tool)
        return (_AsyncFunction if inspect.iscoroutinefunction(tool.function) else _Function)(self, tool)

    async def reset(self, **row: Any) -> None:
        extra = row.get("extra_info")
        self._kwargs = (extra.get("tools_kwargs") if isinstance(extra, dict) else None) or row.get("tools_kwargs") or {}
        for name in self._kwargs:
            tool = self._tools.get(name)
            if tool is not None and not isinstance(tool, FunctionTool):
                await self.instance(tool)
        if self._interactions:
            self._interaction_kwargs = dict(user_of(row))
            self._interaction = self._interactions[self._interaction_kwargs["name"]]
            await self._interaction.start_interaction(self._interaction_id, **self._interaction_kwargs)

    async def respond(self, messages: list[dict[str, Any]]) -> tuple[str, bool]:
        assert self._interaction is not None
        ends, text, score, *_ = await self._interaction.generate_response(
            self._interaction_id, messages, **self._interaction_kwargs
        )
        if score is not None:
            self.turn_scores.append(float(score))
        return str(text), bool(ends)

    async def instance(self, tool: BaseTool) -> str:
        async with self._creates:  # two calls of a turn share the state
            if tool.name not in self._ids:
                created: Any = await tool.create(create_kwargs=self.kwargs(tool, "create"))
                self._ids[tool.name] = created[0] if isinstance(created, tuple) else created
            return self._ids[tool.name]

    def kwargs(self, tool: BaseTool, method: str) -> dict[str, Any]:
        return dict((self._kwargs.get(tool.name) or {}).get(f"{method}_kwargs") or {})

    async def get_reward(self) -> None:
        for name, number in self._ids.items():
            tool = self._tools[name]
            assert not isinstance(tool, FunctionTool)
            self.reward_scores[name] = float(await tool.calc_reward(number, **self.kwargs(tool, "calc_reward")))

    async def end(self) -> None:
        if self._interaction is not None:
            finalize = self._interaction.finalize_interaction
            await finalize(*[self._interaction_id] if inspect.signature(finalize).parameters else [])
        while self._ids:
            name, number = self._ids.popitem()
            tool = self._tools[name]
            assert not isinstance(tool, FunctionTool)
            await tool.release(number, **self.kwargs(tool, "release"))

    def answer(self, returned: Any) -> Any:
        """Return what the model gets: a text, or a content block for what is no text."""
        response, *rest = returned if isinstance(returned, tuple) and 1 <= len(returned) <= 3 else (returned,)
        if rest:
            self.tool_rewards.append(0.0 if rest[0] is None else float(rest[0]))
        if hasattr(response, "text") and hasattr(response, "image"):
            kinds = [kind for kind in ("image", "video") if getattr(response, kind, None)]
            return [{"type": kind} for kind in kinds] if kinds else response.text or ""
        return json.dumps(response, ensure_ascii=False) if isinstance(response, dict) else str(response)


@dataclass
class _Method:
    environment: VerlEnvironment
    tool: BaseTool

    @property
    def schema(self) -> dict[str, Any]:
        return dict(self.tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True))

    async def __call__(self, /, **arguments: Any) -> Any:
        number = await self.environment.instance(self.tool)
        kwargs = self.environment.kwargs(self.tool, "execute")
        return self.environment.answer(await self.tool.execute(number, arguments, **kwargs))


@dataclass
class _Function:
    environment: VerlEnvironment
    tool: FunctionTool

    @property
    def schema(self) -> dict[str, Any]:
        if self.tool.schema is not None:
            return self.tool.schema
        made = schema_of(self.tool.function)
        return {**made, "function": {**made["function"], "name": self.tool.name}}

    def __call__(self, /, **arguments: Any) -> Any:
        return self.environment.answer(self.tool.function(**arguments))


class _AsyncFunction(_Function):
    async def __call__(self, /, **arguments: Any) -> Any:
        return self.environment.answer(await self.tool.function(**arguments))
