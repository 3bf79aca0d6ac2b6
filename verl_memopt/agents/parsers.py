"""Tool calls in the text of a model's turn, in the format that the model was trained to write."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_memopt.data.encoder import RENDER_ERRORS
from verl_memopt.data.plugin import load_from_file
from verl_memopt.data.template_trial import render_bounded
from verl_memopt.errors import ConfigError

KEY = "actor_rollout_ref.rollout.multi_turn.format"


@dataclass(frozen=True)
class ToolCall:
    """A call that the model asks for. ``problem`` says why a call cannot be read; its name and arguments are then empty."""

    name: str
    arguments: Mapping[str, Any]
    problem: str | None = None


@dataclass(frozen=True)
class Parsed:
    """A turn without its calls, and the calls in order."""

    content: str
    calls: tuple[ToolCall, ...]


Parser = Callable[[str, Sequence[Mapping[str, Any]]], Parsed]
"""Called with the text of a turn without its end token, and the schemas of the tools."""


def _from_json(text: str, arguments_key: str = "arguments") -> list[ToolCall]:
    """Read one call, or a list of calls, from JSON text."""
    try:
        read = json.loads(text)
    except (ValueError, RecursionError) as problem:
        return [ToolCall("", {}, f"the call is no JSON ({problem})")]
    return [_from_object(entry, arguments_key) for entry in (read if isinstance(read, list) else [read])]


def _from_object(entry: Any, arguments_key: str) -> ToolCall:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        return ToolCall("", {}, "the call has no name")
    arguments = entry.get(arguments_key, entry.get("arguments", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        return ToolCall(entry["name"], {}, f"{arguments_key} of {entry['name']} is no JSON object")
    return ToolCall(entry["name"], arguments)


_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def hermes(text: str, tools: Sequence[Mapping[str, Any]]) -> Parsed:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Qwen 2.5, Qwen 3 and Hermes."""
    calls = [call for match in _HERMES.finditer(text) for call in _from_json(match[1].strip())]
    return Parsed(_HERMES.sub("", text).strip(), tuple(calls))


_FUNCTION = re.compile(r"<function=([^>\n]*)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]*)>\n?(.*?)\n?(?=</parameter>|<parameter=|\Z)", re.DOTALL)


def qwen3_coder(text: str, tools: Sequence[Mapping[str, Any]]) -> Parsed:
    """``<tool_call><function=f><parameter=p>value</parameter></function></tool_call>``: Qwen3-Coder and Qwen 3.5.

    A value is text where the tool's schema says string, and otherwise JSON.
    """
    calls = []
    for block in _HERMES.finditer(text):
        functions = _FUNCTION.findall(block[1])
        for name, body in functions:
            types = _parameter_types(tools, name.strip())
            calls.append(ToolCall(name.strip(), {key: _value(value, types.get(key)) for key, value in _PARAMETER.findall(body)}))
        if not functions:
            calls.append(ToolCall("", {}, "the call has no <function=...>"))
    return Parsed(_HERMES.sub("", text).strip(), tuple(calls))


