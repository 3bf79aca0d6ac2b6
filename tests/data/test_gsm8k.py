import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from recipe.rloo.prepare_gsm8k import INSTRUCTION, as_row, final_number, prepare_gsm8k
from verl_memopt.config.schema import Data
from verl_memopt.data.dataset import PromptDataset
from verl_memopt.errors import DataError
from verl_memopt.rewards.rules import gsm8k

RECORD = {"question": "Ann has 2,000 pens and buys 5. How many?", "answer": "2000 + 5 = <<2000+5=2005>>2005\n#### 2,005"}
SCRIPT = Path(__file__).parents[2] / "recipe" / "rloo" / "prepare_gsm8k.py"


def write_source(folder, train=RECORD, test=RECORD):
    folder.mkdir()
    (folder / "train.jsonl").write_text(json.dumps(train) + "\n")
    parquet.write_table(pa.Table.from_pylist([test]), folder / "test-00000-of-00001.parquet")
    return folder


def test_the_files_written_are_datasets_whose_own_answers_earn_the_reward(tmp_path, tokenizer):
    made = prepare_gsm8k(tmp_path / "out", local_dir=write_source(tmp_path / "source"))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["test.parquet", "train.parquet"]
    for split, path in made.items():
        (row,) = PromptDataset(str(path), Data(train_files=str(path), val_files=None, seed=0), tokenizer, "train")
        assert row.data_source == "openai/gsm8k"
        assert f"{RECORD['question']}\n{INSTRUCTION}" in row.text
        assert row.ground_truth == "2005"
        assert row.extra_info == {"split": split, "index": 0, "answer": RECORD["answer"], "question": RECORD["question"]}
        assert gsm8k(row.extra_info["answer"], row.ground_truth) == 1.0


@pytest.mark.parametrize(("answer", "number"), [("#### 5", "5"), ("#### 4 #### -1,234", "-1234"), ("x ####7\n", "7")])
def test_the_truth_is_the_number_after_the_last_mark(answer, number):
    assert final_number("a:1", answer) == number


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"question": "q", "answer": "it is 5"}, "^a:1: the answer does not end in '#### number'"),
        ({"question": "q"}, "^a:1: there is no string 'answer'. The row has question"),
        ({"question": 3, "answer": "#### 5"}, "^a:1: there is no string 'question'"),
    ],
)
def test_a_record_without_question_or_number_is_named(record, message):
    with pytest.raises(DataError, match=message):
        as_row("a:1", record, "train", 0)


def test_a_bad_record_leaves_no_file_of_its_split_and_a_folder_without_files_of_one_is_refused(tmp_path):
    source = write_source(tmp_path / "source", test={"question": "q", "answer": "none"})
    with pytest.raises(DataError, match=r"test-00000-of-00001\.parquet:1"):
        prepare_gsm8k(tmp_path / "out", local_dir=source)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["train.parquet"]
    (tmp_path / "train.csv").write_text("")
    with pytest.raises(DataError, match=r"there is no file train\* that ends in \.parquet"):
        prepare_gsm8k(tmp_path / "out", local_dir=tmp_path)


def test_a_hub_that_cannot_be_reached_is_told_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(DataError, match=r"nobody/nothing: the hub could not deliver it.*pass their folder"):
        prepare_gsm8k(tmp_path / "out", hub_id="nobody/nothing")


def test_the_script_writes_the_files_and_ends_with_2_on_bad_data(tmp_path):
    def run(*arguments):
        return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True)

    source = write_source(tmp_path / "source")
    assert run("--local-dir", str(source), "--out", str(tmp_path / "out")).returncode == 0
    assert (tmp_path / "out" / "train.parquet").is_file()
    refused = run("--local-dir", str(tmp_path), "--out", str(tmp_path / "out"))
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"{tmp_path}: there is no file train*")
