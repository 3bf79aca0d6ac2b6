"""SAPO: a smooth gate on each token's ratio in the place of a clip, averaged over responses whatever ``loss_agg_mode`` is."""

from __future__ import annotations

import torch

from verl_memopt.algorithms.losses.tokens import LossAndMetrics, LossSettings, LossTokens, beyond_clamp, safe_ratio


def sapo_loss(tokens: LossTokens, settings: LossSettings) -> LossAndMetrics:
    """Return SAPO's loss: -A * 4 / tau * sigmoid(tau * (ratio - 1)), averaged over tokens, then over responses.

    tau is ``tau_pos`` where A > 0, else ``tau_neg``. At a ratio of 1 the gradient is that of -A * ratio; away from it the
    gradient falls smoothly to 0, faster for a larger tau. Source: SAPO, arXiv 2511.20347.

    Args:
        tokens: Of the micro-batch.
        settings: The two steepnesses.

    Returns:
        The loss, and ``ratio_clamped``, the share of log-ratios beyond plus or minus 20.
    """
    assert settings.tau_pos is not None, "sapo needs actor.tau_pos"
    assert settings.tau_neg is not None, "sapo needs actor.tau_neg"
    tau = torch.full_like(tokens.advantages, settings.tau_neg).masked_fill(tokens.advantages > 0, settings.tau_pos)
    gate = 4 / tau * torch.sigmoid(tau * (safe_ratio(tokens.log_ratio) - 1))
    loss = tokens.row_means(tokens.weighted(-tokens.advantages * gate)).sum() / tokens.counts.sequences
    return loss, {"ratio_clamped": tokens.share(beyond_clamp(tokens.log_ratio))}
