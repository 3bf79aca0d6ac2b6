"""The host's time for one update: the same rows by a worker and by transformers."""

import json

from benchmarks.host_time import main


def test_each_contestant_has_its_times_and_the_calls_of_a_block(tmp_path, capsys):
    names = ["transformers", "default"]
    assert main(["--contestants", *names, "--rounds", "1", "--profile", "--json", str(tmp_path / "host.json")]) == 0
    record = json.loads((tmp_path / "host.json").read_text())
    assert [found["name"] for found in record["contestants"]] == names
    assert all(found["calls"] > record["layers"] and found["least_seconds"] > 0 for found in record["contestants"])
    printed = capsys.readouterr().out
    assert all(printed.count(name) >= 2 for name in names), "one row in the table, and a profile of each"
