"""Clipped policy-gradient losses over flat response tokens.

``log_probs``, ``old_log_probs``, ``advantages`` are ``[R]`` fp32. ``row [R]`` is the row of each token, ``lengths [rows]`` the
response length of each row. Loss and metrics are shares of the mini-batch: sum them over micro-batches and ranks, never
average them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from verl_memopt.algorithms.kl import MAX_LOG_RATIO
from verl_memopt.algorithms.reductions import GlobalCounts, aggregate, row_means, row_sums
from verl_memopt.config.schema import Actor

LossAndMetrics = tuple[Tensor, dict[str, Tensor]]


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    row: Tensor,
    lengths: Tensor,
    counts: GlobalCounts,
    actor: Actor,
) -> LossAndMetrics:
    """Return the loss that ``actor.policy_loss.loss_mode`` names (scalar, with gradient) and its metrics (scalars, without).

    Metrics: ``pg_loss``; ``pg_clipfrac``, the share of ratios where the clip is active; ``pg_clipfrac_lower``, the share that is
    bounded by ``clip_ratio_c``; ``ppo_kl``, the mean of log old - log new per token; ``ratio_clamped``, the share of log-ratios
    beyond plus or minus 20. Shares are of tokens, or of sequences in sequence modes.

    Args:
        log_probs: fp32 [R], with gradient.
        old_log_probs: fp32 [R], of the policy that sampled the responses.
        advantages: fp32 [R].
        row: int64 [R], the row of each token.
        lengths: int64 [rows].
        counts: Tokens and sequences of the mini-batch over all ranks.
        actor: Clip ratios and loss modes.
    """
    loss_of = LOSSES[actor.policy_loss.loss_mode]
    loss, metrics = loss_of(log_probs, old_log_probs, advantages, row, lengths, counts, actor)
    token_kl = (old_log_probs - log_probs).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return loss, {"pg_loss": loss.detach(), "ppo_kl": token_kl.sum() / counts.tokens, **metrics}


def token_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    row: Tensor,
    lengths: Tensor,
    counts: GlobalCounts,
    actor: Actor,
) -> LossAndMetrics:
    """Return PPO's loss: one ratio per token, a dual clip for negative advantages, reduced by ``actor.loss_agg_mode``.

    Sources: PPO, arXiv 1707.06347; dual clip, arXiv 1912.09729. Arguments as in :func:`policy_loss`.
    """
    log_ratio = log_probs - old_log_probs
    clipped_losses, clipped, clamped = _clip(log_ratio, advantages, actor)
    bound = -advantages * actor.clip_ratio_c
    bounded = (advantages < 0) & (clipped_losses > bound)
    losses = torch.where(bounded, bound, clipped_losses)
    loss = aggregate(losses, row, lengths, actor.loss_agg_mode, counts, actor.loss_scale_factor)
    return loss, _shares(counts.tokens, pg_clipfrac=clipped, pg_clipfrac_lower=bounded, ratio_clamped=clamped)


def sequence_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    row: Tensor,
    lengths: Tensor,
    counts: GlobalCounts,
    actor: Actor,
) -> LossAndMetrics:
    """Return RLOO's clipped loss: one ratio per sequence, exp of the summed log-ratio, averaged over sequences.

    It does not read ``actor.loss_agg_mode``. Source: RLOO, arXiv 2402.14740. Arguments as in :func:`policy_loss`.
    """
    log_ratio = row_sums(log_probs - old_log_probs, row, lengths.shape[0])
    return _per_sequence(log_ratio, row_means(advantages, row, lengths), counts, actor)


def gspo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    row: Tensor,
    lengths: Tensor,
    counts: GlobalCounts,
    actor: Actor,
) -> LossAndMetrics:
    """Return GSPO's clipped loss: one length-normalised ratio per sequence, averaged over sequences.

    It does not read ``actor.loss_agg_mode``. Source: GSPO, arXiv 2507.18071. Arguments as in :func:`policy_loss`.
    """
    log_ratio = row_means(log_probs - old_log_probs, row, lengths)
    return _per_sequence(log_ratio, row_means(advantages, row, lengths), counts, actor)


LOSSES: dict[str, Callable[..., LossAndMetrics]] = {"vanilla": token_loss, "sequence": sequence_loss, "gspo": gspo_loss}
"""Values of ``actor.policy_loss.loss_mode``."""

TOKEN_LOCAL = frozenset({"vanilla"})
"""Modes that sum over tokens: the loss and the gradient of a token do not depend on other tokens' log-probs."""


def _per_sequence(log_ratio: Tensor, advantages: Tensor, counts: GlobalCounts, actor: Actor) -> LossAndMetrics:
    """Average clipped losses over sequences. A row without tokens has advantage 0 here and adds 0."""
    losses, clipped, clamped = _clip(log_ratio, advantages, actor)
    none_bounded = torch.zeros_like(clipped)
    shares = _shares(counts.sequences, pg_clipfrac=clipped, pg_clipfrac_lower=none_bounded, ratio_clamped=clamped)
    return losses.sum() / counts.sequences, shares


def _clip(log_ratio: Tensor, advantages: Tensor, actor: Actor) -> tuple[Tensor, Tensor, Tensor]:
    """Return max(-A * ratio, -A * clipped ratio), where the second is larger, and where the log-ratio was clamped."""
    assert actor.clip_ratio_low is not None, "clip_ratio_low follows clip_ratio when settings are loaded"
    assert actor.clip_ratio_high is not None, "clip_ratio_high follows clip_ratio when settings are loaded"
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - actor.clip_ratio_low, 1 + actor.clip_ratio_high)
    return torch.maximum(free, clipped), clipped > free, log_ratio.abs() > MAX_LOG_RATIO


def _shares(count: float, **flags: Tensor) -> dict[str, Tensor]:
    return {name: flag.detach().sum() / count for name, flag in flags.items()}
