"""``python -m benchmarks.gpu.train --out FOLDER``: the toy task, then a model of Qwen3-0.6B's shapes, without Ray and vLLM.

The second has random weights and a reward that depends on chance. It shows that real lengths train under the limit, with
finite numbers, and what each phase takes; it shows nothing about learning, which is what the toy task is for.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import statistics
import string
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, write_json
from verl_memopt.model.tiny import SHAPES, make_tiny_model
from verl_memopt.observe.phase import MIB

LOCAL = ("trainer.worker_group=local", "actor_rollout_ref.rollout.name=hf", "trainer.logger=[console,jsonl]")
KEPT = ("config.yaml", "metrics.jsonl", "summary.json", "peak_memory_by_phase.png", "reward_and_validation.png")
"""Files of a run's folder that are evidence."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs both and gives the exit code: 1 where one failed or a figure is not what it must be."""
    asked = parse(argv)
    asked.out.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in asked.runs:
            record[name] = run(asked, name, Path(folder), RUNS[name])
            # Written after each run: the second may be cut off.
            write_json(asked.out / "train.json", record)
            (asked.out / "train.txt").write_text("\n\n".join(table(*item) for item in record.items()) + "\n")
    print((asked.out / "train.txt").read_text())
    return 0 if all(not found["problems"] for found in record.values()) else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the evidence")
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--toy-steps", type=int, default=40)
    parser.add_argument("--steps", type=int, default=4, help="of the second model")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--shrink", type=int, default=1, help="divide the widths of the second model by this")
    parser.add_argument("--prompts", type=int, default=4, help="in a batch")
    parser.add_argument("--answers", type=int, default=8, help="to a prompt")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--response", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--limit-gb", type=float, default=32.0, help="memory.device_limit_gb")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the second run")
    return parser.parse_intermixed_args(argv)


def toy_settings(asked: argparse.Namespace, folder: Path) -> list[str]:
    subprocess.run([sys.executable, "-m", "verl_memopt", "toy", str(folder / "toy_task")], cwd=ROOT, check=True)
    return [
        "--config-dir", "recipe/rloo", "--config-name", "toy",
        f"data.train_files={folder}/toy_task/train.parquet", f"data.val_files={folder}/toy_task/val.parquet",
        f"actor_rollout_ref.model.path={folder}/toy_task/model", f"trainer.total_training_steps={asked.toy_steps}",
    ]  # fmt: skip


