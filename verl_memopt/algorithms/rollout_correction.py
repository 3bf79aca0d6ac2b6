"""The correction for a rollout engine whose probabilities differ from the trainer's: importance weights, rejection and metrics.

Log-probs and log-ratios (log trainer - log engine) are fp32 ``[R]``, flat, row after row. ``row [R]`` int64 is the row of each
token, ``lengths [rows]`` int64 its number of tokens. ``level`` is ``token`` or ``sequence``, ``threshold`` is a threshold in the
settings, and ``names`` is the setting ``rollout_rs``. Weights are fp64 ``[R]``; ``raw`` weights are not bounded yet.

In decoupled mode :func:`correct` computes the correction once per step. In bypass mode the engine's log-probs are used as old
log-probs, and :func:`bypass_loss` corrects.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verl_memopt.algorithms.custom import inputs_of, statistics_of
from verl_memopt.algorithms.kl import MAX_LOG_RATIO
from verl_memopt.algorithms.losses import LossAndMetrics, LossTokens, gpg_loss, vanilla_loss
from verl_memopt.algorithms.records import LOSSES
from verl_memopt.algorithms.rows import row_means, row_sums
from verl_memopt.config.algorithm_rules import importance_bounds, rejection_bounds
from verl_memopt.config.role_settings import SAMPLED
from verl_memopt.config.schema import Actor, Algorithm, RolloutCorrection, Settings

# How far the trainer's probabilities are from the rollout engine's: divergences and perplexities.


def mismatch_metrics(old_log_probs: Tensor, rollout_log_probs: Tensor, row: Tensor, lengths: Tensor) -> dict[str, float]:
    """The metrics of ``compute_offpolicy_metrics`` in verl, without the prefix ``rollout_corr/``; empty without tokens.

    ``kl`` and ``k3_kl`` estimate KL(engine || trainer) per token. Perplexities are means over rows of exp(-mean log-prob).
    ``chi2_token`` and ``chi2_seq`` are mean r^2 - 1 over tokens and rows, with r = trainer / engine.
    """
    if not row.numel():
        return {}
    filled = lengths > 0
    trainer, engine = old_log_probs.detach().double(), rollout_log_probs.detach().double()
    log_ratio = trainer - engine
    token_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # Sum first, then clamp. A sum of clamped log-ratios would be another ratio.
    row_ratio = row_sums(log_ratio, row, lengths.shape[0])[filled].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    trainer_mean, engine_mean = (row_means(values, row, lengths)[filled] for values in (trainer, engine))
    difference = engine_mean - trainer_mean
    metrics = {
        "training_ppl": (-trainer_mean).exp().mean(),
        "training_log_ppl": -trainer_mean.mean(),
        "rollout_ppl": (-engine_mean).exp().mean(),
        "rollout_log_ppl": -engine_mean.mean(),
        "kl": -log_ratio.mean(),
        "k3_kl": (token_ratio.exp() - token_ratio - 1).mean(),
        "log_ppl_diff": difference.mean(),
        "log_ppl_abs_diff": difference.abs().mean(),
        "log_ppl_diff_max": difference.max(),
        "log_ppl_diff_min": difference.min(),
        "ppl_ratio": difference.exp().mean(),
        "chi2_token": (2 * token_ratio).exp().mean() - 1,
        "chi2_seq": (2 * row_ratio).exp().mean() - 1,
    }
    return {name: float(value) for name, value in metrics.items()}


# Importance weights: probability under the trainer over probability under the rollout engine, per token or per response.

EPSILON = 1e-8
"""Weights are not divided by a mean at or below this value."""


def importance_weights(
    log_ratio: Tensor, row: Tensor, lengths: Tensor, level: str, threshold: float | str, batch_normalize: bool
) -> tuple[Tensor, dict[str, float]]:
    """Return the importance weight of each token, fp32 [R], without a gradient, and the metrics of the weights.

    A weight is exp of the token's log-ratio, or for ``sequence`` exp of the summed log-ratio of the row. A single threshold caps
    the weight (truncated importance sampling). With a lower and an upper threshold, a weight outside them becomes 0 (IcePop).
    Normalised weights have mean 1 over the tokens, or for ``sequence`` over the rows. Sources:
    ``compute_rollout_correction_weights`` in verl; "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (Yao
    et al., 2025).
    """
    raw, weights = bounded_weights(log_ratio, row, lengths, level, threshold)
    metrics = importance_metrics(raw, weights, row, lengths, level, *importance_bounds(threshold))
    if batch_normalize:
        mean = mean_weight(weights, row, lengths, level)
        metrics["rollout_is_batch_norm_factor"] = mean
        weights = weights / mean
    return weights.float(), metrics


def bounded_weights(log_ratio: Tensor, row: Tensor, lengths: Tensor, level: str, threshold: float | str) -> tuple[Tensor, Tensor]:
    """Return the importance weights before and after the bounds, both fp64 [R], without gradients and not normalised.

    Arguments are as in :func:`importance_weights`. No operation here waits for the device.
    """
    assert level in ("token", "sequence"), level
    lower, upper = importance_bounds(threshold)
    # fp64, because the sum over a long response is exponentiated, which turns small errors into large ones.
    exact = log_ratio.detach().double()
    if level == "sequence":
        exact = row_sums(exact, row, lengths.shape[0])[row]
    raw = exact.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return raw, raw.clamp(max=upper) if lower is None else raw.where((raw >= lower) & (raw <= upper), 0.0)


def mean_weight(weights: Tensor, row: Tensor, lengths: Tensor, level: str) -> float:
    values = weights if level == "token" else row_means(weights, row, lengths)[lengths > 0]
    mean = float(values.mean()) if values.numel() else 0.0
    # Weights are divided by the result, so it must not be 0.
    return mean if mean > EPSILON else 1.0


def importance_metrics(
    raw: Tensor, weights: Tensor, row: Tensor, lengths: Tensor, level: str, lower: float | None, upper: float
) -> dict[str, float]:
    """Return the distribution of the weights, as verl 0.9 reports it, without the prefix ``rollout_corr/``.

    Means, deviations and the effective sample size are computed from the bounded weights before normalisation. The shares above
    and below the bounds are computed from the raw weights. Without a lower bound, 1 / upper takes its place.
    ``rollout_is_eff_sample_size`` is a share, mean(weights)^2 / mean(weights^2).
    """
    if not weights.numel():
        return {}
    filled = lengths > 0
    floor = 1 / upper if lower is None else lower
    per_row, raw_per_row = row_means(weights, row, lengths)[filled], row_means(raw, row, lengths)[filled]
    mean = weights.mean()
    compared = raw if level == "token" else raw_per_row
    extremes = weights if level == "token" else raw_per_row
    metrics = {
        "rollout_is_mean": mean,
        "rollout_is_max": extremes.max(),
        "rollout_is_min": extremes.min(),
        "rollout_is_std": weights.std(correction=0),
        "rollout_is_eff_sample_size": mean.square() / weights.square().mean().clamp(min=EPSILON**2),
        "rollout_is_ratio_fraction_high": (compared > upper).double().mean(),
        "rollout_is_ratio_fraction_low": (compared < floor).double().mean(),
        **{f"rollout_is_{name}": value for name, value in _over_rows(per_row, 1, raw_per_row, floor, upper).items()},
    }
    if lower is not None:
        metrics["rollout_is_oob_ratio"] = ((raw < lower) | (raw > upper)).double().mean()
    return {name: float(value) for name, value in metrics.items()}


def _over_rows(values: Tensor, centre: float, compared: Tensor, lower: float, upper: float) -> dict[str, Tensor]:
    return {
        "seq_mean": values.mean(),
        "seq_std": values.std() if values.numel() > 1 else torch.zeros(()),
        "seq_max": values.max(),
        "seq_min": values.min(),
        "seq_max_deviation": (values - centre).abs().max(),
        "seq_fraction_high": (compared > upper).double().mean(),
        "seq_fraction_low": (compared < lower).double().mean(),
    }


# Rejection: tokens or responses whose probabilities differ too much between trainer and engine are left out of the update.

DIVERGENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_ratio: -log_ratio,
    "k2": lambda log_ratio: 0.5 * log_ratio.square(),
    "k3": lambda log_ratio: log_ratio.exp() - 1 - log_ratio,
}
"""Name of a divergence -> its value per token from the log-ratio."""


def _row_max(values: Tensor, row: Tensor, lengths: Tensor) -> Tensor:
    # The first value of a row replaces the 0, so that a row of negative values does not get 0 as its maximum.
    return values.new_zeros(lengths.shape[0]).scatter_reduce(0, row, values, "amax", include_self=False)


LEVELS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "seq_sum": lambda values, row, lengths: row_sums(values, row, lengths.shape[0]),
    "seq_mean": row_means,
    "seq_max": _row_max,
}
"""Name of a level -> function that computes one value per row from one value per token."""


def rejection(
    log_ratio: Tensor, row: Tensor, lengths: Tensor, names: str, threshold: float | str | None
) -> tuple[Tensor, dict[str, float]]:
    """Return which tokens all rejections keep, bool [R], and the metrics of the rejections.

    A rejection per response keeps or drops all tokens of the response. Source: ``compute_rollout_rejection_mask`` in verl.

    Raises:
        ConfigError: The names or the thresholds cannot be read.
    """
    kept = torch.ones_like(row, dtype=torch.bool)
    metrics: dict[str, float] = {}
    for name, (lower, upper) in rejection_bounds(names, threshold).items():
        token_statistic = _statistic(log_ratio, row, lengths, name)
        token_keeps = (token_statistic >= lower) & (token_statistic <= upper)
        kept = kept & token_keeps
        row_statistic = row_means(token_statistic, row, lengths)[lengths > 0]
        compared = token_statistic if name.startswith("token") else row_statistic
        metrics |= _rejection_metrics(f"rollout_rs_{name}", token_statistic, row_statistic, compared, lower, upper)
        metrics |= _masked_shares(f"rollout_rs_{name}_", token_keeps, row, lengths)
    return kept, metrics | _masked_shares("rollout_rs_", kept, row, lengths)


def kept_tokens(log_ratio: Tensor, row: Tensor, lengths: Tensor, names: str, threshold: float | str | None) -> Tensor:
    # Unlike in rejection(), nothing here waits for the device.
    kept = torch.ones_like(row, dtype=torch.bool)
    for name, (lower, upper) in rejection_bounds(names, threshold).items():
        statistic = _statistic(log_ratio, row, lengths, name)
        kept = kept & (statistic >= lower) & (statistic <= upper)
    return kept


def _statistic(log_ratio: Tensor, row: Tensor, lengths: Tensor, name: str) -> Tensor:
    # The number of each token that a rejection compares with its bounds, fp64 [R].
    level, divergence = name.rsplit("_", 1)
    values = DIVERGENCES[divergence](log_ratio.detach().double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    return values if level == "token" else LEVELS[level](values, row, lengths)[row]


def kept_lengths(kept: Tensor, row: Tensor, lengths: Tensor) -> Tensor:
    return row_sums(kept.long(), row, lengths.shape[0])


def _rejection_metrics(
    prefix: str, per_token: Tensor, per_row: Tensor, compared: Tensor, lower: float, upper: float
) -> dict[str, float]:
    """Return the distribution of one statistic under verl's names: over tokens, and as ``seq`` over rows with tokens.

    ``compared`` is ``per_token`` or ``per_row``, whichever the bounds apply to. Without a lower bound (k2 and k3) there is no
    ``seq_fraction_low``.
    """
    if not per_token.numel():
        return {}
    held = per_token.clamp(max(lower, 0.0) if math.isinf(lower) else lower, upper)
    metrics = {
        "mean": per_token.mean(),
        "std": held.std(correction=0),
        "max": compared.max(),
        "min": compared.min(),
        "fraction_high": (compared > upper).double().mean(),
        "fraction_low": (compared < lower).double().mean(),
        **_over_rows(per_row, 0, per_row, lower, upper),
    }
    if math.isinf(lower):
        del metrics["seq_fraction_low"]
    return {f"{prefix}_{name}": float(value) for name, value in metrics.items()}


def _masked_shares(prefix: str, kept: Tensor, row: Tensor, lengths: Tensor) -> dict[str, float]:
    filled = lengths > 0
    touched = kept_lengths(kept, row, lengths)[filled] < lengths[filled]
    return {
        f"{prefix}masked_fraction": float((~kept).double().mean()) if kept.numel() else 0.0,
        f"{prefix}seq_masked_fraction": float(touched.double().mean()) if touched.numel() else 0.0,
    }


# The whole correction of a step in decoupled mode: weights, kept tokens and metrics.

PREFIX = "rollout_corr/"


@dataclass(frozen=True)
class Correction:
    weights: Tensor | None
    """fp32 [R]; None without importance weights."""
    kept: Tensor | None
    """bool [R]; None without rejection."""
    metrics: dict[str, float]
    """Under verl's names, with the prefix ``rollout_corr/``."""


