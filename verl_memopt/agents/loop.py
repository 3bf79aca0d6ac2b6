"""The agent loop: conversations of several turns, beside the engine that generates them.

Each conversation is a sequence of requests. While one waits for a tool, the engine generates others, and finds the tokens that a
conversation had before in its prefix cache.
"""

from __future__ import annotations

import logging
import os
import time
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from verl_memopt.agents.agent_loops import VerlLoops
from verl_memopt.agents.conversation import Transcript, Turn
from verl_memopt.agents.driven import Request, UnknownTokensError, request_sampling, sampling_params, turns_of
from verl_memopt.agents.environments import (
    Answers,
    Driven,
    EnvironmentKind,
    EnvironmentPool,
    Event,
    Failed,
    Finished,
    Generate,
    Ready,
    Restart,
    UserTurn,
)
from verl_memopt.agents.parsers import Parser, ToolCall, no_calls, parser_of, shows_tools
from verl_memopt.agents.program import Program
from verl_memopt.agents.tools import Loads, Source
from verl_memopt.agents.verl_tools import VerlTools, user_of
from verl_memopt.config.agent_settings import SINGLE_TURN, TOOL_AGENT, Agent, AgentEnvironment, AgentTools, MultiTurn
from verl_memopt.config.schema import Rollout
from verl_memopt.data.encoder import decode
from verl_memopt.data.messages import NO_PROMPT, Messages
from verl_memopt.errors import ConfigError, DataError
from verl_memopt.model import forest
from verl_memopt.rewards.score import Limits as ProcessLimits
from verl_memopt.rollout.engine import Output, Requests, SamplingSettings, row_seed

logger = logging.getLogger(__name__)

AGENT_COLUMN = "agent_name"
"""Column with the name of a row's agent loop, as in verl."""
KEY, TURNS_KEY = "actor_rollout_ref.rollout.agent", "actor_rollout_ref.rollout.multi_turn"
OPEN_FILES = 4096
"""Largest number of files that a process of environments may have open."""

ANSWER = "answer"
"""The model has ended the conversation with a turn without calls."""
FAILED = "failed"
"""The environment or a limit of its process has ended the conversation."""
USER = "user"
"""The user, who answers turns without calls, has ended the conversation."""
TOKENS = "tokens"
"""The conversation has no room for further tokens."""
SECONDS = "seconds"
"""The conversation took longer than ``agent.timeout_seconds``."""

MOST_REQUESTS = 4096
"""Largest number of requests of one conversation that an agent loop drives."""

WAIT_SECONDS = 0.05
"""Longest wait for tools while the engine has no request. The loop then looks at stop requests and time limits."""


@dataclass(frozen=True)
class Task:
    """What begins a conversation.

    Attributes:
        messages: The prompt.
        arguments: Arguments of the chat template, without tools.
        environment: Name of the environment; None = the only one, or none.
        row: Arguments of ``reset``: the columns of the row.
        seed: Seed of the conversation. Each turn's seed depends on it.
        address: File and row, for errors.
    """

    messages: Messages
    arguments: Mapping[str, Any]
    environment: str | None
    row: Mapping[str, Any]
    seed: int
    address: str


