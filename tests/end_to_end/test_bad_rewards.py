"""A reward function that fails is named with the row it failed on; nothing it leaves disturbs the next start."""

import json

import pytest

from tests.end_to_end.runs import LOCAL, metrics

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


def test_what_a_function_raised_is_shown_from_its_own_first_frame_on(refused, function, tmp_path):
    message = refused(function(HEAD + "return solution_str[10**6]\n"), *ONE_STEP, kind="RewardError", leaves=BEGUN)
    frames = [line for line in message.splitlines() if line.lstrip().startswith("File ")]
    assert frames == [f'  File "{tmp_path / "reward.py"}", line 2, in compute_score']
    assert "IndexError: string index out of range" in message


def test_the_mended_function_trains_in_the_folder_that_the_broken_one_left(refused, here, function, tmp_path):
    refused(function(HEAD + "return 'good'\n"), *ONE_STEP, kind="RewardError", leaves=BEGUN)
    assert here(function(HEAD + "return float(solution_str == ground_truth)\n"), *ONE_STEP) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 1


def test_with_on_error_score_failed_rows_take_the_fallback_and_are_counted_and_told(here, function, tmp_path, capsys):
    body = "if extra_info['index'] % 2: raise ValueError('odd')\n    return 3.0\n"
    go_on = ["custom_reward_function.on_error=score", "custom_reward_function.fallback_score=-1"]
    assert here(function(HEAD + body), *ONE_STEP, *go_on) == 0
    row = metrics(tmp_path / "run")[1]
    failed = row["reward/failed_rows"]
    assert 0 < failed < 64
    assert row["critic/score/mean"] == pytest.approx((3 * (64 - failed) - failed) / 64, rel=1e-6)
    shown = capsys.readouterr().err
    assert f"the reward function failed on {failed:.0f} of 64 rows, which get the fallback score -1.0; the first is" in shown
    assert "ValueError: odd" in shown
