"""``python -m benchmarks.gpu_cost.peers``: what our update costs a GPU beside the peers', counted without one.

The contestants are those of ``benchmarks/update_pass``: forward and backward of one group of answers, the peers by their own
code, without an optimizer step. Every figure is an estimate. Run it in ``.venv-peers``.

Ours runs on the virtual GPU. The peers run on a CPU with real values, since nested tensors and checks of lengths need some; an
operation counts as the same one of a GPU. Two blocks cost twice what one does, so models of one block and of two say what all
blocks cost.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from benchmarks.common import commit, text_table, write_json
from benchmarks.gpu_cost.__main__ import DONE, MISSING, PROMPT_SHARE
from benchmarks.gpu_cost.device import FREE, Cost, Counted, CountingGpu, launches_of, moved_bytes, operations
from benchmarks.gpu_cost.update import MODELS
from benchmarks.update_pass.contest import CONTESTANTS, make_batch
from benchmarks.update_pass.flops import PRODUCTS, attention_formulas
from benchmarks.update_pass.ours import build_ours
from benchmarks.update_pass.sides import Job
from benchmarks.update_pass.work import Workload
from recipe.rloo.memory_study.fake_guard import NoCompilerError, call_in_fake_process
from tests.virtual_gpu.device import _written
from verl_memopt.distributed.device import leave_process_group
from verl_memopt.memory.fused import fused_statements, recorded_calls
from verl_memopt.model.tiny import make_tiny_model

PEERS = ("trl_rloo_trimmed", "trl_grpo_trimmed", "liger", "verl", "verl_fused", "verl_prefix_grouper")
OURS = {
    "ours_no_sharing": {"shared": False},
    "ours": {"shared": True},
    "ours_no_sharing, compiled": {"shared": False, "compiled": True},
    "ours, compiled": {"shared": True, "compiled": True},
}
"""Of ``use_torch_compile``, the default on a GPU, and of shared prompts."""


class CountingHost(TorchDispatchMode):
    """Counts the operations of a CPU as :class:`CountingGpu` counts those of a GPU, waits and copies apart."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = Counted()
        self._flops: dict[Any, Callable[..., int]] = {**flop_registry, **PRODUCTS, **attention_formulas()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented
        result = func(*args, **kwargs)
        name = func.__name__.partition(".")[0]
        given = [one for one in tree_iter((args, kwargs)) if isinstance(one, Tensor)]
        made = [one for one in tree_iter(result) if isinstance(one, Tensor)]
        if name in FREE or not (given or made):
            return result
        read, written = moved_bytes(name, args, kwargs, given, [*made, *_written(func, given, args, kwargs)])
        formula = self._flops.get(func._overloadpacket)
        flops = 0 if formula is None else operations(formula, args, kwargs, result)
        launches = launches_of(name, args, kwargs, given)
        self.counted.ops.setdefault(name, Cost()).add(launches, read, written, flops)
        return result


def count_peer(name: str, work: Workload) -> Cost:
    """Return what one update of a peer costs."""
    with tempfile.TemporaryDirectory() as parent:
        folder = make_tiny_model(Path(parent) / "model", work.shape, seed=0)
        batch = make_batch(work)
        zeros = [torch.zeros(len(answer)) for answer in batch.answers]
        side = CONTESTANTS[name].build(Job(work, batch, folder, True, torch.device("cpu"), zeros))
        with CountingHost() as host:
            side.update()
    return total(host.counted)


def count_ours(name: str, work: Workload) -> Cost:
    """Return what one update of ours costs. In a process that has the fake device."""
    with tempfile.TemporaryDirectory() as parent:
        folder = make_tiny_model(Path(parent) / "model", work.shape, seed=0)
        leave_process_group()
        dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
        with fused_statements(OURS[name].get("compiled", False)), CountingGpu() as gpu, recorded_calls(gpu.record):
            side = build_ours(Job(work, make_batch(work), folder, True, torch.device("cuda", 0), ()), **OURS[name])
            counted = gpu.counted(side.update)
        gpu.finish(counted)
    return total(counted)


def total(counted: Counted) -> Cost:
    """Return the sum over all operations."""
    whole = Cost()
    for cost in counted.ops.values():
        whole.add(cost.launches, cost.read_bytes, cost.written_bytes, cost.flops)
    return whole


def counted_by_depth(count: Callable[[Workload], Cost], work: Workload) -> Cost:
    """Return the cost at the full depth, from those of one block and of two."""
    one, two = (count(dataclasses.replace(work, shape=dataclasses.replace(work.shape, num_layers=n))) for n in (1, 2))
    deep = work.shape.num_layers - 1
    return Cost(*(a + deep * (b - a) for a, b in zip(dataclasses.astuple(one), dataclasses.astuple(two), strict=True)))


def main(argv: Sequence[str] | None = None) -> int:
    """Count what was asked for. Exit codes: 0 done, 2 the fake device needs a compiler that is not there."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_cost.peers", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=["0.5b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 8192], help="of a group of 8, its prompt once")
    parser.add_argument("--contestants", nargs="+", choices=(*PEERS, *OURS), default=[*PEERS, *OURS])
    parser.add_argument("--json", type=Path, help="write the record here")
    asked = parser.parse_args(argv)
    records = []
    for model in asked.models:
        for tokens in asked.tokens:
            prompt = tokens // PROMPT_SHARE
            work = Workload("", MODELS[model], 1, 8, prompt, (tokens - prompt) // 8, dtype="bfloat16")
            for name in asked.contestants:
                try:
                    cost = counted_by_depth(lambda some, name=name: counted(name, some), work)
                except NoCompilerError as error:
                    print(f"gpu_cost: {error}", file=sys.stderr)
                    return MISSING
                records.append({"model": model, "tokens": tokens, "contestant": name, **dataclasses.asdict(cost)})
                print(f"counted {model}, {tokens} tokens, {name}: {cost}", file=sys.stderr, flush=True)
                if asked.json is not None:
                    write_json(asked.json, {"schema": 1, "estimated": True, "commit": commit(), "updates": records})
    print(render(records))
    return DONE


def counted(name: str, work: Workload) -> Cost:
    """Return the cost of one update of a contestant."""
    if name in OURS:
        return call_in_fake_process("benchmarks.gpu_cost.peers:count_ours", name, work)
    return count_peer(name, work)


def render(records: Sequence[dict[str, Any]]) -> str:
    """Return the table of all updates."""
    heads = ("model", "tokens", "contestant", "launches", "GB\nmoved", "TFLOP")
    rows = [
        [
            record["model"], f"{record['tokens']:,}", record["contestant"], f"{record['launches']:,}",
            f"{(record['read_bytes'] + record['written_bytes']) / 1e9:,.1f}", f"{record['flops'] / 1e12:,.1f}",
        ]
        for record in records
    ]  # fmt: skip
    return "\n".join([text_table(heads, rows), "Estimated, not measured: forward and backward, no optimizer step."])


if __name__ == "__main__":
    sys.exit(main())
