"""Agent loops of the user's own in verl's form: what they make of the engine's answers, and what ends them."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.agents.test_loop import ALWAYS, check, converse, settings_of, tasks_of  # noqa: F401 - a fixture
from tests.rollout.tools import model_of, naive_log_probs
from verl_memopt.agents import loop as agent_loop
from verl_memopt.agents.agent_loops import FunctionCall, ToolParser
from verl_memopt.agents.loop import ANSWER, FAILED, TOKENS, AgentPlan, check_agents
from verl_memopt.errors import AgentError, ConfigError, DataError
from verl_memopt.model.forest import build_forest

FILE = Path(__file__).parent / "loops.py"
ENTRIES = [("three", "Loop", "\n  turns: 3"), ("wrong", "Wrong", "")]


@pytest.fixture
def settings(tmp_path):
    file = tmp_path / "loops.yaml"

    def make(default="three", text=None, **agent):
        lines = (f"- name: {name}\n  _target_: {FILE}:{owner}{more}\n" for name, owner, more in ENTRIES)
        file.write_text("".join(lines) if text is None else text)
        return settings_of(None, agent={"agent_loop_config_path": str(file), "default_agent_loop": default, **agent})

    return make


def run(converse, engine, tasks, settings):  # noqa: F811
    return converse(engine, tasks, settings, ALWAYS)


def test_the_update_learns_the_tokens_that_an_agent_loop_got_from_the_engine(engine, converse, settings, tied_folder):  # noqa: F811
    conversations, _, log = run(converse, engine, tasks_of(12), settings())
    check(conversations, log, build_forest([each.ids for each in conversations]))
    assert [len(each.turns) for each in conversations] == [3] * 12
    assert [each.reward for each in conversations] == list(range(12))
    assert {each.num_turns for each in conversations} == {7}
    assert {each.attributes.extra_fields["kept"] for each in conversations} == {"yes"}
    model = model_of(tied_folder)
    for turn in conversations[0].turns:
        assert turn.log_probs == pytest.approx(naive_log_probs(model, turn.prompt_ids, turn.output_ids, 2.0), abs=1e-5)


def test_responses_without_context_between_them_and_with_a_cut_end_are_turns(vllm_engine, converse, settings):  # noqa: F811
    conversations, _, log = run(converse, vllm_engine, tasks_of(6, agent_name="cut"), settings())
    assert TOKENS in {each.ended for each in conversations}
    for each in conversations:
        first, second = each.turns
        assert second.prompt_ids == first.prompt_ids + first.output_ids
        assert len(second.output_ids) == len(second.log_probs)
        assert each.attributes.extra_fields["other"]
    asked = Counter((tuple(log.asked[number]), tuple(out.response_ids)) for number, out in log.answered.items())
    assert sum(asked.values()) == 18
    for turn in (turn for each in conversations for turn in each.turns):
        assert any(turn.prompt_ids == list(ids) and list(out[: len(turn.output_ids)]) == turn.output_ids for ids, out in asked)


WRONG = {
    "raises": "run raised LookupError: no such game",
    "hangs": "run, between two requests, took longer than",
    "blocks": "took longer than",
    "floods": "more than 200 requests",
    "mask": "response_mask of",
    "invents": "did not sample",
    "moves": "did not sample",
    "long": "response_length is 100",
    "nothing": "return an AgentLoopOutput",
    "temperature": "other parameters",
    "foreign": "token ids of the tokenizer",
    "empty": "at least one",
    "parameter": "top_p=7 must be",
    "name": "'beams' is not supported",
    "room": "no room",
}


@pytest.mark.slow  # the process that blocks is ended after some seconds
def test_an_agent_loop_that_goes_wrong_ends_its_conversation_alone(vllm_engine, converse, settings, monkeypatch):  # noqa: F811
    monkeypatch.setattr(agent_loop, "MOST_REQUESTS", 200)
    tasks = [task for name in WRONG for task in tasks_of(1, agent_name="wrong", wrong=name)] + tasks_of(4)
    conversations, _, log = run(converse, vllm_engine, tasks, settings(tool_timeout_seconds=1.5))
    for (name, words), each in zip(WRONG.items(), conversations, strict=False):
        assert (each.ended, each.turns) == (FAILED, []), name
        assert words in each.reason, name
        assert "\n" not in each.reason
    assert [len(each.turns) for each in conversations[len(WRONG) :]] == [3] * 4
    check(conversations, log, build_forest([each.ids for each in conversations]))


def test_rows_choose_between_an_agent_loop_and_a_conversation_with_tools(vllm_engine, converse, settings):  # noqa: F811
    tasks = tasks_of(2) + tasks_of(2, agent_name="single_turn_agent") + tasks_of(2, agent_name="tool_agent")
    conversations, _, _ = run(converse, vllm_engine, tasks, settings())
    assert [len(each.turns) for each in conversations] == [3, 3, 1, 1, 1, 1]
    assert {each.ended for each in conversations} <= {ANSWER, TOKENS}
    with pytest.raises(DataError, match=r"row 0: 'chess' is no environment and no agent loop.*three, wrong, cut"):
        run(converse, vllm_engine, tasks_of(1, agent_name="chess"), settings())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("three: 3", "there is no list"),
        ("- name: three", "entry 0: name or _target_ is missing"),
        (f"- name: three\n  _target_: {FILE}:uuid4", "is no agent loop"),
        (f"- name: three\n  _target_: {FILE}:Broken", "three: the class raised .*trainer"),
        ("- name: three\n  _target_: no_such_module.Loop", "cannot be imported"),
    ],
)
def test_agent_loops_that_cannot_be_loaded_stop_the_run_before_it_begins(settings, text, words, tied_folder):
    with pytest.raises(AgentError, match=words):
        loaded(settings(text=text), tied_folder)


def test_verls_parser_finds_the_calls_in_the_tokens_of_a_turn(tied_folder):
    tokenizer = AutoTokenizer.from_pretrained(tied_folder)
    text = 'Now <tool_call>{"name": "add", "arguments": {"to": "ü"}}</tool_call><tool_call>{"name": }</tool_call>'
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    found = asyncio.run(ToolParser.get_tool_parser("hermes", tokenizer).extract_tool_calls(ids))
    assert found == ("Now", [FunctionCall("add", '{"to": "ü"}')])


def test_a_default_agent_loop_that_nothing_defines_is_refused(settings, tied_folder):
    with pytest.raises(ConfigError, match=r"default_agent_loop=four: there is no such agent loop"):
        loaded(settings("four"), tied_folder)


def loaded(given, folder):
    return check_agents(given, AgentPlan({}, False, False), AutoTokenizer.from_pretrained(folder), (0,))
