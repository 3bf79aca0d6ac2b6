"""Rejection: tokens or whole responses that trainer and rollout engine see too differently are left out of the update.

Log-ratios are log trainer - log engine, fp32 ``[R]``, flat, row after row. With r = trainer / engine, k1 = -log r,
k2 = (log r)^2 / 2 and k3 = r - 1 - log r. k1 has a lower and an upper bound, given as bounds of a ratio. k2 and k3 have
an upper one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from verl_memopt.algorithms.kl import MAX_LOG_RATIO
from verl_memopt.algorithms.reductions import row_means, row_sums
from verl_memopt.config.correction_bounds import rejection_bounds

DIVERGENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_ratio: -log_ratio,
    "k2": lambda log_ratio: 0.5 * log_ratio.square(),
    "k3": lambda log_ratio: log_ratio.exp() - 1 - log_ratio,
}
"""Name of a divergence -> its value per token from the log-ratio."""


def _row_max(values: Tensor, row: Tensor, lengths: Tensor) -> Tensor:
    return values.new_zeros(lengths.shape[0]).scatter_reduce(0, row, values, "amax", include_self=False)


LEVELS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "seq_sum": lambda values, row, lengths: row_sums(values, row, lengths.shape[0]),
    "seq_mean": row_means,
    "seq_max": _row_max,
}
"""Name of a level -> one value per row from one per token."""


def rejection(
    log_ratio: Tensor, row: Tensor, lengths: Tensor, names: str, threshold: float | str | None
) -> tuple[Tensor, dict[str, float]]:
    """Return True for the tokens that every rejection keeps, bool [R], and the metrics of the rejections.

    A rejection per response keeps or drops all its tokens. The source is ``compute_rollout_rejection_mask`` in verl.

    Args:
        log_ratio: fp32 [R].
        row: int64 [R].
        lengths: int64 [rows].
        names: ``rollout_rs``.
        threshold: ``rollout_rs_threshold``.

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
    """Return True for the tokens that every rejection keeps, bool [R], as :func:`rejection`, without metrics.

    Nothing here waits for the device. Arguments as in :func:`rejection`.
    """
    kept = torch.ones_like(row, dtype=torch.bool)
    for name, (lower, upper) in rejection_bounds(names, threshold).items():
        statistic = _statistic(log_ratio, row, lengths, name)
        kept = kept & (statistic >= lower) & (statistic <= upper)
    return kept


def _statistic(log_ratio: Tensor, row: Tensor, lengths: Tensor, name: str) -> Tensor:
    """Return the number that a rejection compares with its bounds, for each token, fp64 [R]."""
    level, divergence = name.rsplit("_", 1)
    values = DIVERGENCES[divergence](log_ratio.detach().double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    return values if level == "token" else LEVELS[level](values, row, lengths)[row]


def kept_lengths(kept: Tensor, row: Tensor, lengths: Tensor) -> Tensor:
    """Return the number of kept tokens of each row, int64 [rows].

    Args:
        kept: bool [R].
        row: int64 [R].
        lengths: int64 [rows].
    """
    return row_sums(kept.long(), row, lengths.shape[0])


def _rejection_metrics(
    prefix: str, per_token: Tensor, per_row: Tensor, compared: Tensor, lower: float, upper: float
) -> dict[str, float]:
    """Return the distribution of one statistic, under verl's names: its mean over tokens, and ``seq`` over rows with tokens.

    ``compared`` is the one of the two to which the bounds apply. k2 and k3 count nothing below their bound.
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
        "seq_mean": per_row.mean(),
        "seq_std": per_row.std() if per_row.numel() > 1 else torch.zeros(()),
        "seq_max": per_row.max(),
        "seq_min": per_row.min(),
        "seq_max_deviation": per_row.abs().max(),
        "seq_fraction_high": (per_row > upper).double().mean(),
    }
    if not math.isinf(lower):
        metrics["seq_fraction_low"] = (per_row < lower).double().mean()
    return {f"{prefix}_{name}": float(value) for name, value in metrics.items()}


def _masked_shares(prefix: str, kept: Tensor, row: Tensor, lengths: Tensor) -> dict[str, float]:
    """Return the share of tokens that are rejected, and the share of rows that lose one."""
    filled = lengths > 0
    touched = kept_lengths(kept, row, lengths)[filled] < lengths[filled]
    return {
        f"{prefix}masked_fraction": float((~kept).double().mean()) if kept.numel() else 0.0,
        f"{prefix}seq_masked_fraction": float(touched.double().mean()) if touched.numel() else 0.0,
    }
