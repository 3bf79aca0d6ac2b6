"""``python -m benchmarks.toy_trl.gate_trl TASK FOLDER SIDE``: TRL's loss and gradient of the fixed batch.

Runs in TRL's own environment.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from trl.trainer.utils import pad

from benchmarks.toy_trl.gate import CASES, MICRO_BATCHES, TRL_SIDES, Batch, Finding, file_name, slices
from benchmarks.toy_trl.trl_trainer import MeasuredTrainer, build
from benchmarks.toy_trl.work import TRL, WORK, Contestant


def padded(rows: list[list[int]], value: int, side: str) -> tuple[Tensor, Tensor]:
    """Gives ids and mask, int64 [B, T], as the trainer makes them."""
    ids = [torch.tensor(row) for row in rows]
    return pad(ids, padding_value=value, padding_side=side), pad(
        [torch.ones_like(row) for row in ids], padding_value=0, padding_side=side
    )


def inputs(trainer: MeasuredTrainer, batch: Batch) -> dict[str, Tensor]:
    """Gives what the trainer's loss takes, old log-probs left out."""
    blank = trainer.processing_class.pad_token_id
    prompt_ids, prompt_mask = padded(batch.prompts, blank, "left")
    completion_ids, completion_mask = padded(batch.responses, blank, "right")
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": torch.tensor(batch.advantages),
    }


def log_probs(trainer: MeasuredTrainer, given: dict[str, Tensor]) -> Tensor:
    """Gives the policy's log-probs, [B, T] with zeros where there is no response token."""
    ids = torch.cat([given["prompt_ids"], given["completion_ids"]], dim=1)
    mask = torch.cat([given["prompt_mask"], given["completion_mask"]], dim=1)
    with torch.no_grad():
        found, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, given["completion_ids"].shape[1])
    return found * given["completion_mask"]


def find(trainer: MeasuredTrainer, batch: Batch, case: str, micro_batches: int, folder: Path) -> None:
    """Writes loss, gradient and log-probs of a case."""
    trainer.model.zero_grad()
    trainer.model.train()
    given = inputs(trainer, batch)
    scores = log_probs(trainer, given)
    given["old_logps"] = scores.sum(1) + torch.tensor([batch.shift(row, case) for row in range(WORK.rows)])
    loss = 0.0
    for rows in slices(micro_batches):
        # The trainer divides by the number of accumulation steps outside its loss function.
        part = trainer._compute_loss(trainer.model, {name: value[list(rows)] for name, value in given.items()}) / micro_batches
        part.backward()
        loss += part.item()
    gradients = {name: parameter.grad for name, parameter in trainer.model.named_parameters()}
    norm = torch.nn.utils.get_total_norm(list(gradients.values())).item()
    save_file(gradients, folder / f"{file_name(case, micro_batches)}.safetensors")
    kept = [row[: len(response)].tolist() for row, response in zip(scores, batch.responses, strict=True)]
    (folder / f"{file_name(case, micro_batches)}.json").write_text(json.dumps(asdict(Finding(loss, norm, kept))))


def main(task: Path, folder: Path, side: str) -> None:
    """Writes all cases of a side."""
    batch = Batch.read(folder / "batch.json")
    own = folder / side
    own.mkdir(exist_ok=True)
    trainer = build(Contestant(TRL, "hf", 1, trimmed=TRL_SIDES[side]), task, own / "run", steps=1, seed=0, track=False)
    trainer.meter.begin_step()
    for case in CASES:
        for micro_batches in MICRO_BATCHES:
            find(trainer, batch, case, micro_batches, own)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
