import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from recipe.rloo.memory_study.__main__ import chosen_arms, main, parse
from recipe.rloo.memory_study.cells import ARMS

ROOT = Path(__file__).parents[4]
STAND_IN = ["--measure", "tests.recipe.rloo.memory_study.stand_in:measure_cell"]
FEW = ["--arm", "token_full_legacy", "token_full_response_only"]
LIMIT = str(100_000 / 2**30)
"""Room for the second of the few, and not for the first. GiB."""
FILES = {
    "cells",
    "combined.csv",
    "summary.json",
    "peak_memory_comparison.png",
    "memory_usage_timeline.png",
    "method_performance_summary.png",
    "what_really_saves.png",
}


def study(out, *options):
    return main(["study", "--out", str(out), "--quick", "--jobs", "2", *STAND_IN, *options])


def summary(out):
    return json.loads((out / "summary.json").read_text())


def test_a_quick_study_runs_every_arm_and_leaves_table_summary_and_charts(tmp_path, capsys):
    assert study(tmp_path) == 0
    assert {path.name for path in tmp_path.iterdir()} == FILES
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.glob("*.png"))
    assert summary(tmp_path)["outcomes"] == {"completed": len(ARMS)}
    text = capsys.readouterr().out
    assert "no GPU: bytes are counted, not sampled" in text
    counted = [line.split("  ")[0] for line in text.splitlines() if re.match(r"\d+ of", line)]
    assert counted == [f"{number} of {len(ARMS)}" for number in range(1, len(ARMS) + 1)]
    assert "What really saves" in text


def run(out, *options, repeats=1):
    return main(["run", "--out", str(out), "--k", "2", "--repeats", str(repeats), *options, *STAND_IN])


def test_a_study_out_of_memory_ends_with_3_and_still_has_its_files(tmp_path):
    assert study(tmp_path, "--k", "2", *FEW, "--device-limit-gb", LIMIT) == 3
    assert {path.name for path in tmp_path.iterdir()} == FILES
    assert summary(tmp_path)["outcomes"] == {"completed": 1, "oom": 1}


def test_a_cell_over_the_time_limit_ends_with_5(tmp_path):
    assert run(tmp_path, "--arm", "token_full_legacy", "--time-limit", "0") == 5


def test_methods_can_be_run_one_by_one_into_one_folder_and_those_that_diverge_end_with_4(tmp_path, capsys):
    for expansion in ("token", "string"):
        assert run(tmp_path, "--arm", f"{expansion}_full_legacy", "--device", "fake", repeats=2) == 0
    assert main(["charts", "--out", str(tmp_path)]) == 0  # of all cells that there are
    assert {(row["expansion"], row["repeats"]) for row in summary(tmp_path)["rows"]} == {("token", 2), ("string", 2)}
    path = tmp_path / "cells" / "string_full_legacy_k2_r0.json"
    other = json.loads(path.read_text())
    other["records"][0]["ids_sha256"] = "another"
    path.write_text(json.dumps(other))
    assert main(["combine", "--out", str(tmp_path)]) == 4
    assert "diverged: string_full_legacy_k2_r0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "--device", "cuda"], "no GPU is visible"),
        (["run", "--expansion", "lazy", "--arm", "token_full_legacy"], "no arm has this"),
        (["run", "--device", "cpu"], "token_full_legacy_coupled_k8 needs about 51 GiB of real tensors"),
        (["run", "--documents", "no/such/file"], "no such file or folder"),
        (["combine"], "no results"),
        (["charts"], "no results"),
    ],
)
def test_what_cannot_work_is_refused_with_2_before_anything_runs(arguments, words, tmp_path, capsys):
    command, *options = arguments
    assert main([command, "--out", str(tmp_path), *options]) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("script", "expansion"), [("run_basic.sh", "token"), ("run_baseline-rloo.sh", "token"), ("run_improve-rloo.sh", "string")]
)
def test_a_published_script_runs_its_method(script, expansion, tmp_path):
    command = printed(script, tmp_path, "--seed", "7", REPEATS="1", KS="2 4", DEVICE="fake", DEVICE_LIMIT_GB="32")
    options = parse(command)
    assert command[0] == "run"
    assert {(arm.expansion, arm.k) for arm in chosen_arms(options)} == {(expansion, 2), (expansion, 4)}
    assert (options.out, options.repeats, options.device, options.device_limit_gb) == (tmp_path, 1, "fake", 32.0)
    assert options.seed == 7


@pytest.mark.parametrize(
    ("script", "command"), [("run_study.sh", "study"), ("combine_results.sh", "combine"), ("visualize_results.sh", "charts")]
)
def test_a_script_runs_its_command_with_what_it_is_given(script, command, tmp_path):
    words = printed(script, tmp_path, "--out", "elsewhere")
    assert words[0] == command
    assert str(parse(words).out) == "elsewhere"


def printed(script, out, *options, **variables):
    """Return the arguments that a script hands to the study's command line."""
    ended = shell(script, out, *options, PYTHON="/bin/echo", **variables)
    module, name, *words = ended.stdout.split()
    assert (module, name) == ("-m", "recipe.rloo.memory_study")
    return words


def shell(script, out, *options, **variables):
    env = {**os.environ, "OUT": str(out), **variables}
    path = ROOT / "recipe/rloo/memory_study" / script
    return subprocess.run(["bash", str(path), *options], env=env, capture_output=True, text=True, timeout=200)