def shape_settings(asked: argparse.Namespace, folder: Path) -> list[str]:
    shape = SHAPES["qwen3-0.6b"]
    narrow = {name: getattr(shape, name) // asked.shrink for name in ("hidden_size", "intermediate_size")}
    model = make_tiny_model(folder / "model", replace(shape, num_layers=asked.layers, vocab_size=asked.vocabulary, **narrow))
    write_prompts(folder / "prompts.jsonl", asked.prompts * asked.steps, asked.prompt)
    actor = "actor_rollout_ref.actor"
    return [
        "--config-name", "rloo_trainer", "memory=constrained", f"memory.device_limit_gb={asked.limit_gb}",
        f"data.train_files={folder}/prompts.jsonl", "data.val_files=null", "data.seed=1", "data.truncation=left",
        f"data.train_batch_size={asked.prompts}", f"data.max_prompt_length={asked.prompt}",
        f"data.max_response_length={asked.response}", f"actor_rollout_ref.model.path={model}",
        f"actor_rollout_ref.rollout.n={asked.answers}", "actor_rollout_ref.rollout.dtype=bfloat16",
        f"{actor}.ppo_mini_batch_size={asked.prompts}", f"{actor}.use_kl_loss=true", f"{actor}.fsdp_config.dtype=bfloat16",
        f"{actor}.optim.lr=1e-6", f"custom_reward_function.path={ROOT}/benchmarks/gpu/visible_reward.py",
        f"trainer.total_training_steps={asked.steps}", "trainer.save_freq=-1", "trainer.test_freq=-1",
        "trainer.val_before_train=false", "trainer.track_memory_every_steps=1", *asked.overrides,
    ]  # fmt: skip


RUNS = {"toy": toy_settings, "shape": shape_settings}


def write_prompts(path: Path, rows: int, length: int) -> None:
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(rows):
            row = {
                "data_source": "random letters",
                "prompt": "".join(draw.choices(string.ascii_lowercase, k=2 * length)),
                "reward_model": {"style": "rule", "ground_truth": ""},
            }
            file.write(json.dumps(row) + "\n")


def run(asked: argparse.Namespace, name: str, folder: Path, settings: Any) -> dict[str, Any]:
    run_dir, kept = folder / f"{name}_run", asked.out / name
    # Settings of the command line come last, so they may ask for another engine.
    command = [sys.executable, "-m", "verl_memopt.trainer.main_ppo", f"trainer.default_local_dir={run_dir}", *LOCAL]
    command += settings(asked, folder)
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    kept.mkdir(exist_ok=True)
    for file in KEPT:
        if (run_dir / file).exists():
            shutil.copy(run_dir / file, kept / file)
    if code != 0 or not (run_dir / "summary.json").exists():
        return {"problems": [f"the run ended with exit code {code}"]}
    summary = json.loads((run_dir / "summary.json").read_text())
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found = figures(summary, [step for step in steps if "actor/loss" in step])
    return {**found, "problems": problems(name, found)}


def figures(summary: dict[str, Any], steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Gives what a run computed and what each phase took. Rates leave out the first step, which warms up."""
    warm = steps[1:] or steps
    return {
        "device": summary["device"], "steps": len(steps), "prompt_tokens": steps[-1]["prompt_length/max"],
        "response_tokens": steps[-1]["response_length/max"],
        "validation": [summary.get("validation_before"), summary.get("validation_after")],
        "reward": [step["critic/rewards/mean"] for step in steps], "loss": [step["actor/loss"] for step in steps],
        "grad_norm": [step["actor/grad_norm"] for step in steps],
        "logprob_diff_max": max(step.get("rollout/logprob_diff_max", 0.0) for step in steps),
        "tokens_per_second": statistics.mean(step["perf/throughput"] for step in warm),
        "seconds_per_step": statistics.mean(step["timing_s/step"] for step in warm), "phases": summary["phases"],
    }  # fmt: skip


def problems(name: str, found: dict[str, Any]) -> list[str]:
    wrong = [f"{key} is not finite: {found[key]}" for key in ("reward", "loss", "grad_norm") if not _finite(found[key])]
    if not any(norm > 0 for norm in found["grad_norm"]):
        wrong.append("no step had a gradient")
    before, after = found["validation"]
    if name == "toy" and not (before is not None and after is not None and after > before):
        wrong.append(f"the toy task did not learn: validation {before} before, {after} after")
    return wrong


def _finite(values: Sequence[float]) -> bool:
    return all(math.isfinite(value) for value in values)


def table(name: str, found: dict[str, Any]) -> str:
    if "phases" not in found:
        return f"{name}: {'; '.join(found['problems'])}"
    before, after = found["validation"]
    head = f"{name} on {found['device']}: {found['steps']} steps, {found['seconds_per_step']:.2f} s and "
    head += f"{found['tokens_per_second']:,.0f} tokens/s a step; reward {found['reward'][0]:.3f} to {found['reward'][-1]:.3f}"
    lines = [head + (f"; validation {before:.3f} before, {after:.3f} after" if after is not None else "")]
    lines.append(f"{'phase':16} {'calls':>5} {'s':>8} {'allocated MiB':>14} {'reserved MiB':>13} {'device MiB':>11}")
    for phase, row in found["phases"].items():
        sizes = (row["peak_allocated_bytes"], row["peak_reserved_bytes"], row["device_used_bytes"])
        allocated, reserved, used = ("-" if size is None else f"{size / MIB:,.1f}" for size in sizes)
        lines.append(f"{phase:16} {row['count']:5} {row['seconds']:8.2f} {allocated:>14} {reserved:>13} {used:>11}")
    return "\n".join([*lines, *(f"PROBLEM: {problem}" for problem in found["problems"])])


if __name__ == "__main__":
    sys.exit(main())
