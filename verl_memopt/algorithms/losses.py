"""Policy losses over flat response tokens, and the critic's loss. ``records.py`` has a record of each policy loss.

A policy loss is a function of the ``tokens`` of a micro-batch and the settings ``actor``, which have its clips and aggregation.
``log_probs``, ``old_log_probs``, ``advantages`` are ``[R]`` fp32. ``row [R]`` is the row of each token, ``lengths [rows]`` the
response length of each row. In the formulas A is the advantage, and the ratio is exp(log_probs - old_log_probs). Loss and metrics
are a micro-batch's shares of the mini-batch: sum them over micro-batches and ranks, and never average them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verl_memopt.algorithms.kl import MAX_LOG_RATIO
from verl_memopt.algorithms.records import LOSSES, load
from verl_memopt.algorithms.rows import GlobalCounts, aggregate, row_means, row_sums
from verl_memopt.config.schema import Actor, PolicyLoss

# The input of every policy loss, and the shares and clips that several losses use.

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
    """int64 [rows], number of response tokens of each row, without the tokens that ``kept`` rejects."""
    counts: GlobalCounts
    """Tokens and sequences of the mini-batch over all ranks. Tokens are counted as in ``lengths``."""
    weights: Tensor | None = None
    """fp32 [R], importance weights of the rollout correction, without a gradient. None = 1."""
    kept: Tensor | None = None
    """bool [R]: False for tokens that the rollout correction rejects. None = all are kept."""
    selected: Tensor | None = None
    """bool [R]: the tokens that ``clip_cov`` or ``kl_cov`` acts on. They are selected from the whole mini-batch."""

    @property
    def log_ratio(self) -> Tensor:
        """Return log new - log old of each token, fp32 [R], with gradient. 0 for rejected tokens, whose old value may be NaN."""
        if self.kept is None:
            return self.log_probs - self.old_log_probs
        # A mask after the exponential would be too late: the gradient of exp(NaN) is NaN, and 0 times NaN is NaN.
        return self.log_probs - self.old_log_probs.where(self.kept, self.log_probs.detach())

    def masked(self, values: Tensor) -> Tensor:
        return values if self.kept is None else values.where(self.kept, 0.0)

    def weighted(self, values: Tensor) -> Tensor:
        return self.masked(values if self.weights is None else values * self.weights)

    def row_means(self, values: Tensor) -> Tensor:
        """Return the mean over each row's kept tokens, ``[rows]``. A row without kept tokens gets 0."""
        return row_means(self.masked(values), self.row, self.lengths)

    def share(self, flags: Tensor) -> Tensor:
        """Return the number of flagged tokens here, divided by all tokens of the mini-batch, a scalar without a gradient."""
        return self.masked(flags.detach()).sum() / self.counts.tokens

    def aggregated(self, token_losses: Tensor, actor: Actor) -> Tensor:
        """Return this micro-batch's share of the mini-batch loss under ``actor.loss_agg_mode``, a scalar.

        ``token_losses`` is fp32 [R], before importance weights and rejection.
        """
        losses = self.weighted(token_losses)
        return aggregate(losses, self.row, self.lengths, actor.loss_agg_mode, self.counts, actor.loss_scale_factor)


def clip_bounds(actor: Actor) -> tuple[float, float]:
    assert actor.clip_ratio_low is not None, "clip_ratio_low follows clip_ratio when settings are loaded"
    assert actor.clip_ratio_high is not None, "clip_ratio_high follows clip_ratio when settings are loaded"
    return actor.clip_ratio_low, actor.clip_ratio_high


def safe_ratio(log_ratio: Tensor) -> Tensor:
    # A clamped log-ratio gives no gradient.
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def beyond_clamp(log_ratio: Tensor) -> Tensor:
    return log_ratio.abs() > MAX_LOG_RATIO


def clipped_loss(ratio: Tensor, advantages: Tensor, actor: Actor) -> tuple[Tensor, Tensor]:
    """Return max(-A * ratio, -A * clipped ratio), and whether the clipped term is larger, both [R] or [rows]."""
    low, high = clip_bounds(actor)
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    return clipped.maximum(free), clipped > free


# Losses with one ratio per token, or without a ratio: PPO, CISPO, DPPO, GPG and REINFORCE. A token's gradient depends only on
# this token.


