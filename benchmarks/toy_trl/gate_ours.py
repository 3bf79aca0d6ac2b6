"""``python -m benchmarks.toy_trl.gate_ours TASK FOLDER``: our loss and gradient of the fixed batch."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.toy_trl.gate import CASES, MICRO_BATCHES, OUR_SIDE, Batch, Finding, file_name, slices
from benchmarks.toy_trl.ours import overrides
from benchmarks.toy_trl.work import OURS, WORK, Contestant, Plan
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.config.loader import load_settings
from verl_memopt.data.batch import Ragged, RolloutBatch
from verl_memopt.model.weights import named_weights
from verl_memopt.trainer.build import build_run
from verl_memopt.worker.group import LOOPBACK, Placement, free_port
from verl_memopt.worker.policy import Policy
from verl_memopt.worker.trained_model import micro_batch
from verl_memopt.worker.worker import Worker


def build_worker(task: Path, folder: Path) -> Worker:
    """Gives the worker that a run of the benchmark would have."""
    plan = Plan(Contestant(OURS, "hf", 1), str(task), str(folder), steps=1, seed=0, track=False)
    context = build_run(load_settings("rloo_trainer", overrides(plan)))
    return Worker(context.worker_plan, Placement(0, 1, 0, LOOPBACK, free_port(LOOPBACK), "cpu"))


def to_batch(batch: Batch) -> RolloutBatch:
    """Gives the rows as the trainer's batch, old log-probs left out."""
    responses = Ragged.from_rows(batch.responses, torch.int64)
    return RolloutBatch(
        prompts=Ragged.from_rows(batch.prompts, torch.int64),
        responses=responses,
        group=torch.arange(WORK.rows) // WORK.samples,
        advantages=torch.tensor(batch.advantages).repeat_interleave(responses.lengths),
        batch_size=[],
    )


def find(policy: Policy, batch: Batch, case: str, micro_batches: int, folder: Path) -> None:
    """Writes loss, gradient and log-probs of a case."""
    policy.trained.optimizer.zero_grad()
    whole, cuts = to_batch(batch), [list(rows) for rows in slices(micro_batches)]
    scores = policy.compute_log_probs(whole, cuts, WORK.temperature, with_entropy=False).log_probs
    lengths = whole.responses.lengths
    shifts = torch.tensor([batch.shift(row, case) for row in range(WORK.rows)]) / lengths
    whole.old_log_probs = scores + shifts.repeat_interleave(lengths)
    counts = GlobalCounts(tokens=float(lengths.sum()), sequences=float(WORK.rows))
    metrics = policy.accumulate((micro_batch(whole, rows) for rows in cuts), counts, WORK.temperature)
    gradients = {name: _whole(parameter.grad) for name, parameter in named_weights(policy.model)}
    norm = torch.nn.utils.get_total_norm(list(gradients.values())).item()
    save_file(gradients, folder / f"{file_name(case, micro_batches)}.safetensors")
    kept = [row.tolist() for row in scores.split(lengths.tolist())]
    found = Finding(metrics["actor/loss"].item(), norm, kept)
    (folder / f"{file_name(case, micro_batches)}.json").write_text(json.dumps(asdict(found)))


def _whole(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.full_tensor().contiguous() if isinstance(gradient, DTensor) else gradient


def main(task: Path, folder: Path) -> None:
    """Writes all cases."""
    batch = Batch.read(folder / "batch.json")
    (folder / OUR_SIDE).mkdir(exist_ok=True)
    worker = build_worker(task, folder / OUR_SIDE)
    try:
        assert worker.policy is not None
        for case in CASES:
            for micro_batches in MICRO_BATCHES:
                find(worker.policy, batch, case, micro_batches, folder / OUR_SIDE)
    finally:
        worker.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
