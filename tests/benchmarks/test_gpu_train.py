"""The two training runs of a bare GPU machine: their evidence, and which figures are refused."""

import json
import subprocess

from benchmarks.gpu.train import problems, write_prompts
from benchmarks.gpu.visible_reward import compute_score
from tests.end_to_end.runs import ROOT, script_environment
from tests.forked import CHILDREN
from verl_memopt.model.tiny import build_tokenizer

GOOD = {"reward": [0.1, 0.2], "loss": [0.0, 0.1], "grad_norm": [1.0, 0.0], "validation": [0.3, 0.9]}


def test_the_run_of_the_larger_shape_leaves_figures_for_every_phase(tmp_path):
    small = {"LAYERS": "1", "VOCABULARY": "512", "SHRINK": "32", "PROMPT": "16", "RESPONSE": "8", "STEPS": "2"}
    env = script_environment(OUT=str(tmp_path), RUNS="shape", ANSWERS="2", PROMPTS="2", **small, **{CHILDREN: "1"})
    process = subprocess.run(
        ["bash", "benchmarks/gpu/train.sh"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=280
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    found = json.loads((tmp_path / "train.json").read_text())["shape"]
    assert found["problems"] == []
    assert found["steps"] == 2
    assert found["prompt_tokens"] == 16
    assert found["phases"].keys() >= {"gen", "ref", "update_actor", "update_weights"}
    assert found["phases"]["update_actor"]["peak_allocated_bytes"] > 0
    assert "update_actor" in (tmp_path / "train.txt").read_text()
    assert (tmp_path / "shape" / "metrics.jsonl").exists()
    assert "memory.device_limit_gb=32" in (tmp_path / "shape" / "summary.json").read_text()


def test_figures_that_are_not_finite_and_runs_without_a_gradient_or_an_effect_are_problems():
    assert problems("shape", GOOD) == problems("toy", GOOD) == []
    assert "loss is not finite" in problems("shape", {**GOOD, "loss": [float("nan")]})[0]
    assert problems("shape", {**GOOD, "grad_norm": [0.0]}) == ["no step had a gradient"]
    assert "did not learn" in problems("toy", {**GOOD, "validation": [0.4, 0.4]})[0]


def test_prompts_have_at_least_the_tokens_that_the_run_cuts_them_to(tmp_path):
    write_prompts(tmp_path / "prompts.jsonl", 3, 50)
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    assert all(len(build_tokenizer(320)(row["prompt"])["input_ids"]) >= 50 for row in rows)


def test_the_reward_is_the_share_of_different_characters():
    assert compute_score("", "", "") == 0.0
    assert compute_score("", "abab", "") == 2 / 4
    assert compute_score("", "abcdefghijklmnopqrstu", "") == 1.0