def vanilla_loss(tokens: LossTokens, actor: Actor) -> LossAndMetrics:
    """PPO's loss: max(-A * ratio, -A * clipped ratio), at most -A * ``clip_ratio_c`` for negative A.

    The upper and the lower clip are separate settings (clip-higher of DAPO, arXiv 2503.14476). Sources: PPO, arXiv
    1707.06347; dual clip, arXiv 1912.09729.

    Metrics: ``pg_clipfrac``, ``pg_clipfrac_lower`` (the share bounded by ``clip_ratio_c``) and ``ratio_clamped``.
    """
    losses, clipped = clipped_loss(safe_ratio(tokens.log_ratio), tokens.advantages, actor)
    bound = -tokens.advantages * (math.inf if actor.clip_ratio_c is None else actor.clip_ratio_c)
    bounded = (tokens.advantages < 0) & (losses > bound)
    shares = {
        "pg_clipfrac": tokens.share(clipped),
        "pg_clipfrac_lower": tokens.share(bounded),
        "ratio_clamped": tokens.share(beyond_clamp(tokens.log_ratio)),
    }
    return tokens.aggregated(torch.where(bounded, bound, losses), actor), shares


def cispo_loss(tokens: LossTokens, actor: Actor) -> LossAndMetrics:
    """CISPO's loss: -A * log-prob, times the clipped ratio without its gradient.

    Every token keeps a gradient, even if its ratio is clipped. ``cispo_max_ratio``, if set, is the only bound. Source: CISPO
    (MiniMax-M1), arXiv 2506.13585.

    Metrics: ``pg_clipfrac``, ``pg_clipfrac_lower`` (0) and ``ratio_clamped``.
    """
    (low, high), most = clip_bounds(actor), actor.policy_loss.cispo_max_ratio
    ratio = safe_ratio(tokens.log_ratio.detach())
    factor = ratio.clamp(1 - low, 1 + high) if most is None else ratio.clamp(max=most)
    shares = {
        "pg_clipfrac": tokens.share(ratio != factor),
        "pg_clipfrac_lower": torch.zeros((), device=ratio.device),
        "ratio_clamped": tokens.share(beyond_clamp(tokens.log_ratio)),
    }
    # The ratio only scales the gradient of log-prob, which no clip can stop.
    return tokens.aggregated(-factor * tokens.advantages * tokens.log_probs, actor), shares


def dppo_tv_loss(tokens: LossTokens, actor: Actor) -> LossAndMetrics:
    """DPPO's loss with the total variation of the sampled token: -A * min(ratio, ``clip_ratio_c``) * log-prob.

    The ratio has no gradient. The loss of a token is set to 0 if A > 0 and the token's probability has risen by more than
    ``clip_ratio_high``, or if A <= 0 and the probability has fallen by more than ``clip_ratio_low``. Source: DPPO, arXiv
    2602.04879.

    Metrics are shares of tokens: ``pg_clipfrac`` (loss set to 0), ``pg_clipfrac_lower`` (ratio above ``clip_ratio_c``, loss not
    set to 0) and ``ratio_clamped``.
    """
    low, high = clip_bounds(actor)
    moved = tokens.log_probs.detach().exp() - tokens.old_log_probs.exp()
    return _dppo_loss(tokens, actor, torch.where(tokens.advantages > 0, moved <= high, moved >= -low))


KL_EPSILON = 1e-8
"""Added to the old and the new probability of all other tokens in DPPO's binary KL divergence, as in verl."""


def dppo_kl_loss(tokens: LossTokens, actor: Actor) -> LossAndMetrics:
    """DPPO's loss as :func:`dppo_tv_loss`, but measured by a KL divergence.

    The divergence is KL(old || new) of two outcomes: the sampled token, and any other token. The loss of a token is set to 0 if
    A > 0, its probability has risen and the divergence is above ``clip_ratio_high``. It is also set to 0 if A <= 0, the
    probability has fallen and the divergence is above ``clip_ratio_low``.
    """
    low, high = clip_bounds(actor)
    log_probs, old_log_probs = tokens.log_probs.detach(), tokens.old_log_probs
    p, old = log_probs.exp(), old_log_probs.exp()
    divergence = old * (old_log_probs - log_probs) + (1 - old) * ((1 - old + KL_EPSILON) / (1 - p + KL_EPSILON)).log()
    rises, falls = (divergence <= high) | (p <= old), (divergence <= low) | (p >= old)
    return _dppo_loss(tokens, actor, torch.where(tokens.advantages > 0, rises, falls))


