"""Mean 0 and standard deviation 1 over all tokens or all rows of a step, the same however the rows are cut later."""

from __future__ import annotations

import torch
from torch import Tensor

VARIANCE_EPSILON = 1e-8
"""Added to the variance. This is verl's value, so that results agree with verl."""

STD_EPSILON = 1e-4
"""Added to the standard deviation of a step's rows. This is TRL's value, so that results agree with TRL."""


def whiten(values: Tensor, valid: Tensor) -> Tensor:
    """Return (value - mean) / sqrt(variance + 1e-8) over the valid tokens, fp64 [R], and 0 elsewhere.

    The variance is unbiased. Call it with all tokens of a step, so that the statistics are global. Fewer than two valid tokens,
    or equal values, give exactly 0: there is nothing to compare. verl raises an error for one token.

    Args:
        values: fp32 or fp64 [R]. What is not valid may be NaN.
        valid: bool [R].
    """
    centred, variance, differ = _centred(values, valid)
    return torch.where(differ, centred * (variance + VARIANCE_EPSILON).rsqrt(), 0.0)


def normalize_rows(advantages: Tensor, valid: Tensor) -> Tensor:
    """Return (advantage - mean) / (std + 1e-4) over the valid rows of a whole step, fp64 [B], and 0 elsewhere.

    The standard deviation is unbiased. Fewer than two valid rows, or equal advantages, give exactly 0. Source:
    ``normalize_advantages`` of TRL's ``RLOOConfig``.

    Args:
        advantages: fp32 or fp64 [B]. What is not valid may be NaN.
        valid: bool [B].
    """
    centred, variance, differ = _centred(advantages, valid)
    return torch.where(differ, centred / (variance.sqrt() + STD_EPSILON), 0.0)


def _centred(values: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return valid values minus their mean (0 elsewhere), their unbiased variance, and whether two of them differ; fp64."""
    known = torch.where(valid, values.double(), 0.0)
    count = valid.sum()
    mean = known.sum() / count.clamp(min=1)
    centred = torch.where(valid, known - mean, 0.0)
    variance = centred.square().sum() / (count - 1).clamp(min=1)
    lowest = torch.where(valid, known, torch.inf).amin() if values.numel() else mean
    highest = torch.where(valid, known, -torch.inf).amax() if values.numel() else mean
    return centred, variance, lowest < highest
