import pytest

from benchmarks import shape_of_code


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A small package in the place of ours."""
    files = {
        "cli.py": '"""The door."""\nimport small.room.one\n# Why.\n\nx = """a\nb"""\n',
        "room/one.py": "def act():\n    '''Do.'''\n    return 1  # not a line of its own\n",
        "room/__init__.py": "",
        "other/one.py": "from small.room import one\nstudent = 'rlt'\n",
        "rlt/two.py": "rlt = 1\n",
    }
    for name, text in files.items():
        path = tmp_path / "small" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(shape_of_code, "ROOT", tmp_path)
    monkeypatch.setattr(shape_of_code, "PACKAGE", tmp_path / "small")
    for function in (shape_of_code.files, shape_of_code.imported, shape_of_code.importers):
        function.cache_clear()
    yield tmp_path / "small"
    for function in (shape_of_code.files, shape_of_code.imported, shape_of_code.importers):
        function.cache_clear()


def test_docstrings_imports_comments_and_blank_lines_are_not_code(package):
    assert shape_of_code.code_and_comment_lines(package / "cli.py") == (2, 1)
    assert shape_of_code.code_and_comment_lines(package / "room" / "one.py") == (2, 0)


def test_an_import_is_found_in_either_spelling(package):
    importers = shape_of_code.importers(package / "room" / "one.py")
    assert [path.relative_to(package).as_posix() for path in importers] == ["cli.py", "other/one.py"]


def test_a_name_is_found_in_the_file_that_defines_it(package):
    assert shape_of_code.defined("act") == package / "room" / "one.py"
    with pytest.raises(SystemExit, match="gone is defined in 0 files"):
        shape_of_code.defined("gone")


def test_rlt_is_counted_outside_its_own_folder(package, monkeypatch):
    monkeypatch.setattr(shape_of_code, "WAY", {})
    monkeypatch.setattr(shape_of_code, "knob_files", lambda: {"k": ["a"]})
    rows = {name: (number, names) for name, number, names in shape_of_code.static_rows()}
    assert rows["files outside RLT's folders that name RLT"] == (1, ["other/one.py"])
    assert rows["base names in several folders"] == (1, ["one"])
    assert rows["files of the package"][0] == 4


KNOB = """from dataclasses import dataclass
@dataclass(frozen=True)
class {cls}:
    {field}: bool = False
KNOB = object()
"""


def test_a_knob_has_the_files_where_it_acts_and_no_others(package):
    reading = "def act(given: {annotation}) -> bool:\n    return given.keep\n"
    files = {
        "__main__.py": 'print(\'[{"name": "keep"}]\')\n',
        "memory/keep.py": KNOB.format(cls="Keep", field="keep"),
        "memory/keep_torch.py": "class Kept:\n    size = 0\ndef keep() -> Kept:\n    return Kept()\n",
        "memory/other.py": KNOB.format(cls="Other", field="keep_too")
        + "from small.memory.keep import Keep\n"
        + reading.format(annotation="Keep"),
        "config/model.py": "from small.memory.keep import Keep\nfrom small.memory.other import Other\n"
        "class Model(Keep, Other):\n    path = ''\n",
        "config/rules.py": "from small.config.model import Model\n" + reading.format(annotation="Model"),
        "worker/reads.py": "from small.config.model import Model\n" + reading.format(annotation="Model | None"),
        "worker/calls.py": "from small.memory.keep_torch import keep\nkept = keep()\n",
        "worker/holds.py": "from small.memory.keep_torch import Kept\ndef size(kept: Kept) -> int:\n    return kept.size\n",
        "worker/untyped.py": "from elsewhere import given\nkept = given().keep\n",
        "worker/by_name.py": "from small.config.model import Model\ndef act(given: Model) -> list[bool]:\n"
        "    return [getattr(given, name) for name in ('keep',)]\n",
        "worker/names.py": "from small.memory.keep_torch import Kept\ndef hand_on(kept: Kept) -> Kept:\n    return kept\n",
        "worker/other_class.py": "class Box:\n    keep = True\n" + reading.format(annotation="Box"),
        "worker/other_key.py": "from small.config.model import Model\n"
        "def act(given: Model) -> tuple[bool, str]:\n    return given.keep_too, given.path\n",
        "recipes/reads.py": "from small.config.model import Model\n" + reading.format(annotation="Model"),
    }
    for name, text in files.items():
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_text(text)
    acts = ["worker/by_name.py", "worker/calls.py", "worker/holds.py", "worker/reads.py", "worker/untyped.py"]
    assert shape_of_code.knob_files() == {"keep": ["config/model.py", "memory/keep.py", "memory/keep_torch.py", *acts]}