def corrects_before_update(settings: RolloutCorrection) -> bool:
    # In bypass mode the update computes weights and rejections.
    return not settings.bypass_mode and (settings.rollout_is is not None or settings.rollout_rs is not None)


def update_gives_old_log_probs(settings: Settings) -> bool:
    """Return whether the forward of the only optimizer step gives the old log-probs, so that they need no separate pass."""
    actor, algorithm, distill = settings.actor_rollout_ref.actor, settings.algorithm, settings.distill
    once = actor.ppo_epochs == 1 and settings.data.train_batch_size == actor.ppo_mini_batch_size
    read_before = algorithm.use_kl_in_reward or algorithm.use_pf_ppo or corrects_before_update(algorithm.rollout_correction)
    read_before |= reads_entropy(actor, algorithm) or LOSSES[actor.policy_loss.loss_mode].selects is not None
    read_before |= actor.router_replay.mode == "R2"  # the pass records the experts
    # The sampled divergence from a teacher is a part of the advantages.
    read_before |= bool(distill.coef) and distill.divergence == SAMPLED
    read_before |= "old_log_probs" in inputs_of(algorithm) or bool(statistics_of(algorithm))
    return actor.old_log_prob_pass == "auto" and once and not read_before


def reads_entropy(actor: Actor, algorithm: Algorithm) -> bool:
    # The pass for old log-probs computes the entropy.
    return actor.calculate_entropy or algorithm.top_entropy_quantile < 1


