"""The toy task: true sums, true explanations, and files that are datasets of RLT."""

from itertools import chain

import pytest
from transformers import PreTrainedTokenizerFast

from verl_memopt.config.schema import Data
from verl_memopt.data.rlt.dataset import RltDataset
from verl_memopt.data.rlt.toy import explanation, make_rlt_toy, solution
from verl_memopt.data.toy import ToyRecipe, split_problems
from verl_memopt.errors import DataError


@pytest.mark.parametrize(
    ("problem", "text"),
    [((47, 8), "7+8=15 4+1=5"), ((41, 8), "1+8=9 4+0=4"), ((19, 1), "9+1=10 1+1=2"), ((89, 9), "9+9=18 8+1=9")],
)
def test_an_explanation_adds_the_ones_then_the_tens(problem, text):
    assert explanation(problem) == text


def test_the_last_digits_of_the_steps_are_the_solution():
    for problem in chain(*split_problems(ToyRecipe(), 0)):
        ones, tens = explanation(problem).split(" ")
        assert solution(problem) == tens.partition("=")[2] + ones[-1] == str(sum(problem))
        assert all(eval(left) == int(right) for left, _, right in (step.partition("=") for step in (ones, tens)))


def test_the_files_are_datasets_without_rejected_rows_and_share_no_question(tmp_path, tokenizer: PreTrainedTokenizerFast) -> None:
    folder = make_rlt_toy(tmp_path / "toy", num_validation=64)
    questions = {}
    for split in ("train", "val"):
        data = Data(train_files=None, val_files=None, seed=0, max_prompt_length=200)
        rows = RltDataset(str(folder / f"{split}.parquet"), data, tokenizer, split, "short")
        assert rows.rejected == {}
        questions[split] = {row.extra_info["question"] for row in rows}
    assert (len(questions["train"]), len(questions["val"])) == (720 - 64, 64)
    assert not questions["train"] & questions["val"]


def test_the_same_seed_gives_the_same_files_and_replaces_them(tmp_path):
    first = (make_rlt_toy(tmp_path / "toy", seed=1) / "val.parquet").read_bytes()
    assert (make_rlt_toy(tmp_path / "toy", seed=1) / "val.parquet").read_bytes() == first
    assert (make_rlt_toy(tmp_path / "toy", seed=2) / "val.parquet").read_bytes() != first


def test_a_folder_of_something_else_is_kept(tmp_path):
    (tmp_path / "mine").write_text("x")
    with pytest.raises(DataError, match="is no toy task of RLT"):
        make_rlt_toy(tmp_path)
    assert (tmp_path / "mine").read_text() == "x"
