import json
import sys

import pytest

from benchmarks.checkpoint import __main__ as benchmark


def test_a_small_run_measures_every_contestant_and_leaves_nothing_behind(tmp_path, monkeypatch, capsys):
    small = ["--layers", "1", "--vocabulary", "500", "--rounds", "1", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["checkpoint", *small, "--json", str(tmp_path / "result.json")])
    benchmark.main()
    result = json.loads((tmp_path / "result.json").read_text())
    assert result == json.loads(capsys.readouterr().out)
    assert result["seconds"].keys() == {"torch", "checked", "unchecked", "verify"}
    assert all(len(values) == 1 for values in result["seconds"].values())
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_the_contestants_save_the_same_tensors(tmp_path, one_rank):
    contest = benchmark.Contest(benchmark.shaped_model(1, 500), tmp_path)
    contest.torch()
    contest.unchecked()
    contest.checked()
    contest.verify()
    theirs, *ours = (next((tmp_path / place).rglob("*.distcp")).stat().st_size for place in benchmark.CONTESTANTS)
    assert ours[0] == ours[1] == pytest.approx(theirs, rel=1e-4)
