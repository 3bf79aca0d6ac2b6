"""Tools that were written for verl, with their import line changed."""

import pytest
from transformers.utils import get_json_schema

from tests.agents.conftest import Talk
from verl_memopt.agents.environments import EnvironmentPool, Failed, Ready, UserTurn
from verl_memopt.agents.program import Program
from verl_memopt.agents.verl_tools import VerlTools, initialize_interactions_from_config, initialize_tools_from_config
from verl_memopt.errors import AgentError
from verl_memopt.rewards.score import Limits

CLASSES = """
import asyncio
from verl_memopt.agents.verl_tools import BaseTool, OpenAIFunctionToolSchema, ToolResponse, rollout_trace_op

released = []

class Answer(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.states = {}

    async def create(self, instance_id=None, **kwargs):
        instance_id, _ = await super().create(instance_id)
        await asyncio.sleep(0.05)
        self.states[instance_id] = {"truth": kwargs["create_kwargs"].get("truth"), "given": []}
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id, parameters, **kwargs):
        state = self.states[instance_id]
        if parameters["answer"] == "image":
            return ToolResponse(text="seen", image=[1]), 0.0, {}
        state["given"].append(parameters["answer"])
        right = parameters["answer"] == state["truth"]
        return ToolResponse(text=f"{len(state['given'])} of {self.config['most']}"), 1.0 if right else -0.05, {}

    async def calc_reward(self, instance_id, **kwargs):
        return float(self.states[instance_id]["truth"] in self.states[instance_id]["given"])

    async def release(self, instance_id, **kwargs):
        del self.states[instance_id]
        released.append(instance_id)

class Count(BaseTool):
    def get_openai_tool_schema(self):
        return OpenAIFunctionToolSchema.model_validate(
            {"type": "function", "function": {"name": "count", "description": "Count what was released."}}
        )

    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text=str(len(released))), None, {}
"""

SCHEMA = {
    "type": "function",
    "function": {
        "name": "answer",
        "description": "Check an answer.",
        "parameters": {
            "type": "object",
            "properties": {"answer": {"type": "string", "description": "The answer."}},
            "required": ["answer"],
        },
    },
}

CONFIG = """
tools:
  - class_name: "{file}:Answer"
    config: {{type: native, most: "${{oc.env:MOST,9}}"}}
    tool_schema:
      type: function
      function:
        name: answer
        description: Check an answer.
        parameters:
          type: object
          properties: {{answer: {{type: string, description: The answer.}}}}
          required: [answer]
  - class_name: "{file}:Count"
"""

FUNCTIONS = '''
from verl_memopt.agents.verl_tools import function_tool

@function_tool
def weather(city: str) -> dict:
    """Tell the weather.

    Args:
        city: Where.
    """
    return {"city": city, "sky": "klar ü"}

@function_tool("twice")
async def double(number: int) -> str:
    """Double a number.

    Args:
        number: Which.
    """
    return 2 * number, 0.5

@function_tool(schema={"type": "function", "function": {"name": "plain", "description": "Plain."}})
def plain():
    return 3
'''


@pytest.fixture
def start(tmp_path):
    pools = []

    def start(config=None, functions=None):
        (tmp_path / "classes.py").write_text(CLASSES)
        paths = {}
        for name, text, file in [("tool_config_path", config, "tools.yaml"), ("function_tool_path", functions, "functions.py")]:
            if text is not None:
                (tmp_path / file).write_text(text.format(file=tmp_path / "classes.py") if file == "tools.yaml" else text)
                paths[name] = str(tmp_path / file)
        pools.append(EnvironmentPool(Program({None: VerlTools(**paths)}), Limits(4.0, 60.0, 4096), 1))
        return Talk(pools[-1])

    yield start
    for pool in pools:
        pool.close()


