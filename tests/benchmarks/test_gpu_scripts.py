"""The scripts that measure on a GPU, run on the CPU on small shapes: what only a GPU changes is the figures."""

import json
import subprocess
import sys

import pytest

from tests.end_to_end.runs import ROOT, script_environment

SMALL = {"LAYERS": "1", "VOCABULARY": "1024", "ROWS": "2", "PROMPT": "16", "RESPONSE": "8"}


def test_the_ladder_script_leaves_its_files_and_goes_on_after_a_row_over_the_limit(tmp_path):
    """The limit lies between an update with Adam's moments on the device and one with them on the host."""
    env = script_environment(**SMALL, OUT=str(tmp_path / "out"), ONLY="optimizer_offload", LIMIT_GB="0.23")
    command = ["bash", "benchmarks/gpu/ladder.sh", "actor_rollout_ref.actor.optim.bucket_megabytes=1"]
    process = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr[-3000:]
    out = tmp_path / "out"
    assert "memory.device_limit_gb=0.23" in (out / "machine.txt").read_text()
    assert (out / "ladder.png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads((out / "ladder.json").read_text())["rungs"]
    assert [(row["knob"], row["status"]) for row in rows] == [("rollout_memory", "out of memory"), ("optimizer_offload", "ok")]
    assert rows[0]["out_of_memory"]["phase"] == "update_actor"
    assert rows[0]["out_of_memory"]["asked_bytes"] > 0
    assert [saving["measured_bytes"] for saving in rows[1]["savings"]] == [None]
    text = (out / "ladder.txt").read_text()
    assert text == process.stdout
    assert "not measurable: rollout_memory ran out of memory" in text
    assert "row 2 of 2" in process.stderr


def test_the_script_of_linear_layers_says_why_it_measures_no_kernels(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu.linear_layers", "--json", str(tmp_path / "lines.json")]
    env = {**script_environment(), "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr[-3000:]
    assert "need a GPU" in process.stderr
    environment, record = map(json.loads, (tmp_path / "lines.json").read_text().splitlines())
    assert "fla-core" in {*environment["missing"], *environment["packages"]}
    assert record["form"] == "torch"
    assert 0 < record["forward_ms"] < record["both_ms"]


@pytest.mark.slow
def test_a_script_that_is_terminated_keeps_the_rows_it_has_and_prints_them(tmp_path):
    out = tmp_path / "out"
    env = script_environment(**SMALL, OUT=str(out))
    command = ["bash", "benchmarks/gpu/ladder.sh"]
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if "row 2 of" in line:
            process.terminate()
            break
    shown, _ = process.communicate(timeout=300)
    assert process.returncode == 143
    assert [row["knob"] for row in json.loads((out / "ladder.json").read_text())["rungs"]] == ["all off"]
    assert shown == (out / "ladder.txt").read_text()
    assert "all off" in shown


def test_the_update_pass_script_leaves_a_table_and_a_record(tmp_path):
    out = tmp_path / "out"
    env = script_environment(
        OUT=str(out), LAYERS="1", SHRINK="64", REPEATS="1", BUDGET="600", WORKLOADS="c", CONTESTANTS="response_logits ours"
    )
    command = ["bash", "benchmarks/gpu/update_pass.sh", "--k", "2", "--checkpointing", "off"]
    process = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr[-3000:]
    rows = json.loads((out / "c.json").read_text())["rows"]
    assert {row["contestant"]: row["status"] for row in rows} == {"response_logits": "measured", "ours": "measured"}
    assert "1 to 1 made, within " in (out / "c.txt").read_text()
    assert "Workload c" in (out / "c.txt").read_text()
    assert "--workload c" in (out / "machine-c.txt").read_text()
