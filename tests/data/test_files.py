import json

import pyarrow
import pytest
from pyarrow import parquet

from verl_memopt.data.sources import read_rows
from verl_memopt.errors import DataError

KEY = "data.train_files"
ROWS = [{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}]


def as_parquet(path):
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)


def as_lines(path):
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def as_array(path):
    path.write_text(json.dumps(ROWS, indent=1))


@pytest.mark.parametrize(
    ("name", "write"), [("r.parquet", as_parquet), ("r.jsonl", as_lines), ("r.json", as_lines), ("r.json", as_array)]
)
def test_rows_come_in_order_with_file_and_number(tmp_path, name, write):
    path = tmp_path / name
    write(path)
    assert read_rows(str(path), KEY) == [(f"{path}:1", ROWS[0]), (f"{path}:2", ROWS[1])]


def test_files_follow_one_another_and_count_their_own_rows(tmp_path):
    paths = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for path in paths:
        as_lines(path)
    assert [address for address, _ in read_rows(paths, KEY)] == [f"{path}:{row}" for path in paths for row in (1, 2)]


def test_an_empty_line_is_no_row_and_still_counts_as_a_line_and_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "r.jsonl"
    path.write_text('\n{"a": 1}\n  \n{"a": 2}')
    assert read_rows("~/r.jsonl", KEY) == read_rows(path, KEY) == [(f"{path}:2", {"a": 1}), (f"{path}:4", {"a": 2})]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("r.csv", b"a", "the suffix '.csv' is unknown. Use one of .parquet, .json, .jsonl"),
        ("r.jsonl", b"", "the file has no rows"),
        ("r.jsonl", b'{"a": 1}\n{"a": \n', "r.jsonl:2: not valid JSON"),
        ("r.jsonl", b'{"a": 1}\n[2]\n', "r.jsonl:2: a row must be a JSON object, but this is a list"),
        ("r.json", b'[{"a": 1}, 2]', "r.json:2: a row must be a JSON object, but this is a int"),
        ("r.jsonl", b'{"a": "\xff"}\n', "r.jsonl:1: not valid UTF-8"),
        ("r.jsonl", b'{"a": "\xed\xa0\x80"}\n', "r.jsonl:1: not valid UTF-8"),
        ("r.jsonl", b'{"a": 1}\n{"a": "x\\ud800y"}\n', "r.jsonl:2: a string contains \\ud800, half of a surrogate pair"),
        ("r.json", b'[{"a": 1}, {"b": [{"\\udc00": 1}]}]', "r.json:2: a string contains \\udc00, half of a surrogate pair"),
        ("r.jsonl", b'{"a": 1}\n{"a": 1, "b": {"c": 1, "c": 2}}\n', "r.jsonl:2: the JSON cannot be read ('c' appears twice"),
        ("r.jsonl", b"[" * 100_000 + b"\n", "r.jsonl:1: the JSON cannot be read"),
        ("r.jsonl", "{}".encode("utf-16"), "r.jsonl:1: not valid UTF-8"),
        ("r.parquet", b"PAR1", "not a readable parquet file"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_rows(str(tmp_path / name), KEY)
    assert said in str(caught.value)


@pytest.mark.parametrize(("files", "said"), [([], "the list of files is empty"), ("/no/r.jsonl", "there is no such file")])
def test_what_is_not_there_is_told_under_its_key(files, said):
    with pytest.raises(DataError, match=f"^{KEY}: .*{said}"):
        read_rows(files, KEY)


def test_a_byte_order_mark_and_windows_line_ends_are_no_part_of_a_row(tmp_path):
    (tmp_path / "r.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n{"a": 2}\r\n')
    (tmp_path / "r.json").write_bytes(b'\xef\xbb\xbf[{"a": 1},\r\n{"a": 2}]\r\n')
    for name in ("r.jsonl", "r.json"):
        assert [row for _, row in read_rows(tmp_path / name, KEY)] == [{"a": 1}, {"a": 2}]
    (tmp_path / "r.jsonl").write_text('{"a": "\\ud83d\\ude00"}\n')
    assert read_rows(tmp_path / "r.jsonl", KEY)[0][1] == {"a": "\U0001f600"}, "a whole surrogate pair is a character"


def test_a_folder_given_as_a_file_is_called_a_folder(tmp_path):
    (tmp_path / "r.jsonl").mkdir()
    with pytest.raises(DataError, match=f"^{KEY}: .*this is a folder. Name the files in it."):
        read_rows(tmp_path / "r.jsonl", KEY)


def test_a_column_that_is_there_twice_and_a_parquet_text_that_is_no_utf8_are_told(tmp_path):
    broken = pyarrow.array([b"\xff"], type=pyarrow.binary()).view(pyarrow.string())
    for table, said in (
        (pyarrow.table([["x"], ["y"]], names=["prompt", "prompt"]), "the column 'prompt' appears several times"),
        (pyarrow.table([broken], names=["prompt"]), "this is not a readable parquet file"),
    ):
        parquet.write_table(table, tmp_path / "r.parquet")
        with pytest.raises(DataError, match=rf"r\.parquet: {said}"):
            read_rows(tmp_path / "r.parquet", KEY)
