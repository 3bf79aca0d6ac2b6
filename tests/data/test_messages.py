"""Conversations: content of parts and of none, tools and other columns that change the prompt, and what is refused."""

import json
import re
import sys

import pytest

from verl_memopt.config.schema import Data
from verl_memopt.data import template_trial
from verl_memopt.data.dataset import PromptDataset
from verl_memopt.data.encoder import end_of_turn
from verl_memopt.data.responses import build_supervised_dataset
from verl_memopt.errors import DataError, UserError
from verl_memopt.recipes.rlt.dataset import FORMATS, RltPrompts
from verl_memopt.run.chat import Chat, ChatOptions

from .conftest import row

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"x": {"type": "number"}}}},
}
OTHER = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"x": 2}}}
TURNS = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
TURNS = [*TURNS, {"role": "tool", "name": "add", "content": "2"}]
SHOWS_ALL = (
    "{{ tools | tojson if tools else '' }}|{{ enable_thinking }}|{% for m in messages %}{% if m.tool_calls is defined %}"
    "{% for c in m.tool_calls %}{{ c.function.name }}{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}"
    "{% endfor %}{% endif %}{{ m.content }};{% endfor %}"
)


@pytest.fixture(params=[SHOWS_ALL])
def tools_tokenizer(tokenizer, request):
    before = tokenizer.chat_template
    tokenizer.chat_template = request.param
    yield tokenizer
    tokenizer.chat_template = before


def texts(path, tokenizer, **settings):
    settings = Data(train_files=path, val_files=path, seed=0, max_prompt_length=1000, **settings)
    return [each.text for each in PromptDataset(path, settings, tokenizer, "train")]


def test_the_tools_of_a_row_reach_the_chat_template_without_keys_that_a_table_filled_with_null(jsonl, tools_tokenizer):
    merged = json.loads(json.dumps(OTHER))
    merged["function"]["parameters"]["properties"]["x"] = None  # as datasets gives a key that only other rows have
    rows = [row(tools=[TOOL]), row(tools=json.dumps([TOOL])), row(tools=[json.dumps(TOOL)]), row(tools=[merged])]
    read = texts(jsonl(*rows, row(tools=[]), row(tools=None), row()), tools_tokenizer)
    expected = [
        tools_tokenizer.apply_chat_template(row()["prompt"], tools=tools, tokenize=False)
        for tools in ([TOOL], [TOOL], [TOOL], [OTHER], None, None, None)
    ]
    assert read == expected
    assert texts(jsonl(row(tools=[TOOL])), tools_tokenizer, tools_key=None) == [expected[-1]]


def test_a_supervised_run_renders_the_tools_of_a_conversation(jsonl, tools_tokenizer):
    path = jsonl({"messages": [*TURNS[:1], {"role": "assistant", "content": "2"}], "tools": [TOOL], "enable_thinking": False})
    settings = Data(train_files=path, val_files=None, seed=0, max_prompt_length=1000)
    (read,) = build_supervised_dataset(path, settings, tools_tokenizer, "train")
    arguments = {"tools": [TOOL], "enable_thinking": False, "tokenize": False}
    assert read.text == tools_tokenizer.apply_chat_template(TURNS[:1], **arguments)


def test_arguments_of_the_template_in_a_row_win_over_those_of_the_settings(jsonl, tools_tokenizer):
    own, null = row(chat_template_kwargs={"enable_thinking": True}), row(chat_template_kwargs={"enable_thinking": None})
    path = jsonl(own, null, row(), row(enable_thinking=True))
    read = texts(path, tools_tokenizer, apply_chat_template_kwargs={"enable_thinking": False})
    assert [text.split("|")[1] for text in read] == ["True", "False", "False", "True"]
    assert texts(jsonl(row(enable_thinking=True)), tools_tokenizer, enable_thinking_key=None)[0].startswith("||")


def test_a_call_without_content_keeps_its_arguments_in_either_form(jsonl, tools_tokenizer):
    in_json = json.loads(json.dumps(TURNS))
    in_json[1]["tool_calls"][0]["function"]["arguments"] = json.dumps({"x": 2})
    filled = [{"tool_calls": None, "name": None, **turn} for turn in TURNS]
    read = texts(jsonl(row(TURNS), row(in_json), row(filled)), tools_tokenizer)
    assert read == ["||1+1=;addx=2;2;"] * 3


READS_NULL = "{% for m in messages %}{% if m['content'] is none %}{{ m.tool_calls[0].function.name }}{% endif %};{% endfor %}"


@pytest.mark.parametrize("tools_tokenizer", [READS_NULL], indirect=True)
def test_a_template_that_asks_for_no_content_gets_none(jsonl, tools_tokenizer):
    assert texts(jsonl(row(TURNS)), tools_tokenizer) == [";add;;"]


