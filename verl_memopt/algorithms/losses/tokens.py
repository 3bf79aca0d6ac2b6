"""What every policy loss reads, and the shares and clips that they have in common."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from verl_memopt.algorithms.kl import MAX_LOG_RATIO
from verl_memopt.algorithms.reductions import GlobalCounts, aggregate, row_means
from verl_memopt.config.schema import Actor

LossAndMetrics = tuple[Tensor, dict[str, Tensor]]


@dataclass(frozen=True)
class LossTokens:
    """The response tokens of a micro-batch, flat, row after row."""

    log_probs: Tensor
    """fp32 [R], with gradient."""
    old_log_probs: Tensor
    """fp32 [R], of the policy that sampled the responses, or of the rollout engine in bypass mode."""
    advantages: Tensor
    """fp32 [R]."""
    row: Tensor
    """int64 [R], the row of each token."""
    lengths: Tensor
    """int64 [rows], the response tokens of each row that count: only the kept ones where ``kept`` rejects some."""
    counts: GlobalCounts
    """Tokens and sequences of the mini-batch over all ranks, tokens counted as in ``lengths``."""
    weights: Tensor | None = None
    """fp32 [R], importance weights of the rollout correction, without a gradient. None = 1."""
    kept: Tensor | None = None
    """bool [R]: False for tokens that the rollout correction rejects. None = all are kept."""
    selected: Tensor | None = None
    """bool [R]: the tokens that ``clip_cov`` or ``kl_cov`` acts on, chosen over the mini-batch."""

    @property
    def log_ratio(self) -> Tensor:
        """Return log new - log old of each token, fp32 [R], with gradient."""
        return self.log_probs - self.old_log_probs

    def masked(self, values: Tensor) -> Tensor:
        """Return the values with 0 for rejected tokens, ``[R]``."""
        return values if self.kept is None else values.where(self.kept, 0.0)

    def weighted(self, values: Tensor) -> Tensor:
        """Return the values times the importance weights, with 0 for rejected tokens, ``[R]``."""
        return self.masked(values if self.weights is None else values * self.weights)

    def row_means(self, values: Tensor) -> Tensor:
        """Return the mean over each row's kept tokens, ``[rows]``. A row without any gets 0."""
        return row_means(self.masked(values), self.row, self.lengths)

    def share(self, flags: Tensor) -> Tensor:
        """Return this micro-batch's part of the share of tokens that are flagged, a scalar without a gradient."""
        return self.masked(flags.detach()).sum() / self.counts.tokens


@dataclass(frozen=True)
class LossSettings:
    """The settings of ``actor_rollout_ref.actor`` that policy losses read."""

    clip_ratio_low: float | None
    clip_ratio_high: float | None
    clip_ratio_c: float
    loss_agg_mode: str
    loss_scale_factor: int | None
    ppo_kl_coef: float | None = None
    """``policy_loss.ppo_kl_coef``, the weight of the penalty in ``kl_cov``."""
    tau_pos: float | None = None
    """``actor.tau_pos``, of sapo."""
    tau_neg: float | None = None
    """``actor.tau_neg``, of sapo."""

    @classmethod
    def of(cls, actor: Actor) -> LossSettings:
        """Take the settings from their section.

        Args:
            actor: The section ``actor_rollout_ref.actor``.
        """
        return cls(
            actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_c, actor.loss_agg_mode, actor.loss_scale_factor,
            actor.policy_loss.ppo_kl_coef, actor.tau_pos, actor.tau_neg,
        )  # fmt: skip

    @property
    def bounds(self) -> tuple[float, float]:
        """Return how far the ratio may fall below 1 and rise above it."""
        assert self.clip_ratio_low is not None, "clip_ratio_low follows clip_ratio when settings are loaded"
        assert self.clip_ratio_high is not None, "clip_ratio_high follows clip_ratio when settings are loaded"
        return self.clip_ratio_low, self.clip_ratio_high

    def aggregate(self, token_losses: Tensor, tokens: LossTokens) -> Tensor:
        """Return the micro-batch's share of the mini-batch loss under ``loss_agg_mode``, a scalar.

        Args:
            token_losses: fp32 [R], before importance weights and rejection.
            tokens: What the losses were made from.
        """
        losses = tokens.weighted(token_losses)
        return aggregate(losses, tokens.row, tokens.lengths, self.loss_agg_mode, tokens.counts, self.loss_scale_factor)


def safe_ratio(log_ratio: Tensor) -> Tensor:
    """Return exp of the log-ratio, clamped to plus and minus 20 first, where its gradient stops. Same shape."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def beyond_clamp(log_ratio: Tensor) -> Tensor:
    """Return True where :func:`safe_ratio` clamps. Bool in the same shape."""
    return log_ratio.abs() > MAX_LOG_RATIO


def clipped_loss(ratio: Tensor, advantages: Tensor, bounds: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Return max(-A * ratio, -A * clipped ratio), and True where the second is larger.

    Args:
        ratio: fp32, per token or per row.
        advantages: A, fp32 in the same shape.
        bounds: How far the ratio may fall below 1 and rise above it.
    """
    low, high = bounds
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    return clipped.maximum(free), clipped > free
