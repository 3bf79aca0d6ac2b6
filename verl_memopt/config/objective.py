"""What a run trains, in one line, so that nobody has to work it out from a recipe, a profile and a command line."""

from __future__ import annotations

import logging

from verl_memopt.config.schema import Actor, Algorithm

logger = logging.getLogger(__name__)

_RATIO = {
    "vanilla": "one clipped ratio per token",
    "sequence": "one clipped ratio per sequence",
    "gspo": "one clipped ratio per sequence, length-normalised",
}


def objective(algorithm: Algorithm, actor: Actor) -> str:
    """Return the estimator, the loss and every KL of a run."""
    loss = actor.policy_loss.loss_mode
    parts = [f"advantages {algorithm.adv_estimator}", f"loss {loss} ({_RATIO[loss]})"]
    if actor.use_kl_loss:
        parts.append(f"KL in the loss {actor.kl_loss_coef:g} x {actor.kl_loss_type}")
    if algorithm.use_kl_in_reward:
        parts.append(f"KL in the reward {algorithm.kl_ctrl.kl_coef:g} x {algorithm.kl_penalty}")
    return ", ".join([*parts, *(["no KL"] if len(parts) == 2 else [])])


def log_objective(algorithm: Algorithm, actor: Actor) -> None:
    """Log the objective, and a warning where GRPO's advantages meet the loss that the RLOO recipe sets."""
    logger.info("objective: %s", objective(algorithm, actor))
    if algorithm.adv_estimator == "grpo" and actor.policy_loss.loss_mode == "sequence":
        logger.warning(
            "algorithm.adv_estimator=grpo with actor_rollout_ref.actor.policy_loss.loss_mode=sequence, which is RLOO's loss and "
            "what rloo_trainer sets. For GRPO's loss set it to vanilla, or use --config-name grpo_trainer."
        )
