"""Tool calls are found in the formats of real models, and a call that cannot be read says why."""

import pytest

from verl_memopt.agents.parsers import PARSERS, PROBE_TOOL, ToolCall, load_parser, parser_of
from verl_memopt.errors import ConfigError
from verl_memopt.model.tiny import build_tokenizer

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "note": {"type": "string"}}},
    },
}

WRITTEN = {
    "hermes": 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "note": "2"}}\n</tool_call>',
    "qwen3_coder": (
        "Let me see.\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
        "<parameter=note>\n2\n</parameter>\n</function>\n</tool_call>"
    ),
    "mistral": 'Let me see.[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "note": "2"}}]',
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_is_separated_from_the_text_before_it(name):
    parsed = PARSERS[name](WRITTEN[name], [ADD])
    assert parsed.content == "Let me see."
    assert parsed.calls == (ToolCall("add", {"a": 1, "note": "2"}),)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3_json", '{"name": "add", "parameters": {"a": 1, "note": "2"}}'),
        ("llama3_json", '<|python_tag|>{"name": "add", "parameters": {"a": 1, "note": "2"}}'),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "note": "2"}'),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"note\\": \\"2\\"}"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1, "note": "2"}}'),
    ],
)
def test_other_spellings_of_a_call(name, text):
    assert PARSERS[name](text, [ADD]).calls == (ToolCall("add", {"a": 1, "note": "2"}),)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", WRITTEN["hermes"] * 3),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {}}, {"name": "add", "arguments": {}}, {"name": "add"}]'),
        ("llama3_json", '{"name": "add", "parameters": {}}; {"name": "add", "parameters": {}}; {"name": "add"}'),
        ("qwen3_coder", WRITTEN["qwen3_coder"] * 3),
    ],
)
def test_several_calls_of_a_turn_keep_their_order(name, text):
    calls = PARSERS[name](text, [ADD]).calls
    assert [(call.name, call.problem) for call in calls] == [("add", None)] * 3


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>', "no JSON"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "no name"),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "no JSON object"),
        ("qwen3_coder", "<tool_call>add(1)</tool_call>", "<function="),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1}', "no JSON"),
        ("mistral", "[TOOL_CALLS][{]", "no JSON"),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "no JSON"),
    ],
)
def test_a_malformed_call_says_what_is_wrong(name, text, problem):
    (call,) = PARSERS[name](text, [ADD]).calls
    assert problem in str(call.problem)


@pytest.mark.parametrize("name", PARSERS)
def test_a_plain_answer_has_no_calls(name):
    parsed = PARSERS[name]("The answer is {42}.", [ADD])
    assert (parsed.content, parsed.calls) == ("The answer is {42}.", ())


def template(call, content="{{- message.content -}}"):
    return (
        "{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\n' -}}" + content
        + "{%- for tool_call in message.tool_calls or [] -%}" + call + "{%- endfor -%}{{- '<|im_end|>\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
    )  # fmt: skip


TEMPLATES = {
    "hermes": template("<tool_call>\n{{ tool_call.function | tojson }}\n</tool_call>"),
    "mistral": template("[TOOL_CALLS][{{ tool_call.function | tojson }}]"),
    "llama3_json": template(
        '{"name": "{{ tool_call.function.name }}", "parameters": {{ tool_call.function.arguments | tojson }}}'
    ),
    "qwen3_coder": template(
        "<tool_call>\n<function={{ tool_call.function.name }}>{% for key, value in tool_call.function.arguments.items() %}\n"
        "<parameter={{ key }}>\n{{ value }}\n</parameter>{% endfor %}\n</function>\n</tool_call>"
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_format_is_that_in_which_the_chat_template_writes_calls(name):
    tokenizer = build_tokenizer(chat_template=TEMPLATES[name])
    assert parser_of(tokenizer, "auto", {}) is PARSERS[name]
    assert parser_of(tokenizer, name, {}) is PARSERS[name]


def test_a_parser_that_does_not_read_the_template_is_refused_with_one_that_does():
    with pytest.raises(ConfigError, match=r"format=mistral: it finds no call.* Use hermes"):
        parser_of(build_tokenizer(chat_template=TEMPLATES["hermes"]), "mistral", {})


def test_a_template_without_calls_needs_a_format():
    plain = build_tokenizer(chat_template=template(""))
    with pytest.raises(ConfigError, match=r"format=auto: the chat template writes no tool calls"):
        parser_of(plain, "auto", {})
    assert parser_of(plain, "hermes", {}) is PARSERS["hermes"]


def test_a_parser_of_the_user(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "import re\n"
        "def calls(text):\n"
        "    if 'boom' in text: raise ValueError('boom')\n"
        "    return [(name, {'text': argument}) for name, argument in re.findall(r'(\\w+)\\((.*?)\\)', text)]\n"
    )
    parse = load_parser(f"{file}:calls")
    assert parse("probe_tool(a b)", [PROBE_TOOL]).calls == (ToolCall("probe_tool", {"text": "a b"}),)
    assert "boom" in str(parse("boom", []).calls[0].problem)


@pytest.mark.parametrize(("name", "error"), [("hermess", "Use auto, hermes"), ("none.py:calls", "no such file")])
def test_an_unknown_parser_is_refused(name, error):
    with pytest.raises(ConfigError, match=error):
        load_parser(name)


def test_the_arguments_of_a_template_may_be_json_text():
    # Some templates write the arguments as they are, so they expect text.
    written = template(
        '<tool_call>{"name": "{{ tool_call.function.name }}", "arguments": {{ tool_call.function.arguments }}}</tool_call>'
    )
    assert parser_of(build_tokenizer(chat_template=written), "auto", {}) is PARSERS["hermes"]