def correct(
    log_probs: Tensor, rollout_log_probs: Tensor, row: Tensor, lengths: Tensor, settings: RolloutCorrection
) -> Correction:
    """Compute the correction from the rollout engine's probabilities to the trainer's.

    Call it with all tokens of a step, because it normalises and averages over the given tokens. Normalisation includes rejected
    tokens, as in verl. So rejection changes which tokens are used, but not their weights.

    ``settings``: ``bypass_mode`` and ``loss_type`` are not read here.

    Raises:
        ConfigError: A threshold cannot be read.
    """
    log_ratio = (log_probs - rollout_log_probs).detach()
    weights: Tensor | None = None
    kept: Tensor | None = None
    metrics = mismatch_metrics(log_probs, rollout_log_probs, row, lengths)
    if settings.rollout_is is not None:
        options = settings.rollout_is, settings.rollout_is_threshold, settings.rollout_is_batch_normalize
        weights, weight_metrics = importance_weights(log_ratio, row, lengths, *options)
        metrics |= weight_metrics
    if settings.rollout_rs is not None:
        kept, kept_metrics = rejection(log_ratio, row, lengths, settings.rollout_rs, settings.rollout_rs_threshold)
        metrics |= kept_metrics
    return Correction(weights, kept, {PREFIX + name: value for name, value in metrics.items()})