@dataclass
class Conversation:
    """A conversation from its first prompt to its end.

    Attributes:
        turns: The calls of the engine, in order.
        messages: The whole conversation, as reward functions get it.
        prompt_messages: Number of messages before the model's first turn.
        ended: Why it ended: one of the names above, or the setting whose limit it reached.
        reason: With ``FAILED``, what failed, in words.
        reward: The environment's reward; None = it gives none.
        attributes: The environment's attributes at the end, for reward functions. None = there is no environment.
        calls: Number of calls of tools.
        failed_calls: Calls that could not be read, that raised, or that named no tool.
        text: Everything after the first prompt as text, without special tokens.
        cached_tokens: Prompt tokens that the engine found in its prefix cache.
        seconds: Time from the first call of the environment to the end.
        counted_turns: The number of messages that an agent loop of the user's own counts. 0 = it counts none.
    """

    turns: list[Turn] = field(default_factory=list)
    messages: Messages = field(default_factory=list)
    prompt_messages: int = 0
    ended: str = ANSWER
    reason: str = ""
    reward: float | None = None
    attributes: Any = None
    calls: int = 0
    failed_calls: int = 0
    text: str = ""
    cached_tokens: int = 0
    seconds: float = 0.0
    counted_turns: int = 0

    def for_rewards(self) -> dict[str, Any]:
        """Return what a reward function gets in ``extra_info``: all messages, verl's number of turns, and the environment."""
        found: dict[str, Any] = {
            "messages": self.messages,
            "completion": self.messages[self.prompt_messages :],
            "num_turns": self.num_turns,
        }
        return found | ({} if self.attributes is None else {"environments": self.attributes})

    @property
    def ids(self) -> list[forest.Turn]:
        """The token ids of each turn."""
        return [forest.Turn(turn.prompt_ids, turn.output_ids) for turn in self.turns]

    @property
    def num_turns(self) -> int:
        """The number of messages from the last one of the prompt on, as verl counts turns."""
        return self.counted_turns or len(self.messages) - self.prompt_messages + 1

    def record(self) -> dict[str, Any]:
        """Return the fields of a :class:`verl_memopt.observe.samples.Sample` that describe the turns."""
        turns, before = [], list[int]()
        for turn in self.turns:
            kept = next(
                (place for place, pair in enumerate(zip(before, turn.prompt_ids, strict=False)) if pair[0] != pair[1]),
                min(len(before), len(turn.prompt_ids)),
            )
            turns.append({"kept": kept, "new_ids": turn.prompt_ids[kept:], "sampled": len(turn.output_ids)})
            before = [*turn.prompt_ids, *turn.output_ids]
        ended = f"{self.ended}: {self.reason}" if self.reason else self.ended
        return {"turns": turns, "conversation": self.messages, "ended": ended}

    @classmethod
    def recorded(
        cls,
        turns: Sequence[Mapping[str, Any]],
        response_ids: Sequence[int],
        log_probs: Sequence[float] | None,
        messages: Messages,
        address: str,
    ) -> Conversation:
        """Return the conversation of a recorded sample.

        Raises:
            DataError: The turns do not fit to the response.
        """
        found, before, place = cls(messages=messages), list[int](), 0
        try:
            for turn in turns:
                end = place + turn["sampled"]
                prompt, output = [*before[: turn["kept"]], *turn["new_ids"]], list(response_ids[place:end])
                found.turns.append(Turn(prompt, output, None if log_probs is None else list(log_probs[place:end])))
                before, place = [*prompt, *output], end
        except (KeyError, TypeError) as problem:
            raise DataError(f"{address}: turns is malformed ({problem!r}). Write the dump again.") from problem
        if place != len(response_ids):
            raise DataError(
                f"{address}: the turns sample {place} tokens, but the response has {len(response_ids)}. Write the dump again."
            )
        return found


@dataclass(frozen=True)
class LoopTimes:
    """What the engine did during a rollout.

    Attributes:
        seconds: Length of the rollout.
        engine_seconds: Time in which the engine generated.
        engine_steps: Steps of the engine.
    """

    seconds: float
    engine_seconds: float
    engine_steps: int


def loop_metrics(times: Sequence[LoopTimes]) -> dict[str, float]:
    """Return the share of the rollout in which engines generated: the mean over the engines."""
    busy = [engine.engine_seconds / max(engine.seconds, 1e-9) for engine in times]
    return {"rollout/engine_busy": sum(busy) / len(busy)}


def prompt_tokens(conversations: Sequence[Conversation]) -> int:
    """Count the prompt tokens of all turns, with those that the engine found in its prefix cache."""
    return sum(len(turn.prompt_ids) for each in conversations for turn in each.turns)


