import json
from pathlib import Path

from benchmarks.packing import __main__ as benchmark
from benchmarks.packing.__main__ import even_parts, measure, next_fit

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
