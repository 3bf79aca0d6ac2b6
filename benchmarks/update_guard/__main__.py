"""Measures an optimizer step that looks at its gradient norm first, beside one that does not, in turns in one process.

    python -m benchmarks.update_guard [--device cpu] [--layers 4] [--hidden 256] [--vocabulary 8192] [--rows 8] [--tokens 128]
                                      [--micro-batches 2] [--steps 150] [--json FILE]

README.md says what is compared. Prints the median seconds of each side, their ratio, and the median over the steps of the ratio
within a step, as a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from benchmarks.common import seconds_of
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.config.schema import Actor, Model, TrainedFsdp
from verl_memopt.data.batch import Ragged, RolloutBatch
from verl_memopt.distributed.device import join_process_group, leave_process_group, local_device, training_mesh
from verl_memopt.model.assembly import ModelUse, build_policy, materialize
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.worker.policy import Policy
from verl_memopt.worker.trained_model import ACTOR, MiniBatch, TrainedModel, on_host

HEAD_DIM = 64


class Unguarded(TrainedModel):
    """Updates whatever the gradient norm is, and reads it afterwards."""

    def step(self, accumulate: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        metrics = accumulate()
        metrics[ACTOR.grad_norm] = self.clip()
        metrics[ACTOR.lr] = torch.tensor(self.schedule.get_last_lr()[0])
        self.apply()
        self.optimizer.zero_grad(set_to_none=True)
        return on_host(metrics) | {ACTOR.skipped: torch.zeros(())}


def policy_of(kind: type[TrainedModel], folder: Path, device: torch.device) -> Policy:
    """Gives a policy whose optimizer steps are of a kind, on its own copy of the model."""
    fsdp = TrainedFsdp(dtype="bfloat16" if device.type != "cpu" else "fp32")
    mesh = training_mesh(device.type, 1, -1)
    policy_model = build_policy(Model(path=str(folder)), fsdp, folder, mesh, device, ModelUse(trained=True))
    materialize(policy_model, folder, device)
    actor = Actor(fsdp_config=fsdp, clip_ratio_low=0.2, clip_ratio_high=0.2, use_prefix_grouper=False)
    policy = Policy(policy_model, actor, 1000, 1, device)
    policy.trained = kind(ACTOR, policy_model, actor, 1000, 1, device)
    return policy


def mini_batch(rows: int, tokens: int, vocabulary: int, micro_batches: int) -> MiniBatch:
    """Gives rows whose first half is the prompt, in as many micro-batches as asked for."""
    generator = torch.Generator().manual_seed(0)

    def ids() -> Ragged:
        return Ragged.from_rows(
            [torch.randint(3, vocabulary, (tokens // 2,), generator=generator) for _ in range(rows)], torch.int64
        )

    count = rows * (tokens // 2)
    batch = RolloutBatch(
        prompts=ids(), responses=ids(), group=torch.arange(rows), old_log_probs=torch.full((count,), -9.0),
        advantages=torch.randn(count, generator=generator), batch_size=[],
    )  # fmt: skip
    cut = [list(range(number, rows, micro_batches)) for number in range(micro_batches)]
    return MiniBatch(batch, cut, GlobalCounts(float(count), float(rows)))


def in_turns(sides: Sequence[Policy], mini: MiniBatch, steps: int, device: torch.device) -> list[list[float]]:
    """Gives the seconds of each side's updates. The sides take turns at going first; the first two turns warm up."""
    seconds: list[list[float]] = [[] for _ in sides]
    for turn in range(steps + 2):
        for side in range(len(sides)) if turn % 2 else reversed(range(len(sides))):
            found = seconds_of(lambda policy=sides[side]: policy.update([mini], 1.0), device)
            if turn >= 2:
                seconds[side].append(found)
    return seconds


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    for name, default in (("layers", 4), ("hidden", 256), ("vocabulary", 8192), ("rows", 8), ("tokens", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the line here too")
    asked = parser.parse_args(arguments)
    device = local_device(asked.device, 0)
    shape = TinyShape(
        vocab_size=asked.vocabulary, hidden_size=asked.hidden, intermediate_size=3 * asked.hidden, num_layers=asked.layers,
        num_heads=max(asked.hidden // HEAD_DIM, 2), num_kv_heads=max(asked.hidden // HEAD_DIM // 2, 1), head_dim=HEAD_DIM,
        max_positions=max(asked.tokens, 64),
    )  # fmt: skip
    join_process_group(device, 0, 1, "", 0, 60)
    try:
        with TemporaryDirectory() as folder:
            model = make_tiny_model(Path(folder) / "model", shape, seed=0)
            sides = [policy_of(kind, model, device) for kind in (TrainedModel, Unguarded)]
        mini = mini_batch(asked.rows, asked.tokens, asked.vocabulary, asked.micro_batches)
        seconds = in_turns(sides, mini, asked.steps, device)
    finally:
        leave_process_group()
    guarded, unguarded = map(statistics.median, seconds)
    paired = statistics.median(one / other for one, other in zip(*seconds, strict=True))
    figures = {"guarded_seconds": guarded, "unguarded_seconds": unguarded, "ratio": guarded / unguarded, "paired_ratio": paired}
    asked_for = {name: value for name, value in vars(asked).items() if name != "json"}
    line = json.dumps({**asked_for, **figures}) + "\n"
    sys.stdout.write(line)
    if asked.json is not None:
        asked.json.write_text(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