def _dppo_loss(tokens: LossTokens, actor: Actor, counts: Tensor) -> LossAndMetrics:
    ratio = safe_ratio(tokens.log_ratio.detach())
    most = math.inf if actor.clip_ratio_c is None else actor.clip_ratio_c
    losses = -tokens.advantages * ratio.clamp(max=most) * tokens.log_probs * counts
    return tokens.aggregated(losses, actor), {
        "pg_clipfrac": tokens.share(~counts),
        "pg_clipfrac_lower": tokens.share((ratio > most) & counts),
        "ratio_clamped": tokens.share(beyond_clamp(tokens.log_ratio)),
    }


def gpg_loss(tokens: LossTokens, actor: Actor) -> LossAndMetrics:
    """The loss of REINFORCE and GPG: -A * log-prob, without a ratio and without a clip.

    Sources: REINFORCE (Williams, 1992); GPG, arXiv 2504.02546. It has no metrics of its own.
    """
    return tokens.aggregated(-tokens.advantages * tokens.log_probs, actor), {}


# SAPO: a smooth gate on each token's ratio instead of a clip. It averages over responses, whatever ``loss_agg_mode`` says.


def sapo_loss(tokens: LossTokens, actor: Actor) -> LossAndMetrics:
    """SAPO's loss: -A * 4 / tau * sigmoid(tau * (ratio - 1)), averaged over tokens, then over responses.

    tau is ``tau_pos`` if A > 0, else ``tau_neg``. At a ratio of 1 the gradient is the gradient of -A * ratio. Away from 1 it
    falls smoothly to 0, faster for a larger tau. Source: SAPO, arXiv 2511.20347.

    Metrics: ``ratio_clamped``, the share of log-ratios beyond plus or minus 20.
    """
    assert actor.tau_pos is not None, "sapo needs actor.tau_pos"
    assert actor.tau_neg is not None, "sapo needs actor.tau_neg"
    tau = torch.full_like(tokens.advantages, actor.tau_neg).masked_fill(tokens.advantages > 0, actor.tau_pos)
    gate = 4 / tau * torch.sigmoid(tau * (safe_ratio(tokens.log_ratio) - 1))
    loss = tokens.row_means(tokens.weighted(-tokens.advantages * gate)).sum() / tokens.counts.sequences
    return loss, {"ratio_clamped": tokens.share(beyond_clamp(tokens.log_ratio))}


# Losses with one ratio per response: RLOO's loss, GSPO, VESPO and GMPO. RLOO's loss and GMPO average over responses, whatever
# ``loss_agg_mode`` says.

SMALLEST_WEIGHT = 1e-10
"""Lower bound of an importance weight before a logarithm."""


def sequence_loss(tokens: LossTokens, actor: Actor) -> LossAndMetrics:
    """RLOO's clipped loss: one ratio per response, exp of the summed log-ratio.

    Source: RLOO, arXiv 2402.14740. The advantage and the importance weight of a response are means over its tokens.

    Metrics are shares of responses: ``pg_clipfrac``, ``pg_clipfrac_lower`` (0) and ``ratio_clamped``.
    """
    # Leave rejected tokens out of the sum, because a single one of them could decide the whole ratio.
    log_ratio = row_sums(tokens.masked(tokens.log_ratio), tokens.row, tokens.lengths.shape[0])
    losses, clipped = clipped_loss(safe_ratio(log_ratio), tokens.row_means(tokens.advantages), actor)
    if tokens.weights is not None:
        losses = losses * tokens.row_means(tokens.weights)
    return losses.sum() / tokens.counts.sequences, _row_shares(tokens, clipped, beyond_clamp(log_ratio))


MAX_MEAN_LOG_RATIO = 10.0
"""Largest log-ratio of a response in GSPO, as in verl."""


