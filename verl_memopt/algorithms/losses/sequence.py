"""Losses with one ratio per response: RLOO's, GSPO and GMPO. They average over responses whatever ``loss_agg_mode`` says."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_memopt.algorithms.losses.tokens import (
    LossAndMetrics,
    LossSettings,
    LossTokens,
    beyond_clamp,
    clipped_loss,
    safe_ratio,
)
from verl_memopt.algorithms.reductions import row_sums

SMALLEST_WEIGHT = 1e-10
"""Importance weights are raised to this before a logarithm."""


def sequence_loss(tokens: LossTokens, settings: LossSettings) -> LossAndMetrics:
    """Return RLOO's clipped loss: one ratio per response, exp of the summed log-ratio.

    Source: RLOO, arXiv 2402.14740. Advantage and importance weight of a response are the means over its tokens.

    Args:
        tokens: Of the micro-batch.
        settings: Clips.

    Returns:
        The loss, and the shares of responses ``pg_clipfrac``, ``pg_clipfrac_lower`` (0) and ``ratio_clamped``.
    """
    log_ratio = row_sums(tokens.masked(tokens.log_ratio), tokens.row, tokens.lengths.shape[0])
    losses, clipped = clipped_loss(safe_ratio(log_ratio), tokens.row_means(tokens.advantages), settings.bounds)
    if tokens.weights is not None:
        losses = losses * tokens.row_means(tokens.weights)
    return losses.sum() / tokens.counts.sequences, _row_shares(tokens, clipped, beyond_clamp(log_ratio))


def gspo_loss(tokens: LossTokens, settings: LossSettings) -> LossAndMetrics:
    """Return GSPO's clipped loss: one ratio per response, exp of the mean log-ratio.

    It is GSPO's form per token: the value of each token's ratio is the response's, its gradient is the token's own, so that
    advantages and importance weights may differ inside a response. Where they do not, it equals the form per response. Source:
    GSPO, arXiv 2507.18071.

    Args:
        tokens: Of the micro-batch.
        settings: Clips.

    Returns:
        The loss, and the shares of responses ``pg_clipfrac``, ``pg_clipfrac_lower`` (0) and ``ratio_clamped``.
    """
    log_ratio = tokens.row_means(tokens.log_ratio.detach())
    own = tokens.log_probs - tokens.log_probs.detach()
    losses, clipped = clipped_loss(safe_ratio(log_ratio[tokens.row] + own), tokens.advantages, settings.bounds)
    loss = tokens.row_means(tokens.weighted(losses)).sum() / tokens.counts.sequences
    return loss, _row_shares(tokens, tokens.row_means(clipped.to(losses)), beyond_clamp(log_ratio))


def geo_mean_loss(tokens: LossTokens, settings: LossSettings) -> LossAndMetrics:
    """Return GMPO's loss: -A times the geometric mean of a response's ratios, each clipped in the log on the side that binds.

    The log-ratio of a token is held to [-``clip_ratio_low``, ``clip_ratio_high``]: from above where A > 0, from below where
    A < 0. Source: GMPO, arXiv 2507.20673. The importance weight of a response is the geometric mean of its tokens' weights.

    Args:
        tokens: Of the micro-batch.
        settings: Clips, of the log-ratio.

    Returns:
        The loss, and the shares of tokens ``pg_clipfrac`` (outside the clips, A > 0) and ``pg_clipfrac_lower`` (A < 0).
    """
    low, high = settings.bounds
    sign, log_ratio = tokens.advantages.sign(), tokens.log_ratio
    held = log_ratio.clamp(-low, high)
    binding = sign * torch.minimum(sign * log_ratio, sign * held)
    losses = -tokens.row_means(tokens.advantages) * safe_ratio(tokens.row_means(binding))
    if tokens.weights is not None:
        losses = losses * tokens.row_means(tokens.weights.clamp(min=SMALLEST_WEIGHT).log()).exp()
    outside = log_ratio != held
    shares = {
        "pg_clipfrac": tokens.share(outside & (tokens.advantages > 0)),
        "pg_clipfrac_lower": tokens.share(outside & (tokens.advantages < 0)),
    }
    return losses.sum() / tokens.counts.sequences, shares


def _row_shares(tokens: LossTokens, clipped: Tensor, clamped: Tensor) -> dict[str, Tensor]:
    """Return shares of responses. A response without tokens adds 0 to all of them."""
    sequences = tokens.counts.sequences
    return {
        "pg_clipfrac": clipped.detach().sum() / sequences,
        "pg_clipfrac_lower": torch.zeros_like(clipped, dtype=torch.float32).sum(),
        "ratio_clamped": clamped.detach().sum() / sequences,
    }
