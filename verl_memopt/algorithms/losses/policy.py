"""The policy losses by name, and the metrics that all of them report."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from verl_memopt.algorithms.kl import MAX_LOG_RATIO
from verl_memopt.algorithms.losses.covariance import clip_cov_loss, kl_cov_loss
from verl_memopt.algorithms.losses.gate import sapo_loss
from verl_memopt.algorithms.losses.sequence import geo_mean_loss, gspo_loss, sequence_loss
from verl_memopt.algorithms.losses.tokens import LossAndMetrics, LossSettings, LossTokens
from verl_memopt.algorithms.losses.vanilla import cispo_loss, gpg_loss, vanilla_loss
from verl_memopt.algorithms.reductions import GlobalCounts
from verl_memopt.config.schema import Actor

LOSSES: dict[str, Callable[[LossTokens, LossSettings], LossAndMetrics]] = {
    "vanilla": vanilla_loss,
    "sequence": sequence_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
    "gpg": gpg_loss,
    "sapo": sapo_loss,
    "geo_mean": geo_mean_loss,
    "clip_cov": clip_cov_loss,
    "kl_cov": kl_cov_loss,
}
"""Values of ``actor.policy_loss.loss_mode``, in verl's spelling."""

TOKEN_LOCAL = frozenset({"vanilla", "cispo", "gpg", "sapo", "clip_cov", "kl_cov"})
"""Modes in which the loss and the gradient of a token do not depend on other tokens' log-probs."""


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    row: Tensor,
    lengths: Tensor,
    counts: GlobalCounts,
    actor: Actor,
    weights: Tensor | None = None,
    kept: Tensor | None = None,
    selected: Tensor | None = None,
) -> LossAndMetrics:
    """Return the loss that ``actor.policy_loss.loss_mode`` names (scalar, with gradient) and its metrics (scalars, without).

    Metrics of all modes: ``pg_loss``, and ``ppo_kl``, the mean of log old - log new per token. Modes with a clip add
    ``pg_clipfrac``, the share of ratios where the clip is active; ``pg_clipfrac_lower``, the share that is bounded by
    ``clip_ratio_c``; ``ratio_clamped``, the share of log-ratios beyond plus or minus 20. Shares are of tokens, or of sequences in
    modes with one ratio per sequence.

    Args:
        log_probs: fp32 [R], with gradient.
        old_log_probs: fp32 [R], of the policy that sampled the responses.
        advantages: fp32 [R].
        row: int64 [R], the row of each token.
        lengths: int64 [rows], of kept tokens where ``kept`` is given.
        counts: Tokens and sequences of the mini-batch over all ranks.
        actor: Clip ratios and loss modes.
        weights: fp32 [R], importance weights of the rollout correction.
        kept: bool [R], False for tokens that the rollout correction rejects.
        selected: bool [R], required by the modes in ``SELECTIONS``.
    """
    tokens = LossTokens(log_probs, old_log_probs, advantages, row, lengths, counts, weights, kept, selected)
    return with_shared_metrics(tokens, *LOSSES[actor.policy_loss.loss_mode](tokens, LossSettings.of(actor)))


def with_shared_metrics(tokens: LossTokens, loss: Tensor, metrics: dict[str, Tensor]) -> LossAndMetrics:
    """Return a loss with its metrics and those that all losses report: ``pg_loss`` and ``ppo_kl``.

    Args:
        tokens: What the loss was made from.
        loss: Scalar, with gradient.
        metrics: The loss's own.
    """
    token_kl = (-tokens.log_ratio).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return loss, {"pg_loss": loss.detach(), "ppo_kl": tokens.share(token_kl), **metrics}
