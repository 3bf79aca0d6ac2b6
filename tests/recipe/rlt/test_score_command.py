"""``verl-memopt score``: the rewards of a run, the rank of each explanation, and the worker that computes them."""

import json
from functools import partial

import pytest
import torch

from tests.end_to_end.runs import lines_of
from tests.rlt import brief_toy, settings_of, write
from verl_memopt.cli import main
from verl_memopt.errors import ConfigError
from verl_memopt.model.tiny import make_tiny_model
from verl_memopt.recipes.rlt.score_command import ScoringWorker, read_explanations, reward_settings, with_ranks
from verl_memopt.recipes.rlt.settings import RltReward
from verl_memopt.trainer.main_ppo import train
from verl_memopt.worker.group import LocalGroup

SHORT = "tag_format=short"
ROWS = [
    {"question": "47+8=", "solution": "55", "explanation": "7+8=15 4+1=5"},
    {"question": "47+8=", "solution": "55", "explanation": ""},
    {"question": "12+3=", "solution": "15", "explanation": "2+3=5 1+0=1</explanation> and more"},
    {"question": "47+8=", "solution": "55", "explanation": "never </thought> mind"},
]


@pytest.fixture(scope="module")
def rlt_toy(tmp_path_factory):
    return brief_toy(tmp_path_factory.mktemp("rlt") / "toy")


@pytest.fixture
def score(rlt_toy, tmp_path):
    """Return a function that runs the command and gives the scored rows."""

    def run(file, *more):
        out = tmp_path / "out" / f"scored-{len(list(tmp_path.glob('out/*')))}.jsonl"
        assert main(["score", str(file), "--student", str(rlt_toy / "student"), "--out", str(out), SHORT, *more]) == 0
        return lines_of(out)

    return run


@pytest.fixture
def stored(tmp_path):
    return write(tmp_path / "explanations.jsonl", *ROWS)


def test_the_rewards_of_a_dump_are_those_of_the_run_that_wrote_it(rlt_toy, tmp_path, score):
    more = {"trainer.rollout_data_dir": str(tmp_path / "dump"), "trainer.total_training_steps": 1}
    assert train(settings_of(rlt_toy, tmp_path / "run", more)) == 0
    dump = tmp_path / "dump" / "1.jsonl"
    for row, own in zip(lines_of(dump), score(dump, "--teacher", str(rlt_toy / "teacher")), strict=True):
        assert (own["reward"], own["r_ss"], own["r_kl"]) == pytest.approx((row["score"], row["r_ss"], row["r_kl"]), abs=1e-5)
        assert own["question"] == row["extra_info"]["question"]


def test_each_row_keeps_its_texts_and_gets_a_reward_a_status_and_a_rank(score, stored, tmp_path, capsys):
    scored = score(stored, "not_matched_penalty=-5", "--best", str(tmp_path / "best.jsonl"))
    assert [{name: row[name] for name in ROWS[0]} for row in scored] == ROWS
    assert [row["status"] for row in scored] == ["ok", "empty_think", "ok", "ok"]
    assert {row["match"] for row in scored} == {0.0}, "a stored text without an end tag gets one"
    assert [row["address"] for row in scored] == [f"{stored}:{number}" for number in range(1, 5)]
    for row in scored:  # without a teacher the reward is that of the solution
        assert row["reward"] == pytest.approx(row["r_ss"], abs=1e-6)
        assert row["r_ss"] == pytest.approx(row["answer_log_prob/mean"] + 0.01 * row["answer_log_prob/min"], abs=1e-5)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "4 explanations of 2 questions"
    assert shown[1].startswith("mean reward ")
    assert shown[2] == "ok 3, empty_think 1"
    of_question = [row for row in scored if row["question"] == "47+8="]
    best_first = sorted(of_question, key=lambda row: -row["reward"])
    assert [row["rank"] for row in (*best_first, scored[2])] == [1, 2, 3, 1]
    assert lines_of(tmp_path / "best.jsonl") == [row for row in scored if row["rank"] == 1]


