"""The whole correction of a step in decoupled mode: weights, kept tokens and metrics."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from verl_memopt.algorithms.corrections.importance import importance_weights
from verl_memopt.algorithms.corrections.mismatch import mismatch_metrics
from verl_memopt.algorithms.corrections.rejection import rejection
from verl_memopt.config.schema import RolloutCorrection

PREFIX = "rollout_corr/"


@dataclass(frozen=True)
class Correction:
    """What the update multiplies and leaves out."""

    weights: Tensor | None
    """fp32 [R]; None without importance weights."""
    kept: Tensor | None
    """bool [R]; None without rejection."""
    metrics: dict[str, float]
    """Under verl's names, with the prefix ``rollout_corr/``."""


def corrects_before_update(settings: RolloutCorrection) -> bool:
    """Return whether weights or rejections are computed once a step, before the update: there are some, in decoupled mode."""
    return not settings.bypass_mode and (settings.rollout_is is not None or settings.rollout_rs is not None)


def correct(
    log_probs: Tensor, rollout_log_probs: Tensor, row: Tensor, lengths: Tensor, settings: RolloutCorrection
) -> Correction:
    """Return the correction from the rollout engine's probabilities to the trainer's.

    Call it with all tokens of a step: normalisation and metrics are over what it is given. The weights count rejected tokens as
    well, as in verl: rejection changes which tokens are used, not their weights.

    Args:
        log_probs: fp32 [R], of the trainer before the update.
        rollout_log_probs: fp32 [R], of the engine.
        row: int64 [R].
        lengths: int64 [rows].
        settings: ``bypass_mode`` and ``loss_type`` are not read here.

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
