import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import golden, shape_of_code
from benchmarks.estimators.__main__ import PEERS, cases_of_ours_alone, compare, main, peer_side, report
from benchmarks.estimators.batch import SIZES, make_batch
from benchmarks.estimators.ours import ALONE, CASES
from benchmarks.packing import __main__ as benchmark
from benchmarks.packing.__main__ import even_parts, measure, next_fit

RECORD = Path(__file__).parents[2] / "docs" / "evidence" / "2026-11-22-estimators"


def test_rows_are_padded_and_flattened_without_loss():
    batch = make_batch(1)
    padded = batch.pad(batch.values)
    assert padded.shape == (len(SIZES), max(SIZES))
    assert torch.equal(batch.flat(padded), batch.values)
    assert padded.count_nonzero() == sum(SIZES)
    assert torch.equal(batch.pad(batch.token_rewards).sum(1), batch.scores)


@pytest.mark.parametrize("name", CASES)
def test_every_case_has_finite_numbers(name):
    values = CASES[name](make_batch(0, name.endswith(ALONE)))
    assert values
    for value in values.values():
        assert not isinstance(value, torch.Tensor) or value.isfinite().all()


def moved(case):
    """Gives a case whose first value is a little off."""

    def values(batch):
        found = case(batch)
        name = next(iter(found))
        return found | {name: found[name] + 1e-4}

    return values


def test_a_peer_that_agrees_is_in_its_bound_and_one_that_does_not_is_named():
    some = {name: CASES[name] for name in ("advantages gae", "loss gspo", "correction presets")}
    rows, text = report({"twin": SimpleNamespace(VERSION="1", VALUES=some)}, seeds=2)
    assert [row.difference for row in rows] == [0.0] * 3
    assert "3 comparisons: 0 with a reason to differ, 0 others beyond" in text
    other = SimpleNamespace(VERSION="2", VALUES={"loss gspo": moved(CASES["loss gspo"])})
    rows, text = report({"other": other}, seeds=1)
    assert rows[0].difference == pytest.approx(1e-4)
    assert (rows[0].where, rows[0].holds) == ("loss", False)
    assert "NOT THE SAME" in text
    assert len(cases_of_ours_alone({"other": other})) == len(CASES) - 1


def test_a_value_that_one_side_lacks_or_shapes_otherwise_is_no_agreement():
    one, two = {"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(1)}
    assert compare("f", "p", "1", one, two).difference == float("inf")
    assert compare("f", "p", "1", one, {"a": torch.ones(3)}).difference == float("inf")
    assert compare("f", "p", "1", {"a": {"x": 1}}, {"a": {"x": 2}}).difference == float("inf")
    assert compare("f", "p", "1", {"a": {"x": 1}}, {"a": {"x": 1}}).difference == 0


def test_without_a_peer_the_command_says_what_to_run(capsys):
    if any(peer_side(name) for name in PEERS):
        pytest.skip("a peer is installed here")
    assert main([]) == 2
    assert "setup.sh" in capsys.readouterr().err


AR = "actor_rollout_ref"


def test_a_case_is_answered_with_its_error_or_with_what_it_changes_and_what_is_logged():
    base = golden.flat(golden.to_plain(golden.settings_from_mapping(golden.LEAST)))
    wrong = golden.answer({"mapping": golden.LEAST | {"trainer.save_freq": "often"}}, base)
    assert wrong["error"].startswith("ConfigError: trainer.save_freq=often: expected a whole number")
    assert "settings" not in wrong
    right = golden.answer({"mapping": golden.LEAST | {"trainer.save_freq": 7, f"{AR}.model.use_liger": True}}, base)
    assert right["settings"] == {"trainer.save_freq": 7}
    assert len(right["log"]) == 1
    assert right["log"][0].startswith(f"WARNING {AR}.model.use_liger=true does nothing here")


def test_every_recipe_and_packaged_config_is_among_the_configs():
    names = {name for name, _ in golden.configs()}
    assert {"ppo_trainer", "rloo_trainer memory=24g", "recipe/rloo/toy.yaml", "recipe/rloo/toy.yaml +device=gpu"} <= names
    assert {"recipe/ppo/toy.yaml", "recipe/rlt/config/teacher_rlt_toy.yaml"} <= names


def test_equal_outputs_pass_and_a_difference_is_told_once_with_where_it_shows(tmp_path, capsys):
    old, new = tmp_path / "old", tmp_path / "new"
    golden.write(old / "configs.json", {"a": {"lr": 1, "n": 2}, "b": {"lr": 1, "n": 3}})
    (old / "cases.jsonl").write_text(json.dumps({"case": {"mapping": {}}, "answer": {"error": "no"}}) + "\n")
    shutil.copytree(old, new)
    assert golden.main(["--compare", str(old), str(new)]) == 0
    golden.write(new / "configs.json", {"a": {"lr": 5, "n": 2}, "b": {"lr": 5, "n": 3}})
    (new / "cases.jsonl").write_text("")
    capsys.readouterr()
    assert golden.main(["--compare", str(old), str(new)]) == 1
    said = capsys.readouterr().out
    assert said.count('+ "lr": 5') == 1
    assert "2 differences, in 3 of 3 outputs" in said


COMMITTED = Path(benchmark.__file__).parent / "results.json"


def test_a_broken_promise_is_an_exit_code():
    record = json.loads(COMMITTED.read_text())
    record["rules"]["token budget"]["uniform"]["batches_over_cap"] = 1
    assert not benchmark.holds(record)


def test_a_short_run_writes_the_same_bins_each_time(tmp_path, capsys):
    rules = []
    for name in ("one", "two"):
        benchmark.main(["--batches", "3", "--repeats", "1", "--json", str(tmp_path / name)])
        rules.append(json.loads((tmp_path / name).read_text())["rules"])
    assert rules[0] == rules[1]
    assert "token budget" in capsys.readouterr().out


def test_the_two_simpler_rules_show_what_they_lack():
    assert measure([6, 6, 6], 10, even_parts).over_cap == 1
    assert measure([6, 6, 4, 4], 10, next_fit).bins == 3


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
