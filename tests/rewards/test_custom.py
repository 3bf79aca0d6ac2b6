import asyncio

import pytest

from verl_memopt.errors import RewardError
from verl_memopt.rewards.rules import score_batch_by_rule, score_by_rule
from verl_memopt.rewards.sandbox import Sandbox
from verl_memopt.rewards.scorer import is_async, load_reward_function


def write(folder, text):
    path = folder / "reward.py"
    path.write_text(text)
    return str(path)


def test_without_a_file_the_rules_are_used():
    assert load_reward_function(None, "compute_score", {}).func is score_by_rule
    assert load_reward_function(None, "compute_score", {}, whole_batch=True).func is score_batch_by_rule


def test_with_a_service_the_rules_score_code_too_and_wait_for_many_rows():
    sandbox = Sandbox("http://h", 4, 64)
    rules = load_reward_function(None, "compute_score", {}, sandbox=sandbox)
    assert is_async(rules)
    assert asyncio.run(rules("toy/arithmetic", "4", "4")) == 1.0
    assert asyncio.run(rules("apps", "no code", {"inputs": ["1"], "outputs": ["1"]})) == 0.0
    batch = load_reward_function(None, "compute_score", {}, whole_batch=True, sandbox=sandbox)
    assert asyncio.run(batch(["toy/arithmetic"] * 2, ["4", "5"], ["4", "4"], [{}, {}])) == [1.0, 0.0]


def test_the_function_is_called_with_its_fixed_arguments(tmp_path):
    path = write(
        tmp_path, "def f(data_source, solution_str, ground_truth, extra_info=None, *, scale): return scale * len(solution_str)"
    )
    function = load_reward_function(path, "f", {"scale": 3})
    assert function(data_source="", solution_str="ab", ground_truth="", extra_info={}) == 6


@pytest.mark.parametrize(
    ("text", "name", "kwargs", "message"),
    [
        ("def other(): pass", "compute_score", {}, "has no 'compute_score'. It defines other"),
        ("compute_score = 3", "compute_score", {}, "is not a function"),
        (
            "def compute_score(solution): return 0", "compute_score", {},
            r"compute_score\(solution\), which does not accept the arguments",
        ),
        (
            "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 0", "compute_score",
            {"scale": 3}, r"unexpected keyword argument 'scale'.*Define compute_score\(.*, extra_info=None, scale=None\)",
        ),
        (
            "def compute_score(data_source, solution_str, ground_truth, extra_info, needed): return 0", "compute_score", {},
            "missing a required argument: 'needed'",
        ),
        (
            "def compute_score(**kwargs): return 0", "compute_score", {"extra_info": 1},
            "extra_info is passed for each row already",
        ),
        ("import nowhere_to_be_found", "compute_score", {}, "does not run.*ModuleNotFoundError"),
        ("raise SystemExit(3)", "compute_score", {}, "does not run.*SystemExit"),
    ],
)  # fmt: skip
def test_a_function_that_cannot_be_used_is_refused(tmp_path, text, name, kwargs, message):
    with pytest.raises(RewardError, match=f"(?s){message}"):
        load_reward_function(write(tmp_path, text), name, kwargs)


@pytest.mark.parametrize(
    ("text", "kwargs", "message"),
    [
        (
            "def f(data_source, solution_str, ground_truth, extra_info=None): return 0",
            {},
            r"a reward function for reward_model\.reward_manager=batch .*Define f\(data_sources, solution_strs, ground_truths, "
            r"extra_infos=None\)",
        ),
        ("def f(**kwargs): return 0", {"extra_infos": 1}, "extra_infos is passed with each call already"),
    ],
)
def test_a_function_of_one_row_is_refused_where_one_for_a_batch_is_due(tmp_path, text, kwargs, message):
    with pytest.raises(RewardError, match=message):
        load_reward_function(write(tmp_path, text), "f", kwargs, whole_batch=True)
