"""Sums over tokens and rows that do not depend on how a mini-batch is split into micro-batches or over ranks.

The response tokens of a micro-batch lie flat, row after row: ``values [R]``, ``row [R]`` int64 (the row of each token) and
``lengths [rows]`` int64. Each reduction divides by counts of the whole mini-batch. Sum the results over micro-batches and
ranks, never average them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class GlobalCounts:
    """Numbers of a mini-batch over all ranks."""

    tokens: float
    """Response tokens, without those that the rollout correction rejected before the update."""
    sequences: float
    """Rows, including those with an empty response."""
    mean_weight: float | None = None
    """Mean importance weight in bypass mode, by which ``rollout_is_batch_normalize`` divides. None = not divided."""


def row_sums(values: Tensor, row: Tensor, num_rows: int) -> Tensor:
    """Return the sum of each row's tokens, ``[num_rows]``. A row without tokens gets 0."""
    return values.new_zeros(num_rows).index_add(0, row, values)


def row_means(values: Tensor, row: Tensor, lengths: Tensor) -> Tensor:
    """Return the mean of each row's tokens, ``[rows]``. A row without tokens gets 0."""
    return row_sums(values, row, lengths.shape[0]) / lengths.clamp(min=1)


def aggregate(
    token_losses: Tensor, row: Tensor, lengths: Tensor, mode: str, counts: GlobalCounts, scale_factor: int | None
) -> Tensor:
    """Return this micro-batch's share of the mini-batch loss, a scalar.

    The shares of all micro-batches and ranks add up to the loss.

    ``token-mean``: sum / tokens. ``token-sum``: the sum. ``seq-mean-token-sum``: sum / sequences. ``seq-mean-token-mean``: row
    means / sequences. ``seq-mean-token-sum-norm``: sum / (sequences * ``scale_factor``), with one constant length for all rows
    (Dr. GRPO, arXiv 2503.20783).

    Args:
        token_losses: fp32 [R].
        row: int64 [R].
        lengths: int64 [rows].
        mode: One of ``LOSS_AGG_MODES``.
        counts: Tokens and sequences of the mini-batch over all ranks.
        scale_factor: The constant length of ``seq-mean-token-sum-norm``.
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
