"""The command for a bare GPU machine: its parts, what it does when one fails, and the wheels it installs."""

import json
import subprocess
import tarfile

import pytest

from tests.end_to_end.runs import ROOT, script_environment
from tests.forked import CHILDREN

TINY = {
    "WHEELS": "none", "LAYERS": "2", "VOCABULARY": "512", "SHRINK": "32", "PROMPT": "16",
    "CASES": "0.6b/lora", "START": "64", "MOST": "64", "LIMIT_GB": "1",
}  # fmt: skip


def run_all(out, **more):
    env = script_environment(**{**TINY, "OUT": str(out), **more})
    return subprocess.run(["bash", "benchmarks/gpu/all.sh"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)


def summary(out):
    return {row["name"]: row["status"] for row in json.loads((out / "summary.json").read_text())}


def test_a_part_that_fails_does_not_stop_the_next_and_fails_the_command(tmp_path):
    out, packed = tmp_path / "out", tmp_path / "evidence.tar.gz"
    out.mkdir()
    process = run_all(out, ONLY="2 5", KNOBS="no_such_knob", TAR=str(packed), **{CHILDREN: "1"})
    assert process.returncode == 1, process.stderr[-3000:]
    assert summary(out) == {"ladder": "failed (2)", "reach": "done"}
    assert "no_such_knob" in (out / "ladder" / "output.txt").read_text()
    assert "part  name" in (out / "summary.txt").read_text()
    (case,) = json.loads((out / "reach" / "reach.json").read_text())["cases"]
    assert (case["name"], case["longest"]) == ("0.6b/lora", 64)
    assert case["measured"]["update_peak_bytes"] > 0
    assert "--limit-gb 1" in (out / "reach" / "machine.txt").read_text()
    with tarfile.open(packed) as tar:
        assert any(name.endswith("reach/reach.json") for name in tar.getnames())


def test_a_part_out_of_time_is_named_and_keeps_what_it_wrote(tmp_path):
    (tmp_path / "test_hangs.py").write_text("import time\n\ntime.sleep(100)\n")
    process = run_all(tmp_path, ONLY="1", PART_SECONDS="1", TESTS=str(tmp_path / "test_hangs.py"))
    assert process.returncode == 1, process.stderr[-3000:]
    assert summary(tmp_path) == {"tests": "out of time"}
    assert (tmp_path / "tests" / "output.txt").exists()


def test_an_unknown_part_is_refused_before_anything_runs(tmp_path):
    process = run_all(tmp_path, ONLY="1 9")
    assert process.returncode == 2
    assert "ONLY=9: no such part" in process.stderr
    assert not list(tmp_path.iterdir())


def test_updates_of_one_copy_of_the_weights_are_measured_beside_what_was_foreseen(tmp_path):
    process = run_all(tmp_path, ONLY="7", RESPONSE="16", LIMITS="1")
    assert summary(tmp_path) == {"one_copy": "done"}, process.stdout[-3000:]
    record = json.loads((tmp_path / "one_copy" / "8b-1gb.json").read_text())
    assert 0 < record["phases"]["update_actor"]["peak"] <= record["foreseen"]["update_actor"]
    assert record["phases"]["update_actor"]["grad_norm"] > 0
    assert len((tmp_path / "one_copy" / "8b-1gb.jsonl").read_text().splitlines()) == 3 * 4  # steps and phases


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_part_runs_on_a_cpu_with_small_shapes(tmp_path):
    env = script_environment(SMALL="1", WHEELS="none", OUT=str(tmp_path))
    command = ["bash", "benchmarks/gpu/all.sh"]
    process = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1400)
    assert set(summary(tmp_path).values()) == {"done"}, process.stdout[-3000:]
    assert process.returncode == 0
    for part in ("tests", "ladder", "update_pass", "train", "reach", "profile", "one_copy", "vllm"):
        assert list((tmp_path / part).glob("machine*.txt")), part
        assert list((tmp_path / part).glob("*.json*")), part
