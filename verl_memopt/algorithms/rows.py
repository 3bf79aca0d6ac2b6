"""Functions of token values that are stored flat, row after row: positions, scans, sums, means and whitening.

``values [R]`` has one value per token of all rows. ``row [R]`` int64 is the row of each token, and does not decrease. ``lengths
[rows]`` int64 is the number of tokens of each row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def positions(row: Tensor, lengths: Tensor) -> Tensor:
    """Return the position of each token in its row, int64 [R], from 0."""
    starts = lengths.cumsum(0) - lengths
    return torch.arange(row.shape[0], device=row.device) - starts[row]


def is_last(row: Tensor, lengths: Tensor) -> Tensor:
    return positions(row, lengths) == lengths[row] - 1


def reverse_scan(values: Tensor, row: Tensor, decay: float) -> Tensor:
    """Return the decayed sum s of the values from each token to the end of its row, fp64 [R].

    ``s[t] = values[t] + decay * s[t + 1]``, where s is 0 after the last token of a row. The scan takes log2(R) operations on
    whole tensors, without a loop over tokens and without padding: after operation k, ``s[t]`` is the sum over 2^k tokens.

    ``decay``: factor per token, from 0 to 1.
    """
    sums, size, reach = values.double(), values.shape[0], 1
    # Once the factor underflows to 0, no later token can change a sum any more.
    while reach < size and decay**reach != 0:
        same_row = row[reach:] == row[:-reach]
        later = torch.where(same_row, sums[reach:], 0.0)
        # Make a new tensor, because this operation reads sums of the previous one at other positions.
        sums = torch.cat([sums[:-reach] + decay**reach * later, sums[-reach:]])
        reach *= 2
    return sums


def dense_ids(keys: Tensor) -> Tensor:
    """Replace equal keys by equal ids 0, 1, ..., both int64 [N]. No shape depends on the values of the keys."""
    ordered, order = torch.sort(keys, stable=True)
    is_new = torch.cat([torch.zeros_like(ordered[:1]), (ordered[1:] != ordered[:-1]).long()])
    return torch.empty_like(keys).scatter(0, order, is_new.cumsum(0))


# Sums over tokens and rows that do not depend on how a mini-batch is split into micro-batches or over ranks.


@dataclass(frozen=True)
class GlobalCounts:
    """Numbers of a whole mini-batch, over all ranks and micro-batches."""

    tokens: float
    """Response tokens, without those that the rollout correction rejected before the update."""
    sequences: float
    """Rows, including those with an empty response."""
    mean_weight: float | None = None
    """Mean importance weight in bypass mode, by which ``rollout_is_batch_normalize`` divides. None = it was not computed."""
    entropy_coeff: float | None = None
    """Adapted weight of the entropy bonus. None = the weight of the settings."""


def row_sums(values: Tensor, row: Tensor, num_rows: int) -> Tensor:
    """Return the sum of each row's tokens, ``[num_rows]``. A row without tokens gets 0."""
    return values.new_zeros(num_rows).index_add(0, row, values)


def row_means(values: Tensor, row: Tensor, lengths: Tensor) -> Tensor:
    """Return the mean of each row's tokens, ``[rows]``. A row without tokens gets 0."""
    return row_sums(values, row, lengths.shape[0]) / lengths.clamp(min=1)


def aggregate(
    token_losses: Tensor, row: Tensor, lengths: Tensor, mode: str, counts: GlobalCounts, scale_factor: int | None
) -> Tensor:
    """Return this micro-batch's share of the mini-batch loss, a scalar. The shares of all micro-batches and ranks add up to it.

    ``mode`` is one of ``LOSS_AGG_MODES``. Tokens and sequences are those of ``counts``::

        token-mean                 sum of token losses / tokens
        token-sum                  sum of token losses
        seq-mean-token-sum         sum of token losses / sequences
        seq-mean-token-mean        sum of row means / sequences
        seq-mean-token-sum-norm    sum of token losses / (sequences * scale_factor)

    ``scale_factor`` is a constant length for all rows (Dr. GRPO, arXiv 2503.20783). Other modes do not use it.
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


# Scale values to mean 0 and standard deviation 1 over all tokens or rows of a step, before the rows are cut for the ranks.

VARIANCE_EPSILON = 1e-8
"""Added to the variance. This is verl's value, so that results agree with verl."""

STD_EPSILON = 1e-4
"""Added to the standard deviation of a step's rows. This is TRL's value, so that results agree with TRL."""


def whiten(values: Tensor, valid: Tensor) -> Tensor:
    """Scale the valid values to mean 0 and standard deviation 1, fp64 [R]. Other tokens get 0, and may be NaN before.

    The result is ``(value - mean) / sqrt(variance + 1e-8)``, with an unbiased variance. Call it with all tokens of a step, so
    that the statistics are global. Fewer than two valid tokens, or equal values, give exactly 0, because there is nothing to
    compare. verl raises an error for a single token.
    """
    centred, variance, differ = _centred(values, valid)
    return torch.where(differ, centred * (variance + VARIANCE_EPSILON).rsqrt(), 0.0)


def normalize_rows(advantages: Tensor, valid: Tensor) -> Tensor:
    """Scale the valid advantages of a whole step to mean 0 and standard deviation 1, fp64 [B]. Other rows get 0.

    The result is ``(advantage - mean) / (std + 1e-4)``, with an unbiased standard deviation. Fewer than two valid rows, or equal
    advantages, give exactly 0. Invalid rows may be NaN. Source: ``normalize_advantages`` of TRL's ``RLOOConfig``.
    """
    centred, variance, differ = _centred(advantages, valid)
    return torch.where(differ, centred / (variance.sqrt() + STD_EPSILON), 0.0)


def _centred(values: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # Returns the valid values minus their mean (0 elsewhere), their unbiased variance, and whether two of them differ; fp64.
    valid_values = torch.where(valid, values.double(), 0.0)
    count = valid.sum()
    mean = valid_values.sum() / count.clamp(min=1)
    centred = torch.where(valid, valid_values - mean, 0.0)
    variance = centred.square().sum() / (count - 1).clamp(min=1)
    # An empty tensor has no smallest element, and amin() would raise.
    lowest = torch.where(valid, valid_values, torch.inf).amin() if values.numel() else mean
    highest = torch.where(valid, valid_values, -torch.inf).amax() if values.numel() else mean
    return centred, variance, lowest < highest
