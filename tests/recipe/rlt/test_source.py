"""Local files and hub datasets."""

import json
from pathlib import Path

import pytest

from verl_memopt.data.dataset import NAMES_OF_SPLITS, files_of_split, read_source
from verl_memopt.errors import DataError


def write(path: Path, question: str = "q") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"question": question, "solution": "s"}) + "\n")
    return path


def test_local_files_keep_their_order(tmp_path):
    paths = [str(write(tmp_path / f"{name}.jsonl", name)) for name in ("b", "a")]
    assert [row["question"] for _, row in read_source(paths, "train", "data.train_files")] == ["b", "a"]


def test_files_of_a_split_may_lie_in_a_folder(tmp_path):
    expected = [write(tmp_path / "data" / f"train-0000{part}.jsonl") for part in (0, 1)]
    write(tmp_path / "data" / "test-00000.jsonl")
    (tmp_path / "train.md").write_text("no rows")
    assert files_of_split(tmp_path, NAMES_OF_SPLITS["train"], "hub:x") == expected
    assert [path.name for path in files_of_split(tmp_path, NAMES_OF_SPLITS["val"], "hub:x")] == ["test-00000.jsonl"]


def test_a_split_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match=r"^hub:x: there is no file validation\*, val\*, test\* that ends in"):
        files_of_split(tmp_path, NAMES_OF_SPLITS["val"], "hub:x")


@pytest.mark.parametrize("name", ["hub:nobody/nothing", "hub:no such name"])
def test_a_hub_that_cannot_deliver_is_told_with_the_way_out(tmp_path, monkeypatch, name):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(DataError, match=rf"data\.train_files={name}: the hub could not deliver it.*download the files"):
        read_source(name, "train", "data.train_files")
