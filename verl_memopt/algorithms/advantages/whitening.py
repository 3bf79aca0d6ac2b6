"""Whitening over all tokens of a step: mean 0 and standard deviation 1, the same however the rows are cut later."""

from __future__ import annotations

import torch
from torch import Tensor

VARIANCE_EPSILON = 1e-8
"""Added to the variance. This is verl's value, so that results agree with verl."""


def whiten(values: Tensor, valid: Tensor) -> Tensor:
    """Return (value - mean) / sqrt(variance + 1e-8) over the valid tokens, fp64 [R], and 0 elsewhere.

    The variance is unbiased. Call it with all tokens of a step, so that the statistics are global. Fewer than two valid tokens,
    or equal values, give exactly 0: there is nothing to compare. verl raises an error for one token.

    Args:
        values: fp32 or fp64 [R]. What is not valid may be NaN.
        valid: bool [R].
    """
    known = torch.where(valid, values.double(), 0.0)
    count = valid.sum()
    mean = known.sum() / count.clamp(min=1)
    centred = torch.where(valid, known - mean, 0.0)
    variance = centred.square().sum() / (count - 1).clamp(min=1)
    lowest = torch.where(valid, known, torch.inf).amin() if values.numel() else mean
    highest = torch.where(valid, known, -torch.inf).amax() if values.numel() else mean
    return torch.where(lowest < highest, centred * (variance + VARIANCE_EPSILON).rsqrt(), 0.0)
