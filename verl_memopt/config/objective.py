"""What a run trains, in one line, so that nobody has to work it out from a recipe, a profile and a command line."""

from __future__ import annotations

import logging

from verl_memopt.config.schema import Algorithm

logger = logging.getLogger(__name__)

_RATIO = {
    "vanilla": "one clipped ratio per token",
    "sequence": "one clipped ratio per sequence",
    "gspo": "one clipped ratio per sequence, length-normalised",
    "geo_mean": "one ratio per sequence, the geometric mean of clipped ones",
    "cispo": "log-probs weighted by one clipped ratio per token",
    "gpg": "log-probs without a ratio",
    "clip_cov": "one clipped ratio per token, some tokens without a gradient",
    "kl_cov": "one ratio per token, a KL penalty on some",
}


def objective(algorithm: Algorithm, loss: str, kl_in_loss: str | None) -> str:
    """Return the estimator, the loss and every KL of a run, and whether groups are left out, in words.

    Args:
        algorithm: The section ``algorithm``.
        loss: ``policy_loss.loss_mode``.
        kl_in_loss: coefficient and kind of the KL in the loss; None = there is none.
    """
    parts = [f"advantages {algorithm.adv_estimator}", f"loss {loss} ({_RATIO[loss]})"]
    if kl_in_loss is not None:
        parts.append(f"KL in the loss {kl_in_loss}")
    if algorithm.use_kl_in_reward:
        parts.append(f"KL in the reward {algorithm.kl_ctrl.kl_coef:g} x {algorithm.kl_penalty}")
    if len(parts) == 2:
        parts.append("no KL")
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
    if algorithm.adv_estimator != "rloo" and loss == "sequence":
        logger.warning(
            "algorithm.adv_estimator=%s with actor_rollout_ref.actor.policy_loss.loss_mode=sequence, which is RLOO's loss and "
            "what rloo_trainer sets. For PPO's loss set it to vanilla, or use --config-name ppo_trainer or grpo_trainer.",
            algorithm.adv_estimator,
        )