def test_a_class_of_a_tool_config_serves_whole_conversations(start):
    talk = start(CONFIG)
    kind = talk.pool.wait_until_loaded()[None]
    assert kind.schemas[0] == SCHEMA
    assert not kind.has_reward
    row = {"extra_info": {"tools_kwargs": {"answer": {"create_kwargs": {"truth": "4"}}}}}
    assert talk.begin(0, **row) == Ready(0, None)
    talk.begin(1)
    talk.pool.call(0, [("answer", {"answer": "3"}), ("answer", {"answer": "4"})])  # both calls of a turn share one state
    assert sorted(talk.next(0).answers) == [("1 of 9", False), ("2 of 9", False)]
    talk.pool.call(1, [("answer", {"answer": "4"}), ("answer", {"answer": "5"})])
    assert sorted(talk.next(1).answers) == [("1 of 9", False), ("2 of 9", False)]
    assert talk.call(1, "count").answers == [("0", False)]
    finished = talk.finish(0)
    assert finished.reward is None
    assert (sorted(finished.snapshot.tool_rewards), finished.snapshot.reward_scores) == ([-0.05, 1.0], {"answer": 1.0})
    assert talk.call(1, "count").answers == [("1", False)]


@pytest.mark.parametrize("ends", ["fails", "is abandoned"])
def test_a_tool_is_released_however_its_conversation_ends(start, ends):
    talk = start(CONFIG)
    talk.begin(0, tools_kwargs={"answer": {}})
    if ends == "fails":
        failed = talk.call(0, "answer", answer="image")
        assert isinstance(failed, Failed)
        assert "'image'; only text is possible" in failed.reason
    else:
        talk.pool.abandon(0)
    talk.begin(1)
    assert talk.call(1, "count").answers == [("1", False)]


def test_what_a_tool_raises_is_told_to_the_model(start):
    talk = start(CONFIG)
    talk.begin(0)
    assert talk.call(0, "answer", wrong=1).answers == [(str({"error": "'answer'"}), True)]


def test_functions_with_the_decorator_are_tools(start):
    talk = start(CONFIG, FUNCTIONS)
    schemas = {schema["function"]["name"]: schema for schema in talk.pool.wait_until_loaded()[None].schemas}
    assert list(schemas) == ["answer", "count", "weather", "twice", "plain"]
    assert schemas["twice"]["function"]["parameters"]["properties"] == {"number": {"type": "integer", "description": "Which."}}
    scope = {}
    exec(FUNCTIONS, scope)
    assert schemas["weather"] == get_json_schema(scope["weather"])
    talk.begin(0)
    talk.pool.call(0, [("weather", {"city": "Bonn"}), ("twice", {"number": 4}), ("plain", {}), ("weather", {})])
    answers = talk.next(0).answers
    assert answers[:3] == [('{"city": "Bonn", "sky": "klar ü"}', False), ("8", False), ("3", False)]
    assert answers[3][1]
    assert talk.finish(0).snapshot.tool_rewards == [0.5]


@pytest.mark.parametrize(
    ("config", "functions", "said"),
    [
        ("tools: []", None, r"tool_config_path=.*there is no list 'tools'"),
        ("tools: [", None, "cannot be read"),
        ("tools: [{{config: {{}}}}]", None, r"tools\[0\]: class_name is missing"),
        ("tools: [{{class_name: no.module.Tool}}]", None, r"class_name=no\.module\.Tool cannot be imported"),
        ("tools: [{{class_name: '{file}:Answer', config: {{type: mcp}}}}]", None, r"config\.type=mcp is not supported"),
        ("tools: [{{class_name: '{file}:Answer'}}]", None, "Answer raised AssertionError: the tool has no schema"),
        ("tools: [{{class_name: json.JSONDecoder}}]", None, "JSONDecoder raised TypeError"),
        (CONFIG, FUNCTIONS.replace('"twice"', '"answer"'), "two tools with the name answer"),
        (None, "def plain(): ...", "no function has the decorator function_tool"),
        (None, FUNCTIONS.replace("city: str", "city"), r"functions\.py:\d+: weather: .*Argument city"),
    ],
)
def test_tools_that_do_not_load_end_the_start_with_one_error(start, config, functions, said):
    with pytest.raises(AgentError, match=f"multi_turn.*{said}" if "weather" not in said else said) as caught:
        start(config, functions).pool.wait_until_loaded()
    assert "\n" not in str(caught.value)