def gspo_loss(tokens: LossTokens, actor: Actor) -> LossAndMetrics:
    """GSPO's clipped loss: one ratio per response, exp of the mean log-ratio.

    This is the token-level form of GSPO: every token has the ratio of the response, but the gradient of its own log-prob. So
    advantages and importance weights may differ inside a response. If they do not, it equals the response-level form of the paper
    with ``loss_agg_mode=seq-mean-token-mean``. Source: GSPO, arXiv 2507.18071.

    Metrics: ``pg_clipfrac`` (share of tokens), ``pg_clipfrac_lower`` (0) and ``ratio_clamped``, the share of responses whose mean
    log-ratio is above 10. It is clamped to 10, and gives no gradient.
    """
    log_ratio = tokens.row_means(tokens.log_ratio.detach())
    # ``own`` has value 0 and the gradient of the token's log-prob. Adding it changes only the gradient.
    own = tokens.log_probs - tokens.log_probs.detach()
    ratio = (log_ratio[tokens.row] + own).clamp(max=MAX_MEAN_LOG_RATIO).exp()
    losses, clipped = clipped_loss(ratio, tokens.advantages, actor)
    shares = _row_shares(tokens, log_ratio, log_ratio > MAX_MEAN_LOG_RATIO)
    return tokens.aggregated(losses, actor), shares | {"pg_clipfrac": tokens.share(clipped)}


LEAST_LOG_WEIGHT = math.log(1e-8)
"""Lower bound of logarithms in VESPO, as in its reference implementation."""


def vespo_loss(tokens: LossTokens, actor: Actor) -> LossAndMetrics:
    """VESPO's loss: -A * log-prob, times phi(w) = w^k * exp(lambda * (1 - w)) without its gradient.

    w is the ratio of a response, exp of the summed log-ratio, times the importance weights of its tokens. phi is 1 at w = 1. It
    is largest at w = k / lambda, and falls to 0 on both sides of it. k and lambda depend on the sign of the advantage. Source:
    VESPO, arXiv 2602.10693.

    Metrics: ``vespo_weight``, the mean of phi over tokens, and ``ratio_clamped``.
    """
    options, plain = actor.policy_loss, replace(tokens, weights=None)
    log_ratio = tokens.log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if tokens.weights is not None:
        log_ratio = log_ratio + tokens.weights.log().clamp(LEAST_LOG_WEIGHT, MAX_LOG_RATIO)
    summed = row_sums(tokens.masked(log_ratio), tokens.row, tokens.lengths.shape[0])
    log_weight = summed.clamp(LEAST_LOG_WEIGHT, MAX_LOG_RATIO)[tokens.row]
    negative = tokens.advantages < 0
    power = torch.full_like(log_weight, options.vespo_k_pos).masked_fill(negative, options.vespo_k_neg)
    decay = torch.full_like(log_weight, options.vespo_lambda_pos).masked_fill(negative, options.vespo_lambda_neg)
    decay = decay.clamp(min=1e-4)
    phi = (decay + power * log_weight - decay * log_weight.exp()).exp()
    shares = {"vespo_weight": tokens.share(phi), "ratio_clamped": tokens.share(beyond_clamp(tokens.log_ratio))}
    return plain.aggregated(-phi * tokens.advantages * tokens.log_probs, actor), shares


def geo_mean_loss(tokens: LossTokens, actor: Actor) -> LossAndMetrics:
    """GMPO's loss: -A times the geometric mean of a response's clipped ratios.

    The log-ratio of a token is at most ``clip_ratio_high`` if A > 0, and at least -``clip_ratio_low`` if A < 0. The importance
    weight of a response is the geometric mean of its tokens' weights. Source: GMPO, arXiv 2507.20673.

    Metrics are shares of tokens with a log-ratio outside the clips: ``pg_clipfrac`` (A > 0) and ``pg_clipfrac_lower`` (A < 0).
    """
    low, high = clip_bounds(actor)
    sign, log_ratio = tokens.advantages.sign(), tokens.log_ratio
    held = log_ratio.clamp(-low, high)
    binding = sign * torch.minimum(sign * log_ratio, sign * held)
    # The exponent is not clamped, as in verl, because the clips bound the side that could grow without limit.
    losses = -tokens.row_means(tokens.advantages) * tokens.row_means(binding).exp()
    if tokens.weights is not None:
        losses = losses * tokens.row_means(tokens.weights.clamp(min=SMALLEST_WEIGHT).log()).exp()
    outside = log_ratio != held
    shares = {
        "pg_clipfrac": tokens.share(outside & (tokens.advantages > 0)),
        "pg_clipfrac_lower": tokens.share(outside & (tokens.advantages < 0)),
    }
    return losses.sum() / tokens.counts.sequences, shares