def conversation_metrics(conversations: Sequence[Conversation]) -> dict[str, float]:
    """Return the metrics of the conversations of a step. Lengths are means per conversation, in tokens."""
    number = max(len(conversations), 1)
    endings = Counter(each.ended for each in conversations)
    sampled = sum(len(turn.output_ids) for each in conversations for turn in each.turns)
    turns = [len(each.turns) for each in conversations]
    calls = sum(each.calls for each in conversations)
    context = sum(_context_tokens(each) for each in conversations)
    return {
        "agent/turns/mean": sum(turns) / number,
        "agent/turns/max": max(turns, default=0), "agent/turns/min": min(turns, default=0),
        "agent/tool_calls/mean": calls / number,
        "agent/failed_call_rate": sum(each.failed_calls for each in conversations) / max(calls, 1),
        "agent/context_tokens/mean": context / number, "agent/sampled_tokens/mean": sampled / number,
        "agent/seconds/max": max((each.seconds for each in conversations), default=0.0),
        **{f"agent/ended/{name}": count / number for name, count in sorted(endings.items())},
    }  # fmt: skip


def _context_tokens(conversation: Conversation) -> int:
    """Count the tokens after the first prompt that the model read and did not sample: of tools, users and the template."""
    if not conversation.turns:
        return 0
    last, first = conversation.turns[-1], conversation.turns[0]
    sampled = sum(len(turn.output_ids) for turn in conversation.turns[:-1])
    return max(len(last.prompt_ids) - len(first.prompt_ids) - sampled, 0)


@dataclass(frozen=True)
class Limits:
    """Limits of a conversation in tokens.

    Attributes:
        prompt: Largest number of tokens of the first prompt.
        after: Largest number of tokens after the first prompt, of all kinds.
    """

    prompt: int
    after: int


@dataclass
class _Live:
    number: int
    task: Task
    transcript: Transcript
    conversation: Conversation
    began: float
    tools: Sequence[Mapping[str, Any]] = ()
    answers: dict[int, str] = field(default_factory=dict)
    """Place of a call in the last turn -> the text of its result, if it did not reach the environment."""
    calls: list[ToolCall] = field(default_factory=list)
    user_turns: int = 0
    has_environment: bool = False
    drives: bool = False
    """An agent loop of the user's own drives the conversation."""
    has_user: bool = False
    """A user answers turns without calls."""
    requests: list[Request] = field(default_factory=list)
    """The requests of an agent loop that drives the conversation itself."""


@dataclass
class AgentLoop:
    """Runs conversations until all have ended.

    Attributes:
        tokenizer: A tokenizer of transformers.
        parser: Finds calls in a turn.
        pool: The processes of tools and environments. None = there are neither.
        multi_turn: Limits of turns and calls.
        agent: Limits of time.
        limits: Limits of tokens.
        stops: Tokens that end a turn.
        allow_special: See :class:`Transcript`.
    """

    tokenizer: Any
    parser: Parser
    pool: EnvironmentPool | None
    multi_turn: MultiTurn
    agent: Agent
    limits: Limits
    stops: frozenset[int]
    allow_special: bool = False

    def run(self, tasks: Sequence[Task], requests: Requests, sampling: SamplingSettings) -> tuple[list[Conversation], LoopTimes]:
        """Return the conversation of each task, in order, and what the engine did.

        Raises:
            DataError: A prompt is too long, or the chat template cannot render a conversation.
            Stopped: The caller of ``requests`` wants to stop.
        """
        return _Run(self, list(tasks), requests, sampling).run()

    def close(self) -> None:
        """End the processes of tools and environments."""
        if self.pool is not None:
            self.pool.close()


