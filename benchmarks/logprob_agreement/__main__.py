"""Measures the mean difference between the engine's log-probs and the trainer's, by engine, model and dtypes.

    python -m benchmarks.logprob_agreement FOLDER [--engines vllm,hf] [--rows 32] [--tokens 64] [--tiny]

Models have random weights. A larger standard deviation of the weights gives sharper distributions, which rounding moves more. One
process runs one measurement; FOLDER keeps the models and a table (results.json, results.txt), written as it goes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import CPU, text_table, write_json
from verl_memopt.config.schema import Fsdp, Model, Rollout
from verl_memopt.distributed.device import join_process_group, training_mesh
from verl_memopt.model.assembly import build_policy, materialize
from verl_memopt.model.packing import pack_rows
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.rollout.engine import EnginePlace, SamplingSettings, build_engine
from verl_memopt.worker.policy import pack_log_probs

WIDTHS = {
    "vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 3072, "num_heads": 16, "num_kv_heads": 8, "head_dim": 128,
}  # fmt: skip
SHAPES = {
    "tiny": {"num_layers": 2},
    "qwen3-0.6b, 4 layers": {**WIDTHS, "num_layers": 4},
    "qwen3-0.6b, 12 layers": {**WIDTHS, "num_layers": 12},
}
"""Widths of the published model; a smaller vocabulary, which changes the time and not the rounding."""

WEIGHTS = (0.02, 0.1)
"""Standard deviations of the weights."""

DTYPES = {
    "vllm": [("fp32", "fp32"), ("bfloat16", "fp32"), ("bfloat16", "bfloat16"), ("fp16", "bfloat16")],
    "hf": [("fp32", "fp32"), ("bfloat16", "bfloat16")],
}
"""Engine -> (its dtype, the trainer's)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--engines", default="vllm,hf")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--tiny", action="store_true", help="the tiny model alone")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None:
        print(json.dumps(measure(given.folder, json.loads(given.one))))
        return
    given.folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for case in cases(given):
        command = [sys.executable, "-m", "benchmarks.logprob_agreement", str(given.folder), "--one", json.dumps(case)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"failed": done.stderr.strip()[-200:]}
        rows.append(case | found)
        write_json(given.folder / "results.json", rows)
        (given.folder / "results.txt").write_text(table(rows))
        print(table(rows[-1:]).splitlines()[-1], flush=True)


def cases(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns what is to be measured; fp8 KV caches exist in vLLM alone."""
    common = {"rows": given.rows, "tokens": given.tokens}
    found = []
    for model in ("tiny",) if given.tiny else SHAPES:
        for deviation in WEIGHTS:
            for engine in given.engines.split(","):
                kinds = [(*pair, "auto") for pair in DTYPES[engine]]
                kinds += [("bfloat16", "bfloat16", "fp8_e5m2")] if engine == "vllm" else []
                for rollout, trainer, cache in kinds:
                    one = {"model": model, "deviation": deviation, "engine": engine, "rollout": rollout, "trainer": trainer}
                    found.append(one | {"kv_cache": cache} | common)
    return found


def measure(folder: Path, case: dict[str, Any]) -> dict[str, float]:
    """Returns mean and largest |engine - trainer| in nats of the sampled tokens, and the mean entropy of the trainer."""
    at = folder / f"{case['model'].replace(' ', '_').replace(',', '')}_{case['deviation']}"
    if not (at / "config.json").is_file():
        make_tiny_model(at, TinyShape(initializer_range=case["deviation"], tie_embeddings=False, **SHAPES[case["model"]]))
    generator = torch.Generator().manual_seed(0)
    vocabulary = SHAPES[case["model"]].get("vocab_size", 320)
    prompts = torch.randint(3, vocabulary, (case["rows"], 32), generator=generator)
    rollout = Rollout(
        name=case["engine"], dtype=case["rollout"], prompt_length=32, response_length=case["tokens"], max_num_seqs=32, seed=0,
        load_format="auto", enforce_eager=True, kv_cache_memory_gb=0.5, kv_cache_dtype=case["kv_cache"], ignore_eos=True,
    )  # fmt: skip
    place = EnginePlace(0, 1, 0, 1, CPU, str(at), str(at), False, (2,))
    engine = build_engine(rollout, place)
    sampling = SamplingSettings(1.0, -1, 1.0, 1.0, True, case["tokens"], True, True)
    answers = engine.generate(prompts.tolist(), list(range(case["rows"])), sampling)
    engine.shutdown()
    join_process_group(CPU, 0, 1, "", 0, 60)
    policy = build_policy(Model(path=str(at)), Fsdp(dtype=case["trainer"]), at, training_mesh("cpu", 1, -1), CPU)
    materialize(policy, at, CPU)
    differences, entropies = [], []
    for prompt, response, engine_log_probs in zip(prompts, answers.response_ids, answers.log_probs or [], strict=True):
        pack = pack_rows(prompt, [len(prompt)], torch.tensor(response), [len(response)])
        log_probs, entropy = pack_log_probs(policy, pack, 1.0, True)
        assert entropy is not None
        differences.append((log_probs - torch.tensor(engine_log_probs)).abs())
        entropies.append(entropy)
    difference = torch.cat(differences)
    return {"mean": float(difference.mean()), "max": float(difference.max()), "entropy": float(torch.cat(entropies).mean())}


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the table as text, figures in nats."""
    heads = ("engine", "model", "weights", "engine dtype", "KV cache", "trainer", "mean", "largest", "entropy")
    lines = []
    for row in rows:
        told = [f"{row['mean']:.2g}", f"{row['max']:.2g}", f"{row['entropy']:.2f}"] if "mean" in row else ["failed"] * 3
        lines.append([str(row[name]) for name in ("engine", "model", "deviation", "rollout", "kv_cache", "trainer")] + told)
    failed = [f"failed: {row['failed']}" for row in rows if "failed" in row]
    return "\n".join([text_table(heads, lines, left=range(len(heads))), *failed]) + "\n"


if __name__ == "__main__":
    main()
