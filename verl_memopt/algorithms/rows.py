"""Values of flat rows: places and scans inside rows, sums and means over rows and mini-batches, whitening over a step.

``values [R]`` holds the tokens of all rows, row after row. ``row [R]`` int64 is the row of each token and does not decrease.
``lengths [rows]`` int64 is the number of tokens of each row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def positions(row: Tensor, lengths: Tensor) -> Tensor:
    """Place of each token in its row, int64 [R], from 0."""
    starts = lengths.cumsum(0) - lengths
    return torch.arange(row.shape[0], device=row.device) - starts[row]


def is_last(row: Tensor, lengths: Tensor) -> Tensor:
    return positions(row, lengths) == lengths[row] - 1


def reverse_scan(values: Tensor, row: Tensor, decay: float) -> Tensor:
    """``s[t] = values[t] + decay * s[t + 1]`` inside each row, fp64 [R]. After its last token a row has 0.

    The scan doubles its reach: after step k, ``s[t]`` holds the terms of the next 2^k tokens. It takes log2(R) steps of whole
    tensors, no loop over tokens and no padding.

    ``decay``: factor of one step, from 0 to 1.
    """
    sums, size, reach = values.double(), values.shape[0], 1
    # Once the factor underflows to 0, no later token can change a sum any more.
    while reach < size and decay**reach != 0:
        same_row = row[reach:] == row[:-reach]
        later = torch.where(same_row, sums[reach:], 0.0)
        # A new tensor, since each step reads sums of the step before at other places.
        sums = torch.cat([sums[:-reach] + decay**reach * later, sums[-reach:]])
        reach *= 2
    return sums


def dense_ids(keys: Tensor) -> Tensor:
    """Replace equal keys by equal ids 0, 1, ..., both int64 [N]. No shape depends on the keys' values."""
    ordered, order = torch.sort(keys, stable=True)
    is_new = torch.cat([torch.zeros_like(ordered[:1]), (ordered[1:] != ordered[:-1]).long()])
    return torch.empty_like(keys).scatter(0, order, is_new.cumsum(0))


# Sums over tokens and rows that do not depend on how a mini-batch is split into micro-batches or over ranks.


@dataclass(frozen=True)
class GlobalCounts:
    """Numbers of a mini-batch over all ranks."""

    tokens: float
    """Response tokens, without those that the rollout correction rejected before the update."""
    sequences: float
    """Rows, including those with an empty response."""
    mean_weight: float | None = None
    """Mean importance weight in bypass mode, by which ``rollout_is_batch_normalize`` divides. None = not divided."""
    entropy_coeff: float | None = None
    """Weight of the entropy bonus where it is adapted. None = that of the settings."""


def row_sums(values: Tensor, row: Tensor, num_rows: int) -> Tensor:
    """Sum of each row's tokens, ``[num_rows]``; 0 for a row without tokens."""
    return values.new_zeros(num_rows).index_add(0, row, values)


def row_means(values: Tensor, row: Tensor, lengths: Tensor) -> Tensor:
    """Return the mean of each row's tokens, ``[rows]``. A row without tokens gets 0."""
    return row_sums(values, row, lengths.shape[0]) / lengths.clamp(min=1)


def aggregate(
    token_losses: Tensor, row: Tensor, lengths: Tensor, mode: str, counts: GlobalCounts, scale_factor: int | None
) -> Tensor:
    """This micro-batch's share of the mini-batch loss, a scalar. The shares of all micro-batches and ranks add up to the loss.

    ``token-mean``: sum / tokens. ``token-sum``: the sum. ``seq-mean-token-sum``: sum / sequences. ``seq-mean-token-mean``: row
    means / sequences. ``seq-mean-token-sum-norm``: sum / (sequences * ``scale_factor``), with one constant length for all rows
    (Dr. GRPO, arXiv 2503.20783).

    ``mode``: one of ``LOSS_AGG_MODES``. ``scale_factor``: the constant length of ``seq-mean-token-sum-norm``.
    """
    assert mode in LOSS_AGG_MODES, mode
    if mode == "token-mean":
        return token_losses.sum() / counts.tokens
    if mode == "token-sum":
        return token_losses.sum()
    if mode == "seq-mean-token-mean":
        return row_means(token_losses, row, lengths).sum() / counts.sequences
    if mode == "seq-mean-token-sum":
        return token_losses.sum() / counts.sequences
    assert scale_factor is not None, "seq-mean-token-sum-norm needs actor.loss_scale_factor"
    return token_losses.sum() / (counts.sequences * scale_factor)


LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
"""Values of ``actor.loss_agg_mode``."""


# Mean 0 and standard deviation 1 over all tokens or all rows of a step, the same however the rows are cut later.

VARIANCE_EPSILON = 1e-8
"""Added to the variance. This is verl's value, so that results agree with verl."""

STD_EPSILON = 1e-4
"""Added to the standard deviation of a step's rows. This is TRL's value, so that results agree with TRL."""


def whiten(values: Tensor, valid: Tensor) -> Tensor:
    """(value - mean) / sqrt(variance + 1e-8) over the valid tokens, fp64 [R], and 0 elsewhere.

    The variance is unbiased. Call it with all tokens of a step, so that the statistics are global. Fewer than two valid tokens,
    or equal values, give exactly 0: there is nothing to compare. verl raises an error for one token. Invalid values may be NaN.
    """
    centred, variance, differ = _centred(values, valid)
    return torch.where(differ, centred * (variance + VARIANCE_EPSILON).rsqrt(), 0.0)


def normalize_rows(advantages: Tensor, valid: Tensor) -> Tensor:
    """(advantage - mean) / (std + 1e-4) over the valid rows of a whole step, fp64 [B], and 0 elsewhere.

    The standard deviation is unbiased. Fewer than two valid rows, or equal advantages, give exactly 0. Invalid values may be NaN.
    Source: ``normalize_advantages`` of TRL's ``RLOOConfig``.
    """
    centred, variance, differ = _centred(advantages, valid)
    return torch.where(differ, centred / (variance.sqrt() + STD_EPSILON), 0.0)


def _centred(values: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # Valid values minus their mean (0 elsewhere), their unbiased variance, and whether two of them differ; fp64.
    valid_values = torch.where(valid, values.double(), 0.0)
    count = valid.sum()
    mean = valid_values.sum() / count.clamp(min=1)
    centred = torch.where(valid, valid_values - mean, 0.0)
    variance = centred.square().sum() / (count - 1).clamp(min=1)
    # An empty tensor has no smallest element, and amin() would raise.
    lowest = torch.where(valid, valid_values, torch.inf).amin() if values.numel() else mean
    highest = torch.where(valid, valid_values, -torch.inf).amax() if values.numel() else mean
    return centred, variance, lowest < highest