def _row_shares(tokens: LossTokens, clipped: Tensor, clamped: Tensor) -> dict[str, Tensor]:
    # Shares of responses. A response without tokens adds 0 to all of them.
    sequences = tokens.counts.sequences
    return {
        "pg_clipfrac": clipped.detach().sum() / sequences,
        "pg_clipfrac_lower": torch.zeros_like(clipped, dtype=torch.float32).sum(),
        "ratio_clamped": clamped.detach().sum() / sequences,
    }


# The policy losses by name, and the metrics that all of them report.


def policy_loss(tokens: LossTokens, actor: Actor) -> LossAndMetrics:
    """Return the loss of ``actor.policy_loss.loss_mode`` (scalar, with gradient) and its metrics (scalars, without).

    Metrics of all modes: ``pg_loss``, and ``ppo_kl``, the mean of log old - log new per token. Modes with a clip add
    ``pg_clipfrac``, the share of ratios where the clip is active; ``pg_clipfrac_lower``, the share that is bounded by
    ``clip_ratio_c``; ``ratio_clamped``, the share of log-ratios beyond plus or minus 20. Shares are of tokens, or of sequences in
    modes with one ratio per sequence. Losses whose record has ``selects`` require ``tokens.selected``.
    """
    loss = load(LOSSES[actor.policy_loss.loss_mode].function)
    return with_shared_metrics(tokens, *loss(tokens, actor))


def with_shared_metrics(tokens: LossTokens, loss: Tensor, metrics: dict[str, Tensor]) -> LossAndMetrics:
    token_kl = (-tokens.log_ratio).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return loss, {"pg_loss": loss.detach(), "ppo_kl": tokens.share(token_kl), **metrics}


# The critic's clipped loss, and how much of the returns it explains.

VARIANCE_EPSILON = 1e-5
"""Added to the variance of the returns, as in verl."""


@dataclass(frozen=True)
class ValueTokens:
    """The input of the critic's loss: the response tokens of a micro-batch, flat, row after row."""

    predictions: Tensor
    """fp32 [R], with gradient."""
    values: Tensor
    """fp32 [R], the critic's values when the advantages were computed."""
    returns: Tensor
    """fp32 [R]."""
    row: Tensor
    """int64 [R], the row of each token."""
    lengths: Tensor
    """int64 [rows], the tokens of each row that count."""
    counts: GlobalCounts
    """Tokens and sequences of the mini-batch over all ranks."""
    kept: Tensor | None = None
    """bool [R]: False for tokens that the rollout correction rejected, which do not count. None = all count."""


def value_loss(tokens: ValueTokens, clip: float, mode: str, scale_factor: int | None = None) -> LossAndMetrics:
    """Return the critic's loss: half of the larger of two squared errors of each token, aggregated by ``mode``.

    The two errors are (prediction - return)^2 and (clipped prediction - return)^2. The prediction is clipped to the old value
    plus or minus ``clip``. Source: the reference implementation of PPO, arXiv 1707.06347, and ``compute_value_loss`` in verl.

    ``clip``: ``critic.cliprange_value``. ``mode``: ``critic.loss_agg_mode``. ``scale_factor``: the constant length of
    ``seq-mean-token-sum-norm``. The loss and the metrics ``vf_loss``, ``vf_clipfrac`` and ``vpred_mean`` are this micro-batch's
    shares: sum them over micro-batches and ranks.
    """
    predictions, values, returns, kept = tokens.predictions, tokens.values, tokens.returns, tokens.kept
    if kept is not None:
        # Set prediction, value and return of a rejected token to 0, so that it adds neither an error nor a NaN.
        predictions, values, returns = (tensor.where(kept, 0.0) for tensor in (predictions, values, returns))
    errors = (predictions - returns).square()
    clipped_errors = (predictions.clamp(values - clip, values + clip) - returns).square()
    token_losses = torch.maximum(errors, clipped_errors)
    loss = 0.5 * aggregate(token_losses, tokens.row, tokens.lengths, mode, tokens.counts, scale_factor)
    return loss, {
        "vf_loss": loss.detach(),
        "vf_clipfrac": (clipped_errors > errors).sum() / tokens.counts.tokens,
        "vpred_mean": predictions.detach().sum() / tokens.counts.tokens,
    }


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """Return 1 - var(returns - values) / (var(returns) + 1e-5) over all tokens of a step, or 0 for fewer than two tokens."""
    if returns.numel() < 2:
        return 0.0
    # fp64, because the difference of two almost equal variances loses most of its digits in fp32.
    returns, values = returns.double(), values.double()
    return float(1 - (returns - values).var() / (returns.var() + VARIANCE_EPSILON))


