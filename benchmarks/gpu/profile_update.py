"""``python -m benchmarks.gpu.profile_update``: launches and time per kernel group of one update of the policy.

The update is that of a worker (``worker/policy.py``) on random tokens: a forward and backward of each micro-batch, clipping and
the optimizer step, with default settings and with ``memory=constrained``, each with and without ``torch.compile``.
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

from benchmarks.gpu.device_peaks import measured_peak, stated_peak
from benchmarks.gpu.profile_table import draw, render
from benchmarks.gpu.traces import Launch, busy_seconds, by_group, longest, profiled, span_seconds
from benchmarks.update_pass.flops import count
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.config.loader import load_settings
from verl_memopt.config.schema import Settings
from verl_memopt.distributed import device as device_room
from verl_memopt.ladder.measure import Work, make_batch
from verl_memopt.model.tiny import SHAPES, make_tiny_model
from verl_memopt.trainer.micro_batching import budgets, cut_ranks
from verl_memopt.worker.group import LocalGroup
from verl_memopt.worker.plan import WorkerPlan
from verl_memopt.worker.trained_model import MiniBatch
from verl_memopt.worker.worker import Worker

logger = logging.getLogger(__name__)

DONE, BROKEN = 0, 5
PROFILES = {"default": (), "constrained": ("memory=constrained",)}
COMPILED = {"off": False, "on": True}
WARM_UPS = 2
"""Updates before any is timed: the first compiles and makes the optimizer's state, the second finds both there."""
LONGEST = 20
"""Names of kernels in the record."""


