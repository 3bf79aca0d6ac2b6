"""A reward function that fails is named with the row it failed on; nothing it leaves disturbs the next start."""

import json

import pytest

from tests.end_to_end.runs import LOCAL

ONE_STEP = [
    *LOCAL,
    "trainer.total_training_steps=1",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
]
BEGUN = ["config.yaml", "console.log", "memory_timeline.csv"]
"""What a run has written when its first answers are scored."""
HEAD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    "


@pytest.fixture
def function(tmp_path):
    """Writes a reward file and gives the setting that names it."""

    def write(text):
        (tmp_path / "reward.py").write_text(text)
        return f"custom_reward_function.path={tmp_path / 'reward.py'}"

    return write


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def compute_score(:\n", "SyntaxError: invalid syntax"),
        (
            "def compute_score(prompt, completion): return 1.0\n",
            "defines compute_score(prompt, completion), which does not accept the arguments of a reward function "
            "(missing a required argument: 'prompt'). "
            "Define compute_score(data_source, solution_str, ground_truth, extra_info=None).",
        ),
    ],
)
def test_a_file_without_a_function_that_can_be_called_is_refused_before_a_worker_starts(refused, function, text, said):
    message = refused(function(text), *ONE_STEP, kind="RewardError")
    assert message.startswith("custom_reward_function.")
    assert said in message


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("import time; time.sleep(1000)", "took longer than custom_reward_function.timeout_seconds=0.5"),
        ("import os; os._exit(3)", "ended its process, which exited with code 3"),
    ],
)
def test_a_function_that_fails_ends_the_run_and_is_named_with_file_row_and_way_out(refused, function, tmp_path, body, said):
    setting = function(HEAD + body + "\n")
    message = refused(setting, *ONE_STEP, "custom_reward_function.timeout_seconds=0.5", kind="RewardError", leaves=BEGUN)
    address, _, rest = message.partition(": the reward function compute_score of ")
    row = int(address.rpartition("train.parquet:")[2])
    assert 1 <= row <= 592
    assert rest.startswith(f"{tmp_path / 'reward.py'} {said}")
    assert "custom_reward_function.on_error=score" in message


def test_the_mended_function_trains_in_the_folder_that_the_broken_one_left(refused, here, function, tmp_path):
    refused(function(HEAD + "return 'good'\n"), *ONE_STEP, kind="RewardError", leaves=BEGUN)
    assert here(function(HEAD + "return float(solution_str == ground_truth)\n"), *ONE_STEP) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 1
