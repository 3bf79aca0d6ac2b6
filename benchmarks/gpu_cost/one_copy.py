"""``python -m benchmarks.gpu_cost.one_copy``: device and host bytes of each phase of a step, from the real step on fake tensors.

A worker of a published shape runs on the virtual GPU (``tests/virtual_gpu``), whose tensors have no values: load, old log-probs,
reference log-probs, the pass of a teacher, update and weight sync. Generation is not run: its weights are those that are there,
and the KV cache takes what is left. Every figure is predicted. Host buffers are mapped and never written, so that a model larger
than this machine can be run.

``--measure`` runs the same steps for real, with random weights, on the GPU that is there: three steps, with what the allocator
counts beside what the formulas of ``fit`` say. Without a GPU it runs on the CPU; make it small then (``--shrink 32 --layers 2``).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import mmap
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed._tools.fake_collectives import CollectiveOp
from torch.utils._pytree import tree_iter

from benchmarks.common import NONE, commit, fake_process_group, text_table, write_json
from benchmarks.gpu.reach_cases import SHAPES, make_model_folder, size_of, worker_plan
from benchmarks.gpu_cost.update import Case
from benchmarks.update_pass.work import shrunk_shape
from recipe.rloo.memory_study.fake_guard import call_in_fake_process
from tests.virtual_gpu.device import VirtualGpu
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.config.loader import load_settings
from verl_memopt.config.schema import Settings
from verl_memopt.distributed.device import is_gpu, leave_process_group, local_device, resolve_device
from verl_memopt.errors import DeviceMemoryError
from verl_memopt.ladder.measure import UpdateSize, make_batch
from verl_memopt.memory.host_buffers import host_allocator
from verl_memopt.observe.log_setup import setup_logging
from verl_memopt.observe.phase import GIB
from verl_memopt.plan.peaks import Sizes, predict
from verl_memopt.trainer.micro_batching import budgets, cut_ranks, teacher_budget
from verl_memopt.worker.group import Placement
from verl_memopt.worker.trained_model import MiniBatch
from verl_memopt.worker.worker import Worker

aten = torch.ops.aten
NO_RESERVE = 0x4000
"""MAP_NORESERVE of Linux: pages that nobody writes need no memory."""
LARGE = 2**16
"""Elements of a host tensor from which on it is not written."""
MODELS = {
    **SHAPES,
    "14b": dataclasses.replace(
        SHAPES["8b"], hidden_size=5120, intermediate_size=17408, num_layers=40, num_heads=40, num_kv_heads=8
    ),
}
MODELS["32b"] = dataclasses.replace(MODELS["14b"], intermediate_size=25_600, num_layers=64, num_heads=64)
STEPS = {"predicted": 2, "measured": 3}
"""The first makes the optimizer's state, and compiles; the last one's figures are shown."""


c10d = torch.ops.c10d
WIRE = {
    c10d._allgather_base_.default: "gathered", c10d.allgather_.default: "gathered",
    c10d._reduce_scatter_base_.default: "reduced",
}  # fmt: skip
"""Collectives of FSDP2 and of the weight sync -> what their bytes are counted as: those that one rank receives, and sends."""


def _size(given: Any) -> int:
    return sum(each.nbytes for each in tree_iter(given) if isinstance(each, torch.Tensor))


class BoundlessHost(VirtualGpu):
    """Counts the bytes that cross the bus. Large host tensors keep the zeros that they are mapped with."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.crossed: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.zero_.default, aten.fill_.Scalar) and not self.owns(args[0]) and args[0].numel() >= LARGE:
            return args[0]
        if func is aten.copy_.default and args[0].numel() >= LARGE and not self.owns(args[0]) and not self.owns(args[1]):
            return args[0]  # weights that are read from a folder of zeros
        if func is aten.copy_.default and self.owns(args[0]) and not self.owns(args[1]) and args[1].dim():
            self.crossed["to the device"] += args[1].nbytes
        if func in WIRE:
            group, size = CollectiveOp.get_process_group(func, args).size(), max(map(_size, (args[0], args[1])))
            self.crossed[WIRE[func]] += size * (group - 1) // group
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _copy_to_host(self, func: Any, args: Any, kwargs: Any, lane: str) -> Any:
        self.crossed["to the host"] += (args[0] if func is aten._to_copy.default else args[1]).nbytes
        if func is aten._to_copy.default or args[0].numel() < LARGE:
            return super()._copy_to_host(func, args, kwargs, lane)
        target, source = args[:2]
        self._on_host(target)
        self._launch(lane, str(func), [source, target], [target])
        return target