class _Requests:
    """The requests of a run. One that a conversation made before it had to begin again gets the response that it got before."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._first: dict[tuple[int, SamplingSettings, bytes], int] = {}
        """Seed, settings and hash of a prompt -> the first request that had them."""
        self._outputs: dict[int, Output] = {}
        self._again: dict[int, int] = {}
        """Number of a request -> the earlier one whose response it gets."""

    def add(self, number: int, prompt_ids: list[int], seed: int, sampling: SamplingSettings) -> None:
        first = self._first.setdefault((seed, sampling, blake2b(array("q", prompt_ids).tobytes()).digest()), number)
        if first == number:
            self._requests.add(number, prompt_ids, seed, sampling)
        else:
            self._again[number] = first

    def step(self) -> dict[int, Output]:
        complete = self._requests.step()
        self._outputs |= complete
        known = [number for number, first in self._again.items() if first in self._outputs]
        return complete | {number: self._outputs[self._again.pop(number)] for number in known}

    @property
    def under_way(self) -> int:
        return self._requests.under_way + len(self._again)


class _Run:
    def __init__(self, loop: AgentLoop, tasks: list[Task], requests: Requests, sampling: SamplingSettings) -> None:
        self.loop, self.tasks, self.requests, self.sampling = loop, tasks, _Requests(requests), sampling
        self.live: dict[int, _Live] = {}
        self.asked: dict[int, tuple[_Live, Request | None]] = {}
        """Number of a request -> its conversation, and the request if an agent loop made it. A conversation that has ended, or
        begins again, ignores the response."""
        self.num_asked = 0
        self.done: dict[int, Conversation] = {}
        self.endings: Counter[str] = Counter()
        self.kinds: Mapping[str | None, EnvironmentKind] = {} if loop.pool is None else loop.pool.wait_until_loaded()

    def run(self) -> tuple[list[Conversation], LoopTimes]:
        began, engine_seconds, steps = time.monotonic(), 0.0, 0
        try:
            for number in range(len(self.tasks)):
                self._begin(number)
            while self.live:
                busy = self.requests.under_way > 0
                before = time.monotonic()
                complete = self.requests.step()
                engine_seconds += (time.monotonic() - before) * busy
                steps += busy
                for request, output in complete.items():
                    live, made = self.asked.pop(request)
                    if self.live.get(live.number) is not live:
                        continue
                    if made is None:
                        self._turn(live.number, output)
                    else:
                        self._answer(live, made, output)
                if self.loop.pool is not None:
                    for event in self.loop.pool.poll(0.0 if self.requests.under_way else WAIT_SECONDS):
                        self._handle(event)
                self._end_late()
        except BaseException:
            for number in self.live:
                if self.loop.pool is not None and self.live[number].has_environment:
                    self.loop.pool.abandon(number)
            raise
        return [self.done[number] for number in range(len(self.tasks))], LoopTimes(
            time.monotonic() - began, engine_seconds, steps
        )

    def _begin(self, number: int) -> None:
        task, loop = self.tasks[number], self.loop
        transcript = Transcript(loop.tokenizer, list(task.messages), dict(task.arguments), loop.allow_special, task.address)
        live = self.live[number] = _Live(number, task, transcript, Conversation(), time.monotonic())
        if loop.pool is None:
            self._ask(number)
            return
        live.has_environment = True
        name = environment_of(task.environment, task.row, loop.agent, self.kinds)
        if name not in self.kinds:
            raise DataError(f"{task.address}: {unknown_environment(name, self.kinds)}")
        live.tools = self.kinds[name].schemas
        live.drives, users = self.kinds[name].drives, self.kinds[name].users
        if users and (user := user_of(task.row).get("name")) not in users:
            raise DataError(
                f"{task.address}: extra_info.interaction_kwargs.name={user!r:.100} is no interaction of the run. Use one of "
                f"{', '.join(users)}."
            )
        live.has_user = bool(users)
        row = {**task.row, "raw_prompt": task.messages} if live.drives else task.row
        loop.pool.begin(number, name, row, task.seed)

    def _handle(self, event: Event) -> None:
        number = event.conversation
        live = self.live.get(number)
        if live is None:
            return
        if isinstance(event, Ready) and live.drives:
            assert self.loop.pool is not None
            self.loop.pool.drive(number, sampling_params(self.sampling))
        elif isinstance(event, Generate):
            self._generate(live, event)
        elif isinstance(event, Driven):
            self._take(live, event)
        elif isinstance(event, Ready):
            add_observation(live.transcript.messages, event.observation)
            if live.tools:
                live.transcript.arguments = {**live.transcript.arguments, "tools": list(live.tools)}
            self._ask(number)
        elif isinstance(event, Answers):
            live.conversation.failed_calls += sum(failed for _, failed in event.answers)
            left = iter([text for text, _ in event.answers])
            self._results(number, [live.answers[at] if at in live.answers else next(left) for at in range(len(live.calls))])
        elif isinstance(event, UserTurn):
            live.transcript.messages.append({"role": "user", "content": event.text})
            if event.ends:
                self._end(number, USER)
            else:
                self._ask(number)
        elif isinstance(event, Finished):
            live.conversation.reward, live.conversation.attributes = event.reward, event.snapshot
            self._close(number)
        elif isinstance(event, Failed):
            live.has_environment = False
            self._end(number, FAILED, event.reason)
        elif isinstance(event, Restart):
            # Another conversation has ended the process. The same seeds give the same conversation again.
            self._begin(number)

    def _ask(self, number: int) -> None:
        """Begin the next turn of the model, or end the conversation if it has no room for one."""
        live, limits = self.live[number], self.loop.limits
        conversation = live.conversation
        try:
            prompt = live.transcript.prompt()
        except DataError as problem:
            if not conversation.turns:
                raise
            self._end(number, FAILED, str(problem))
            return
        first = len(conversation.turns[0].prompt_ids) if conversation.turns else len(prompt)
        if not conversation.turns:
            conversation.prompt_messages = len(live.transcript.messages)
            if live.transcript.messages == NO_PROMPT:
                raise DataError(
                    f"{live.task.address}: the row has no prompt, and no environment gave one. Set data.prompt_key to the column "
                    "of the prompt, or return the prompt from the environment's reset."
                )
            if first > limits.prompt:
                raise DataError(
                    f"{live.task.address}: the prompt has {first} tokens with its tools, but data.max_prompt_length is "
                    f"{limits.prompt}. Raise data.max_prompt_length, or shorten the descriptions of the tools."
                )
        room = limits.after - (len(prompt) - first)
        if room < 1:
            self._end(number, TOKENS)
            return
        sampling = replace(self.sampling, max_tokens=min(self.sampling.max_tokens, room))
        conversation.turns.append(Turn(prompt, [], None))
        self._add(live, None, prompt, len(conversation.turns), sampling)

    def _add(self, live: _Live, made: Request | None, prompt: list[int], turn: int, sampling: SamplingSettings) -> None:
        self.asked[self.num_asked] = live, made
        self.requests.add(self.num_asked, prompt, row_seed(live.task.seed, turn, 0, 0), sampling)
        self.num_asked += 1

    # Conversations that an agent loop drives.

    def _generate(self, live: _Live, event: Generate) -> None:
        assert self.loop.pool is not None
        if len(live.requests) >= MOST_REQUESTS:
            self._fail(live, f"run made more than {MOST_REQUESTS} requests")
            return
        limits = self.loop.limits
        try:
            sampling = request_sampling(event.sampling, self.sampling)
            if not event.prompt_ids or min(event.prompt_ids) < 0 or max(event.prompt_ids) >= len(self.loop.tokenizer):
                raise ValueError("prompt_ids must be token ids of the tokenizer, at least one")
            room = limits.prompt + limits.after - len(event.prompt_ids)
            if room < 1:
                raise ValueError(
                    f"the prompt has {len(event.prompt_ids)} tokens, and prompt_length + response_length = "
                    f"{limits.prompt + limits.after} leaves no room for a response"
                )
        except ValueError as problem:
            self.loop.pool.answer_request(live.number, event.request, str(problem))
            return
        made = Request(event.request, event.prompt_ids, replace(sampling, max_tokens=min(sampling.max_tokens, room)))
        live.requests.append(made)
        self._add(live, made, list(made.prompt_ids), len(live.requests), made.sampling)

    def _answer(self, live: _Live, made: Request, output: Output) -> None:
        assert self.loop.pool is not None
        made.output = output
        live.conversation.cached_tokens += output.cached_tokens
        self.loop.pool.answer_request(live.number, made.number, (output.response_ids, output.log_probs, output.finish_reason))

    def _take(self, live: _Live, event: Driven) -> None:
        conversation, limits = live.conversation, self.loop.limits
        try:
            turns, is_whole = turns_of(event.sequences, live.requests, self.sampling, limits.prompt, limits.after)
        except UnknownTokensError as problem:
            self._fail(live, str(problem))
            return
        conversation.turns, conversation.counted_turns = turns, event.num_turns
        conversation.prompt_messages = len(live.transcript.messages)
        ids, sampled = event.sequences[-1]
        first = sampled.index(1) if 1 in sampled else len(ids)
        conversation.text = self.loop.tokenizer.decode(ids[first:], skip_special_tokens=True)
        live.transcript.messages.append({"role": "assistant", "content": conversation.text})
        self._end(live.number, ANSWER if is_whole else TOKENS)

    def _fail(self, live: _Live, reason: str) -> None:
        assert self.loop.pool is not None
        self.loop.pool.abandon(live.number)
        live.has_environment = False
        self._end(live.number, FAILED, reason)

    def _turn(self, number: int, output: Output) -> None:
        live, loop = self.live[number], self.loop
        conversation, multi_turn = live.conversation, loop.multi_turn
        prompt = conversation.turns[-1].prompt_ids
        conversation.turns[-1] = Turn(prompt, output.response_ids, output.log_probs, output.routes)
        conversation.cached_tokens += output.cached_tokens
        text = self._text(output.response_ids)
        parsed = loop.parser(text, live.tools)
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
        if parsed.calls and not any(call.problem for call in parsed.calls):
            message["tool_calls"] = [_message_of(call, place) for place, call in enumerate(parsed.calls)]
        elif parsed.calls:
            message["content"] = text
        live.transcript.add_output(output.response_ids, message, text)
        if output.finish_reason == "length":
            self._end(number, TOKENS)
        elif not parsed.calls and not live.has_user:
            self._end(number, ANSWER)
        elif multi_turn.max_assistant_turns is not None and len(conversation.turns) >= multi_turn.max_assistant_turns:
            self._end(number, "max_assistant_turns")
        elif multi_turn.max_user_turns is not None and live.user_turns >= multi_turn.max_user_turns:
            self._end(number, "max_user_turns")
        elif not parsed.calls:
            assert loop.pool is not None, "without a pool there is no user"
            live.user_turns += 1
            loop.pool.respond(number, live.transcript.messages)
        else:
            self._call(number, list(parsed.calls))

    def _call(self, number: int, calls: list[ToolCall]) -> None:
        live, most = self.live[number], self.loop.multi_turn.max_parallel_calls
        known = {tool.get("function", tool)["name"] for tool in live.tools}
        live.calls, live.answers, live.user_turns = calls, {}, live.user_turns + 1
        live.conversation.calls += len(calls)
        for place, call in enumerate(calls):
            if call.problem is not None:
                live.answers[place] = problem_text(f"{call.problem}. Write the call again.")
            elif call.name not in known:
                live.answers[place] = problem_text(
                    f"there is no tool {call.name!r}. The tools are {', '.join(sorted(known)) or 'none'}."
                )
            elif place - len(live.answers) >= most:
                live.answers[place] = problem_text(f"not run: at most {most} calls in one turn.")
        live.conversation.failed_calls += len(live.answers)
        run = [(call.name, dict(call.arguments)) for place, call in enumerate(calls) if place not in live.answers]
        if run:
            assert self.loop.pool is not None, "without a pool there are no tools"
            self.loop.pool.call(number, run)
        else:
            self._results(number, [live.answers[place] for place in range(len(calls))])

    def _results(self, number: int, texts: Sequence[str]) -> None:
        live = self.live[number]
        for place, (call, text) in enumerate(zip(live.calls, texts, strict=True)):
            live.transcript.messages.append({"role": "tool", "name": call.name, "tool_call_id": _call_id(place), "content": text})
        self._ask(number)

    def _end_late(self) -> None:
        limit = self.loop.agent.timeout_seconds
        if limit is None:
            return
        now = time.monotonic()
        for number in [
            number for number, live in self.live.items() if now - live.began > limit and not live.conversation.seconds
        ]:
            turns = self.live[number].conversation.turns
            if turns and not turns[-1].output_ids:
                turns.pop()  # its request is ignored when it is complete
            self._end(number, SECONDS)

    def _end(self, number: int, ended: str, reason: str = "") -> None:
        live = self.live[number]
        conversation = live.conversation
        conversation.ended, conversation.reason, conversation.seconds = ended, reason, time.monotonic() - live.began
        conversation.messages = live.transcript.messages
        self.endings[ended] += 1
        if ended == FAILED and self.endings[FAILED] == 1:
            logger.warning("%s: the conversation ends: %s", live.task.address, reason)
        if live.has_environment and self.loop.pool is not None:
            if ended == SECONDS:
                self.loop.pool.abandon(number)
            else:
                self.loop.pool.finish(number)
                return
        self._close(number)

    def _close(self, number: int) -> None:
        live = self.live.pop(number)
        conversation = live.conversation
        if conversation.turns and not live.drives:
            first = len(conversation.turns[0].prompt_ids)
            conversation.text = self.loop.tokenizer.decode(live.transcript.ids[first:], skip_special_tokens=True)
        self.done[number] = conversation

    def _text(self, output_ids: Sequence[int]) -> str:
        ids = list(output_ids)
        while ids and ids[-1] in self.loop.stops:
            ids.pop()
        return decode(self.loop.tokenizer, ids)


def _call_id(place: int) -> str:
    return f"call{place:05d}"  # nine letters and digits, as some chat templates require


def _message_of(call: ToolCall, place: int) -> dict[str, Any]:
    return {"type": "function", "id": _call_id(place), "function": {"name": call.name, "arguments": dict(call.arguments)}}


def problem_text(problem: str) -> str:
    """Return what the model reads instead of a tool's result."""
    return f"error: {problem}"


