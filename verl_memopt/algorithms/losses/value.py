"""The critic's clipped loss, and how much of the returns it explains."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_memopt.algorithms.reductions import GlobalCounts, aggregate

VARIANCE_EPSILON = 1e-5
"""Added to the variance of the returns, as in verl."""


def value_loss(
    predictions: Tensor,
    values: Tensor,
    returns: Tensor,
    row: Tensor,
    lengths: Tensor,
    counts: GlobalCounts,
    clip: float,
    mode: str,
    scale_factor: int | None = None,
    kept: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return half of the larger of two squared errors: that of the prediction, and that of it clipped around the old value.

    Source: the reference implementation of PPO, arXiv 1707.06347, and ``compute_value_loss`` in verl.

    Args:
        predictions: fp32 [R], with gradient.
        values: fp32 [R], the critic's values when the advantages were computed.
        returns: fp32 [R].
        row: int64 [R], the row of each token.
        lengths: int64 [rows], the tokens of each row that count.
        counts: Tokens and sequences of the mini-batch over all ranks.
        clip: ``critic.cliprange_value``, how far a prediction may move from the old value.
        mode: ``critic.loss_agg_mode``.
        scale_factor: The constant length of ``seq-mean-token-sum-norm``.
        kept: bool [R], False for the tokens that the rollout correction rejected; they do not count. None = all count.

    Returns:
        This micro-batch's share of the loss (scalar, with gradient), and its shares of ``vf_loss``, ``vf_clipfrac`` and
        ``vpred_mean`` (scalars, without): sum them over micro-batches and ranks.
    """
    if kept is not None:
        predictions, values, returns = (tensor.where(kept, 0.0) for tensor in (predictions, values, returns))
    errors = (predictions - returns).square()
    clipped_errors = (predictions.clamp(values - clip, values + clip) - returns).square()
    loss = 0.5 * aggregate(torch.maximum(errors, clipped_errors), row, lengths, mode, counts, scale_factor)
    return loss, {
        "vf_loss": loss.detach(),
        "vf_clipfrac": (clipped_errors > errors).sum() / counts.tokens,
        "vpred_mean": predictions.detach().sum() / counts.tokens,
    }


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """Return 1 - var(returns - values) / (var(returns) + 1e-5) over all tokens of a step. 0 for fewer than two tokens.

    Args:
        values: fp32 [R].
        returns: fp32 [R].
    """
    if returns.numel() < 2:
        return 0.0
    returns, values = returns.double(), values.double()
    return float(1 - (returns - values).var() / (returns.var() + VARIANCE_EPSILON))
