"""The policy loss of bypass mode, in which the rollout engine's log-probs stand in for the old ones."""

from __future__ import annotations

from dataclasses import replace

from verl_memopt.algorithms.corrections.rejection import kept_lengths
from verl_memopt.algorithms.corrections.rollout import correct
from verl_memopt.algorithms.losses.tokens import LossAndMetrics, LossSettings, LossTokens
from verl_memopt.algorithms.losses.vanilla import gpg_loss, vanilla_loss
from verl_memopt.config.schema import RolloutCorrection


def bypass_loss(
    tokens: LossTokens, settings: LossSettings, correction: RolloutCorrection, mean_weight: float | None = None
) -> tuple[*LossAndMetrics, dict[str, float]]:
    """Return the loss of bypass mode, its metrics as shares, and the correction's metrics of this micro-batch.

    ``ppo_clip``: PPO's loss, whose ratio to the engine is the correction; no importance weights. ``reinforce``: -A * log-prob
    times the importance weight. Weights and rejection follow from the policy's present log-probs, so that they change within a
    step. The loss divides by the counts of ``tokens``, rejected tokens included, as they are known before. Source:
    ``compute_policy_loss_bypass_mode`` in verl.

    Args:
        tokens: Of the micro-batch, with whole rows; ``old_log_probs`` are the engine's, ``weights`` and ``kept`` are not read.
        settings: Clips and aggregation.
        correction: The correction.
        mean_weight: The mean weight of the mini-batch, by which ``rollout_is_batch_normalize`` divides. None takes the mean of
            this micro-batch, as verl does: the loss then depends on how the mini-batch is cut.

    Returns:
        The loss with gradient, shares to sum over micro-batches, and numbers under ``rollout_corr/``.
    """
    unnormalised = correction if mean_weight is None else replace(correction, rollout_is_batch_normalize=False)
    result = correct(tokens.log_probs.detach(), tokens.old_log_probs, tokens.row, tokens.lengths, unnormalised)
    weights = result.weights
    if weights is not None and mean_weight is not None and correction.rollout_is_batch_normalize:
        weights = weights / mean_weight
    lengths = tokens.lengths if result.kept is None else kept_lengths(result.kept, tokens.row, tokens.lengths)
    if correction.loss_type == "ppo_clip":
        loss, metrics = vanilla_loss(replace(tokens, lengths=lengths, kept=result.kept, weights=None), settings)
    else:
        assert correction.loss_type == "reinforce", correction.loss_type
        loss, metrics = gpg_loss(replace(tokens, lengths=lengths, kept=result.kept, weights=weights), settings)
    return loss, metrics, result.metrics