def main(argv: Sequence[str] | None = None) -> int:
    """Profiles what was asked for. Exit codes: 0 done, 5 a profile failed; the others are measured all the same."""
    asked, started = parse(argv), time.monotonic()
    device = device_room.local_device(device_room.resolve_device(asked.device), 0)
    with tempfile.TemporaryDirectory() as parent:
        folder = make_tiny_model(Path(parent) / "model", shape(asked))
        record = heading(asked, device)
        for name in asked.profiles:
            for compiled in asked.compile:
                print(f"profile_update: {name}, compile {compiled}", file=sys.stderr, flush=True)
                spent = asked.seconds is not None and time.monotonic() - started > asked.seconds
                found = left_out(asked, name, compiled) if spent else attempt(asked, folder, name, compiled, device)
                record["profiles"].append(found)
                write(asked.json, record)
    with_flops(record["profiles"])
    write(asked.json, record)
    print(render(record))
    if asked.png is not None:
        draw(record, asked.png)
    return BROKEN if any("error" in found for found in record["profiles"]) else DONE


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Gives the options."""
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
    parser.add_argument("--png", type=Path, help="draw the record here")
    parser.add_argument("overrides", nargs="*", help="settings of every profile")
    return parser.parse_args(argv)


def shape(asked: argparse.Namespace) -> Any:
    """Gives the model's shape, smaller where that is asked for. Heads stay; their size is at least 8."""
    found, by = SHAPES[asked.shape], asked.shrink
    return dataclasses.replace(
        found,
        num_layers=asked.layers or found.num_layers,
        vocab_size=max(found.vocab_size // by, 320),
        hidden_size=max(found.hidden_size // by, 16),
        intermediate_size=max(found.intermediate_size // by, 16),
        head_dim=max(found.head_dim // by, 8),
    )


def work(asked: argparse.Namespace) -> Work:
    """Gives the rows of an update."""
    lengths = (max(length // asked.shrink, 2) for length in (asked.prompt, asked.response))
    prompt, response = lengths
    return Work(rows=asked.groups * asked.group, prompt=prompt, response=response, group=asked.group)


def heading(asked: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Gives what a record says about itself: the work, and what the device can do."""
    on_gpu = device_room.is_gpu(device)
    name, dtype = (torch.cuda.get_device_name(device), "bfloat16") if on_gpu else ("CPU", "fp32")
    return {
        "schema": 1,
        "device": name,
        "dtype": dtype,
        "torch": torch.__version__,
        "model": {"name": asked.shape, **dataclasses.asdict(shape(asked))},
        "work": dataclasses.asdict(work(asked)),
        "stated_flops_per_second": stated_peak(name, dtype),
        "measured_flops_per_second": measured_peak(device, torch.bfloat16 if on_gpu else torch.float32),
        "profiles": [],
    }


def attempt(asked: argparse.Namespace, folder: Path, name: str, compiled: str, device: torch.device) -> dict[str, Any]:
    """Gives one profile, or the error that ended it."""
    found: dict[str, Any] = {"profile": name, "compile": compiled}
    try:
        found |= one(asked, folder, name, compiled, device)
    except Exception as error:
        logger.exception("%s, compile %s", name, compiled)
        found["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    gc.collect()
    device_room.empty_cache(device)
    return found


def left_out(asked: argparse.Namespace, name: str, compiled: str) -> dict[str, Any]:
    """Gives a profile that is not made."""
    return {"profile": name, "compile": compiled, "error": f"not run: the time budget of {asked.seconds:.0f} s was spent"}


def one(asked: argparse.Namespace, folder: Path, name: str, compiled: str, device: torch.device) -> dict[str, Any]:
    """Measures one profile: time without the profiler, then launches with it, then operations."""
    settings = settings_of(asked, folder, name, compiled)
    with updates(settings, folder, device, work(asked)) as (update, micro_batches, layers):
        for _ in range(WARM_UPS):
            timed(update, device)
        seconds = [timed(update, device) for _ in range(asked.repeats)]
        found = profiled(update, device)
        # A compiled function runs uncompiled under a counter; the operations are the same.
        flops = None if COMPILED[compiled] else count(update)
    return summary(found, seconds, flops, micro_batches, layers)


def settings_of(asked: argparse.Namespace, folder: Path, name: str, compiled: str) -> Settings:
    """Gives a profile's settings: the defaults, the profile, and what the work needs."""
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
def updates(settings: Settings, folder: Path, device: torch.device, rows: Work) -> Iterator[tuple[Callable[[], Any], int, int]]:
    """Yields a call that takes one optimizer step, its number of micro-batches, and the model's of layers."""
    group = LocalGroup(functools.partial(Worker, _plan(settings, folder)), device.type)
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


def _plan(settings: Settings, folder: Path) -> WorkerPlan:
    text = str(folder)
    return WorkerPlan(
        settings=settings.actor_rollout_ref,
        folder=text,
        engine_folder=text,
        reference_folder=None,
        tokenizer_folder=text,
        eos_token_ids=(0,),
        optimizer_steps=100,
        free_engine=True,
        track_init=False,
        memory=settings.memory,
    )


def timed(update: Callable[[], Any], device: torch.device) -> float:
    """Gives the seconds of an update, from an idle device until it is idle again."""
    device_room.synchronize(device)
    started = time.perf_counter()
    update()
    device_room.synchronize(device)
    return time.perf_counter() - started


def summary(
    found: Sequence[Launch], seconds: Sequence[float], flops: int | None, micro_batches: int, layers: int
) -> dict[str, Any]:
    """Gives a profile as plain values. Launches per layer are those of one micro-batch over the number of layers."""
    groups = by_group(found)
    total, busy = sum(share.launches for share in groups.values()), busy_seconds(found)
    span = span_seconds(found)
    return {
        "seconds": statistics.median(seconds),
        "runs": list(seconds),
        "flops": flops,
        "micro_batches": micro_batches,
        "launches": total,
        "launches_per_micro_batch": total / micro_batches,
        "launches_per_layer": total / micro_batches / layers,
        "group_seconds": sum(share.seconds for share in groups.values()),
        "busy_seconds": busy,
        "idle_share": None if busy is None or not span else 1 - busy / span,
        "groups": {name: dataclasses.asdict(share) for name, share in groups.items()},
        "longest": [dataclasses.asdict(launch) for launch in longest(found, LONGEST)],
    }


def with_flops(profiles: Sequence[dict[str, Any]]) -> None:
    """Gives compiled profiles the operations that were counted uncompiled under the same settings."""
    known = {found["profile"]: found["flops"] for found in profiles if found.get("flops")}
    for found in profiles:
        if found.get("seconds"):
            found["flops"] = found["flops"] or known.get(found["profile"])


def write(path: Path | None, record: dict[str, Any]) -> None:
    """Writes the record in one step, so that a run that is interrupted leaves the last whole one."""
    if path is not None:
        beside = path.with_name(f"{path.name}.part")
        beside.write_text(json.dumps(record, indent=1) + "\n")
        beside.replace(path)


if __name__ == "__main__":
    sys.exit(main())