# The policy loss of bypass mode, which uses the rollout engine's log-probs as old log-probs.


def bypass_loss(tokens: LossTokens, actor: Actor, correction: RolloutCorrection) -> LossAndMetrics:
    """Return the loss of bypass mode, and its metrics as shares to sum over micro-batches.

    ``ppo_clip``: PPO's loss. Its ratio to the engine is the correction, and there are no importance weights. ``reinforce``:
    -A * log-prob times the importance weight. Weights and rejection are computed from the policy's current log-probs, so they
    change within a step. The loss divides by the counts of ``tokens``, including rejected tokens, because these counts are known
    beforehand. Source: ``compute_policy_loss_bypass_mode`` in verl.

    ``rollout_is_batch_normalize`` divides the weights by ``counts.mean_weight``, their mean over the mini-batch. If
    ``counts.mean_weight`` is None, it takes the mean over the given tokens, as verl does. The loss then depends on how the
    mini-batch is cut.

    ``tokens``: the micro-batch. Its ``old_log_probs`` are the engine's, and its ``weights`` and ``kept`` are not read.
    """
    tokens = replace(tokens, kept=None, weights=None)
    kept, lengths = None, tokens.lengths
    if correction.rollout_rs is not None:
        rejections = correction.rollout_rs, correction.rollout_rs_threshold
        kept = kept_tokens(tokens.log_ratio, tokens.row, tokens.lengths, *rejections)
        lengths = kept_lengths(kept, tokens.row, tokens.lengths)
    if correction.loss_type == "ppo_clip":
        return vanilla_loss(replace(tokens, lengths=lengths, kept=kept), actor)
    assert correction.loss_type == "reinforce", correction.loss_type
    return gpg_loss(replace(tokens, lengths=lengths, kept=kept, weights=_weights(tokens, correction)), actor)


def is_token_local(correction: RolloutCorrection, loss_agg_mode: str) -> bool:
    """Return whether a token's gradient depends only on the log-prob of the same token.

    It depends on other tokens if a weight or a rejection is computed per response, or if a row's mean counts its kept tokens.
    """
    if correction.loss_type == "reinforce" and correction.rollout_is == "sequence":
        return False
    if correction.rollout_rs is None:
        return True
    rejections = rejection_bounds(correction.rollout_rs, correction.rollout_rs_threshold)
    return loss_agg_mode != "seq-mean-token-mean" and all(name.startswith("token") for name in rejections)


def _weights(tokens: LossTokens, correction: RolloutCorrection) -> Tensor | None:
    if correction.rollout_is is None:
        return None
    level, row, lengths = correction.rollout_is, tokens.row, tokens.lengths
    _, weights = bounded_weights(tokens.log_ratio, row, lengths, level, correction.rollout_is_threshold)
    if correction.rollout_is_batch_normalize:
        mean = tokens.counts.mean_weight
        weights = weights / (mean_weight(weights, row, lengths, level) if mean is None else mean)
    return weights.float()
