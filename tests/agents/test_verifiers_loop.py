"""Environments of the package verifiers beside the run's engine."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.agents.test_loop import check, converse, settings_of, tasks_of  # noqa: F401 - a fixture
from verl_memopt.agents.loop import ANSWER, FAILED, TOKENS, AgentPlan, check_agents
from verl_memopt.errors import AgentError
from verl_memopt.model.forest import build_forest

HERE = Path(__file__).parent
IS_INSTALLED = importlib.util.find_spec("verifiers") is not None
CHAT = (
    "{%- for message in messages -%}<{{ message.role }}>{{ message.content }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<assistant>{%- endif -%}"
)


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    file = tmp_path / "loops.yaml"
    file.write_text(
        "- name: counting\n  _target_: verl_memopt.agents.verifiers_loop.VerifiersLoop\n"
        "  env: {taskset: {id: counting}, agent: {runtime: {type: subprocess}}}\n"
    )
    agent = {"agent_loop_config_path": str(file), "default_agent_loop": "counting", "num_workers": 1, "tool_timeout_seconds": 60}
    return replace(settings_of(None, agent=agent), prompt_length=200, response_length=400)


@pytest.mark.slow
@pytest.mark.skipif(not IS_INSTALLED, reason="needs the package verifiers")
def test_the_update_learns_the_tokens_of_an_episode(vllm_engine, converse, settings):  # noqa: F811
    tasks = [replace(task, row={"task_index": index}) for index, task in enumerate(tasks_of(9))]
    conversations, _, log = converse(vllm_engine, tasks, settings, CHAT)
    *played, beyond = conversations
    check(played, log, build_forest([each.ids for each in played]))
    assert {each.ended for each in played} <= {ANSWER, TOKENS}
    assert [len(each.turns) for each in played] == [3] * 8
    assert all(each.reward == each.attributes.extra_fields["rewards"]["distinct"] > 0 for each in played)
    assert beyond.ended == FAILED
    assert "task_index=8: the taskset has 8 tasks" in beyond.reason


@pytest.mark.skipif(IS_INSTALLED, reason="needs an installation without the package verifiers")
def test_a_missing_package_is_named_before_the_run_begins(settings, tied_folder):
    with pytest.raises(AgentError, match=r"counting: .*install verifiers==0\.4\.0"):
        check_agents(settings, AgentPlan({}, False, False), AutoTokenizer.from_pretrained(tied_folder), (0,))
