"""Conversations in the rows of a dataset. They are read, checked, and rendered with the columns that change the prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl_memopt.config import schema
from verl_memopt.config.agent_settings import SINGLE_TURN
from verl_memopt.data.encoder import RENDER_ERRORS, Spans, SpecialTokens
from verl_memopt.errors import DataError

Messages = list[dict[str, Any]]

NO_PROMPT: Messages = [{"role": "user", "content": ""}]
"""Begins a conversation whose row has no prompt. The environment's ``reset`` continues it, as in TRL."""

MEDIA_COLUMNS = ("images", "image", "videos", "audios")
MEDIA_PARTS = ("image", "image_url", "video", "video_url", "audio", "audio_url", "input_audio")
KWARGS_COLUMN = "chat_template_kwargs"
"""Column with further arguments of the chat template for a row, as in TRL."""
_ENABLE = "actor_rollout_ref.rollout.multi_turn.enable=true"

_READS_NULL = re.compile(r"content['\"\]]*\s*(==|!=|is not|is)\s+none")
"""Finds chat templates that distinguish a message without content from one with empty content."""


def read_messages(value: Any, address: str) -> Messages | None:
    """Return a conversation in the form that chat templates of text models read. None = ``value`` is not a conversation.

    Text parts are joined. Keys with the value null are dropped, because datasets add them where other rows have the key. A
    message with tool calls may have no content.

    Raises:
        DataError: A message contains media.
    """
    if not isinstance(value, list | tuple) or not value or not all(isinstance(turn, Mapping) for turn in value):
        return None
    read = [_message(turn, address) for turn in value]
    return None if None in read else [turn for turn in read if turn is not None]


def _message(turn: Mapping[str, Any], address: str) -> dict[str, Any] | None:
    content = turn.get("content")
    if isinstance(content, list | tuple):
        content = _joined(content, address)
    message = {key: without_nulls(entry) for key, entry in turn.items() if entry is not None and key != "content"}
    calls = message.pop("tool_calls", None)
    if not isinstance(message.get("role"), str) or not (isinstance(content, str) or (content is None and calls)):
        return None
    message |= {"content": content} | ({"tool_calls": calls} if calls else {})
    return {key: message[key] for key in dict.fromkeys([*turn, *message]) if key in message}


def _joined(parts: Sequence[Any], address: str) -> str | None:
    texts: list[Any] = []
    for part in parts:
        if isinstance(part, Mapping) and part.get("type") in MEDIA_PARTS:
            raise DataError(f"{address}: a message has a part of type {part['type']!r}, but only text is supported. Remove it.")
        texts.append(part.get("text") if isinstance(part, Mapping) else part)
    return "".join(texts) if all(isinstance(text, str) for text in texts) else None


def without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list | tuple) else value


def is_chat(prompt: Any) -> bool:
    try:
        return read_messages(prompt, "") is not None
    except DataError:
        return False


# Columns that change how a conversation is rendered, and columns that ask for something unsupported.


def template_arguments(address: str, columns: Mapping[str, Any], data: schema.Data, tokenizer: Any) -> dict[str, Any]:
    """Return the arguments of the chat template for a row: from the settings, from the row, and the row's tools.

    Raises:
        DataError: A column cannot be read, or the template does not read the tools.
    """
    own = _parsed(columns.get(KWARGS_COLUMN))
    if not isinstance(own, Mapping | None):
        raise DataError(f"{address}: the column {KWARGS_COLUMN!r} must be an object, but it is {own!r:.200}. Correct the row.")
    arguments = {**data.apply_chat_template_kwargs, **without_nulls(own or {})}
    thinks = columns.get(data.enable_thinking_key) if data.enable_thinking_key else None
    if thinks is not None:
        arguments["enable_thinking"] = bool(thinks)
    tools = _tools(address, columns, data.tools_key)
    if tools and "tools" not in str(arguments.get("chat_template") or tokenizer.chat_template):
        raise DataError(
            f"{address}: the row has tools, but the chat template does not read any. Set data.tools_key=null to leave the column "
            f"{data.tools_key!r} out, or use the template of a model with tools."
        )
    return arguments | ({"tools": tools} if tools else {})


def _tools(address: str, columns: Mapping[str, Any], key: str | None) -> list[Any]:
    value = None if key is None else _parsed(columns.get(key))
    if value is None:
        return []
    tools = [_parsed(tool) for tool in value] if isinstance(value, list | tuple) else None
    if tools is None or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(
            f"{address}: the column {key!r} must be a list of tools, each a JSON schema, but it is {value!r:.200}. Correct the "
            "row, or set data.tools_key=null to leave the column out."
        )
    without: list[Any] = without_nulls(tools)
    return without


def _parsed(value: Any) -> Any:
    # Some files hold nested columns as JSON text.
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def refuse_media(address: str, columns: Mapping[str, Any]) -> None:
    for name in MEDIA_COLUMNS:
        if _holds_something(columns.get(name)):
            raise DataError(f"{address}: the column {name!r} contains media, but only text is supported. Remove the column.")


def refuse_agents(address: str, columns: Mapping[str, Any]) -> None:
    agent = columns.get("agent_name")
    if agent not in (None, "", SINGLE_TURN):
        raise DataError(
            f"{address}: agent_name={agent!r:.100}: the run has no tools. Set {_ENABLE} and name the tools, or set the column to "
            f"{SINGLE_TURN}, if one answer to the prompt is the task."
        )
    extra = columns.get("extra_info")
    places = (("", columns), ("extra_info.", extra if isinstance(extra, Mapping) else {}))
    for where, values in places:
        for name in ("need_tools_kwargs", "interaction_kwargs"):
            if _holds_something(values.get(name)):
                raise DataError(
                    f"{address}: {where}{name}: the row asks for tools or further turns, but the run has none. Set {_ENABLE} and "
                    f"name the tools, or remove {name}, if one answer to the prompt is the task."
                )


def _holds_something(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_something, value.values()))
    return any(map(_holds_something, value)) if isinstance(value, list | tuple) else bool(value)


# Rendering.


def render(
    special: SpecialTokens, tokenizer: Any, messages: Messages, hides: bool, arguments: Mapping[str, Any]
) -> tuple[str, Spans]:
    """Render messages with the chat template. Return the text and the spans in which special tokens are plain text.

    ``hides``: special tokens in messages and tools are plain text. One of ``RENDER_ERRORS`` is raised if the messages cannot be
    rendered.
    """
    reads_null = _READS_NULL.search(str(arguments.get("chat_template") or tokenizer.chat_template)) is not None
    shown = messages if reads_null else [turn | ({"content": ""} if turn["content"] is None else {}) for turn in messages]
    try:
        return special.render(tokenizer, shown, hides, **arguments)
    except RENDER_ERRORS:
        # Some templates expect the arguments of a tool call as an object, others as JSON text, and datasets have both forms.
        changes: tuple[Callable[[Any], Any], ...] = (
            _parsed,
            lambda value: value if isinstance(value, str) else json.dumps(value),
        )
        for change in changes:
            other = [_with_arguments(turn, change) for turn in shown]
            if other != shown:
                return special.render(tokenizer, other, hides, **arguments)
        raise


def _with_arguments(turn: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    if "tool_calls" not in turn:
        return turn
    calls = []
    for call in turn["tool_calls"]:
        if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping) and "arguments" in call["function"]:
            call = {**call, "function": {**call["function"], "arguments": change(call["function"]["arguments"])}}
        calls.append(call)
    return {**turn, "tool_calls": calls}
