"""``python -m benchmarks.gpu.profile_update``: launches and time per kernel group of one update of the policy.

The update is that of a worker (``worker/policy.py``) on random tokens: a forward and backward of each micro-batch, clipping and
the optimizer step, with default settings, with CUDA graphs and with ``memory=constrained``, each with and without
``torch.compile``.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import NONE, seconds_of, text_table, write_json
from benchmarks.gpu.reach_cases import worker_plan
from benchmarks.gpu.traces import GROUPS, PRODUCTS, Launch, busy_seconds, by_group, longest, profiled, span_seconds
from benchmarks.update_pass.flops import count
from benchmarks.update_pass.work import shrunk_shape
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.config.loader import load_settings
from verl_memopt.config.schema import Settings
from verl_memopt.distributed import device as device_room
from verl_memopt.ladder.measure import UpdateSize, make_batch
from verl_memopt.model.tiny import SHAPES, make_tiny_model
from verl_memopt.trainer.micro_batching import budgets, cut_ranks
from verl_memopt.worker.group import LocalGroup
from verl_memopt.worker.trained_model import MiniBatch
from verl_memopt.worker.worker import Worker

logger = logging.getLogger(__name__)

DONE, BROKEN = 0, 5
PROFILES = {
    "default": (),
    "graphs": ("actor_rollout_ref.actor.fsdp_config.cuda_graphs=true",),
    "constrained": ("memory=constrained",),
}
COMPILED = {"off": False, "on": True}
WARM_UPS = 2
"""Updates before any is timed: the first compiles and makes the optimizer's state, the second finds both there."""
LONGEST = 20
"""Names of kernels in the record."""
TERA = 1e12

PEAKS = {
    "H100 PCIe": {"bfloat16": 756.0, "tf32": 378.0, "fp32": 51.0},
    "H100 NVL": {"bfloat16": 835.0, "tf32": 417.5, "fp32": 60.0},
    "H100": {"bfloat16": 989.4, "tf32": 494.7, "fp32": 66.9},
    "H200": {"bfloat16": 989.4, "tf32": 494.7, "fp32": 66.9},
    "A100": {"bfloat16": 312.0, "tf32": 156.0, "fp32": 19.5},
    "L40S": {"bfloat16": 362.0, "tf32": 183.0, "fp32": 91.6},
    "RTX 5090": {"bfloat16": 209.5, "tf32": 104.8, "fp32": 104.8},
    "RTX 4090": {"bfloat16": 165.2, "tf32": 82.6, "fp32": 82.6},
    "RTX 3090": {"bfloat16": 71.0, "tf32": 35.6, "fp32": 35.6},
}
"""Dense TFLOP/s, half precision with fp32 accumulation. NVIDIA's data sheets of H100, H200, A100 and L40S, which give twice as
much for sparse products, and its architecture papers of Ampere GA102, Ada and RTX Blackwell. The first name that a device's
contains counts."""


def main(argv: Sequence[str] | None = None) -> int:
    """Profiles what was asked for. Exit codes: 0 done, 5 a profile failed; the others are measured all the same."""
    asked, started = parse(argv), time.monotonic()
    device = device_room.local_device(device_room.resolve_device(asked.device), 0)
    with tempfile.TemporaryDirectory() as parent:
        folder = make_tiny_model(Path(parent) / "model", shape(asked))
        record = heading(asked, device)

        def keep() -> None:
            if asked.json is not None:
                write_json(asked.json, record)

        for name in asked.profiles:
            for compiled in asked.compile:
                print(f"profile_update: {name}, compile {compiled}", file=sys.stderr, flush=True)
                spent = asked.seconds is not None and time.monotonic() - started > asked.seconds
                found = left_out(asked, name, compiled) if spent else attempt(asked, folder, name, compiled, device)
                record["profiles"].append(found)
                keep()
    with_flops(record["profiles"])
    keep()
    print(render(record))
    return BROKEN if any("error" in found for found in record["profiles"]) else DONE


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.profile_update", description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b", help="of the model; its weights are random")
    parser.add_argument("--layers", type=int, help="in place of the shape's")
    parser.add_argument("--shrink", type=int, default=1, help="divide widths, vocabulary and lengths by this")
    parser.add_argument("--groups", type=int, default=2, help="prompts (default: 2)")
    parser.add_argument("--group", type=int, default=8, help="answers to each (default: 8)")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt (default: 1024)")
    parser.add_argument("--response", type=int, default=1024, help="tokens of an answer (default: 1024)")
    parser.add_argument("--token-budget", type=int, default=16384, help="tokens of a micro-batch by default (default: 16384)")
    parser.add_argument("--profiles", nargs="+", choices=sorted(PROFILES), default=list(PROFILES))
    parser.add_argument("--compile", nargs="+", choices=sorted(COMPILED), default=list(COMPILED))
    parser.add_argument("--repeats", type=int, default=5, help="updates that are timed without the profiler (default: 5)")
    parser.add_argument("--seconds", type=float, help="begin no further profile after this time")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", type=Path, help="write the record here, profile by profile")
    parser.add_argument("overrides", nargs="*", help="settings of every profile")
    return parser.parse_args(argv)