def add_observation(messages: Messages, observation: str | Sequence[Mapping[str, Any]] | None) -> None:
    """Add what ``reset`` returned, as in TRL: a text continues the last user message, and messages follow the others."""
    if not observation:
        return
    if not isinstance(observation, str):
        messages.extend(dict(message) for message in observation)
        return
    if messages and messages[-1]["role"] == "user":
        messages[-1] = {**messages[-1], "content": f"{messages[-1]['content'] or ''}{observation}"}
    else:
        messages.append({"role": "user", "content": observation})


def environment_of(
    environment: str | None, columns: Mapping[str, Any], agent: Agent, kinds: Mapping[str | None, EnvironmentKind]
) -> str | None:
    """Return the name of a row's environment or agent loop among ``kinds``, if it is there. ``columns``: of the row."""
    name = columns.get(AGENT_COLUMN) or agent.default_agent_loop
    if name in (SINGLE_TURN, TOOL_AGENT):
        return None if None in kinds else environment
    return str(name)


def unknown_environment(name: str | None, kinds: Mapping[str | None, EnvironmentKind]) -> str:
    known = [str(kind) for kind in kinds if kind is not None] + [SINGLE_TURN, TOOL_AGENT]
    return f"{name!r} is no environment and no agent loop of the run. Use one of {', '.join(known)}."