def phases(case: Case, track: bool, ranks: int = 1) -> dict[str, Any]:
    """Return what the second step of a worker holds and moves, by phase. In a process that has the fake device.

    ``ranks``: of the group of which the worker is the first. The case is its share of the work; the others are not there.
    """
    with tempfile.TemporaryDirectory() as parent:
        folder = _folder_of(case, Path(parent))
        settings = settings_of(case, folder, ranks)
        no_reserve = mock.patch.object(mmap, "MAP_PRIVATE", mmap.MAP_PRIVATE | NO_RESERVE)
        with fake_process_group(ranks), BoundlessHost(total_bytes=2**40) as gpu, no_reserve:
            return _steps(case, settings, folder, gpu, "cuda", track, ranks, STEPS["predicted"])


def measured(case: Case, keep: Path | None, steps: int) -> dict[str, Any]:
    """Return what the last of some steps holds and takes, by phase, on the device of this machine, and what was foreseen.

    ``keep``: a file that gets each phase as a line of JSON when it ends.
    """
    device = local_device(resolve_device("auto"), 0)
    with tempfile.TemporaryDirectory() as parent:
        folder = _folder_of(case, Path(parent))
        settings = settings_of(case, folder, device=device.type)
        try:
            found = _steps(case, settings, folder, None, device.type, not is_gpu(device), 1, steps, keep)
        except DeviceMemoryError as error:
            found = {"error": " ".join(str(error).split())}
        leave_process_group()
        foreseen = predict(settings, sizes_of(case), ("init", "old_log_prob", "ref", "teacher", "update_actor"), device.type)
    beside = ("context", "allocator", "engine")
    phases = {name: sum(size for kind, size in kinds.items() if kind not in beside) for name, kinds in foreseen.phases.items()}
    limit = settings.memory.device_limit_gb
    return {**found, "foreseen": phases, "foreseen_host": foreseen.host_bytes, "limit_gb": limit}


def sizes_of(case: Case) -> Sizes:
    return Sizes(size_of(case.shape), teacher=None if case.teacher is None else size_of(case.teacher))


def _folder_of(case: Case, parent: Path) -> Path:
    # A teacher's folder is beside the model's.
    if case.teacher is not None:
        make_model_folder(case.teacher, parent / "teacher")
    return make_model_folder(case.shape, parent / "model")


def settings_of(case: Case, folder: Path, ranks: int = 1, device: str | None = None) -> Settings:
    """Return the settings of a run of which each rank has the case's work. ``device``: a real one, where functions compile."""
    fake = () if device else ("actor_rollout_ref.actor.use_torch_compile=false",)
    taught = () if case.teacher is None else (f"teacher.model.path={folder.parent / 'teacher'}", "distill.coef=1")
    return load_settings(
        "rloo_trainer",
        [
            "data.train_files=none", "data.val_files=null", "data.seed=0", f"data.train_batch_size={case.groups * ranks}",
            f"data.max_prompt_length={case.prompt}", f"data.max_response_length={case.response}",
            f"actor_rollout_ref.model.path={folder}", f"actor_rollout_ref.actor.ppo_mini_batch_size={case.groups * ranks}",
            "actor_rollout_ref.rollout.name=hf", f"actor_rollout_ref.rollout.n={case.group}",
            "actor_rollout_ref.actor.adaptive_token_budget=false", *fake,
            f"trainer.worker_group={'local' if ranks == 1 else 'ray'}", f"trainer.n_gpus_per_node={ranks}",
            f"trainer.device={device or 'cuda'}", *taught, *case.overrides,
        ],
    )  # fmt: skip


