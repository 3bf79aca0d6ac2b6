"""Whether all trainers compute the same: one fixed batch of ids and advantages through each loss path.

``trl_side`` and ``ours`` write what each finds; this module makes the batch and compares. Nothing here imports a trainer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.toy_trl.work import WORK, stored

CASES = {"on-policy": False, "off-policy": True}
"""Whether the old log-probs of a case are moved away from the policy's."""
MICRO_BATCHES = (1, 8)
TRL_SIDES = {"trl": False, "trl-trimmed": True}
"""TRL as it comes, and trimmed."""
OUR_SIDE = "ours"
BOUND = 1e-5
"""Largest relative difference of loss, gradient norm and gradient, and largest difference of a log-prob in nats."""


@dataclass(frozen=True)
class Batch:
    """Rows of different lengths, so that padding and packing both have work. shifts: of each row's summed old log-prob."""

    prompts: list[list[int]]
    responses: list[list[int]]
    advantages: list[float]
    shifts: list[float]

    def shift(self, row: int, case: str) -> float:
        """Gives by how much a row's old log-prob lies above the policy's in a case."""
        return self.shifts[row] if CASES[case] else 0.0


def make_batch(vocabulary: int, seed: int = 0) -> Batch:
    """Gives a random batch; shifts reach beyond the clip on both sides. Ids below 3 are special tokens and left out."""
    draw = random.Random(seed)

    def ids(low: int, high: int) -> list[int]:
        return [draw.randrange(3, vocabulary) for _ in range(draw.randint(low, high))]

    return Batch(
        prompts=[ids(5, WORK.max_prompt_tokens) for _ in range(WORK.rows)],
        responses=[ids(1, WORK.max_response_tokens) for _ in range(WORK.rows)],
        advantages=[draw.gauss(0.0, 1.0) for _ in range(WORK.rows)],
        shifts=[draw.uniform(-0.4, 0.4) for _ in range(WORK.rows)],
    )


@dataclass(frozen=True)
class Finding:
    """What one side computed for one case, cut into so many micro-batches."""

    loss: float
    log_probs: list[list[float]]
    """Per row and token."""
    gradients: dict[str, Any]
    """Whole, by name."""

    @property
    def grad_norm(self) -> float:
        from torch.nn.utils import get_total_norm

        return get_total_norm(list(self.gradients.values())).item()


@dataclass(frozen=True)
class Difference:
    """How far a side is from ours. Relative ones are to TRL's; ``gradient`` is of the whole gradient as one vector.

    The loss of a case may be 0 in truth, so it is relative to the mean of the absolute advantages.
    """

    side: str
    case: str
    micro_batches: int
    loss: float
    grad_norm: float
    gradient: float
    log_prob: float
    trl_loss: float
    trl_grad_norm: float

    @property
    def passed(self) -> bool:
        """Says whether all are within ``BOUND``."""
        return max(self.loss, self.grad_norm, self.gradient, self.log_prob) <= BOUND


def compare(folder: Path, batch: Batch) -> list[Difference]:
    """Gives the differences of all cases from what both sides wrote into the folder."""
    return [
        _difference(folder, side, batch, case, micro_batches)
        for side in TRL_SIDES
        for case in CASES
        for micro_batches in MICRO_BATCHES
    ]


def _difference(folder: Path, side: str, batch: Batch, case: str, micro_batches: int) -> Difference:
    trl, ours = (stored(file_of(folder / one, case, micro_batches)) for one in (side, OUR_SIDE))
    theirs, mine = trl.gradients, ours.gradients
    assert theirs.keys() == mine.keys(), theirs.keys() ^ mine.keys()
    squared = sum(float((theirs[key].double() - mine[key].double()).square().sum()) for key in theirs)
    scale = sum(map(abs, batch.advantages)) / len(batch.advantages)
    return Difference(
        side=side,
        case=case,
        micro_batches=micro_batches,
        loss=abs(trl.loss - ours.loss) / scale,
        grad_norm=abs(trl.grad_norm - ours.grad_norm) / trl.grad_norm,
        gradient=squared**0.5 / trl.grad_norm,
        log_prob=max(
            abs(one - other)
            for row, other_row in zip(trl.log_probs, ours.log_probs, strict=True)
            for one, other in zip(row, other_row, strict=True)
        ),
        trl_loss=trl.loss,
        trl_grad_norm=trl.grad_norm,
    )


def file_of(folder: Path, case: str, micro_batches: int) -> Path:
    """Gives the file of a side's finding."""
    return folder / f"{case}-{micro_batches}.pickle"


def slices(micro_batches: int) -> list[range]:
    size = WORK.rows // micro_batches
    return [range(start, start + size) for start in range(0, WORK.rows, size)]
