"""Files that others may have written: regular, of a bounded size, and with the types that were written."""

import os
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict

import pytest

from verl_memopt.records import RecordError, checked, is_inside, odd_entry, opened, parse_json, read_record


@dataclass(frozen=True)
class Inner:
    size: int
    digest: str


@dataclass(frozen=True)
class Outer:
    step: int
    score: float | None = None
    files: dict[str, Inner] = field(default_factory=dict)
    names: list[str | int] = field(default_factory=list)


class State(TypedDict):
    seed: int
    more: NotRequired[dict[str, Any]]


def test_a_record_comes_back_in_its_types():
    text = '{"step": 3, "score": 1, "files": {"a": {"size": 2, "digest": "x"}}, "names": ["a", 2]}'
    assert parse_json(text, Outer) == Outer(3, 1.0, {"a": Inner(2, "x")}, ["a", 2])
    assert parse_json(b'{"step": 3}', Outer) == Outer(3)
    assert checked({"seed": 1, "other": [1]}, State) == {"seed": 1, "other": [1]}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("1" * 5_000, "not JSON"),
        ("\xff\xfe", "not JSON"),
        ("[]", "expected an object"),
        ("{}", "step is missing"),
        ('{"step": "3"}', "step: expected a whole number, and it is str '3'"),
        ('{"step": true}', "step: expected a whole number, and it is true or false"),
        ('{"step": 1e400}', "step: expected a whole number, and it is float inf"),
        (f'{{"step": {2**70}}}', "step: the number is too large"),
        ('{"step": 3, "score": "a"}', "score: expected a number"),
        ('{"step": 3, "files": [1]}', "files: expected an object"),
        ('{"step": 3, "files": {"a": {"size": null, "digest": "x"}}}', r"files\.a\.size: expected a whole number"),
        ('{"step": 3, "files": {"a": {"size": 1, "digest": "x", "other": 1}}}', r"files\.a\.other: there is no such entry"),
        ('{"step": 3, "names": [[]]}', r"names\[0\]: expected a whole number"),
    ],
)
def test_another_type_is_named_with_its_place(text, says):
    with pytest.raises(RecordError, match=f"^{says}"):
        parse_json(text, Outer)


def test_a_missing_or_wrong_entry_of_a_state_is_named():
    for value, says in (({}, "seed is missing"), ({"seed": 1, "more": []}, "more: expected an object"), ({1: 2, "seed": 3}, "")):
        if says:
            with pytest.raises(RecordError, match=says):
                checked(value, State)
    with pytest.raises(RecordError, match="string as a key"):
        checked({1: 2}, dict[str, Any])


def test_only_regular_files_of_a_bounded_size_are_read(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "endless").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    assert read_record(tmp_path / "file", 5) == b"12345"
    with pytest.raises(RecordError, match="5 bytes"):
        read_record(tmp_path / "file", 4)
    assert read_record(tmp_path / "link", follow=True) == b"12345"
    refused = [("link", False, "link"), ("endless", True, "regular"), ("pipe", False, "regular"), ("pipe", True, "regular")]
    for name, follow, says in refused:
        with pytest.raises(OSError, match=says):
            opened(tmp_path / name, follow)
    with pytest.raises(OSError, match="regular"):
        opened(tmp_path)


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("/etc"), os.mkfifo], ids=["link", "pipe"])
def test_what_is_neither_file_nor_folder_is_found_below_a_folder(tmp_path, make):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").touch()
    assert odd_entry(tmp_path) is None
    make(tmp_path / "a" / "b" / "odd")
    assert odd_entry(tmp_path).startswith("a/b/odd is ")


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a\0b"])
def test_a_name_that_leads_elsewhere_is_not_inside(name):
    assert not is_inside(name)
    assert is_inside("a/b.c")
