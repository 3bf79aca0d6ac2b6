"""Data files of RLT, prepared from files of any accepted form."""

import json

import pytest
from pyarrow import parquet
from transformers import PreTrainedTokenizerFast

from verl_memopt.config.schema import Data
from verl_memopt.errors import DataError
from verl_memopt.recipes.rlt.dataset import (
    EMPTY_SOLUTION,
    NO_SECTIONS,
    STRATOS,
    TAG_IN_QUESTION,
    RltDataset,
    prepare_rlt,
    token_lengths,
)


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def row(number, **more):
    return {"question": f"{number}?", "solution": f"{number}!", "reasoning_trace": f"because {number}", **more}


def conversation(number, answer=None):
    text = STRATOS.thought.wrap(f"hm {number}") + "\n\n" + STRATOS.solution.wrap(f"{number}!")
    turns = [("user", f"{number}?"), ("assistant", answer or text)]
    return {"system": "ignored", "conversations": [{"from": role, "value": value} for role, value in turns]}


def test_rows_are_split_written_and_counted(tmp_path) -> None:
    rows = [*map(row, range(10)), row(10, solution=" "), row(11, question=f"what is {STRATOS.thought.end}")]
    prepared = prepare_rlt(tmp_path / "out", [write(tmp_path / "a.jsonl", *rows)], num_validation=3)
    files = {split: parquet.read_table(path).to_pylist() for split, path in prepared.paths.items()}
    assert {split: len(each) for split, each in files.items()} == {"train": 7, "val": 3}
    together = sorted([*files["train"], *files["val"]], key=lambda each: int(each["question"][:-1]))
    assert together == [row(number) for number in range(10)]
    assert prepared.rejected == {EMPTY_SOLUTION: 1, TAG_IN_QUESTION: 1}


def test_the_seed_decides_which_rows_are_held_out(tmp_path) -> None:
    path = write(tmp_path / "a.jsonl", *map(row, range(30)))
    held_out = [prepare_rlt(tmp_path / "out", [path], num_validation=5, seed=seed).rows["val"] for seed in (0, 0, 1)]
    assert held_out[0] == held_out[1] != held_out[2]


def test_conversations_of_stratos_become_rows_of_rlt(tmp_path) -> None:
    train = write(tmp_path / "a.jsonl", conversation(1), conversation(2, "no tags"), conversation(3))
    val = write(tmp_path / "b.jsonl", conversation(4))
    prepared = prepare_rlt(tmp_path / "out", [train], [val])
    assert parquet.read_table(prepared.paths["train"]).to_pylist() == [
        {"question": f"{n}?", "solution": f"{n}!", "reasoning_trace": f"hm {n}"} for n in (1, 3)
    ]
    assert prepared.rejected == {NO_SECTIONS: 1}


def test_the_files_are_what_a_run_reads(tmp_path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path / "a.jsonl", *map(row, range(4)))
    prepared = prepare_rlt(tmp_path / "out", [path], num_validation=1)
    data = Data(train_files=None, val_files=None, seed=0, max_prompt_length=4000)
    dataset = RltDataset(str(prepared.paths["train"]), data, tokenizer, "train")
    assert [each.ground_truth for each in dataset] == [record.solution for record in prepared.rows["train"]]


@pytest.mark.parametrize("number", [0, 4, 9])
def test_as_many_rows_as_there_are_cannot_be_held_out(tmp_path, number) -> None:
    path = write(tmp_path / "a.jsonl", *map(row, range(4)))
    with pytest.raises(DataError, match=f"--num-validation={number}: choose between 1 and 3"):
        prepare_rlt(tmp_path / "out", [path], num_validation=number)


def test_token_lengths_are_those_of_the_teachers_prompts(tmp_path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [row(n, question="?" * n, reasoning_trace="x" * 5 if n else None) for n in range(1, 21)]
    prepared = prepare_rlt(tmp_path / "out", [write(tmp_path / "a.jsonl", *rows)], num_validation=1)
    lengths = token_lengths(prepared.rows["train"], tokenizer, "short")
    data = Data(train_files=None, val_files=None, seed=0, max_prompt_length=lengths["prompt"]["largest"])
    path = str(prepared.paths["train"])
    assert len(RltDataset(path, data, tokenizer, "train", "short")) == 19
    shorter = Data(train_files=None, val_files=None, seed=0, max_prompt_length=lengths["prompt"]["largest"] - 1)
    with pytest.raises(DataError, match="max_prompt_length"):
        RltDataset(path, shorter, tokenizer, "train", "short")
    assert lengths["trace"] == {"median": 5, "95 %": 5, "largest": 5}
    assert lengths["prompt"]["median"] < lengths["prompt"]["95 %"] <= lengths["prompt"]["largest"]
