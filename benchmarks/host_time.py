"""``python -m benchmarks.host_time``: what the host pays for one update, on a model whose kernels cost almost nothing.

A real worker updates a model of real depth and width 64, with several settings, and transformers alone does the same. The kernels
are so small that nearly all processor time is the host's own work: Python, autograd, the dispatcher. On a GPU the host needs this
time to queue the kernels. Wherever the device needs less, it waits.

With CUDA graphs, what a GPU would replay is left out. A replay costs the host some 10 microseconds, and a block has five.

Transformers computes the prompt once per answer, which at this width costs it next to nothing, and stays in fp32.

Contestants take turns in one process with one thread. Times are processor seconds of the process, which other processes disturb
less than elapsed time. An update is a forward and a backward of all rows in one micro-batch, clipping, and a step of AdamW.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.common import CPU, commit, load, processor, text_table, write_json
from benchmarks.gpu.profile_update import updates
from verl_memopt.config.loader import load_settings
from verl_memopt.ladder.measure import UpdateSize, make_batch
from verl_memopt.model import captured_block
from verl_memopt.model.tiny import TinyShape, make_tiny_model

SHAPE = TinyShape(num_layers=28, num_heads=4, num_kv_heads=2)
ROWS = UpdateSize(rows=4, prompt=16, response=8, group=4)
MODEL, FSDP = "actor_rollout_ref.model", "actor_rollout_ref.actor.fsdp_config"
UNCHECKPOINTED = f"{MODEL}.enable_gradient_checkpointing=false"
WORKER = {
    "default": (),
    "not checkpointed": (UNCHECKPOINTED,),
    "bf16 masters": (f"{FSDP}.model_dtype=bfloat16",),
    "split masters": (f"{FSDP}.split_master_weights=true",),
    "no shared prompt": ("actor_rollout_ref.actor.use_prefix_grouper=false",),
    "elementwise kept": (f"{MODEL}.recompute_elementwise=false",),
    "fp32": (f"{FSDP}.dtype=fp32",),
    "cuda graphs": (f"{FSDP}.cuda_graphs=true",),
    "constrained": ("memory=constrained",),
}
"""Name of a contestant -> settings of its worker."""
PLAIN = {"transformers": True, "transformers, not checkpointed": False}
"""Name -> whether its blocks are checkpointed."""
WARM_UPS = 3
LINES = 12


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_time", description=__doc__.splitlines()[0])
    names = [*PLAIN, *WORKER]
    parser.add_argument("--contestants", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--rounds", type=int, default=5, help="updates of each that are timed (default: 5)")
    parser.add_argument("--profile", action="store_true", help="also print the functions of each that take longest")
    parser.add_argument("--json", type=Path, help="write the record here")
    asked = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as parent, ExitStack() as stack:
        folder = make_tiny_model(Path(parent) / "model", SHAPE)
        calls = {name: stack.enter_context(contestant(name, folder)) for name in asked.contestants}
        seconds = in_turns(calls, asked.rounds)
        found = [summary(name, seconds[name], calls[name]) for name in calls]
        profiles = {name: profile(call) for name, call in calls.items()} if asked.profile else {}
    record = {
        "schema": 1, "processor": processor(), "load": load(), "torch": torch.__version__, "commit": commit(),
        "layers": SHAPE.num_layers, "rounds": asked.rounds, "contestants": found,
    }  # fmt: skip
    if asked.json is not None:
        write_json(asked.json, record)
    print(render(record))
    for name, lines in profiles.items():
        print(f"\n{name}\n{lines}")
    return 0


@contextmanager
def contestant(name: str, folder: Path) -> Iterator[Callable[[], Any]]:
    """Yield a call that takes one optimizer step."""
    if name in PLAIN:
        yield plain(folder, PLAIN[name])
        return
    with without_replays(), updates(settings(folder, WORKER[name]), folder, CPU, ROWS) as (update, micro_batches, _):
        assert micro_batches == 1, name
        yield update


class Replays:
    """Stands in for CUDA graphs: a replay does nothing, so its results are meaningless."""

    def warm_up(self, function: Callable[[], None]) -> None:
        function()

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        return lambda: None


def without_replays() -> Any:
    return mock.patch.multiple(captured_block, CudaGraphs=Replays, is_gpu=lambda _: True)


def settings(folder: Path, overrides: Sequence[str]) -> Any:
    return load_settings(
        "rloo_trainer",
        [
            *overrides,
            "data.train_files=none", "data.val_files=null", "data.train_batch_size=1",
            f"data.max_prompt_length={ROWS.prompt}", f"data.max_response_length={ROWS.response}",
            f"{MODEL}.path={folder}", "actor_rollout_ref.actor.ppo_mini_batch_size=1",
            "actor_rollout_ref.actor.use_dynamic_bsz=true", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
            "actor_rollout_ref.rollout.name=hf", f"actor_rollout_ref.rollout.n={ROWS.group}",
            "trainer.worker_group=local", "trainer.device=cpu",
        ],
    )  # fmt: skip


def plain(folder: Path, checkpointed: bool) -> Callable[[], None]:
    """Transformers in fp32 on the same rows: logits of the answers alone, the loss of RLOO, clipping, AdamW."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    batch = make_batch(ROWS, settings(folder, ()).actor_rollout_ref.actor)
    ids = torch.stack([torch.cat(row) for row in zip(batch.prompts.rows(), batch.responses.rows(), strict=True)])
    answers, advantages = ids[:, ROWS.prompt :], torch.ones(ROWS.rows)

    def update() -> None:
        kept = model(input_ids=ids, use_cache=False, logits_to_keep=ROWS.response + 1).logits[:, :-1].float()
        log_probs = torch.gather(kept, 2, answers[..., None])[..., 0] - kept.logsumexp(-1)
        loss: Tensor = -(advantages * (log_probs.sum(1) - log_probs.sum(1).detach()).exp()).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return update