# Clip-Cov and KL-Cov: losses that restrain a few tokens with a large covariance of log-prob and advantage.
#
# Such tokens lower the entropy most. Both losses act on tokens that were selected before. Call the selection once with all
# tokens of a mini-batch and their old log-probs, so that it depends neither on micro-batches nor on ranks. verl selects inside
# each micro-batch. Source: "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", arXiv 2505.22617.


def token_covariance(log_probs: Tensor, advantages: Tensor) -> Tensor:
    advantages, log_probs = advantages.double(), log_probs.detach().double()
    return (advantages - advantages.mean()) * (log_probs - log_probs.mean())


def select_clip_cov(log_probs: Tensor, advantages: Tensor, loss: PolicyLoss, generator: torch.Generator) -> Tensor:
    """Return the tokens of a mini-batch whose gradient ``clip_cov`` removes, bool [R].

    They are chosen at random among the tokens with a covariance between ``clip_cov_lb`` and ``clip_cov_ub``. Their number is
    ``loss.clip_cov_ratio`` of all tokens, at least one, or all candidates if there are fewer. ``generator`` must be on the host.
    """
    covariance = token_covariance(log_probs, advantages)
    candidates = ((covariance > loss.clip_cov_lb) & (covariance < loss.clip_cov_ub)).nonzero().flatten()
    number = max(int(loss.clip_cov_ratio * covariance.shape[0]), 1)
    order = torch.randperm(candidates.shape[0], generator=generator).to(candidates.device)
    selected = torch.zeros_like(covariance, dtype=torch.bool)
    selected[candidates[order[:number]]] = True
    return selected


def select_kl_cov(log_probs: Tensor, advantages: Tensor, loss: PolicyLoss, generator: torch.Generator) -> Tensor:
    """Return the tokens of a mini-batch that ``kl_cov`` penalises, bool [R].

    They are the tokens with the largest covariance. Their number is ``loss.kl_cov_ratio`` of all tokens, at least one.
    ``generator`` is not used.
    """
    covariance = token_covariance(log_probs, advantages)
    number = min(max(int(loss.kl_cov_ratio * covariance.shape[0]), 1), covariance.shape[0])
    selected = torch.zeros_like(covariance, dtype=torch.bool)
    selected[covariance.topk(number).indices] = True
    return selected


def clip_cov_loss(tokens: LossTokens, actor: Actor) -> LossAndMetrics:
    """PPO's loss without its dual clip. Selected tokens get 0, unless their ratio is clipped.

    ``tokens.selected`` comes from :func:`select_clip_cov`. The metric ``pg_clipfrac`` is the share of tokens that get 0.
    """
    assert tokens.selected is not None, "clip_cov needs the tokens that select_clip_cov chose over the mini-batch"
    losses, clipped = clipped_loss(safe_ratio(tokens.log_ratio), tokens.advantages, actor)
    removed = tokens.selected & ~clipped
    return tokens.aggregated(losses.where(~removed, 0.0), actor), {"pg_clipfrac": tokens.share(removed)}


def kl_cov_loss(tokens: LossTokens, actor: Actor) -> LossAndMetrics:
    """-A * ratio without a clip, plus ``ppo_kl_coef`` * abs(log-ratio) for the selected tokens.

    ``tokens.selected`` comes from :func:`select_kl_cov`. The metric ``ppo_kl_abs`` is the mean absolute log-ratio.
    """
    assert tokens.selected is not None, "kl_cov needs the tokens that select_kl_cov chose over the mini-batch"
    distance = tokens.log_ratio.abs()
    penalty = torch.where(tokens.selected, actor.policy_loss.ppo_kl_coef * distance, 0.0)
    # The ratio is not clamped, as in verl. If it overflows, the gradient is not finite and the update is skipped.
    losses = -tokens.advantages * tokens.log_ratio.exp() + penalty
    return tokens.aggregated(losses, actor), {"ppo_kl_abs": tokens.share(distance)}
