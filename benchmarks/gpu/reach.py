"""``python -m benchmarks.gpu.reach --out FOLDER``: the longest response that an update has room for under a device limit.

For each shape and way of training a response length is sought by bisection. A probe is one update under memory=constrained:
old log-probs, reference log-probs, update, weight sync, with the engine asleep but for the sync. Generation is not part of it.
Running out of memory is an answer, not a failure. Each probe is a line of probes.jsonl as soon as it is measured, and a second
call goes on from there. Every case has a process of its own.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.common import text_table, write_json
from benchmarks.gpu.reach_cases import (
    SHAPES,
    WAYS,
    Case,
    case_settings,
    computed_host_bytes,
    computed_peak,
    make_folder,
    worker_plan,
)
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.config.schema import Settings
from verl_memopt.distributed.device import empty_cache, resolve_device
from verl_memopt.errors import DeviceMemoryError
from verl_memopt.ladder.measure import UpdateSize, make_batch
from verl_memopt.memory.host_buffers import host_allocator
from verl_memopt.observe.log_setup import setup_logging
from verl_memopt.observe.phase import GIB, PhaseMemory
from verl_memopt.trainer.micro_batching import budgets, cut_ranks
from verl_memopt.worker.group import LocalGroup
from verl_memopt.worker.trained_model import MiniBatch
from verl_memopt.worker.worker import Worker

FITS, OUT_OF_MEMORY, NO_HOST_MEMORY = "fits", "out of memory", "not enough host memory"
CASES = ("0.6b/lora", "0.6b/full", "1.7b/lora", "1.7b/full", "4b/lora", "8b/lora", "4b/full_bf16", "4b/full", "8b/full")
"""In the order in which they are tried: what costs least first."""

LEAST_SECONDS = 20.0
"""A case is not begun with less time left."""
STEP = 64
"""Lengths are multiples of this."""

FINE = 16
"""The search ends when what fits and what does not are within 1 / FINE of the length."""
NOTE = """memory=constrained. A probe is one update of {rows} answers to a prompt of {prompt} tokens: old log-probs, reference
log-probs, update, weight sync. The engine sleeps but for the sync, and generation is not part of a probe. Weights are zeros:
bytes do not depend on values. computed: an estimate of the update's peak from the knobs' formulas, made without running it.
error: computed against measured, of the update. lora: rank 16 on a bfloat16 base; full: fp32 masters; full_bf16: bfloat16
masters."""


def main(argv: Sequence[str] | None = None) -> int:
    """Tries every case and writes the report after each. Exit code 1 when a case ended in another way than by its search."""
    asked = parse(argv)
    if asked.case is not None:
        setup_logging(level=logging.ERROR)  # every probe resolves its settings anew, and would say the same again
        search(asked, asked.case)
        return 0
    asked.out.mkdir(parents=True, exist_ok=True)
    ends, broken = time.monotonic() + asked.seconds, 0
    todo = [name for name in asked.cases if name.split("/")[0] in asked.shapes]
    for place, name in enumerate(todo):
        left = ends - time.monotonic()
        if left < min(LEAST_SECONDS, asked.seconds / 2):
            print(f"reach: no time left for {', '.join(todo[place:])}. Call it again to go on.", flush=True)
            break
        # What a case leaves of its share goes to those after it.
        share = left / (len(todo) - place)
        broken += run_case(asked, name, share) != 0
        write_report(asked.out, [case_of(asked, each) for each in todo])
    write_report(asked.out, [case_of(asked, each) for each in todo])
    print((asked.out / "reach.txt").read_text())
    return 1 if broken else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.reach", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the evidence")
    parser.add_argument("--case", help="search one case in this process: SHAPE/WAY")
    parser.add_argument("--cases", nargs="+", default=list(CASES), metavar="SHAPE/WAY")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES), help="only cases of these shapes")
    parser.add_argument("--seconds", type=float, default=450.0, help="for everything; no probe begins after (default: 450)")
    parser.add_argument("--limit-gb", type=float, default=32.0, help="memory.device_limit_gb (default: 32)")
    parser.add_argument("--start", type=int, default=1024, help="tokens of the first response tried (default: 1024)")
    parser.add_argument("--most", type=int, help="tokens of a response at most (default: what the model's positions allow)")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt (default: 512)")
    parser.add_argument("--rows", type=int, default=2, help="answers to it (default: 2)")
    parser.add_argument("--layers", type=int, help="in place of the models'")
    parser.add_argument("--vocabulary", type=int, help="in place of the models'")
    parser.add_argument("--shrink", type=int, default=1, help="divide widths and heads by this")
    asked = parser.parse_args(argv)
    for name in asked.cases:
        shape, _, way = name.partition("/")
        if shape not in SHAPES or way not in WAYS:
            parser.error(f"--cases {name}: use SHAPE/WAY of {', '.join(SHAPES)} and {', '.join(WAYS)}")
    return asked


def case_of(asked: argparse.Namespace, name: str) -> Case:
    shape, way = name.split("/")
    return Case(shape, way, asked.limit_gb, asked.prompt, asked.rows, asked.layers, asked.vocabulary, asked.shrink)


def run_case(asked: argparse.Namespace, name: str, seconds: float) -> int:
    given = ("--case", name, "--out", str(asked.out), "--seconds", f"{seconds:.0f}")
    command = [sys.executable, "-m", "benchmarks.gpu.reach", *given]
    for option in ("limit_gb", "start", "most", "prompt", "rows", "layers", "vocabulary", "shrink"):
        value = getattr(asked, option)
        command += [] if value is None else [f"--{option.replace('_', '-')}", str(value)]
    try:
        # A probe that has begun may end; one that hangs may not take the other cases' time.
        return subprocess.run(command, check=False, timeout=seconds + 60).returncode
    except subprocess.TimeoutExpired:
        print(f"reach: {name} did not come back in {seconds + 60:.0f} s and was ended", file=sys.stderr, flush=True)
        return 1


def search(asked: argparse.Namespace, name: str) -> None:
    case, ends = case_of(asked, name), time.monotonic() + asked.seconds
    record = asked.out / "probes.jsonl"
    most = asked.most or case.model.max_positions - case.prompt
    with tempfile.TemporaryDirectory() as parent:
        folder = make_folder(case, Path(parent) / "model")
        prober = Prober(case, folder)
        try:
            last = 0.0
            while (length := next_length(known(record, case), asked.start, most)) is not None:
                # A longer probe takes about twice as long as the one before.
                if time.monotonic() + 2 * last > ends:
                    return
                began = time.monotonic()
                probe = prober.probe(length)
                last = time.monotonic() - began
                with record.open("a") as file:
                    file.write(json.dumps(probe) + "\n")
                print(line(probe), flush=True)
                if probe["status"] == NO_HOST_MEMORY or probe.get("phase") == "init":
                    return
        finally:
            prober.close()


def known(record: Path, case: Case) -> Known:
    """Gives what earlier probes of the same case say. A model that cannot be built fits no length."""
    probes = probes_of(record, case)
    if any(probe["status"] == NO_HOST_MEMORY or probe.get("phase") == "init" for probe in probes):
        return Known(0, 0)
    return Known.of((probe["response"], probe["status"] == FITS) for probe in probes)


def probes_of(record: Path, case: Case) -> list[dict[str, Any]]:
    lines = record.read_text().splitlines() if record.exists() else []
    return [probe for probe in map(json.loads, lines) if probe["case"] == asdict(case)]


class Prober:
    """Builds the worker of a case, once for as long as probes fit, and anew after one that did not."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        self.device = resolve_device("auto")
        self._group: Any = None
        self._for: int | None = None

    def probe(self, response: int) -> dict[str, Any]:
        settings = case_settings(self.case, self.folder, response)
        shown = {"name": self.case.name, "case": asdict(self.case), "response": response, "device": self.device}
        shown["computed_peak_bytes"] = computed_peak(self.case, settings)
        needs, there = computed_host_bytes(self.case, settings), psutil.virtual_memory().available
        if self._group is None and needs > there:
            text = (
                f"parameters, moments and reference rest in {needs / GIB:.1f} GiB of host memory, and {there / GIB:.1f} are free"
            )
            return {**shown, "status": NO_HOST_MEMORY, "message": text}
        phase = ["init"]
        try:
            began = time.perf_counter()
            memories = self._update(settings, response, phase)
            shown["seconds"] = time.perf_counter() - began
        except DeviceMemoryError as error:
            shown |= {"status": OUT_OF_MEMORY, "phase": phase[0], "message": str(error)}
        else:
            return {**shown, "status": FITS, **figures(memories)}
        # Outside the except clause, which keeps the failed frames and their tensors alive.
        self.close()
        return shown

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.shutdown()
        del group
        gc.collect()
        empty_cache(torch.device(self.device))

    def _work(self, response: int) -> UpdateSize:
        return UpdateSize(rows=self.case.rows, prompt=self.case.prompt, response=response, group=self.case.rows)

    def _update(self, settings: Settings, response: int, phase: list[str]) -> list[PhaseMemory]:
        if self._group is None:
            # A policy with adapters is its own reference.
            plan = worker_plan(settings, self.folder, with_reference=not settings.actor_rollout_ref.model.lora_rank)
            self._group = LocalGroup(functools.partial(Worker, plan), self.device)
            # The first step makes the optimizer's state; a short one does.
            _round(self._group, settings, make_batch(self._work(8), settings.actor_rollout_ref.actor), phase)
        return _round(self._group, settings, make_batch(self._work(response), settings.actor_rollout_ref.actor), phase)