def in_turns(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    names, found = list(calls), {name: list[float]() for name in calls}
    gc.collect()
    gc.disable()  # a collection would fall on whoever happens to run
    try:
        for turn in range(WARM_UPS + rounds):
            start = turn % len(names)
            for name in names[start:] + names[:start]:
                before = time.process_time()
                calls[name]()
                if turn >= WARM_UPS:
                    found[name].append(time.process_time() - before)
            gc.collect()
    finally:
        gc.enable()
    return found


def summary(name: str, seconds: Sequence[float], update: Callable[[], Any]) -> dict[str, Any]:
    median, least, most = (which(seconds) for which in (statistics.median, min, max))
    return {"name": name, "median_seconds": median, "least_seconds": least, "most_seconds": most, "calls": python_calls(update)}


def python_calls(update: Callable[[], Any]) -> int:
    """Return how many Python functions an update calls. Unlike seconds, this number does not vary from machine to machine."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        update()
    finally:
        sys.setprofile(None)
    return count


def profile(update: Callable[[], Any]) -> str:
    profiler = cProfile.Profile()
    for _ in range(3):
        profiler.runcall(update)
    stats: Any = pstats.Stats(profiler)
    rows = sorted(stats.stats.items(), key=lambda item: -item[1][2])[:LINES]
    cells = [
        [f"{Path(file).name}:{line} {name}", f"{calls / 3 / SHAPE.num_layers:.1f}", f"{own / 3 * 1e3:.1f}"]
        for (file, line, name), (_, calls, own, _, _) in rows
    ]
    return text_table(["function", "calls\nper block", "own time\nms"], cells)


def render(record: dict[str, Any]) -> str:
    rows, found = [], record["contestants"]
    bases = {each["name"]: each["median_seconds"] for each in found if each["name"] in PLAIN}
    for each in found:
        ratio = partial(_ratio, each["median_seconds"])
        rows.append(
            [each["name"], *(f"{each[f'{which}_seconds'] * 1e3:.1f}" for which in ("median", "least", "most")),
             f"{each['median_seconds'] / record['layers'] * 1e6:.0f}", f"{each['calls'] / record['layers']:.0f}",
             *(ratio(bases.get(name)) for name in PLAIN)]
        )  # fmt: skip
    heads = [
        "update by", "ms\nmedian", "\nleast", "\nmost", "us\nper block", "Python calls\nper block", "times\ntransformers",
        "times it, not\ncheckpointed",
    ]  # fmt: skip
    where = f"{record['processor']}, load {record['load']}, torch {record['torch']}, commit {record['commit']}"
    work = f"{record['layers']} blocks, one thread, processor time of {record['rounds']} updates"
    return f"{where}\n{work}\n\n{text_table(heads, rows)}"


def _ratio(seconds: float, base: float | None) -> str:
    return "–" if base is None else f"{seconds / base:.2f}"


if __name__ == "__main__":
    sys.exit(main())