def test_parts_of_text_are_one_text_and_empty_columns_are_no_media(jsonl, tokenizer):
    parts = [{"type": "text", "text": "1+", "image": None}, {"type": "text", "text": "1="}]
    empty = {"images": [], "videos": None, "audios": [[], None], "image": {"bytes": None, "path": None}}
    first, second = texts(jsonl(row([{"role": "user", "content": parts}], **empty), row()), tokenizer)
    assert first == second


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"tools": [TOOL]}, r"the row has tools, but the chat template does not read any\. Set data\.tools_key=null"),
        ({"tools": ["add"]}, r"the column 'tools' must be a list of tools, each a JSON schema, .*data\.tools_key=null"),
        ({"chat_template_kwargs": "thinking"}, r"the column 'chat_template_kwargs' must be an object"),
        ({"agent_name": "tool_agent"}, r"agent_name='tool_agent': .* no tools.*set the column to single_turn_agent"),
        (
            {"extra_info": {"need_tools_kwargs": True}},
            r"extra_info\.need_tools_kwargs: .*multi_turn\.enable=true.* remove need_tools_kwargs",
        ),
        (
            {"extra_info": {"interaction_kwargs": {"name": "gsm8k"}}},
            r"extra_info\.interaction_kwargs: .*multi_turn\.enable=true",
        ),
    ],
)
def test_what_a_row_asks_for_and_cannot_have_is_refused_by_its_name(jsonl, tokenizer, columns, message):
    path = jsonl(row(), row(**columns))
    with pytest.raises(DataError, match=rf"^.*rows\.jsonl:2: {message}"):
        texts(path, tokenizer)


def test_a_row_of_one_turn_may_say_so(jsonl, tokenizer):
    extra = {"need_tools_kwargs": False, "interaction_kwargs": {"name": None}, "tools_kwargs": {"add": {}}}
    first, second = texts(jsonl(row(agent_name="single_turn_agent", extra_info=extra), row()), tokenizer)
    assert first == second


WRITES_ALL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content is defined %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("tools_tokenizer", [WRITES_ALL], indirect=True)
@pytest.mark.parametrize(
    ("turn", "text"),
    [
        ({"content": None, "tool_calls": [CALL]}, "<call>add"),
        ({"content": "let me<|im_end|>see", "tool_calls": [CALL]}, "let me<|im_end|>see<call>add"),
        ({"content": "2", "reasoning_content": "one more", "tool_calls": None}, "<think>one more</think>2"),
    ],
)
def test_a_supervised_turn_has_all_that_the_template_writes_of_it(jsonl, tools_tokenizer, turn, text):
    path = jsonl({"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", **turn}]})
    settings = Data(train_files=path, val_files=None, seed=0, max_prompt_length=1000)
    (read,) = build_supervised_dataset(path, settings, tools_tokenizer, "train")
    assert tools_tokenizer.decode(read.response) == text + "<|im_end|>"
    assert read.response.count(tools_tokenizer.eos_token_id) == 1


def test_an_answer_can_be_begun_for_the_model(jsonl, tokenizer):
    begun = row([*row()["prompt"], {"role": "assistant", "content": "It is"}])
    begun |= {"chat_template_kwargs": {"continue_final_message": True, "add_generation_prompt": False}}
    whole, prefix = texts(jsonl(begun, row()), tokenizer)
    assert whole == prefix + "It is"


NEVER_ENDS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
TOO_LARGE = {
    "{{ 'x' * 10**12 }}": "needs more than",
    "{{ 'x' | center(10**10) }}": "needs more than",
    "{% for i in range(99999) %}{{ 'x' * 99 }}{% endfor %}": "writes more than",
    NEVER_ENDS: "processor time",
}


@pytest.mark.parametrize("template", TOO_LARGE)
def test_a_template_that_takes_all_memory_or_never_ends_is_one_error_at_every_door(template, jsonl, tokenizer):
    said = rf"the chat template.* cannot render .*{TOO_LARGE[template]}"
    before, tokenizer.chat_template = tokenizer.chat_template, template
    try:
        with pytest.raises(DataError, match=rf"rows\.jsonl:1: {said}"):
            texts(jsonl(row()), tokenizer)
        with pytest.raises(DataError, match=said):
            end_of_turn(tokenizer, {})
        with pytest.raises(DataError, match=said):
            RltPrompts(tokenizer, FORMATS["r1"], {}, False).student("1+1=")
        with pytest.raises(UserError, match=said):
            Chat(None, tokenizer, ChatOptions(0, 3, None), {}).turn(TURNS[:1])
    finally:
        tokenizer.chat_template = before
    with pytest.raises(DataError, match=rf"rows\.jsonl:1: {said}"):
        texts(jsonl({**row(), "chat_template_kwargs": {"chat_template": template}}), tokenizer)


@pytest.mark.parametrize(
    ("program", "said"),
    [(f'exec {sys.executable} -S "$@"', "writes more than"), ("echo broken >&2; exit 1", r"could not be tried .*broken")],
    ids=["packages elsewhere", "a child that fails"],
)
def test_a_template_is_tried_wherever_the_packages_are_or_is_refused(program, said, tmp_path, monkeypatch):
    """Without its folders of packages, a Python finds Jinja only where it is told."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{program}\n")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    assert re.search(said, template_trial.fault_of.__wrapped__("{% for i in range(99999) %}{{ 'x' * 99 }}{% endfor %}"))


def test_a_conversation_that_becomes_too_long_is_an_error_of_its_row(jsonl, tokenizer, monkeypatch):
    monkeypatch.setattr(template_trial, "LARGEST_PROMPT", 200)
    growing = "{% for m in messages %}{{ m.content * 100 }}{% endfor %}"
    rows = [{**row(), "prompt": [{"role": "user", "content": text}]} for text in ("a", "abcd")]
    rows = [{**each, "chat_template_kwargs": {"chat_template": growing}} for each in rows]
    assert texts(jsonl(rows[0]), tokenizer) == ["a" * 100]
    with pytest.raises(DataError, match=r"rows\.jsonl:2: the chat template cannot render .*it writes 400 characters"):
        texts(jsonl(*rows), tokenizer)
