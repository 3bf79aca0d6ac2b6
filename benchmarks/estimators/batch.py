"""The inputs that every side reads: ragged responses, flat for this project and padded for its peers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SIZES = (5, 1, 9, 3, 7, 2, 12, 4, 6, 1, 8, 3)
GROUP_SIZE = 4
SCALE_FACTOR = 16
CLIP_LOW, CLIP_HIGH, CLIP_C = 0.2, 0.28, 3.0
TAU_POS, TAU_NEG = 1.2, 2.5
GAMMA, LAM = 0.98, 0.9
REWARDS = {"right": 1.0, "short": 0.5}
"""Names of two rewards of gdpo, and their weights."""


@dataclass(frozen=True)
class Batch:
    """B rows with R response tokens, fp64."""

    lengths: Tensor
    """int64 [B]."""
    row: Tensor
    """int64 [R]."""
    group: Tensor
    """int64 [B]."""
    scores: Tensor
    """[B], 0 or 1; all equal in one group."""
    baselines: Tensor
    """[B], one value a group."""
    values: Tensor
    """[R], as all that follow."""
    predictions: Tensor
    returns: Tensor
    advantages: Tensor
    """[B]: one a row, as TRL has it."""
    log_probs: Tensor
    old_log_probs: Tensor
    near_log_probs: Tensor
    """Near the old ones, so that no ratio is clipped."""
    ref_log_probs: Tensor
    rollout_log_probs: Tensor
    sum_pi_squared: Tensor

    @property
    def token_rewards(self) -> Tensor:
        """The score at the last token of each row, [R]."""
        rewards = torch.zeros_like(self.values)
        rewards[self.lengths.cumsum(0) - 1] = self.scores
        return rewards

    @property
    def components(self) -> Tensor:
        """Two rewards of each row, [B, 2]."""
        return torch.stack([self.scores, self.advantages], 1)

    @property
    def mask(self) -> Tensor:
        """Where a padded row has tokens, fp64 [B, longest]."""
        return (torch.arange(int(self.lengths.max())) < self.lengths[:, None]).double()

    def pad(self, flat: Tensor) -> Tensor:
        """Gives flat tokens as padded rows, [B, longest]."""
        return torch.zeros_like(self.mask, dtype=flat.dtype).masked_scatter(self.mask.bool(), flat)

    def flat(self, padded: Tensor) -> Tensor:
        """Gives padded rows as flat tokens, [R]."""
        return padded[self.mask.bool()]


def make_batch(seed: int = 0, alone: bool = False) -> Batch:
    """Gives a batch of three groups. alone: every row is a group of its own."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(SIZES)
    rows, tokens = len(SIZES), sum(SIZES)

    def noise(size: int = tokens) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    group = torch.arange(rows) if alone else torch.arange(rows) // GROUP_SIZE
    scores = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    old = -noise().abs() - 0.2
    return Batch(
        lengths=lengths, row=torch.repeat_interleave(torch.arange(rows), lengths), group=group, scores=scores,
        baselines=noise(rows)[group], values=noise(), predictions=noise(), returns=noise(), advantages=noise(rows),
        log_probs=old + 0.4 * noise(), old_log_probs=old, near_log_probs=old + 0.02 * noise(), ref_log_probs=old + 0.3 * noise(),
        rollout_log_probs=old + 0.3 * noise(), sum_pi_squared=old.exp().square() + 0.1 * noise().abs(),
    )  # fmt: skip


def with_gradient(batch: Batch, loss: Tensor, leaf: Tensor) -> dict[str, Tensor]:
    """Gives a loss and the gradient of the log-probs, flat."""
    gradient = torch.autograd.grad(loss, leaf)[0]
    return {"loss": loss.detach(), "gradient": batch.flat(gradient) if gradient.dim() > 1 else gradient}
