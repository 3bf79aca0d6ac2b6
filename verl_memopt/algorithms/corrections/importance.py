"""Importance weights: probability under the trainer over probability under the rollout engine, per token or per response.

Log-ratios are log trainer - log engine, fp32 ``[R]``, flat, row after row. Call these functions with all tokens of a step, so
that weights and metrics do not depend on micro-batches or ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl_memopt.algorithms.kl import MAX_LOG_RATIO
from verl_memopt.algorithms.reductions import row_means, row_sums
from verl_memopt.config.correction_bounds import importance_bounds

EPSILON = 1e-8
"""A mean weight at or below this is not divided by."""


def importance_weights(
    log_ratio: Tensor, row: Tensor, lengths: Tensor, level: str, threshold: float | str, batch_normalize: bool
) -> tuple[Tensor, dict[str, float]]:
    """Return the importance weight of each token, fp32 [R], without a gradient, and the metrics of the weights.

    A weight is exp of the token's log-ratio, or of the sum over its row for ``sequence``. One threshold caps it (truncated
    importance sampling); a lower and an upper one set a weight outside to 0 (IcePop). Normalised weights have mean 1 over the
    tokens, or over the rows for ``sequence``. Sources: ``compute_rollout_correction_weights`` in verl; "Your Efficient RL
    Framework Secretly Brings You Off-Policy RL Training" (Yao et al., 2025).

    Args:
        log_ratio: fp32 [R].
        row: int64 [R].
        lengths: int64 [rows].
        level: ``token`` or ``sequence``.
        threshold: ``rollout_is_threshold``.
        batch_normalize: ``rollout_is_batch_normalize``.
    """
    raw, weights = bounded_weights(log_ratio, row, lengths, level, threshold)
    metrics = importance_metrics(raw, weights, row, lengths, level, *importance_bounds(threshold))
    if batch_normalize:
        mean = mean_weight(weights, row, lengths, level)
        metrics["rollout_is_batch_norm_factor"] = mean
        weights = weights / mean
    return weights.float(), metrics


def bounded_weights(log_ratio: Tensor, row: Tensor, lengths: Tensor, level: str, threshold: float | str) -> tuple[Tensor, Tensor]:
    """Return the importance weights before and after their bounds, both fp64 [R], without gradients and not normalised.

    Arguments as in :func:`importance_weights`. Nothing here waits for the device.
    """
    assert level in ("token", "sequence"), level
    lower, upper = importance_bounds(threshold)
    exact = log_ratio.detach().double()
    if level == "sequence":
        exact = row_sums(exact, row, lengths.shape[0])[row]
    raw = exact.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return raw, raw.clamp(max=upper) if lower is None else raw.where((raw >= lower) & (raw <= upper), 0.0)


def mean_weight(weights: Tensor, row: Tensor, lengths: Tensor, level: str) -> float:
    """Return the mean weight over tokens, or over rows with tokens for ``sequence``. 1 where that is 0 or there are none.

    Args:
        weights: fp64 [R].
        row: int64 [R].
        lengths: int64 [rows].
        level: ``token`` or ``sequence``.
    """
    values = weights if level == "token" else row_means(weights, row, lengths)[lengths > 0]
    mean = float(values.mean()) if values.numel() else 0.0
    return mean if mean > EPSILON else 1.0


def importance_metrics(
    raw: Tensor, weights: Tensor, row: Tensor, lengths: Tensor, level: str, lower: float | None, upper: float
) -> dict[str, float]:
    """Return the distribution of the weights, as verl 0.9 reports it, without the prefix ``rollout_corr/``.

    Means, deviations and the effective sample size are of the applied weights before normalisation, the shares above and below
    the bounds of the raw ones. Without a lower bound, 1 / upper takes its place. ``rollout_is_eff_sample_size`` is a share:
    1 / mean of the squared weights with mean 1.

    Args:
        raw: fp64 [R], before the bounds.
        weights: fp64 [R], after them.
        row: int64 [R].
        lengths: int64 [rows].
        level: ``token`` or ``sequence``.
        lower: Lower bound, or None.
        upper: Upper bound.
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
        "rollout_is_seq_mean": per_row.mean(),
        "rollout_is_seq_std": per_row.std() if per_row.numel() > 1 else torch.zeros(()),
        "rollout_is_seq_max": per_row.max(),
        "rollout_is_seq_min": per_row.min(),
        "rollout_is_seq_max_deviation": (per_row - 1).abs().max(),
        "rollout_is_seq_fraction_high": (raw_per_row > upper).double().mean(),
        "rollout_is_seq_fraction_low": (raw_per_row < floor).double().mean(),
    }
    if lower is not None:
        metrics["rollout_is_oob_ratio"] = ((raw < lower) | (raw > upper)).double().mean()
    return {name: float(value) for name, value in metrics.items()}
