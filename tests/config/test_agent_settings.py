"""When prompts are answered by conversations."""

import pytest

from verl_memopt.config.agent_settings import Agent, AgentEnvironment, AgentTools, MultiTurn
from verl_memopt.config.schema import Rollout


@pytest.mark.parametrize(
    "given",
    [
        {"multi_turn": MultiTurn(enable=True)},
        {"multi_turn": MultiTurn(tool_config_path="tools.yaml")},
        {"multi_turn": MultiTurn(function_tool_path="tools.py")},
        {"agent": Agent(environment=AgentEnvironment("game.py", "Game"))},
        {"agent": Agent(tools=AgentTools("tools.py", ["add"]))},
        {"agent": Agent(agent_loop_config_path="loops.yaml")},
        {"agent": Agent(default_agent_loop="tool_agent")},
    ],
)
def test_tools_environments_and_loops_make_conversations(given):
    assert Rollout(**given).converses
    off = {**given, "multi_turn": MultiTurn(enable=False)}
    assert not Rollout(**off).converses


def test_without_them_a_prompt_has_one_answer():
    assert not Rollout().converses
    assert not Rollout(multi_turn=MultiTurn(max_assistant_turns=3), agent=Agent(timeout_seconds=5.0)).converses
