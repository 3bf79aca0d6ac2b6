"""Losses with one ratio per token, or none: PPO, CISPO, GPG and REINFORCE. A token's gradient depends on that token alone."""

from __future__ import annotations

import torch

from verl_memopt.algorithms.losses.tokens import (
    LossAndMetrics,
    LossSettings,
    LossTokens,
    beyond_clamp,
    clipped_loss,
    safe_ratio,
)


def vanilla_loss(tokens: LossTokens, settings: LossSettings) -> LossAndMetrics:
    """Return PPO's loss: max(-A * ratio, -A * clipped ratio), at most -A * ``clip_ratio_c`` for negative A.

    The upper and the lower clip are settings of their own (clip-higher of DAPO, arXiv 2503.14476). Sources: PPO, arXiv
    1707.06347; dual clip, arXiv 1912.09729.

    Args:
        tokens: Of the micro-batch.
        settings: Clips and aggregation.

    Returns:
        The loss, and ``pg_clipfrac``, ``pg_clipfrac_lower`` (the share bounded by ``clip_ratio_c``) and ``ratio_clamped``.
    """
    losses, clipped = clipped_loss(safe_ratio(tokens.log_ratio), tokens.advantages, settings.bounds)
    bound = -tokens.advantages * settings.clip_ratio_c
    bounded = (tokens.advantages < 0) & (losses > bound)
    shares = {
        "pg_clipfrac": tokens.share(clipped),
        "pg_clipfrac_lower": tokens.share(bounded),
        "ratio_clamped": tokens.share(beyond_clamp(tokens.log_ratio)),
    }
    return settings.aggregate(torch.where(bounded, bound, losses), tokens), shares


def cispo_loss(tokens: LossTokens, settings: LossSettings) -> LossAndMetrics:
    """Return CISPO's loss: -A * log-prob, times the clipped ratio without its gradient.

    Every token keeps a gradient, also where its ratio is clipped. Source: CISPO (MiniMax-M1), arXiv 2506.13585.

    Args:
        tokens: Of the micro-batch.
        settings: Clips and aggregation.

    Returns:
        The loss, and ``pg_clipfrac`` and ``ratio_clamped``.
    """
    low, high = settings.bounds
    ratio = safe_ratio(tokens.log_ratio.detach())
    factor = ratio.clamp(1 - low, 1 + high)
    shares = {"pg_clipfrac": tokens.share(ratio != factor), "ratio_clamped": tokens.share(beyond_clamp(tokens.log_ratio))}
    return settings.aggregate(-factor * tokens.advantages * tokens.log_probs, tokens), shares


def gpg_loss(tokens: LossTokens, settings: LossSettings) -> LossAndMetrics:
    """Return the loss of REINFORCE and GPG: -A * log-prob, without a ratio and without a clip.

    Sources: REINFORCE (Williams, 1992); GPG, arXiv 2504.02546.

    Args:
        tokens: Of the micro-batch.
        settings: Aggregation.

    Returns:
        The loss, and no metrics of its own.
    """
    return settings.aggregate(-tokens.advantages * tokens.log_probs, tokens), {}
