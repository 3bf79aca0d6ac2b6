"""Keys that have no effect under other keys: giving one earns a warning, since it asks for something that does not happen."""

from __future__ import annotations

import logging
from collections.abc import Callable

from verl_memopt.config.keys import value_at
from verl_memopt.config.links import LINKS
from verl_memopt.config.problems import shown
from verl_memopt.config.schema import Settings
from verl_memopt.knobs.index import knobs

logger = logging.getLogger(__name__)

_AR = "actor_rollout_ref"

Idle = tuple[Callable[[Settings], bool], str]

_PER_SEQUENCE = "actor.policy_loss.loss_mode clips one ratio per sequence"


def _aggregates_tokens(settings: Settings) -> bool:
    actor = settings.actor_rollout_ref.actor
    return actor.policy_loss.loss_mode == "vanilla" or actor.use_kl_loss or actor.entropy_coeff != 0


_KL_LOSS_OFF: Idle = (lambda s: not s.actor_rollout_ref.actor.use_kl_loss, "actor.use_kl_loss is false")
_KL_REWARD_OFF: Idle = (lambda s: not s.algorithm.use_kl_in_reward, "algorithm.use_kl_in_reward is false")
_KL_FIXED: Idle = (lambda s: s.algorithm.kl_ctrl.type == "fixed", "algorithm.kl_ctrl.type is fixed")
IDLE: dict[str, Idle] = {
    "algorithm.norm_adv_by_std_in_grpo": (lambda s: s.algorithm.adv_estimator != "grpo", "it belongs to GRPO"),
    "algorithm.kl_penalty": _KL_REWARD_OFF,
    "algorithm.kl_ctrl.type": _KL_REWARD_OFF,
    "algorithm.kl_ctrl.kl_coef": _KL_REWARD_OFF,
    "algorithm.kl_ctrl.horizon": _KL_FIXED,
    "algorithm.kl_ctrl.target_kl": _KL_FIXED,
    f"{_AR}.actor.kl_loss_coef": _KL_LOSS_OFF,
    f"{_AR}.actor.kl_loss_type": _KL_LOSS_OFF,
    f"{_AR}.actor.loss_scale_factor": (
        lambda s: s.actor_rollout_ref.actor.loss_agg_mode != "seq-mean-token-sum-norm",
        "actor.loss_agg_mode is not seq-mean-token-sum-norm",
    ),
    f"{_AR}.actor.clip_ratio_c": (lambda s: s.actor_rollout_ref.actor.policy_loss.loss_mode != "vanilla", _PER_SEQUENCE),
    f"{_AR}.actor.loss_agg_mode": (lambda s: not _aggregates_tokens(s), _PER_SEQUENCE),
    f"{_AR}.rollout.do_sample": (
        lambda s: not s.actor_rollout_ref.rollout.do_sample,
        "greedy samples of one prompt are all alike, so every advantage is 0",
    ),
    "custom_reward_function.name": (lambda s: s.custom_reward_function.path is None, "custom_reward_function.path is null"),
    "custom_reward_function.fallback_score": (
        lambda s: s.custom_reward_function.on_error == "raise",
        "custom_reward_function.on_error is raise",
    ),
    "trainer.test_freq": (lambda s: s.data.val_files is None, "data.val_files is null"),
    "trainer.keep_best": (
        lambda s: s.data.val_files is None or s.trainer.test_freq <= 0 or s.trainer.max_actor_ckpt_to_keep is None,
        "it needs a validation (data.val_files, trainer.test_freq) and a bound (trainer.max_actor_ckpt_to_keep)",
    ),
    **dict.fromkeys(
        (
            f"{_AR}.rollout.{key}"
            for key in (*("enable_chunked_prefill", "cudagraph_capture_sizes", "disable_log_stats", "scheduling_policy"),)
        ),
        (lambda s: s.actor_rollout_ref.rollout.name == "hf", "it belongs to actor_rollout_ref.rollout.name=vllm"),
    ),
    **{idle.key: (idle.when, idle.because) for knob in knobs() for idle in knob.idle},
}
"""Key -> when giving it asks for something that does not happen, and why."""

_NAMED_ON_SIGHT = "algorithm.norm_adv_by_std_in_grpo"
"""Its default looks like a wish for normalisation, so giving even the default earns the warning."""


def warn_idle(settings: Settings, given: frozenset[str]) -> None:
    """Log a warning for each key of ``given`` that has no effect."""
    for key, (idle, why) in IDLE.items():
        if key in given and idle(settings) and (key == _NAMED_ON_SIGHT or not _as_without_it(settings, key)):
            logger.warning("%s=%s has no effect here: %s.", key, shown(value_at(settings, key)), why)


def _as_without_it(settings: Settings, key: str) -> bool:
    """Whether the key holds what it would hold had it not been given."""
    source, place = (settings, LINKS[key]) if key in LINKS else (Settings(), key)
    return bool(value_at(settings, key) == value_at(source, place))
