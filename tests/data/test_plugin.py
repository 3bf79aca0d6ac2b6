import re

import pytest

from verl_memopt.data.plugin import load_from_file
from verl_memopt.errors import DataError, RewardError

KEY = "data.custom_cls.path"


@pytest.fixture
def plugin(tmp_path):

    def load(text, name="wanted", error=DataError):
        path = tmp_path / "plugin.py"
        path.write_text(text)
        return load_from_file(str(path), name, key=KEY, error=error)

    return load


def test_what_the_file_calls_by_the_name_is_given(plugin):
    assert plugin("def wanted():\n    return 5\n")() == 5


def test_a_file_is_run_once_however_many_names_are_taken_from_it(plugin, tmp_path):
    first = plugin("made = []\nclass wanted:\n    pass\n")
    path = str(tmp_path / "plugin.py")
    assert load_from_file(path, "wanted", key=KEY, error=DataError) is first
    load_from_file(path, "made", key=KEY, error=DataError).append(1)
    assert load_from_file(path, "made", key=KEY, error=DataError) == [1]


def test_files_of_one_name_in_two_folders_are_two(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same.py").write_text(f"wanted = {name!r}")
    found = [load_from_file(str(tmp_path / name / "same.py"), "wanted", key=KEY, error=DataError) for name in ("one", "two")]
    assert found == ["one", "two"]


def test_a_class_of_the_file_can_be_pickled_by_reference(plugin):
    import pickle

    kind = plugin("class wanted:\n    pass\n")
    assert pickle.loads(pickle.dumps(kind)) is kind


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        ("def other():\n    pass\n_hidden = 1\n", "wanted", "the file has no 'wanted'. It defines other. Name one of these in "),
        ("", None, "the file has no None. It defines nothing"),
        ("def wanted(:\n", "wanted", "the file does not run. Correct it:\n"),
        ("raise SystemExit(3)\n", "wanted", "the file does not run. Correct it:\n"),
    ],
)
def test_a_file_that_cannot_give_it_is_refused_under_its_key(plugin, text, name, said):
    with pytest.raises(RewardError, match=re.escape(said)) as caught:
        plugin(text, name, RewardError)
    assert str(caught.value).startswith(f"{KEY}=")


@pytest.mark.parametrize(("text", "cause"), [("def wanted(:\n", "SyntaxError"), ("\n\n1 / 0\n", "line 3")])
def test_a_file_that_does_not_run_shows_where(plugin, text, cause):
    with pytest.raises(DataError, match=f"plugin.py(.|\n)*{cause}"):
        plugin(text)


def test_a_file_that_did_not_run_is_run_anew_once_mended(plugin):
    with pytest.raises(DataError):
        plugin("1 / 0\n")
    assert plugin("wanted = 1\n") == 1


@pytest.mark.parametrize(("name", "said"), [("missing.py", "there is no such file"), ("rows.txt", "this is not a Python file")])
def test_a_path_that_is_no_python_file_is_refused(tmp_path, name, said):
    (tmp_path / "rows.txt").write_text("wanted = 1")
    with pytest.raises(DataError, match=said):
        load_from_file(str(tmp_path / name), "wanted", key=KEY, error=DataError)