def _steps(
    case: Case, settings: Settings, folder: Path, gpu: BoundlessHost | None, device: str, track: bool, ranks: int,
    steps: int, keep: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    roles = settings.actor_rollout_ref
    plan = dataclasses.replace(worker_plan(settings, folder, roles.actor.use_kl_loss), kinds_on_gpu=track, track_init=track)
    if case.teacher is not None:
        folders = (str(settings.teacher.model.path),)
        plan = dataclasses.replace(plan, teacher=settings.teacher, teacher_folders=folders, distill=settings.distill)
    worker = Worker(plan, Placement(0, ranks, 0, "127.0.0.1", 0, device))
    try:
        first = worker.init_memory
        found: dict[str, Any] = {"init": {"peak": first.peak_allocated_bytes, "seconds": first.seconds}}
        if gpu is None and worker.policy is not None:
            _randomize(worker.policy.model)
        work = UpdateSize(rows=case.groups * case.group, prompt=case.prompt, response=case.response, group=case.group)
        batch = make_batch(work, roles.actor)
        names = [f"row {row}" for row in range(batch.num_rows)]
        asked = (*budgets(roles), *(() if case.teacher is None else (teacher_budget(settings),)))
        cuts = (cut_ranks([batch.row_tokens()], [names], each)[0] for each in asked)
        update, scoring, of_reference, *of_teacher = ([list(rows) for rows in cut] for cut in cuts)
        counts = GlobalCounts(float(batch.responses.lengths.sum()), float(batch.num_rows))

        def call(phase: str, method: str, *args: Any) -> Any:
            if gpu is not None:
                gpu.crossed.clear()
            reply = worker.call(phase, track, method, *args)
            memory = reply.memory
            found[phase] = {"peak": memory.peak_allocated_bytes, "kinds": dict(memory.kinds or {}) if track else {}}
            found[phase]["host_kinds"] = {kind: size for kind, size in host_allocator().kinds.items() if size}
            if gpu is not None:
                found[phase] |= {"after": gpu.allocated, "bus": dict(gpu.crossed)}
            else:
                found[phase] |= {"seconds": memory.seconds, "reserved": memory.peak_reserved_bytes}
                found[phase] |= {"used": memory.device_used_bytes, "host": memory.host_buffer_bytes}
            if phase == "update_actor" and gpu is None:
                found[phase]["grad_norm"] = float(reply.value["actor/grad_norm"])
            if keep is not None:
                with keep.open("a") as file:
                    file.write(json.dumps({"phase": phase, **found[phase]}) + "\n")
            return reply.value

        for _ in range(steps):
            call("gen", "release_engine")
            batch.old_log_probs = call("old_log_prob", "old_log_probs", batch, scoring, False).log_probs
            if roles.actor.use_kl_loss:
                batch.ref_log_probs = call("ref", "ref_log_probs", batch, of_reference).log_probs
            if case.teacher is not None:
                batch.places = torch.arange(batch.responses.flat.shape[0])
                call("teacher", "teacher_states", batch, *of_teacher)
            call("update_actor", "update_actor", [MiniBatch(batch, update, counts)])
            call("update_weights", "update_weights")
        params = sum(parameter.numel() for parameter in worker.policy.model.parameters()) if worker.policy else 0
        host = host_allocator()
        return {
            "params": params, "phases": found, "host_bytes": host.held_bytes, "host_peak_bytes": host.peak_bytes,
            "host_kinds": {kind: size for kind, size in host.kinds.items() if size},
            "micro_batches": len(update), "passes": [len(update), len(scoring), len(of_reference), *map(len, of_teacher)],
            "tokens": sum(batch.row_tokens().cost(rows) for rows in update),
        }  # fmt: skip
    finally:
        worker.close()


def _randomize(model: torch.nn.Module) -> None:
    """Give matrices random weights. Bytes do not depend on values, but a product of zeros takes less time."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.is_floating_point():
                parameter.normal_(0, 0.02, generator=generator)


def render_measured(model: str, found: dict[str, Any]) -> str:
    def gib(size: int | None) -> str:
        return NONE if size is None else f"{size / GIB:.2f}"

    limit = f"{found['limit_gb']} GiB" if found["limit_gb"] else "what the device has"
    if "error" in found:
        return f"{model} (measured), limit {limit}: {found['error']}"
    names = ("peak", "reserved", "used", "host")
    rows = [
        [
            phase, *(gib(each.get(name)) for name in names), gib(found["foreseen"].get(phase)),
            f"{each['seconds']:.2f}", f"{each['grad_norm']:.3g}" if "grad_norm" in each else "",
        ]
        for phase, each in found["phases"].items()
    ]  # fmt: skip
    head = ("phase", "peak GiB", "reserved GiB", "device GiB", "host GiB", "foreseen GiB", "seconds", "gradient norm")
    host = found["host_peak_bytes"]
    return (
        f"{model} (measured), limit {limit}: {found['params'] / 1e9:.3f}e9 parameters, {found['micro_batches']} micro-batches of "
        f"{found['tokens']:,} tokens\n{text_table(head, rows)}\nhost: {host / GIB:.2f} GiB, {host / found['params']:.2f} bytes a "
        f"parameter, activations included; foreseen {found['foreseen_host'] / GIB:.2f} GiB\n"
    )


def render(model: str, found: dict[str, Any]) -> str:
    rows = [
        [
            name,
            f"{each['peak'] / GIB:.2f}",
            *(f"{each.get('bus', {}).get(way, 0) / GIB:.2f}" for way in ("to the device", "to the host")),
        ]
        for name, each in found["phases"].items()
    ]
    table = text_table(["phase", "peak GiB", "to the device GiB", "to the host GiB"], rows)
    bus = sum(sum(each.get("bus", {}).values()) for each in found["phases"].values())
    params, flops = found["params"], 8 * found["params"] * found["tokens"]
    head = f"{model} (predicted): {params / 1e9:.3f}e9 parameters, {found['micro_batches']} micro-batches"
    host, kinds = found["host_peak_bytes"], found["host_kinds"]
    parts = ", ".join(f"{kind} {size / GIB:.2f} GiB ({size / params:.2f})" for kind, size in kinds.items())
    return (
        f"{head} of {found['tokens']:,} tokens\n{table}\n"
        f"host: {host / GIB:.2f} GiB, {host / params:.2f} bytes a parameter, at the end {parts}\n"
        f"bus: {bus / GIB:.1f} GiB a step; update: about {flops / 1e15:.2f} PFLOP\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_cost.one_copy", description=__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default="8b")
    parser.add_argument("--teacher", choices=sorted(MODELS), help="a model to distill from")
    parser.add_argument("--layers", type=int, help="in place of the model's")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--response", type=int, default=2048)
    parser.add_argument("--group", type=int, default=8, help="answers to the prompt (default: 8)")
    parser.add_argument("--kinds", action="store_true", help="count bytes by kind too")
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--measure", action="store_true", help="run it for real on the device of this machine")
    parser.add_argument("--shrink", type=int, default=1, help="divide widths, heads and the vocabulary by this")
    parser.add_argument("--steps", type=int, default=STEPS["measured"], help="with --measure (default: 3)")
    parser.add_argument("--keep", type=Path, help="with --measure: write each phase here when it ends")
    parser.add_argument("overrides", nargs="*", help="settings, as on a command line")
    asked = parser.parse_args(argv)
    shape = MODELS[asked.model]
    longest = max(shape.max_positions, asked.prompt + asked.response)
    shape = dataclasses.replace(shrunk_shape(shape, asked.layers, asked.shrink), max_positions=longest)
    teacher = None if asked.teacher is None else shrunk_shape(MODELS[asked.teacher], asked.layers, asked.shrink)
    case = Case(shape, asked.prompt, asked.response, asked.group, overrides=tuple(asked.overrides), teacher=teacher)
    if asked.measure:
        setup_logging(level=logging.INFO)
        found = measured(case, asked.keep, asked.steps)
        print(render_measured(asked.model, found))
    else:
        found = call_in_fake_process("benchmarks.gpu_cost.one_copy:phases", case, asked.kinds)
        print(render(asked.model, found))
    if asked.json is not None:
        about = {"schema": 1, "predicted": not asked.measure, "commit": commit(), "case": dataclasses.asdict(case)}
        write_json(asked.json, about | found)
    return 1 if "error" in found else 0


if __name__ == "__main__":
    sys.exit(main())