def build_pool(rollout: Rollout, plan: AgentPlan, tokenizer: Any, logs: Path | None) -> EnvironmentPool | None:
    """Start the processes of tools, environments and agent loops. None = there are none."""
    multi_turn, agent = rollout.multi_turn, rollout.agent
    environments: dict[str | None, Loads] = {**sources_of(agent.environment)}
    tools = sources_of(agent.tools)
    paths = multi_turn.tool_config_path, multi_turn.function_tool_path, multi_turn.interaction_config_path
    if any(path is not None for path in paths):
        if environments:
            raise ConfigError(
                f"{KEY}.environment.path={agent.environment.path}: {TURNS_KEY}.tool_config_path, function_tool_path and "
                "interaction_config_path make an environment too. Leave one of them out."
            )
        classes, functions, interactions = map(_whole, paths)
        environments = {None: VerlTools(classes, functions, TURNS_KEY, interactions)}
    loops = None
    if agent.agent_loop_config_path is not None:
        config = {"actor_rollout_ref": {"rollout": asdict(rollout)}, "data": _data(rollout, plan)}
        loops = VerlLoops(str(_whole(agent.agent_loop_config_path)), tokenizer, config)
    if not environments and not tools and loops is None:
        return None
    program = Program(
        environments=environments,
        tools=tuple(tools.values()),
        agent_loops=loops,
        key=KEY,
        timeout_seconds=agent.tool_timeout_seconds,
        max_tool_response_length=multi_turn.max_tool_response_length,
        tool_response_truncate_side=multi_turn.tool_response_truncate_side,
    )
    limits = ProcessLimits(agent.memory_gb, agent.cpu_seconds or 32 * agent.tool_timeout_seconds, OPEN_FILES, KEY)
    return EnvironmentPool(program, limits, agent.num_workers or min(os.cpu_count() or 1, 8), logs)