def shape(asked: argparse.Namespace) -> Any:
    return shrunk_shape(SHAPES[asked.shape], asked.layers, asked.shrink)


def work(asked: argparse.Namespace) -> UpdateSize:
    lengths = (max(length // asked.shrink, 2) for length in (asked.prompt, asked.response))
    prompt, response = lengths
    return UpdateSize(rows=asked.groups * asked.group, prompt=prompt, response=response, group=asked.group)


def heading(asked: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    on_gpu = device_room.is_gpu(device)
    name, dtype = (torch.cuda.get_device_name(device), "bfloat16") if on_gpu else ("CPU", "fp32")
    return {
        "schema": 1, "device": name, "dtype": dtype, "torch": torch.__version__,
        "model": {"name": asked.shape, **dataclasses.asdict(shape(asked))}, "work": dataclasses.asdict(work(asked)),
        "stated_flops_per_second": stated_peak(name, dtype),
        "measured_flops_per_second": measured_peak(device, torch.bfloat16 if on_gpu else torch.float32), "profiles": [],
    }  # fmt: skip


def attempt(asked: argparse.Namespace, folder: Path, name: str, compiled: str, device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {"profile": name, "compile": compiled}
    try:
        found |= one(asked, folder, name, compiled, device)
    except Exception as error:  # one that fails is told in the result, and the others go on
        logger.exception("%s, compile %s", name, compiled)
        found["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    gc.collect()
    device_room.empty_cache(device)
    return found


def left_out(asked: argparse.Namespace, name: str, compiled: str) -> dict[str, Any]:
    return {"profile": name, "compile": compiled, "error": f"not run: the time budget of {asked.seconds:.0f} s was spent"}


def one(asked: argparse.Namespace, folder: Path, name: str, compiled: str, device: torch.device) -> dict[str, Any]:
    settings = settings_of(asked, folder, name, compiled)
    with updates(settings, folder, device, work(asked)) as (update, micro_batches, layers):
        for _ in range(WARM_UPS):
            update()
        seconds = [seconds_of(update, device) for _ in range(asked.repeats)]
        found = profiled(update, device)
        # A compiled function runs uncompiled under a counter; the operations are the same.
        flops = None if COMPILED[compiled] else count(update)
    return summary(found, seconds, flops, micro_batches, layers)


def settings_of(asked: argparse.Namespace, folder: Path, name: str, compiled: str) -> Settings:
    batch = work(asked)
    overrides = [
        *PROFILES[name],
        "data.train_files=none", "data.val_files=null", f"data.train_batch_size={asked.groups}",
        f"data.max_prompt_length={batch.prompt}", f"data.max_response_length={batch.response}",
        f"actor_rollout_ref.model.path={folder}", f"actor_rollout_ref.actor.ppo_mini_batch_size={asked.groups}",
        "actor_rollout_ref.actor.use_dynamic_bsz=true", f"actor_rollout_ref.actor.use_torch_compile={COMPILED[compiled]}",
        "actor_rollout_ref.rollout.name=hf", f"actor_rollout_ref.rollout.n={asked.group}",
        "trainer.worker_group=local", f"trainer.device={asked.device}",
    ]  # fmt: skip
    if name == "default":
        overrides.append(f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={asked.token_budget}")
    return load_settings("rloo_trainer", [*overrides, *asked.overrides])


@contextmanager
def updates(
    settings: Settings, folder: Path, device: torch.device, rows: UpdateSize
) -> Iterator[tuple[Callable[[], Any], int, int]]:
    """Yields a call that takes one optimizer step, its number of micro-batches, and the model's of layers."""
    group = LocalGroup(functools.partial(Worker, worker_plan(settings, folder, with_reference=False)), device.type)
    try:
        roles = settings.actor_rollout_ref
        batch, budget = make_batch(rows, roles.actor), budgets(roles)[0]
        batch.old_log_probs = torch.zeros(batch.advantages.shape)
        names = [f"row {row}" for row in range(batch.num_rows)]
        (cut,) = cut_ranks([batch.row_tokens()], [names], budget)
        counts = GlobalCounts(float(batch.responses.lengths.sum()), float(batch.num_rows))
        minis = [MiniBatch(batch, cut, counts)]
        group.all("call", "gen", False, "release_engine")
        config = json.loads((folder / "config.json").read_text())
        yield lambda: group.all("call", "update_actor", False, "update_actor", minis), len(cut), config["num_hidden_layers"]
        group.all("close")
    finally:
        group.shutdown()


def summary(
    found: Sequence[Launch], seconds: Sequence[float], flops: int | None, micro_batches: int, layers: int
) -> dict[str, Any]:
    groups = by_group(found)
    total, busy = sum(share.launches for share in groups.values()), busy_seconds(found)
    span = span_seconds(found)
    return {
        "seconds": statistics.median(seconds), "runs": list(seconds), "flops": flops, "micro_batches": micro_batches,
        "launches": total, "launches_per_micro_batch": total / micro_batches,
        "launches_per_layer": total / micro_batches / layers, "group_seconds": sum(share.seconds for share in groups.values()),
        "busy_seconds": busy, "idle_share": None if busy is None or not span else 1 - busy / span,
        "groups": {name: dataclasses.asdict(share) for name, share in groups.items()},
        "longest": [dataclasses.asdict(launch) for launch in longest(found, LONGEST)],
    }  # fmt: skip


def with_flops(profiles: Sequence[dict[str, Any]]) -> None:
    """Gives compiled profiles the operations that were counted uncompiled under the same settings."""
    known = {found["profile"]: found["flops"] for found in profiles if found.get("flops")}
    for found in profiles:
        if found.get("seconds"):
            found["flops"] = found["flops"] or known.get(found["profile"])


def render(record: dict[str, Any]) -> str:
    done = [found for found in record["profiles"] if "error" not in found]
    failed = [f"{_name(found)}: {found['error']}" for found in record["profiles"] if "error" in found]
    return "\n".join([*_head(record), "", *([_lines(record, done), "", _groups(done)] if done else ()), *failed])


def _head(record: dict[str, Any]) -> list[str]:
    model, work, stated = record["model"], record["work"], record["stated_flops_per_second"]
    peak = "no stated figure is known" if stated is None else f"{stated / TERA:,.1f} TFLOP/s stated"
    return [
        f"One update on {record['device']}, torch {record['torch']}: {model['name']}, {model['num_layers']} layers, "
        f"hidden {model['hidden_size']}, vocabulary {model['vocab_size']:,}, random weights.",
        f"{work['rows']} answers in groups of {work['group']}, {work['prompt']} + {work['response']} tokens.",
        f"Dense {record['dtype']} peak: {peak}, {record['measured_flops_per_second'] / TERA:,.3g} TFLOP/s measured on one "
        "large product.",
        *(["On a CPU operations stand for kernels, and nothing is compiled."] if record["device"] == "CPU" else ()),
    ]


def _lines(record: dict[str, Any], done: Sequence[dict[str, Any]]) -> str:
    heads = (
        "profile", "compile", "seconds", "micro-\nbatches", "launches", "per micro-\nbatch", "per layer", "products\n% of time",
        "idle\n%", "TFLOP/s", "% of\nstated", "% of\nmeasured",
    )  # fmt: skip
    return text_table(heads, [_line(record, found) for found in done], left=(0, 1))


def _line(record: dict[str, Any], found: dict[str, Any]) -> list[str]:
    products = found["groups"].get(PRODUCTS, {"seconds": 0.0})["seconds"] / found["group_seconds"]
    speed = rate(found)
    peaks = record["stated_flops_per_second"], record["measured_flops_per_second"]
    return [
        found["profile"], found["compile"], f"{found['seconds']:.3f}", str(found["micro_batches"]), f"{found['launches']:,}",
        f"{found['launches_per_micro_batch']:,.0f}", f"{found['launches_per_layer']:,.1f}", f"{100 * products:.1f}",
        NONE if found["idle_share"] is None else f"{100 * found['idle_share']:.1f}",
        NONE if speed is None else f"{speed / TERA:,.3g}",
        *(NONE if speed is None or peak is None else f"{100 * speed / peak:.1f}" for peak in peaks),
    ]  # fmt: skip


def rate(found: dict[str, Any]) -> float | None:
    return None if found["flops"] is None else found["flops"] / found["seconds"]


def _groups(done: Sequence[dict[str, Any]]) -> str:
    heads = ["group", *(f"{_name(found)}\n{what}" for found in done for what in ("launches", "ms", "%"))]
    lines = []
    for group in GROUPS:
        cells = []
        for found in done:
            share = found["groups"].get(group)
            part = share and 100 * share["seconds"] / found["group_seconds"]
            cells += [NONE] * 3 if share is None else [f"{share['launches']:,}", f"{1e3 * share['seconds']:,.2f}", f"{part:.1f}"]
        if set(cells) != {NONE}:
            lines.append([group, *cells])
    return text_table(heads, lines)


def _name(found: dict[str, Any]) -> str:
    return found["profile"] + (" compiled" if found["compile"] == "on" else "")


def stated_peak(device_name: str, dtype: str) -> float | None:
    """Gives the FLOP/s that the maker states for a device; None for one that is not listed."""
    words = set(device_name.replace("-", " ").split())
    found = next((peaks for name, peaks in PEAKS.items() if set(name.split()) <= words), None)
    return None if found is None or dtype not in found else found[dtype] * TERA


def measured_peak(device: torch.device, dtype: torch.dtype, size: int | None = None, repeats: int = 10) -> float:
    """Gives the FLOP/s that a product of two square matrices reaches; size: 8,192 on a GPU, 512 on a CPU."""
    size = size or (8192 if device_room.is_gpu(device) else 512)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    # The first two choose a kernel and raise the clock.
    seconds = [seconds_of(lambda: left @ right, device) for _ in range(repeats + 2)]
    return 2 * size**3 / statistics.median(seconds[2:])


if __name__ == "__main__":
    sys.exit(main())
