"""Conversations beside an engine: what the update learns is what the engine read and sampled."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.agents.test_parsers import template
from tests.rollout.tools import EOS, model_of, naive_log_probs, rollout_settings, sampling
from verl_memopt.agents import loop as agent_loop
from verl_memopt.agents.loop import ANSWER, FAILED, SECONDS, TOKENS, USER, AgentPlan, Conversation, Task, build_loop
from verl_memopt.config.agent_settings import Agent, AgentEnvironment, AgentTools, MultiTurn
from verl_memopt.errors import DataError
from verl_memopt.model.forest import build_forest

ENDS = tuple(range(20, 80))
"""Tokens that end a turn, so many that turns are short."""
HERE = Path(__file__).parent
FORGETS = template("", "{{- message.content if loop.last or message.role != 'assistant' else message.content[-2:] -}}")
"""Writes only the end of what the assistant said earlier, so that almost every turn forks."""


class Log:
    """The requests that an engine gets, and its responses."""

    def __init__(self, requests):
        self._requests, self.asked, self.answered = requests, {}, {}

    def add(self, number, prompt_ids, seed, settings):
        self.asked[number] = list(prompt_ids)
        self._requests.add(number, prompt_ids, seed, settings)

    def step(self):
        complete = self._requests.step()
        self.answered |= complete
        return complete

    @property
    def under_way(self):
        return self._requests.under_way


def settings_of(environment="World", file=HERE / "world.py", multi_turn=None, agent=None, **changes):
    turns = MultiTurn(**{"format": f"{HERE / 'world.py'}:calls", "max_tool_response_length": 20, **(multi_turn or {})})
    placed = AgentEnvironment(str(file), environment) if environment else AgentEnvironment()
    agents = Agent(**{"environment": placed, "num_workers": 2, **(agent or {})})
    return replace(rollout_settings("vllm"), multi_turn=turns, agent=agents, prompt_length=60, response_length=100, **changes)


def tasks_of(count, **row):
    return [
        Task([{"role": "user", "content": f"{number % 5}?"}], {}, None, {"number": number, **row}, 100 + number, f"row {number}")
        for number in range(count)
    ]


@pytest.fixture
def converse(tied_folder):
    loops = []

    def run(engine, tasks, settings, chat_template=FORGETS, **changes):
        tokenizer = AutoTokenizer.from_pretrained(tied_folder)
        tokenizer.chat_template = chat_template
        loops.append(build_loop(settings, AgentPlan({}, False, False), tokenizer, (EOS,), "agents"))
        with engine.serving() as requests:
            log = Log(requests)
            return *loops[-1].run(
                tasks, log, sampling(**{"ignore_eos": False, "temperature": 2.0, "stop_token_ids": ENDS, **changes})
            ), log

    yield run
    for loop in loops:
        loop.close()


def check(conversations, log, forest):
    """Every turn is a request of the engine with its response, and the forest has each of its tokens once, after its prompt."""
    logged = Counter((tuple(log.asked[number]), tuple(output.response_ids)) for number, output in log.answered.items())
    turns = [turn for each in conversations for turn in each.turns]
    assert not Counter((tuple(turn.prompt_ids), tuple(turn.output_ids)) for turn in turns) - logged
    starts = forest.sizes.cumsum(0) - forest.sizes
    place = iter(forest.place.tolist())
    for turn in turns:
        for number, token in enumerate(turn.output_ids):
            seen = path(forest, starts, next(place))
            assert seen == [*turn.prompt_ids, *turn.output_ids[:number], token]
    assert next(place, None) is None


def path(forest, starts, place):
    node = int((starts <= place).sum()) - 1
    tokens = forest.tokens[starts[node] : place + 1].tolist()
    while (node := int(forest.parent[node])) >= 0:
        tokens = forest.tokens[starts[node] : starts[node] + forest.sizes[node]].tolist() + tokens
    return tokens


def test_the_update_learns_what_the_engine_read_and_sampled(engine, converse):
    conversations, _, log = converse(engine, tasks_of(40), settings_of())
    check(conversations, log, build_forest([each.ids for each in conversations]))
    endings = Counter(each.ended for each in conversations)
    assert set(endings) <= {ANSWER, TOKENS}
    assert max(len(each.turns) for each in conversations) > 3
    assert any("(truncated)" in each.text for each in conversations)
    assert {each.calls > 0 for each in conversations} == {True, False}
    assert all(
        each.reward == sum(turn["role"] == "tool" and turn["name"] == "echo" for turn in each.messages) for each in conversations
    )
    assert all(each.attributes.count == each.reward for each in conversations)
    names = {turn["name"] for each in conversations for turn in each.messages if turn["role"] == "tool"}
    assert names == {"echo", "fail", "wait", "flood", "missing"}
    assert any(
        len(turn.prompt_ids) > len(first.prompt_ids) for each in conversations for first, *rest in [each.turns] for turn in rest
    )


def test_conversations_do_not_depend_on_the_time_that_tools_take(engine, converse):
    first, _, _ = converse(engine, tasks_of(12), settings_of())
    second, _, _ = converse(engine, tasks_of(12)[::-1], settings_of(agent={"num_workers": 1}))
    assert [each.messages for each in first] == [each.messages for each in second[::-1]]
    assert [each.ids for each in first] == [each.ids for each in second[::-1]]


def test_what_the_record_keeps_gives_the_conversation_again(vllm_engine, converse):
    conversations, _, _ = converse(vllm_engine, tasks_of(8), settings_of())
    for each in conversations:
        kept = each.record()
        response = [token for turn in each.turns for token in turn.output_ids]
        log_probs = [value for turn in each.turns for value in turn.log_probs]
        assert Conversation.recorded(kept["turns"], response, log_probs, kept["conversation"], "").turns == each.turns


USER_CLASS = """
from verl_memopt.agents.verl_tools import BaseInteraction

