"""Agent loops of the user's own: code that drives a conversation itself, and asks only for tokens.

Code that was written for verl runs here after a change of its imports: ``from verl_memopt.agents.agent_loops import
AgentLoopBase, AgentLoopOutput, AgentLoopMetrics, FunctionCall, ToolParser, register, simple_timer``.

Each row gets an object of its own. It runs in a process of environments, and has the time limit of a tool between two requests to
the engine. Reward functions read ``extra_fields`` and ``metrics`` of the output as attributes of ``extra_info["environments"]``.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

from verl_memopt.agents.calls import FailedError
from verl_memopt.agents.parsers import Parser, parser_of
from verl_memopt.agents.tools import OwnTools, Tool
from verl_memopt.agents.verl_tools import (
    BaseInteraction,
    BaseTool,
    ToolResponse,
    entries_of,
    initialize_interactions_from_config,
    initialize_tools_from_config,
    named_class,
    rollout_trace_op,
)
from verl_memopt.data.encoder import decode
from verl_memopt.data.plugin import raised
from verl_memopt.errors import AgentError

__all__ = [
    "AgentLoopBase", "AgentLoopMetrics", "AgentLoopOutput", "AsyncLLMServerManager", "BaseInteraction", "BaseTool",
    "DictConfigWrap", "FunctionCall", "initialize_interactions_from_config", "initialize_tools_from_config", "register",
    "rollout_trace_op", "simple_timer", "TokenOutput", "ToolParser", "ToolResponse",
]  # fmt: skip


@dataclass(frozen=True)
class TokenSequence:
    """Tokens that the engine read and sampled, in the order in which it read them."""

    ids: list[int]
    sampled: list[int]
    """1 = the engine sampled the token, and the update learns it; 0 = context. As long as ``ids``."""


@dataclass(frozen=True)
class TokenOutput:
    """What the engine answered to a request."""

    token_ids: list[int]
    log_probs: list[float] | None
    """None = the run does not ask for them, as in validation."""
    stop_reason: str | None = "completed"
    finish_reason: str = "stop"
    """stop, or length = the limit of tokens ended it."""
    num_preempted: int | None = None
    routed_experts: Any = None
    extra_fields: dict[str, Any] = field(default_factory=dict)


Generates = Callable[[Sequence[int], Mapping[str, Any]], Awaitable[TokenOutput]]
"""Asks the engine to continue token ids. The second argument has sampling parameters in vLLM's names."""


class OwnLoop(OwnTools):
    """Drives one conversation in a process of environments."""

    gives_reward = False
    """Each conversation has a reward of its own, so that a run needs no reward function."""
    num_turns: int = 0

    def listed(self) -> dict[str, Tool]:
        return {}

    async def check(self) -> None:
        """Called once before the first conversation."""

    async def drive(self, generate: Generates, sampling: Mapping[str, Any]) -> list[TokenSequence]:
        """Return what the update learns. Sequences may begin alike. ``sampling``: the parameters of the run."""
        raise NotImplementedError


# What code of verl imports.


class AgentLoopMetrics:
    def __init__(self, generate_sequences: float = 0.0, tool_calls: float = 0.0, num_preempted: int = -1, **_: Any) -> None:
        self.generate_sequences, self.tool_calls, self.num_preempted = generate_sequences, tool_calls, num_preempted


@dataclass
class AgentLoopOutput:
    prompt_ids: list[int]
    response_ids: list[int]
    """Everything after the prompt, sampled or not."""
    response_mask: list[int]
    """1 = the engine sampled the token; 0 = context, such as the result of a tool."""
    metrics: Any = None
    response_logprobs: list[float] | None = None
    """Not used: the update takes the engine's log-probs."""
    reward_score: float | None = None
    num_turns: int = 0
    extra_fields: dict[str, Any] = field(default_factory=dict)
    multi_modal_data: dict[str, Any] | None = None
    routed_experts: Any = None


class DictConfigWrap:
    def __init__(self, config: Any) -> None:
        self.config = config


class AsyncLLMServerManager:
    """Hands the requests of one conversation to the engine."""

    def __init__(self, generate: Generates | None = None) -> None:
        self._generate = generate

    async def generate(
        self,
        request_id: Any = None,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        image_data: Any = None,
        video_data: Any = None,
        **_: Any,
    ) -> TokenOutput:
        """Return tokens that continue ``prompt_ids``. Requests may be under way at the same time.

        ``sampling_params`` may differ from those that ``run`` got. Tokens that were drawn from another distribution, such as with
        another temperature, must have a 0 in ``response_mask``.

        Raises:
            ValueError: The prompt is too long, or a parameter is unknown or out of range.
        """
        if image_data or video_data:
            raise ValueError("image_data and video_data are not supported; only text is")
        assert self._generate is not None, "there is no engine before the first conversation"
        return await self._generate(prompt_ids, sampling_params)


