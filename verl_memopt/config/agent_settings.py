"""Settings of agents: conversations of several turns, in which the model calls tools. The names are verl's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from verl_memopt.memory.knob import POSITIVE, PositiveFloat, PositiveInt, Range

CLASSES = Range("must be a name, or a mapping of names", lambda value: isinstance(value, str | dict))
FUNCTIONS = Range(
    "must be a name, or a list of names",
    lambda value: isinstance(value, str) or (isinstance(value, list) and all(isinstance(name, str) for name in value)),
)

SINGLE_TURN, TOOL_AGENT = "single_turn_agent", "tool_agent"
"""verl's names of its two agent loops: one answer to a prompt, and a conversation with tools."""


@dataclass(frozen=True)
class MultiTurn:
    """Conversations of several turns."""

    enable: bool | None = None
    """Answer a prompt by a conversation, in which the model calls tools and reads their results. null = true if there are tools,
    an environment or an agent loop."""
    max_assistant_turns: Annotated[int | None, POSITIVE] = None
    """Largest number of turns of the model. The calls of the last turn are not run. null = no limit besides the tokens."""
    max_user_turns: Annotated[int | None, POSITIVE] = None
    """Largest number of turns between the model's turns, with the results of tools. null = no limit."""
    max_parallel_calls: PositiveInt = 8
    """Largest number of calls of one turn, which run at the same time. The model reads that further calls were not run."""
    max_tool_response_length: PositiveInt = 4096
    """Largest number of characters of a tool's result. A longer result is cut."""
    tool_response_truncate_side: Literal["left", "right", "middle"] = "middle"
    """Where a long result is cut, as in verl: left = at its beginning, right = at its end, middle = between both."""
    tool_config_path: str | None = None
    """YAML file with tools in verl's format: a class for each tool, its config and its schema."""
    function_tool_path: str | None = None
    """Python file whose functions with the decorator ``function_tool`` are tools."""
    interaction_config_path: str | None = None
    """YAML file with interactions in verl's format: classes that answer a turn without calls, as the user of the conversation.
    The row chooses one by ``extra_info.interaction_kwargs.name``."""
    format: str = "auto"
    """How the model writes calls: hermes, qwen3_coder, mistral, llama3_json, or ``file.py:function`` for a parser of your own.
    auto = the format in which the chat template writes calls."""


@dataclass(frozen=True)
class AgentEnvironment:
    """Environments in TRL's form: classes with ``reset`` and with methods that are tools."""

    path: str | None = None
    """Python file with the environment classes."""
    name: Annotated[Any, CLASSES] = None
    """Name of the class in this file; or a mapping from the names in the dataset's column ``environment`` to classes."""


@dataclass(frozen=True)
class AgentTools:
    """Functions that are tools, besides the methods of an environment or without any."""

    path: str | None = None
    """Python file with the functions."""
    name: Annotated[Any, FUNCTIONS] = None
    """Name of the function in this file, or a list of names."""


@dataclass(frozen=True)
class AgentLimits:
    """Limits of the processes in which tools and environments run."""

    num_workers: Annotated[int | None, POSITIVE] = None
    """Processes on each worker in which tools and environments run; each process serves many conversations at the same time.
    null = one per processor core, at most 8."""
    tool_timeout_seconds: PositiveFloat = 60.0
    """Longest time of a call of a tool or an environment. A conversation whose call takes longer ends."""
    cpu_seconds: Annotated[float | None, POSITIVE] = None
    """Longest processor time that a process may use while one call is under way; null = 32 x ``tool_timeout_seconds``."""
    memory_gb: PositiveFloat = 4
    """Memory limit in GiB of each of these processes, with the processes that it starts."""


@dataclass(frozen=True)
class Agent(AgentLimits):
    """Tools, environments and agent loops."""

    environment: AgentEnvironment = field(default_factory=AgentEnvironment)
    """Environments in TRL's form."""
    tools: AgentTools = field(default_factory=AgentTools)
    """Functions that are tools."""
    default_agent_loop: str = SINGLE_TURN
    """Agent loop of rows without the column ``agent_name``: single_turn_agent, tool_agent, or a name in
    ``agent_loop_config_path``."""
    agent_loop_config_path: str | None = None
    """YAML file with agent loops of your own: a list of {name, _target_}."""
    timeout_seconds: Annotated[float | None, POSITIVE] = None
    """Longest time of a conversation. A conversation that takes longer ends with what it has. null = no limit."""
    failed_reward: float | None = None
    """Reward of a conversation that ends because its environment failed, hung or was ended. null = none: nothing is
    learned from it."""