def _round(group: Any, settings: Settings, batch: Any, phase: list[str]) -> list[PhaseMemory]:
    memories = []
    names = [f"row {row}" for row in range(batch.num_rows)]
    training, scoring, reference = (
        cut_ranks([batch.row_tokens()], [names], budget)[0] for budget in budgets(settings.actor_rollout_ref)
    )

    def step(name: str, method: str, *args: Any) -> Any:
        phase[0] = name
        (reply,) = group.all("call", name, True, method, *args)
        memories.append(reply.memory)
        return reply.value

    step("gen", "release_engine")
    batch.old_log_probs = step("old_log_prob", "old_log_probs", batch, scoring, False).log_probs
    batch.ref_log_probs = step("ref", "ref_log_probs", batch, reference).log_probs
    counts = GlobalCounts(float(batch.responses.lengths.sum()), float(batch.num_rows))
    step("update_actor", "update_actor", [MiniBatch(batch, training, counts)])
    step("update_weights", "update_weights")
    return memories


def figures(memories: Sequence[PhaseMemory]) -> dict[str, Any]:
    highest = max(memories, key=lambda memory: memory.peak_allocated_bytes or 0)
    return {
        "peak_bytes": highest.peak_allocated_bytes, "peak_phase": highest.name,
        "peak_reserved_bytes": max((memory.peak_reserved_bytes or 0 for memory in memories), default=0) or None,
        "update_peak_bytes": next(one.peak_allocated_bytes for one in memories if one.name == "update_actor"),
        "phases": {memory.name: [memory.peak_allocated_bytes, memory.peak_reserved_bytes] for memory in memories},
        "phase_seconds": {memory.name: memory.seconds for memory in memories}, "host_buffer_bytes": host_allocator().peak_bytes,
    }  # fmt: skip