class AgentLoopBase:
    """A conversation that drives itself. Override ``run``. Each row gets an object of its own."""

    gives_reward = False
    """Set it to True if ``run`` always returns a ``reward_score``, and the run has no reward function. Otherwise a
    ``reward_score`` is added to the score of the reward function or of the built-in rules."""
    _class_initialized = False

    def __init__(
        self,
        trainer_config: Any,
        server_manager: AsyncLLMServerManager,
        tokenizer: Any,
        processor: Any = None,
        dataset_cls: Any = None,
        dataset_config: Any = None,
        **kwargs: Any,
    ) -> None:
        self.config = trainer_config.config
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.dataset_config = self.data_config = self.config.data if dataset_config is None else dataset_config.config
        self.server_manager, self.tokenizer, self.processor, self.dataset_cls = server_manager, tokenizer, processor, dataset_cls
        self.apply_chat_template_kwargs = dict(self.dataset_config.get("apply_chat_template_kwargs", {}))
        self.loop = asyncio.get_running_loop()
        if not vars(type(self)).get("_class_initialized"):
            type(self)._class_initialized = True
            self.init_class(config=self.config, tokenizer=tokenizer, processor=processor, **kwargs)

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any, processor: Any, **kwargs: Any) -> None:
        """Called once per process, as in earlier versions of verl."""

    @property
    def system_prompt(self) -> list[int]:
        """Token ids that the chat template writes before the first message."""
        once, twice = (
            self.tokenizer.apply_chat_template(
                [{"role": "user", "content": ""}] * number,
                add_generation_prompt=False, tokenize=True, return_dict=False, **self.apply_chat_template_kwargs,
            )
            for number in (1, 2)
        )  # fmt: skip
        return list(once[: len(once) - (len(twice) - len(once))])

    async def process_vision_info(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        return {}

    async def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        images: Any = None,
        videos: Any = None,
        remove_system_prompt: bool = False,
    ) -> list[int]:
        """Return the token ids of messages, with the beginning of the model's turn."""
        if images or videos:
            raise ValueError("images and videos are not supported; only text is")
        render = partial(
            self.tokenizer.apply_chat_template, messages, tools=tools or None, add_generation_prompt=True, tokenize=True,
            return_dict=False, **self.apply_chat_template_kwargs,
        )  # fmt: skip
        ids = list(await self.loop.run_in_executor(None, render))
        return ids[len(self.system_prompt) :] if remove_system_prompt else ids

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Hold the conversation.

        Args:
            sampling_params: The run's sampling parameters in vLLM's names, for ``server_manager.generate``.
            kwargs: The columns of the row, and its messages as ``raw_prompt``.
        """
        raise NotImplementedError


C = TypeVar("C", bound=type)

_registered: dict[str, type] = {}


def register(agent_name: str) -> Callable[[C], C]:
    """Give a class the name by which ``default_agent_loop`` and the column ``agent_name`` choose it."""

    def decorate(subclass: C) -> C:
        _registered[agent_name] = subclass
        return subclass

    return decorate


@contextmanager
def simple_timer(name: str, timing_raw: dict[str, float]) -> Iterator[None]:
    """Add the seconds of the block to an entry of ``timing_raw``."""
    began = time.monotonic()
    yield
    timing_raw[name] = timing_raw.get(name, 0.0) + time.monotonic() - began


@dataclass(frozen=True)
class FunctionCall:
    name: str
    arguments: str
    """A JSON object."""


class ToolParser:
    """Finds tool calls in the tokens of a turn."""

    def __init__(self, parser: Parser, tokenizer: Any) -> None:
        self._parser, self.tokenizer = parser, tokenizer

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: Any) -> ToolParser:
        """Return the parser of a format.

        Args:
            name: A value of ``multi_turn.format``: ``hermes``, ``llama3_json`` and so on, or ``file.py:function``.
            tokenizer: The policy's tokenizer, which decodes the tokens of a turn.
        """
        return cls(parser_of(tokenizer, name, {}), tokenizer)

    async def extract_tool_calls(self, responses_ids: Sequence[int]) -> tuple[str, list[FunctionCall]]:
        """Return the turn without its calls, and the calls that can be read."""
        ids = list(responses_ids)
        if ids and ids[-1] == self.tokenizer.eos_token_id:
            ids.pop()
        parsed = self._parser(decode(self.tokenizer, ids), ())
        calls = [call for call in parsed.calls if call.problem is None]
        return parsed.content, [FunctionCall(call.name, json.dumps(dict(call.arguments), ensure_ascii=False)) for call in calls]


# The loop of one row.


@dataclass(frozen=True)
class VerlLoops:
    """The agent loops of an ``agent_loop_config_path``, and those that their modules register."""

    path: str
    """YAML file with a list of ``name`` and ``_target_``. All further entries are arguments of the class."""
    tokenizer: Any
    config: Mapping[str, Any]
    """The settings that ``AgentLoopBase.config`` has, as plain data."""
    key: str = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
    name: str = "the agent loops"

    def load(self) -> dict[str, Callable[[], OwnLoop]]:
        address = f"{self.key}={self.path}"
        found: dict[str, Callable[[], OwnLoop]] = {}
        for index, entry in enumerate(entries_of(address, self.path, None, "Write a list of name and _target_")):
            place = f"{address}: entry {index}"
            if not isinstance(entry, dict) or not all(isinstance(entry.get(name), str) for name in ("name", "_target_")):
                raise AgentError(f"{place}: name or _target_ is missing. Give each agent loop both.")
            name, target, others = entry["name"], entry["_target_"], {**entry}
            del others["name"], others["_target_"]
            if name in found:
                raise AgentError(f"{place}: name={name} comes twice. Rename one.")
            base = "AgentLoopBase from verl_memopt.agents.agent_loops"
            made = named_class(f"{place}: _target_", target, base, self.path)
            found[name] = partial(VerlLoop, self._checked(place, made), self, others)
        for name, made in _registered.items():
            found.setdefault(name, partial(VerlLoop, self._checked(f"{address}: {name}", made), self, {}))
        return found

    def _checked(self, address: str, made: Any) -> Any:
        if not isinstance(made, type) or not inspect.iscoroutinefunction(getattr(made, "run", None)):
            raise AgentError(f"{address}: {made!r:.100} is no agent loop. Derive a class from AgentLoopBase, with async def run.")
        return made


class VerlLoop(OwnLoop):
    def __init__(self, made: Any, loops: VerlLoops, arguments: Mapping[str, Any]) -> None:
        self._class, self._loops, self._arguments = made, loops, arguments
        self.gives_reward = bool(getattr(made, "gives_reward", False))
        self.reward_score: float | None = None
        self.extra_fields: dict[str, Any] = {}
        self.metrics: Any = None

    def reset(self, **row: Any) -> None:
        self._row = row

    async def check(self) -> None:
        self._made(AsyncLLMServerManager())

    async def drive(self, generate: Generates, sampling: Mapping[str, Any]) -> list[TokenSequence]:
        made = self._made(AsyncLLMServerManager(generate))
        returned = await made.run(dict(sampling), **self._row)
        outputs = list(returned) if isinstance(returned, list | tuple) else [returned]
        if not outputs or not all(hasattr(output, "response_mask") for output in outputs):
            raise FailedError(f"returned {type(returned).__name__}; return an AgentLoopOutput")
        output = outputs[-1]
        self.reward_score, self.num_turns = output.reward_score, int(output.num_turns or 0)
        self.extra_fields = dict(output.extra_fields or {})
        self.metrics = output.metrics if isinstance(output.metrics, dict) else vars(output.metrics) if output.metrics else {}
        return [_sequence(output) for output in outputs]

    def _made(self, server_manager: AsyncLLMServerManager) -> AgentLoopBase:
        from omegaconf import OmegaConf

        config: Any = OmegaConf.create(dict(self._loops.config))
        return cast(
            AgentLoopBase,
            self._class(
                trainer_config=DictConfigWrap(config), server_manager=server_manager, tokenizer=self._loops.tokenizer,
                processor=None, dataset_cls=None, dataset_config=DictConfigWrap(config.data), **self._arguments,
            ),
        )  # fmt: skip

    def get_reward(self) -> float | None:
        return self.reward_score


def _sequence(output: AgentLoopOutput) -> TokenSequence:
    try:
        prompt, response = [int(token) for token in output.prompt_ids], [int(token) for token in output.response_ids]
        mask = [int(value) for value in output.response_mask]
    except Exception as problem:  # objects of the user
        raise FailedError(f"returned ids that are no whole numbers ({raised(problem)})") from problem
    if len(mask) != len(response):
        raise FailedError(f"returned a response_mask of {len(mask)} entries for {len(response)} response_ids; make them equal")
    if set(mask) - {0, 1}:
        raise FailedError("returned a response_mask with entries besides 0 and 1")
    return TokenSequence([*prompt, *response], [0] * len(prompt) + mask)
