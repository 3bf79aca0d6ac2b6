"""Clip-Cov and KL-Cov: losses that hold back the few tokens whose log-prob and advantage vary together most.

Those tokens drive the entropy down. Both losses act on tokens that were selected before: call the selection once with all
tokens of a mini-batch and their old log-probs, so that it depends neither on micro-batches nor on ranks. verl selects inside each
micro-batch. Source: "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", arXiv 2505.22617.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl_memopt.algorithms.losses import LossAndMetrics, LossSettings, LossTokens, clipped_loss, safe_ratio
from verl_memopt.config.schema import PolicyLoss


def token_covariance(log_probs: Tensor, advantages: Tensor) -> Tensor:
    """Return (A - mean A) * (log-prob - mean log-prob) of each token, fp64 [R].

    Args:
        log_probs: fp32 [R], of all tokens of a mini-batch.
        advantages: fp32 [R].
    """
    advantages, log_probs = advantages.double(), log_probs.detach().double()
    return (advantages - advantages.mean()) * (log_probs - log_probs.mean())


def select_clip_cov(
    log_probs: Tensor, advantages: Tensor, ratio: float, lower: float, upper: float, generator: torch.Generator
) -> Tensor:
    """Return True for the tokens whose gradient ``clip_cov`` removes, bool [R].

    They are a random choice of ``ratio`` of all tokens, at least one, among those with a covariance between the bounds.

    Args:
        log_probs: fp32 [R], of all tokens of a mini-batch.
        advantages: fp32 [R].
        ratio: ``policy_loss.clip_cov_ratio``.
        lower: ``policy_loss.clip_cov_lb``.
        upper: ``policy_loss.clip_cov_ub``.
        generator: Source of the choice, on the host.
    """
    covariance = token_covariance(log_probs, advantages)
    candidates = ((covariance > lower) & (covariance < upper)).nonzero().flatten()
    number = max(int(ratio * covariance.shape[0]), 1)
    order = torch.randperm(candidates.shape[0], generator=generator).to(candidates.device)
    selected = torch.zeros_like(covariance, dtype=torch.bool)
    selected[candidates[order[:number]]] = True
    return selected


def select_kl_cov(log_probs: Tensor, advantages: Tensor, ratio: float) -> Tensor:
    """Return True for the tokens that ``kl_cov`` penalises, bool [R]: ``ratio`` of all, at least one, by largest covariance.

    Args:
        log_probs: fp32 [R], of all tokens of a mini-batch.
        advantages: fp32 [R].
        ratio: ``policy_loss.kl_cov_ratio``.
    """
    covariance = token_covariance(log_probs, advantages)
    number = min(max(int(ratio * covariance.shape[0]), 1), covariance.shape[0])
    selected = torch.zeros_like(covariance, dtype=torch.bool)
    selected[covariance.topk(number).indices] = True
    return selected


def clip_cov_loss(tokens: LossTokens, settings: LossSettings) -> LossAndMetrics:
    """Return PPO's loss without its dual clip, and 0 for the selected tokens whose ratio is not clipped anyway.

    Args:
        tokens: Of the micro-batch, with ``selected`` from :func:`select_clip_cov`.
        settings: Clips and aggregation.

    Returns:
        The loss, and ``pg_clipfrac``, the share of tokens that the selection sets to 0.
    """
    assert tokens.selected is not None, "clip_cov needs the tokens that select_clip_cov chose over the mini-batch"
    losses, clipped = clipped_loss(safe_ratio(tokens.log_ratio), tokens.advantages, settings.bounds)
    removed = tokens.selected & ~clipped
    return settings.aggregate(losses.where(~removed, 0.0), tokens), {"pg_clipfrac": tokens.share(removed)}


def kl_cov_loss(tokens: LossTokens, settings: LossSettings) -> LossAndMetrics:
    """Return -A * ratio without a clip, plus ``ppo_kl_coef`` * abs(log-ratio) for the selected tokens.

    Args:
        tokens: Of the micro-batch, with ``selected`` from :func:`select_kl_cov`.
        settings: Coefficient and aggregation.

    Returns:
        The loss, and ``ppo_kl_abs``, the mean absolute log-ratio.
    """
    assert tokens.selected is not None, "kl_cov needs the tokens that select_kl_cov chose over the mini-batch"
    assert settings.ppo_kl_coef is not None, "kl_cov needs actor.policy_loss.ppo_kl_coef"
    distance = tokens.log_ratio.abs()
    penalty = torch.where(tokens.selected, settings.ppo_kl_coef * distance, 0.0)
    losses = -tokens.advantages * safe_ratio(tokens.log_ratio) + penalty
    return settings.aggregate(losses, tokens), {"ppo_kl_abs": tokens.share(distance)}


def clip_cov_selection(log_probs: Tensor, advantages: Tensor, loss: PolicyLoss, generator: torch.Generator) -> Tensor:
    """Return :func:`select_clip_cov` of the settings."""
    return select_clip_cov(log_probs, advantages, loss.clip_cov_ratio, loss.clip_cov_lb, loss.clip_cov_ub, generator)


def kl_cov_selection(log_probs: Tensor, advantages: Tensor, loss: PolicyLoss, generator: torch.Generator) -> Tensor:
    """Return :func:`select_kl_cov` of the settings."""
    return select_kl_cov(log_probs, advantages, loss.kl_cov_ratio)