def _data(rollout: Rollout, plan: AgentPlan) -> dict[str, Any]:
    return {
        "apply_chat_template_kwargs": dict(plan.template),
        "max_prompt_length": rollout.prompt_length,
        "max_response_length": rollout.response_length,
        "tool_config_path": rollout.multi_turn.tool_config_path,
    }


def _whole(path: str | None) -> str | None:
    # A worker may have another working directory.
    return None if path is None else str(Path(path).expanduser().resolve())


def sources_of(given: AgentEnvironment | AgentTools) -> dict[str | None, Source]:
    """Return the source of each environment by its name (None = the only one), or of each tool."""
    if given.path is None:
        return {}
    names = given.name
    if isinstance(names, str):
        names = {None: names}
    elif not isinstance(names, Mapping):
        names = {name: name for name in names or ()}
    section = "environment" if isinstance(given, AgentEnvironment) else "tools"
    path = _whole(given.path)
    return {name: Source(str(path), str(own), f"{KEY}.{section}.path") for name, own in names.items()}


@dataclass(frozen=True)
class AgentPlan:
    """What a worker needs for conversations besides the settings of the rollout.

    Attributes:
        template: Arguments of the chat template for every row.
        allow_special: See :class:`Transcript`.
        trust_remote_code: The tokenizer may run code from its folder.
        logs: Folder for what tools print. None = the standard output of the worker.
    """

    template: Mapping[str, Any]
    allow_special: bool
    trust_remote_code: bool
    logs: str | None = None