def _parameter_types(tools: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = function.get("parameters", {}).get("properties", {})
            return {key: entry.get("type") for key, entry in properties.items()}
    return {}


def _value(text: str, kind: Any) -> Any:
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


_MISTRAL = re.compile(r"\[TOOL_CALLS\]\s*", re.DOTALL)
_MISTRAL_NAMED = re.compile(r"([\w.\-]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(\{.*\})", re.DOTALL)


def mistral(text: str, tools: Sequence[Mapping[str, Any]]) -> Parsed:
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}]``, or ``[TOOL_CALLS]name[ARGS]{...}`` of newer models."""
    content, *parts = _MISTRAL.split(text)
    calls: list[ToolCall] = []
    for part in parts:
        named = _MISTRAL_NAMED.match(part.strip())
        if named and not part.strip().startswith(("[", "{")):
            calls += [
                ToolCall(call.name and named[1], call.arguments, call.problem)
                for call in _from_json(json.dumps({"name": named[1], "arguments": named[2]}))
            ]
        else:
            calls += _from_json(part.strip())
    return Parsed(content.strip(), tuple(calls))


_PYTHON_TAG = "<|python_tag|>"


def llama3_json(text: str, tools: Sequence[Mapping[str, Any]]) -> Parsed:
    """``{"name": ..., "parameters": {...}}`` as a whole turn, or several with semicolons between: Llama 3."""
    body = text.replace(_PYTHON_TAG, "").strip()
    if not body.startswith(("{", "[")) or '"name"' not in body:
        return Parsed(text.strip(), ())
    calls: list[ToolCall] = []
    decoder, place = json.JSONDecoder(), 0
    while place < len(body):
        try:
            entry, place = decoder.raw_decode(body, place)
        except (ValueError, RecursionError) as problem:
            calls.append(ToolCall("", {}, f"the call is no JSON ({problem})"))
            break
        calls += [_from_object(part, "parameters") for part in (entry if isinstance(entry, list) else [entry])]
        while place < len(body) and body[place] in "; \n\t,":
            place += 1
    return Parsed("", tuple(calls))


def no_calls(text: str, tools: Sequence[Mapping[str, Any]]) -> Parsed:
    """Find no calls, because there are no tools."""
    return Parsed(text, ())


PARSERS: dict[str, Parser] = {
    "hermes": hermes, "qwen3_coder": qwen3_coder, "mistral": mistral, "llama3_json": llama3_json,
}  # fmt: skip

PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "A tool.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "description": "A text."}},
            "required": ["text"],
        },
    },
}
PROBE_CALL = ToolCall("probe_tool", {"text": "a b"})


def load_parser(name: str) -> Parser:
    """Return a parser by its name, or a user's function given as ``file.py:function``.

    A user's function gets the text of a turn, and the schemas of the tools if it takes a second argument. It returns the calls: a
    list of (name, arguments), or of dicts with ``name`` and ``arguments``.

    Raises:
        ConfigError: There is no such parser, file or function.
    """
    if name in PARSERS:
        return PARSERS[name]
    file, _, function = name.partition(".py:")
    if not function:
        raise ConfigError(f"{KEY}={name}: unknown. Use auto, {', '.join(PARSERS)}, or file.py:function.")
    return _users_parser(load_from_file(f"{file}.py", function, key=KEY, error=ConfigError), name)


def _users_parser(function: Callable[..., Any], name: str) -> Parser:
    import inspect

    takes_tools = len(inspect.signature(function).parameters) > 1

    def parse(text: str, tools: Sequence[Mapping[str, Any]]) -> Parsed:
        try:
            found = function(text, tools) if takes_tools else function(text)
            calls = tuple(_as_call(call) for call in found or ())
        except Exception as problem:  # noqa: BLE001 - the parser is the user's code, and the model gets the problem as tool text
            calls = (ToolCall("", {}, f"{name} failed ({type(problem).__name__}: {problem})"),)
        return Parsed(text, calls)

    return parse


def _as_call(call: Any) -> ToolCall:
    if isinstance(call, ToolCall):
        return call
    if isinstance(call, Mapping):
        return _from_object(call.get("function", call), "arguments")
    called, arguments = call
    return _from_object({"name": called, "arguments": arguments}, "arguments")


def parser_of(tokenizer: Any, name: str, template_arguments: Mapping[str, Any]) -> Parser:
    """Return the parser that reads back a call that the chat template writes.

    Args:
        tokenizer: A tokenizer of transformers with a chat template.
        name: A name for :func:`load_parser`, or auto = the first of ``PARSERS`` that reads the template's call.
        template_arguments: Further arguments of the template.

    Raises:
        ConfigError: The template reads no tools, or the parser does not find the call.
    """
    written = list(_written_calls(tokenizer, template_arguments))
    chosen = PARSERS if name == "auto" else {name: load_parser(name)}
    if not written:
        if name != "auto":
            # The template has no form for calls, so the user has said how the model writes them.
            return chosen[name]
        raise ConfigError(
            f"{KEY}=auto: the chat template writes no tool calls, so their format is unknown. Set {KEY} to the format in which "
            f"the model writes calls ({', '.join(PARSERS)}, or file.py:function), or use another template "
            "(actor_rollout_ref.model.custom_chat_template)."
        )
    for parser in chosen.values():
        if _reads(parser, written):
            return parser
    raise ConfigError(
        f"{KEY}={name}: it finds no call in what the chat template writes for one: {written[0]!r:.200}. Use "
        f"{', '.join(own for own in PARSERS if _reads(PARSERS[own], written)) or 'your own function, file.py:function'}."
    )


def shows_tools(tokenizer: Any, template_arguments: Mapping[str, Any]) -> bool:
    """Return whether the chat template tells the model which tools there are."""
    asked = [{"role": "user", "content": "?"}]
    try:
        text = render_bounded(tokenizer, asked, **{**template_arguments, "tools": [PROBE_TOOL]})
    except RENDER_ERRORS:
        return False
    return PROBE_CALL.name in text


def _reads(parser: Parser, written: Sequence[str]) -> bool:
    return any(parser(text, [PROBE_TOOL]).calls == (PROBE_CALL,) for text in written)


def _written_calls(tokenizer: Any, template_arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the chat template writes for a turn with a call, without the end of the turn.

    Some templates expect the arguments of a call as an object, others as JSON text, and each writes the other form wrongly.
    """
    user = {"role": "user", "content": "?"}
    arguments = {**template_arguments, "tools": [PROBE_TOOL]}
    function: dict[str, Any] = {"name": PROBE_CALL.name, "arguments": dict(PROBE_CALL.arguments)}
    for given in (function["arguments"], json.dumps(function["arguments"])):
        call = {"type": "function", "id": "call00000", "function": {**function, "arguments": given}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            before = render_bounded(tokenizer, [user], **{**arguments, "add_generation_prompt": True})
            text = render_bounded(tokenizer, [user, turn], **arguments)
        except RENDER_ERRORS:
            continue
        written = text[len(before) :] if text.startswith(before) else text
        if PROBE_CALL.name not in written:
            continue
        end = tokenizer.eos_token or ""
        yield written.partition(end)[0] if end and end in written else written