class Patient(BaseInteraction):
    async def generate_response(self, instance_id, messages, number, **kwargs):
        turns = sum(message["role"] == "assistant" for message in messages)
        return turns > number, f"turn {turns} of {number}", turns / 2, {}
"""


def test_a_user_answers_turns_without_calls_and_may_end_the_conversation(vllm_engine, converse, tmp_path):
    (tmp_path / "user.py").write_text(USER_CLASS)
    (tmp_path / "users.yaml").write_text(f"interaction: [{{class_name: {tmp_path / 'user.py'}:Patient}}]")
    settings = settings_of(None, multi_turn={"interaction_config_path": str(tmp_path / "users.yaml")})
    first, second = (tasks_of(6, interaction_kwargs={"name": "patient", "number": number}) for number in (0, 2))
    tasks = first + [replace(task, seed=task.seed + 100) for task in second]
    conversations, _, log = converse(vllm_engine, tasks, settings)
    check(conversations, log, build_forest([each.ids for each in conversations]))
    ended = [each for each in conversations if each.ended == USER]
    assert {len(each.turns) for each in ended} == {1, 3}
    assert {each.messages[-1]["content"] for each in ended} == {"turn 1 of 0", "turn 3 of 2"}
    assert next(each.attributes.turn_scores for each in ended if len(each.turns) == 3) == [0.5, 1.0, 1.5]
    with pytest.raises(DataError, match=r"row 0: extra_info\.interaction_kwargs\.name=None is no interaction.*patient"):
        converse(vllm_engine, tasks_of(1), settings)


def test_a_row_without_a_prompt_needs_one_from_reset(vllm_engine, converse):
    tasks = [replace(task, messages=[{"role": "user", "content": ""}]) for task in tasks_of(4)]
    conversations, _, _ = converse(vllm_engine, tasks, settings_of())  # its reset returns a text
    assert [each.messages[0]["content"] for each in conversations] == [" 0", " 1", " 2", " 3"]
    with pytest.raises(DataError, match="row 0: the row has no prompt, and no environment gave one"):
        converse(vllm_engine, tasks, settings_of(None))


@pytest.mark.parametrize(
    ("multi_turn", "ending"), [({"max_assistant_turns": 2}, "max_assistant_turns"), ({"max_user_turns": 1}, "max_user_turns")]
)
def test_a_conversation_ends_at_its_limit_of_turns(vllm_engine, converse, multi_turn, ending):
    conversations, _, _ = converse(vllm_engine, tasks_of(16), settings_of(multi_turn=multi_turn))
    assert max(len(each.turns) for each in conversations) == 2
    ended = [each for each in conversations if each.ended == ending]
    assert ended
    assert all(each.messages[-1]["role"] == "assistant" for each in ended)


ALWAYS = template("", "{{- message.content -}}")
SLOW = '''
import time
class Slow:
    def reset(self, **row):
        if row.get("broken"): raise ValueError("no such game")
    def echo(self, text: str) -> str:
        """Never answer.

        Args:
            text: A text.
        """
        time.sleep(row) if (row := 30) else None
'''


def always(tmp_path):
    file = tmp_path / "always.py"
    file.write_text("def calls(text):\n    return [('echo', {'text': 'x'})]\n" + SLOW)
    return {"file": file, "multi_turn": {"format": f"{file}:calls"}}


def test_a_model_that_never_stops_calling_ends_at_the_limit_of_tokens(vllm_engine, converse, tmp_path):
    given = {"multi_turn": always(tmp_path)["multi_turn"]}
    conversations, _, _ = converse(vllm_engine, tasks_of(4), settings_of(**given), ALWAYS)
    assert {each.ended for each in conversations} == {TOKENS}
    assert all(len(each.turns[-1].prompt_ids) - len(each.turns[0].prompt_ids) <= 100 for each in conversations)


def test_a_call_that_hangs_ends_its_conversation_and_says_why(vllm_engine, converse, tmp_path):
    settings = settings_of("Slow", **always(tmp_path), agent={"tool_timeout_seconds": 0.5})
    conversations, _, _ = converse(vllm_engine, tasks_of(2), settings, ALWAYS)
    assert {each.ended for each in conversations} == {FAILED}
    assert all("echo took longer than" in each.reason for each in conversations)
    assert all(len(each.turns) == 1 for each in conversations)


def test_a_conversation_that_takes_too_long_ends_with_what_it_has(vllm_engine, converse, tmp_path):
    settings = settings_of("Slow", **always(tmp_path), agent={"timeout_seconds": 3})
    conversations, _, _ = converse(vllm_engine, tasks_of(2), settings, ALWAYS)
    assert {each.ended for each in conversations} == {SECONDS}
    assert all(each.turns[0].output_ids for each in conversations)


def test_an_environment_that_cannot_begin_ends_its_conversation_without_turns(vllm_engine, converse, tmp_path, caplog):
    conversations, _, _ = converse(vllm_engine, tasks_of(2, broken=True), settings_of("Slow", **always(tmp_path)), ALWAYS)
    assert [(each.ended, each.turns) for each in conversations] == [(FAILED, [])] * 2
    assert "no such game" in conversations[0].reason
    assert "row 0: the conversation ends: " in caplog.text or "row 1: the conversation ends: " in caplog.text


CRASHES = '''
import os, time
class Crashes:
    def reset(self, number):
        self.number, self.calls = number, 0
        with open(__file__ + ".begun", "a") as file: file.write(str(number))
    def echo(self, text: str) -> str:
        """Answer, and end the process in the second call of one conversation.

        Args:
            text: A text.
        """
        self.calls += 1
        if self.calls == 2:
            time.sleep(0.5 if self.number == 0 else 1.5)
            if self.number == 0: os._exit(3)
        return text
'''


def test_a_conversation_that_begins_again_gets_the_responses_that_it_had(vllm_engine, converse, tmp_path):
    given = always(tmp_path)
    given["file"].write_text(given["file"].read_text() + CRASHES)
    conversations, _, log = converse(vllm_engine, tasks_of(5), settings_of("Crashes", agent={"num_workers": 1}, **given), ALWAYS)
    assert [each.ended for each in conversations] == [FAILED] + [TOKENS] * 4
    begun = Counter((tmp_path / "always.py.begun").read_text())
    assert max(begun[number] for number in "1234") > 1
    assert set(Counter(map(tuple, log.asked.values())).values()) == {1}
    check(conversations, log, build_forest([each.ids for each in conversations]))


def test_functions_are_tools_without_an_environment(vllm_engine, converse, tmp_path):
    file = tmp_path / "functions.py"
    file.write_text(
        "def calls(text):\n    return [('echo', {'text': 'x'})] * 3\n"
        'def echo(text: str) -> str:\n    """Repeat.\n\n    Args:\n        text: A text.\n    """\n    return text * 2\n'
    )
    turns = {"format": f"{file}:calls", "max_parallel_calls": 2}
    settings = settings_of(None, multi_turn=turns, agent={"tools": AgentTools(str(file), ["echo"])})
    (conversation,), _, _ = converse(vllm_engine, tasks_of(1), settings, ALWAYS, max_tokens=4)
    results = [turn["content"] for turn in conversation.messages if turn["role"] == "tool"][:3]
    assert results[:2] == ["xx", "xx"]
    assert "at most 2 calls" in results[2]


def test_a_first_prompt_that_is_too_long_with_its_tools_is_refused(vllm_engine, converse):
    settings = replace(settings_of(), prompt_length=5)
    with pytest.raises(DataError, match=r"row \d: the prompt has \d+ tokens with its tools.*Raise data.max_prompt_length"):
        converse(vllm_engine, tasks_of(1), settings)


def test_the_engine_generates_while_tools_wait(vllm_engine, converse):
    conversations, times, log = converse(vllm_engine, tasks_of(40), settings_of())
    metrics = agent_loop.conversation_metrics(conversations) | agent_loop.loop_metrics([times])
    assert metrics["agent/turns/max"] == max(len(each.turns) for each in conversations)
    assert sum(value for name, value in metrics.items() if name.startswith("agent/ended/")) == pytest.approx(1)
    assert metrics["agent/sampled_tokens/mean"] * 40 == sum(len(output.response_ids) for output in log.answered.values())
    assert 0 < metrics["rollout/engine_busy"] <= 1
    # Turns that continue another find its tokens in the prefix cache.
    assert sum(each.cached_tokens for each in conversations) == sum(output.cached_tokens for output in log.answered.values())


def test_log_probs_of_a_turn_are_those_of_its_own_prompt_alone(vllm_engine, converse, tied_folder):
    conversations, _, _ = converse(vllm_engine, tasks_of(6), settings_of(), max_tokens=8)
    model = model_of(tied_folder)
    for turn in (turn for each in conversations for turn in each.turns if turn.output_ids):
        naive = naive_log_probs(model, turn.prompt_ids, turn.output_ids, 2.0)
        assert turn.log_probs == pytest.approx(naive, abs=1e-5)
