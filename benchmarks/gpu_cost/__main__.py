"""``python -m benchmarks.gpu_cost``: what one update costs a GPU, counted without one. Every figure is an estimate.

The update is that of a worker on fake ``cuda`` tensors at a published model's shape: forward and backward of each micro-batch,
clipping and the optimizer step, one group of answers. ``device.py`` says how operations are counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import commit, text_table, write_json
from benchmarks.gpu.profile_update import PEAKS, TERA
from benchmarks.gpu_cost.device import Counted
from benchmarks.gpu_cost.update import MODELS, Case, Update
from recipe.rloo.memory_study.fake_guard import NoCompilerError, call_in_fake_process

DONE, MISSING = 0, 2
BANDWIDTHS = {"RTX 4090": 1.008e12, "RTX 5090": 1.792e12, "H100": 3.35e12}
"""Bytes a second, by NVIDIA's data sheets; FLOP/s are those of :data:`PEAKS`."""
LAUNCH_SECONDS = 5e-6
"""Stated, not measured: what the host takes to launch a kernel from C++. With Python between launches it takes longer: on an H100
an update of 28,194 launches took 32 microseconds a launch (docs/decisions/launches.md)."""
PROMPT_SHARE = 8
"""Of the tokens of a group, one in so many is the prompt's."""


def main(argv: Sequence[str] | None = None) -> int:
    """Count what was asked for. Exit codes: 0 done, 2 the fake device needs a compiler that is not there."""
    asked = parse(argv)
    records: list[dict[str, Any]] = []
    for model in asked.models:
        for tokens in asked.tokens:
            try:
                update = call_in_fake_process("benchmarks.gpu_cost.update:count", case_of(asked, model, tokens))
            except NoCompilerError as error:
                print(f"gpu_cost: {error}", file=sys.stderr)
                return MISSING
            records.append({"model": model, "group_tokens": tokens, **summary(update)})
            if asked.json is not None:
                write_json(asked.json, {"schema": 1, "estimated": True, "commit": commit(), "updates": records})
    print(render(records))
    for record in records if asked.ops else ():
        print(f"\n{record['model']}, {record['group_tokens']:,} tokens: the {asked.ops} costliest operations (estimated)")
        print(operations(record, asked.ops))
    return DONE


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_cost", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=["0.5b", "1.5b", "8b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 4096, 16_384], help="of a group, its prompt once")
    parser.add_argument("--prompt", type=int, help="tokens of a prompt, in place of --tokens")
    parser.add_argument("--response", type=int, help="tokens of an answer, in place of --tokens")
    parser.add_argument("--groups", type=int, default=1, help="prompts (default: 1)")
    parser.add_argument("--group", type=int, default=8, help="answers to a prompt (default: 8)")
    parser.add_argument("--token-budget", type=int, default=16_384, help="tokens of a micro-batch (default: 16384)")
    parser.add_argument("--off-policy", action="store_true", help="old log-probs are given: a loss of ratios")
    parser.add_argument("--layers", type=int, help="in place of the model's")
    parser.add_argument("--ops", type=int, default=0, help="print so many of the costliest operations")
    parser.add_argument("--json", type=Path, help="write the record here, update by update")
    parser.add_argument("overrides", nargs="*", help="settings, as on a command line")
    asked = parser.parse_args(argv)
    if asked.prompt or asked.response:
        asked.tokens = [(asked.prompt or 1) + asked.group * (asked.response or 1)]
        if not (asked.prompt and asked.response):
            parser.error("--prompt and --response go together")
    return asked


def case_of(asked: argparse.Namespace, model: str, tokens: int) -> Case:
    shape, prompt = MODELS[model], asked.prompt or tokens // PROMPT_SHARE
    return Case(
        dataclasses.replace(shape, num_layers=asked.layers or shape.num_layers), prompt=prompt,
        response=asked.response or (tokens - prompt) // asked.group, group=asked.group, groups=asked.groups,
        budget=asked.token_budget, off_policy=asked.off_policy, overrides=tuple(asked.overrides),
    )  # fmt: skip


def summary(update: Update) -> dict[str, Any]:
    found, ops = update.counted, update.counted.ops.values()
    return {
        "micro_batches": update.micro_batches, "tokens": update.tokens, "launches": sum(cost.launches for cost in ops),
        "compiled_calls": found.compiled_calls, "read_bytes": sum(cost.read_bytes for cost in ops),
        "written_bytes": sum(cost.written_bytes for cost in ops),
        "head_bytes": sum(cost.read_bytes + cost.written_bytes for name, cost in found.ops.items() if "logit" in name),
        "flops": sum(cost.flops for cost in ops), "host_waits": dict(found.host_waits), "border_waits": dict(found.border_waits),
        "stream_waits": found.stream_waits, "uploads": found.uploads, "pageable_uploads": found.pageable_uploads,
        "seconds": {card: seconds(found, card) for card in BANDWIDTHS},
        "ops": {name: dataclasses.asdict(cost) for name, cost in found.ops.items()},
    }  # fmt: skip


def seconds(found: Counted, card: str) -> float:
    bandwidth, peak = BANDWIDTHS[card], PEAKS[card]["bfloat16"] * TERA
    return sum(max(moved / bandwidth, flops / peak, LAUNCH_SECONDS) for moved, flops in found.kernels)


def render(records: Sequence[dict[str, Any]]) -> str:
    heads = (
        "model", "tokens", "micro-\nbatches", "launches", "compiled\ncalls", "GB\nmoved", "GB of\nthe head", "TFLOP",
        "host\nwaits", "stream\nwaits", "copies of\npageable memory", *(f"ms,\n{card}" for card in BANDWIDTHS),
    )  # fmt: skip
    rows = [
        [
            record["model"], f"{record['tokens']:,}", str(record["micro_batches"]), f"{record['launches']:,}",
            f"{record['compiled_calls']:,}", f"{(record['read_bytes'] + record['written_bytes']) / 1e9:,.1f}",
            f"{record['head_bytes'] / 1e9:,.1f}", f"{record['flops'] / TERA:,.1f}", str(sum(record["host_waits"].values())),
            str(record["stream_waits"]), f"{record['pageable_uploads']} of {record['uploads']}",
            *(f"{1e3 * record['seconds'][card]:,.0f}" for card in BANDWIDTHS),
        ]
        for record in records
    ]  # fmt: skip
    note = f"Estimated, not measured. A launch takes {LAUNCH_SECONDS * 1e6:.0f} microseconds, stated."
    return "\n".join([text_table(heads, rows), note])


def operations(record: dict[str, Any], most: int) -> str:
    ranked = sorted(record["ops"].items(), key=lambda pair: -pair[1]["launches"])[:most]
    rows = [
        [name, f"{cost['launches']:,}", *(f"{cost[key] / 1e9:,.2f}" for key in ("read_bytes", "written_bytes"))]
        for name, cost in ranked
    ]
    return text_table(("operation", "launches", "GB read", "GB written"), rows)


if __name__ == "__main__":
    sys.exit(main())
