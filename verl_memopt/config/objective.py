"""What a run trains, in one line, so that nobody has to work it out from a recipe, a profile and a command line."""

from __future__ import annotations

import logging

from verl_memopt.algorithms.records import LOSSES, SFT
from verl_memopt.config.schema import Algorithm

logger = logging.getLogger(__name__)

_BYPASS = {
    "ppo_clip": "one clipped ratio to the engine per token",
    "reinforce": "log-probs without a ratio",
}


def objective(algorithm: Algorithm, loss: str, kl_in_loss: str | None) -> str:
    """Return the estimator, the loss and every KL of a run, and whether groups are left out, in words.

    Args:
        algorithm: The section ``algorithm``.
        loss: ``policy_loss.loss_mode``.
        kl_in_loss: coefficient and kind of the KL in the loss; None = there is none.
    """
    if algorithm.adv_estimator == SFT:
        return "supervised, the mean negative log-prob of the tokens of the dataset's responses"
    correction, loss_in_words = algorithm.rollout_correction, f"loss {loss} ({LOSSES[loss].ratio})"
    if correction.bypass_mode:
        loss_in_words = f"loss {correction.loss_type} ({_BYPASS[correction.loss_type]})"
    normalized = " (normalised over the step)" if algorithm.normalize_advantages and algorithm.adv_estimator == "rloo" else ""
    parts = [f"advantages {algorithm.adv_estimator}{normalized}", loss_in_words]
    if kl_in_loss is not None:
        parts.append(f"KL in the loss {kl_in_loss}")
    if algorithm.use_kl_in_reward:
        parts.append(f"KL in the reward {algorithm.kl_ctrl.kl_coef:g} x {algorithm.kl_penalty}")
    if len(parts) == 2:
        parts.append("no KL")
    if correction.rollout_is is not None and not (correction.bypass_mode and correction.loss_type == "ppo_clip"):
        parts.append(f"importance weights per {correction.rollout_is}")
    if correction.rollout_rs is not None:
        parts.append(f"rejection {correction.rollout_rs}")
    if algorithm.use_pf_ppo:
        parts.append(f"rows drawn by score ({algorithm.pf_ppo.reweight_method})")
    if algorithm.filter_groups.enable:
        parts.append(f"groups whose responses agree in {algorithm.filter_groups.metric or 'score'} left out")
    return ", ".join(parts)


def log_objective(algorithm: Algorithm, loss: str, kl_in_loss: str | None) -> None:
    """Log the objective, and a warning where another estimator than RLOO's meets the loss that the RLOO recipe sets.

    Args:
        algorithm: as in :func:`objective`, like the others.
        loss: ``policy_loss.loss_mode``.
        kl_in_loss: coefficient and kind of the KL in the loss.
    """
    logger.info("objective: %s", objective(algorithm, loss, kl_in_loss))
    bypass_loss = algorithm.rollout_correction.loss_type if algorithm.rollout_correction.bypass_mode else None
    if bypass_loss is not None and loss != "vanilla":
        logger.warning(
            "actor_rollout_ref.actor.policy_loss.loss_mode=%s has no effect: algorithm.rollout_correction.bypass_mode=true has "
            "losses of its own, loss_type=%s.", loss, bypass_loss,
        )  # fmt: skip
    elif algorithm.adv_estimator != "rloo" and loss == "sequence":
        logger.warning(
            "algorithm.adv_estimator=%s with actor_rollout_ref.actor.policy_loss.loss_mode=sequence, which is RLOO's loss and "
            "what rloo_trainer sets. For PPO's loss set it to vanilla, or use --config-name ppo_trainer or grpo_trainer.",
            algorithm.adv_estimator,
        )