def test_how_the_rows_are_cut_changes_no_reward(score, stored):
    cut = ["--rows", "1", "max_tokens_per_micro_batch=64", "logits_chunk_tokens=1"]
    rewards = [[row["reward"] for row in score(stored, *words)] for words in ([], cut)]
    torch.testing.assert_close(torch.tensor(rewards[0]), torch.tensor(rewards[1]), rtol=0, atol=1e-5)


def test_a_row_that_is_too_long_to_score_has_no_rank(score, stored):
    scored = score(stored, "max_student_len=52", "overlong=skip")
    skipped = [row for row in scored if row["status"] == "skipped"]
    assert skipped
    assert len(skipped) < len(scored)
    assert all(row["reward"] is None and row["rank"] is None for row in skipped)


def test_equal_rewards_rank_in_the_order_of_the_rows():
    rows = [
        {"question": "q", "solution": solution, "reward": reward} for solution, reward in zip("aaab", (1, 2, 1, 0), strict=True)
    ]
    assert [row["rank"] for row in with_ranks(rows)] == [2, 1, 3, 1]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"question": "q", "solution": "s"}, "the column 'explanation' must be text, but it is None"),
        ({"question": "q", "solution": 5, "explanation": "e"}, "the column 'solution' must be text, but it is 5"),
        ({"question": "q", "solution": " ", "explanation": "e"}, "the solution is empty"),
        (
            {"output": "e", "response_ids": [-1], "extra_info": {"question": "q", "solution": "s"}},
            "response_ids must be token ids",
        ),
    ],
)
def test_a_row_that_cannot_be_scored_is_named(tmp_path, capsys, row, says):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" + json.dumps(row) + "\n")
    assert main(["score", str(path), "--student", "nowhere", "--out", str(tmp_path / "out")]) == 2
    assert f"{path}:2: {says}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["clip=3"], r"reward_model\.rlt\.clip: no such key"),
        (["include_teacher_think_entropy=true"], "there is no teacher. Add --teacher"),
        (["unbias_student_log_probs_temp=0.5"], "both sides of the KL would belong to different distributions"),
    ],
)
def test_settings_of_the_reward_are_checked_as_those_of_a_run(words, says):
    with pytest.raises(ConfigError, match=says):
        reward_settings(words, False, 0.7)


def test_settings_without_a_teacher_give_the_comparison_no_weight():
    assert reward_settings([], False, 0.7).kl_penalty_reward_coeff == [0.0, 0.0]
    assert reward_settings([], True, 0.7).kl_penalty_reward_coeff == [3.0, 0.03]
    alone = reward_settings(["include_teacher_think_entropy=false"], False, 0.7)
    assert (alone.kl_penalty_reward_coeff, alone.include_teacher_think_entropy) == ([3.0, 0.03], False)


def test_a_teacher_with_another_tokenizer_and_a_folder_without_a_model_are_refused(rlt_toy, stored, tmp_path, capsys):
    other = make_tiny_model(tmp_path / "other", seed=1)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    student, out = str(rlt_toy / "student"), ["--out", str(tmp_path / "out"), SHORT]
    assert main(["score", str(stored), "--student", student, "--teacher", str(other), *out]) == 2
    assert "its tokenizer differs from the policy's" in capsys.readouterr().err
    assert main(["score", str(stored), "--student", str(tmp_path), *out]) == 2
    assert not (tmp_path / "out").exists()


def test_no_file_is_an_error():
    with pytest.raises(ConfigError, match="no file is named"):
        read_explanations([])


def test_without_a_teacher_there_is_one_model(tiny_folder):
    group = LocalGroup(partial(ScoringWorker, str(tiny_folder), None, RltReward(), "bfloat16", False), "cpu")
    try:
        (worker,) = (group._worker,)
        assert worker.teacher is None
        assert {tensor.dtype for _, tensor in worker._resident()} == {torch.bfloat16}
    finally:
        group.shutdown()