def line(probe: dict[str, Any]) -> str:
    head = f"{probe['name']:14} {probe['response']:7,} tokens: {probe['status']}"
    computed = f"computed {probe['computed_peak_bytes'] / GIB:.3f} GiB"
    if probe["status"] != FITS:
        return f"{head} in {probe.get('phase', 'init')}; {computed}"
    return f"{head}, {probe['peak_bytes'] / GIB:.3f} GiB in {probe['peak_phase']}, {probe['seconds']:.1f} s; {computed}"


@dataclass(frozen=True)
class Known:
    """The longest length that fits (0 where none is known to), and the shortest that does not."""

    fits: int
    fails: int | None

    @classmethod
    def of(cls, outcomes: Iterable[tuple[int, bool]]) -> Known:
        pairs = list(outcomes)
        fits = max((length for length, fitted in pairs if fitted), default=0)
        return cls(fits, min((length for length, fitted in pairs if not fitted and length > fits), default=None))


def next_length(known: Known, start: int, most: int) -> int | None:
    """Gives the length to try next: powers of two up, then halves of what is open; None when the search is done."""
    start, most = min(start, most), most // STEP * STEP
    if known.fails is None:
        if known.fits >= most:
            return None
        return min(max(2 * known.fits, start), most)
    if known.fits == 0:
        return STEP if known.fails > STEP else None
    if known.fails - known.fits <= max(STEP, known.fails // FINE):
        return None
    return (known.fits + known.fails) // (2 * STEP) * STEP


def write_report(out: Path, cases: Sequence[Case]) -> None:
    found = [summary(case, probes_of(out / "probes.jsonl", case)) for case in cases]
    write_json(out / "reach.json", {"schema": 1, "cases": found})
    first = cases[0]
    (out / "reach.txt").write_text(f"{table(found)}\n\n{NOTE.format(rows=first.rows, prompt=first.prompt)}\n")


def summary(case: Case, probes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    known = Known.of((probe["response"], probe["status"] == FITS) for probe in probes)
    best = next((probe for probe in reversed(probes) if probe["status"] == FITS and probe["response"] == known.fits), None)
    failed = next((probe for probe in reversed(probes) if probe["status"] != FITS), None)
    return {
        "name": case.name, "case": asdict(case), "status": _status(known, probes, failed), "longest": known.fits,
        "shortest_that_fails": known.fails, "measured": best, "fails_in": None if failed is None else failed.get("phase"),
        "message": None if failed is None else failed.get("message"),
        "error": None if best is None else best["computed_peak_bytes"] / best["update_peak_bytes"] - 1, "probes": list(probes),
    }  # fmt: skip


def _status(known: Known, probes: Sequence[dict[str, Any]], failed: dict[str, Any] | None) -> str:
    if not probes:
        return "not tried"
    if failed is not None and failed["status"] == NO_HOST_MEMORY:
        return NO_HOST_MEMORY
    if known.fits == 0:
        return "does not fit"
    if known.fails is None:
        return "fits at every length tried"
    return "found" if known.fails - known.fits <= max(STEP, known.fails // FINE) else "not searched to the end"


def table(found: Sequence[dict[str, Any]]) -> str:
    heads = ("case", "longest", "fails at", "GiB", "in", "update GiB", "computed", "error", "s", "probes", "status")
    rows = []
    for case in found:
        best = case["measured"]
        fails = f"{case['shortest_that_fails']:,}" if case["shortest_that_fails"] else "-"
        measured = ["-"] * 6
        if best is not None:
            peak, update, computed = (
                f"{best[name] / GIB:.4g}" for name in ("peak_bytes", "update_peak_bytes", "computed_peak_bytes")
            )
            measured = [peak, best["peak_phase"], update, computed, f"{case['error']:+.1%}", f"{best['seconds']:.1f}"]
        longest = "-" if best is None else f"{case['longest']:,}"
        rows.append([case["name"], longest, fails, *measured, str(len(case["probes"])), case["status"]])
    return text_table(heads, rows, left=(0, 4, len(heads) - 1))


if __name__ == "__main__":
    sys.exit(main())