def check_agents(
    rollout: Rollout, plan: AgentPlan, tokenizer: Any, eos_token_ids: Sequence[int]
) -> dict[str | None, EnvironmentKind]:
    """Load the tools and environments of a run once, and return each environment by its name.

    Raises:
        ConfigError, AgentError: As in :func:`build_loop`, before a worker starts.
    """
    loop = build_loop(rollout, replace(plan, logs=None), tokenizer, eos_token_ids, "")
    default = rollout.agent.default_agent_loop
    try:
        kinds = {} if loop.pool is None else dict(loop.pool.wait_until_loaded())
        if default not in (SINGLE_TURN, TOOL_AGENT) and (default not in kinds or not kinds[default].drives):
            raise ConfigError(
                f"{KEY}.default_agent_loop={default}: there is no such agent loop. Name it in {KEY}.agent_loop_config_path, or "
                f"set {SINGLE_TURN} or {TOOL_AGENT}."
            )
        return kinds
    finally:
        loop.close()


def build_loop(rollout: Rollout, plan: AgentPlan, tokenizer: Any, eos_token_ids: Sequence[int], name: str) -> AgentLoop:
    """Build the agent loop of a run, and start the processes of its tools and environments.

    ``name``: folder of the worker's logs.

    Raises:
        ConfigError: A tool or an environment cannot be loaded, or the parser does not read the calls of the chat template.
    """
    pool = build_pool(rollout, plan, tokenizer, None if plan.logs is None else Path(plan.logs) / name)
    has_tools = pool is not None and any(kind.schemas for kind in pool.wait_until_loaded().values())
    parser = parser_of(tokenizer, rollout.multi_turn.format, plan.template) if has_tools else no_calls
    if has_tools and not shows_tools(tokenizer, plan.template):
        logger.warning(
            "the chat template does not tell the model which tools there are, so the prompts must. Otherwise use the template of "
            "a model with tools (actor_rollout_ref.model.custom_chat_template)"
        )
    assert rollout.prompt_length is not None
    assert rollout.response_length is not None
    limits = Limits(rollout.prompt_length, rollout.response_length)
    stops = frozenset([*eos_token_ids, *rollout.stop_token_ids])
    return AgentLoop(tokenizer, parser, pool, rollout.multi_turn, rollout.agent, limits, stops, plan.allow_special)
