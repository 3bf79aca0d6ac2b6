"""The policy loss of bypass mode, in which the rollout engine's log-probs stand in for the old ones."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from verl_memopt.algorithms.corrections.importance import bounded_weights, mean_weight
from verl_memopt.algorithms.corrections.rejection import kept_lengths, kept_tokens
from verl_memopt.algorithms.losses.tokens import LossAndMetrics, LossSettings, LossTokens
from verl_memopt.algorithms.losses.vanilla import gpg_loss, vanilla_loss
from verl_memopt.config.correction_bounds import rejection_bounds
from verl_memopt.config.schema import RolloutCorrection


def bypass_loss(tokens: LossTokens, settings: LossSettings, correction: RolloutCorrection) -> LossAndMetrics:
    """Return the loss of bypass mode, and its metrics as shares to sum over micro-batches.

    ``ppo_clip``: PPO's loss, whose ratio to the engine is the correction; no importance weights. ``reinforce``: -A * log-prob
    times the importance weight. Weights and rejection follow from the policy's present log-probs, so that they change within a
    step. The loss divides by the counts of ``tokens``, rejected tokens included, as they are known before. Source:
    ``compute_policy_loss_bypass_mode`` in verl.

    ``rollout_is_batch_normalize`` divides the weights by ``counts.mean_weight``, their mean over the mini-batch. Where that is
    None it takes the mean of these tokens, as verl does: the loss then depends on how the mini-batch is cut.

    Args:
        tokens: Of the micro-batch; ``old_log_probs`` are the engine's, ``weights`` and ``kept`` are not read.
        settings: Clips and aggregation.
        correction: The section ``algorithm.rollout_correction``.
    """
    kept, lengths = None, tokens.lengths
    if correction.rollout_rs is not None:
        rejections = correction.rollout_rs, correction.rollout_rs_threshold
        kept = kept_tokens(tokens.log_ratio, tokens.row, tokens.lengths, *rejections)
        lengths = kept_lengths(kept, tokens.row, tokens.lengths)
    if correction.loss_type == "ppo_clip":
        return vanilla_loss(replace(tokens, lengths=lengths, kept=kept, weights=None), settings)
    assert correction.loss_type == "reinforce", correction.loss_type
    return gpg_loss(replace(tokens, lengths=lengths, kept=kept, weights=_weights(tokens, correction)), settings)


def is_token_local(correction: RolloutCorrection, loss_agg_mode: str) -> bool:
    """Return whether the gradient of a token depends on no other token's log-prob.

    It does where a weight or a rejection is that of a whole response, or where a row's mean counts its kept tokens.

    Args:
        correction: The section ``algorithm.rollout_correction``.
        loss_agg_mode: ``actor.loss_agg_mode``.
    """
    if correction.loss_type == "reinforce" and correction.rollout_is == "sequence":
        return False
    if correction.rollout_rs is None:
        return True
    rejections = rejection_bounds(correction.rollout_rs, correction.rollout_rs_threshold)
    return loss_agg_mode != "seq-mean-token-mean" and all(name.startswith("token") for name in rejections)


def _weights(tokens: LossTokens, correction: RolloutCorrection) -> Tensor | None:
    """Return the importance weight of each token, fp32 [R]. None = 1."""
    if correction.rollout_is is None:
        return None
    level, row, lengths = correction.rollout_is, tokens.row, tokens.lengths
    _, weights = bounded_weights(tokens.log_ratio, row, lengths, level, correction.rollout_is_threshold)
    if correction.rollout_is_batch_normalize:
        mean = tokens.counts.mean_weight
        weights = weights / (mean_weight(weights, row, lengths, level) if mean is None else mean)
    return weights.float()