INTERACTIONS = """
from verl_memopt.agents.verl_tools import BaseInteraction

open_conversations = {}

class CountingInteraction(BaseInteraction):
    async def start_interaction(self, instance_id=None, truth=None, **kwargs):
        open_conversations[instance_id] = truth
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        said, truth = messages[-1]["content"], open_conversations[instance_id]
        if said == "raise":
            raise ValueError("no")
        answer = f"{self.name} {self.config['tone']} {len(open_conversations)} {kwargs['truth']}"
        return said == truth, answer, float(said == truth), {}

    async def finalize_interaction(self, instance_id, **kwargs):
        del open_conversations[instance_id]
"""
INTERACTION_CONFIG = """
interaction:
  - {{class_name: "{file}:CountingInteraction", config: {{tone: kind}}}}
  - {{class_name: "{file}:CountingInteraction", name: other, config: {{tone: cold}}}}
"""


@pytest.fixture
def interact(tmp_path):
    pools = []

    def start(config=INTERACTION_CONFIG):
        (tmp_path / "interactions.py").write_text(INTERACTIONS)
        (tmp_path / "interactions.yaml").write_text(config.format(file=tmp_path / "interactions.py"))
        tools = VerlTools(interaction_config_path=str(tmp_path / "interactions.yaml"))
        pools.append(EnvironmentPool(Program({None: tools}), Limits(4.0, 60.0, 4096), 1))
        return Talk(pools[-1])

    yield start
    for pool in pools:
        pool.close()


def test_an_interaction_answers_as_the_user_until_it_ends_the_conversation(interact):
    talk = interact()
    assert talk.pool.wait_until_loaded()[None].users == ["counting", "other"]

    def says(conversation, text):
        talk.pool.respond(conversation, [{"role": "assistant", "content": text}])
        return talk.next(conversation)

    talk.begin(0, interaction_kwargs={"name": "counting", "truth": "4"})
    talk.begin(1, extra_info={"interaction_kwargs": {"name": "other", "truth": "5"}})
    assert says(0, "3") == UserTurn(0, "counting kind 2 4", False)
    assert says(0, "4") == UserTurn(0, "counting kind 2 4", True)
    finished = talk.finish(0)
    assert (finished.reward, finished.snapshot.turn_scores) == (None, [0.0, 1.0])
    assert says(1, "4") == UserTurn(1, "other cold 1 5", False)  # the first conversation is over
    assert "ValueError: no" in says(1, "raise").reason


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("interaction: []", r"there is no list 'interaction'"),
        ("interaction: [{{config: {{}}}}]", r"interaction\[0\]: class_name is missing"),
        (
            "interaction: [{{class_name: '{file}:CountingInteraction'}}, {{class_name: '{file}:CountingInteraction'}}]",
            "two inter",
        ),
        ("interaction: [{{class_name: json.JSONDecoder}}]", "JSONDecoder raised TypeError"),
        ("interaction: [{{class_name: builtins.dict}}]", "class_name=dict is no interaction"),
    ],
)
def test_interactions_that_do_not_load_end_the_start_with_one_error(interact, config, said):
    with pytest.raises(AgentError, match=f"interaction_config_path=.*{said}"):
        interact(config).pool.wait_until_loaded()


def test_a_loop_of_the_users_own_gets_the_tools_and_interactions_of_files_beside_their_classes(tmp_path):
    (tmp_path / "classes.py").write_text(CLASSES)
    (tmp_path / "interactions.py").write_text(INTERACTIONS)
    for name, text, file in [("tools", CONFIG, "classes.py"), ("users", INTERACTION_CONFIG, "interactions.py")]:
        (tmp_path / f"{name}.yaml").write_text(text.format(file=file))  # relative to the YAML file
    assert [tool.name for tool in initialize_tools_from_config(str(tmp_path / "tools.yaml"))] == ["answer", "count"]
    found = initialize_interactions_from_config(str(tmp_path / "users.yaml"))
    assert {name: user.config["tone"] for name, user in found.items()} == {"counting": "kind", "other": "cold"}
