"""The sections ``algorithm.rollout_correction`` and ``algorithm.pf_ppo``, under verl's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verl_memopt.knobs.values import NaturalFloat


@dataclass(frozen=True)
class RolloutCorrection:
    """What the update does about a rollout engine whose probabilities differ from the trainer's."""

    rollout_is: Literal["token", "sequence"] | None = None
    """Weigh each token's loss by probability under the trainer over probability under the engine: of the token, or of its whole
    response; null = no weights."""
    rollout_is_threshold: str | float = 2.0
    """Upper bound of the weights. ``lower_upper``, as 0.5_5.0, sets weights outside to 0 instead (IcePop)."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the batch. In bypass mode over the mini-batch, which takes one more log-prob pass
    per mini-batch."""
    rollout_rs: str | None = None
    """Rejections: tokens or responses that trainer and engine see too differently are left out of the update. Names such as
    token_k1, seq_sum_k1, seq_mean_k3 or seq_max_k2, separated by commas; null = none."""
    rollout_rs_threshold: str | float | None = None
    """Bound of each rejection, separated by commas, or one for all. k1 reads ``lower_upper`` as bounds of the ratio, as 0.5_2.0,
    or one number of at least 1; k2 and k3 read one number."""
    bypass_mode: bool = False
    """Take the engine's log-probs as the old ones, and leave their pass out."""
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    """Loss of bypass mode, in the place of ``actor.policy_loss.loss_mode``. ppo_clip = PPO's, whose ratio to the engine is the
    correction; reinforce = log-prob times advantage times importance weight."""


@dataclass(frozen=True)
class PfPpo:
    """How PF-PPO weighs the rows that it draws."""

    reweight_method: Literal["pow", "max_min", "max_random"] = "pow"
    """pow = size of the score, to the power ``weight_pow``; max_min = the best and the worst scores of the batch alone;
    max_random = 0.4 for the best scores, 0.1 for the others."""
    weight_pow: NaturalFloat = 2.0
    """Power of pow."""
