"""Keys that have no effect under other keys: giving one earns a warning, since it asks for something that does not happen."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

from verl_memopt.algorithms.records import CUSTOM, ESTIMATORS, LOSSES, RECORDS, WITH_GREEDY_RESPONSES, WITHOUT_GROUPS, with_option
from verl_memopt.config.correction_rules import CORRECTION_UNUSED
from verl_memopt.config.problems import shown
from verl_memopt.config.reference_rules import REFERENCE_UNUSED
from verl_memopt.config.sandbox_rules import SANDBOX_UNUSED
from verl_memopt.config.schema import Settings
from verl_memopt.knobs.critic_rules import twin_unused, unused_keys
from verl_memopt.knobs.knob import UnusedKey

logger = logging.getLogger(__name__)

_AR = "actor_rollout_ref"
_AGG_MODE, _LOSS_MODE = f"{_AR}.actor.loss_agg_mode", f"{_AR}.actor.policy_loss.loss_mode"
_FILTER, _KL = "algorithm.filter_groups", "algorithm.kl_ctrl"
_REWARD, _OVERLONG = "custom_reward_function", "reward_model.reward_kwargs.overlong_buffer_cfg"
_NAMED_ON_SIGHT = "algorithm.norm_adv_by_std_in_grpo"
"""Its default looks like a wish for normalisation, so giving even the default earns the warning."""


def _estimator(settings: Settings) -> str:
    return settings.algorithm.adv_estimator


def _loss(settings: Settings) -> str:
    return settings.actor_rollout_ref.actor.policy_loss.loss_mode


def _has_other_estimator(settings: Settings, owners: tuple[str, ...]) -> bool:
    return _estimator(settings) not in (*owners, CUSTOM)


def _has_other_loss(settings: Settings, owners: tuple[str, ...]) -> bool:
    return _loss(settings) not in (*owners, CUSTOM)


def _of_advantages() -> Iterator[UnusedKey]:
    """Yield the rules of estimators, groups and the KL."""
    for key in dict.fromkeys(key for record in ESTIMATORS.values() for key in record.options.values()):
        owners = with_option(key)
        yield UnusedKey(f"algorithm.{key}", partial(_has_other_estimator, owners=owners), f"it belongs to {' and '.join(owners)}")
    section = "algorithm.custom_estimator"
    yield UnusedKey(
        f"{section}.name", lambda settings: settings.algorithm.custom_estimator.path is None, f"{section}.path is null"
    )
    yield UnusedKey(
        f"{_FILTER}.enable", lambda settings: settings.actor_rollout_ref.rollout.n < 2, "a group of one is always kept"
    )
    for key in ("metric", "max_num_gen_batches"):
        yield UnusedKey(
            f"{_FILTER}.{key}", lambda settings: not settings.algorithm.filter_groups.enable, f"{_FILTER}.enable is false"
        )
    for key in ("algorithm.kl_penalty", f"{_KL}.type", f"{_KL}.kl_coef"):
        yield UnusedKey(key, lambda settings: not settings.algorithm.use_kl_in_reward, "algorithm.use_kl_in_reward is false")
    for key in ("horizon", "target_kl"):
        yield UnusedKey(f"{_KL}.{key}", lambda settings: settings.algorithm.kl_ctrl.type == "fixed", f"{_KL}.type is fixed")
    for key in ("kl_loss_coef", "kl_loss_type"):
        yield UnusedKey(
            f"{_AR}.actor.{key}",
            lambda settings: not settings.actor_rollout_ref.actor.use_kl_loss,
            "actor.use_kl_loss is false",
        )


def _averages_sequences(settings: Settings) -> bool:
    actor = settings.actor_rollout_ref.actor
    return LOSSES[_loss(settings)].by_sequence and not actor.use_kl_loss and actor.entropy_coeff == 0


def _of_losses() -> Iterator[UnusedKey]:
    """Yield the rules of the losses."""
    scale_factor = UnusedKey(
        f"{_AR}.actor.loss_scale_factor",
        lambda settings: settings.actor_rollout_ref.actor.loss_agg_mode != "seq-mean-token-sum-norm",
        "actor.loss_agg_mode is not seq-mean-token-sum-norm",
    )
    yield from (scale_factor, twin_unused(scale_factor))
    for key in dict.fromkeys(key for record in LOSSES.values() for key in record.options):
        owners = with_option(key)
        yield UnusedKey(
            f"{_AR}.actor.{key}",
            partial(_has_other_loss, owners=owners),
            f"it belongs to {_LOSS_MODE}={owners[0]}" if len(owners) == 1 else "this loss has no clip",
        )
    section = f"{_AR}.actor.policy_loss.custom"
    yield UnusedKey(
        f"{section}.name",
        lambda settings: settings.actor_rollout_ref.actor.policy_loss.custom.path is None,
        f"{section}.path is null",
    )
    yield from (unused for record in RECORDS for unused in record.unused_keys)
    yield UnusedKey(_AGG_MODE, _averages_sequences, "actor.policy_loss.loss_mode averages over sequences")


def _has_equal_answers(settings: Settings) -> bool:
    """Return whether greedy answers are compared with each other, or with another greedy one."""
    compares = _estimator(settings) not in WITHOUT_GROUPS or _estimator(settings) in WITH_GREEDY_RESPONSES
    return not settings.actor_rollout_ref.rollout.do_sample and compares


def _of_rollouts() -> Iterator[UnusedKey]:
    """Yield the rules of sampling and of the engine."""
    yield UnusedKey(
        f"{_AR}.rollout.do_sample",
        _has_equal_answers,
        "greedy samples of one prompt are all alike, so every advantage is 0",
    )
    for key in ("enable_chunked_prefill", "cudagraph_capture_sizes", "disable_log_stats", "scheduling_policy"):
        yield UnusedKey(
            f"{_AR}.rollout.{key}",
            lambda settings: settings.actor_rollout_ref.rollout.name == "hf",
            f"it belongs to {_AR}.rollout.name=vllm",
        )


def _never_ranks_checkpoints(settings: Settings) -> bool:
    trainer = settings.trainer
    return settings.data.val_files is None or trainer.test_freq <= 0 or trainer.max_actor_ckpt_to_keep is None


def _of_rewards_and_runs() -> Iterator[UnusedKey]:
    """Yield the rules of reward functions, validation and checkpoints."""
    yield UnusedKey(f"{_REWARD}.name", lambda settings: settings.custom_reward_function.path is None, f"{_REWARD}.path is null")
    yield UnusedKey(
        f"{_REWARD}.fallback_score",
        lambda settings: settings.custom_reward_function.on_error == "raise",
        f"{_REWARD}.on_error is raise",
    )
    for key in (f"{_OVERLONG}.len", f"{_OVERLONG}.penalty_factor", f"{_OVERLONG}.log", "reward_model.reward_kwargs.max_resp_len"):
        yield UnusedKey(
            key,
            lambda settings: not settings.reward_model.reward_kwargs.overlong_buffer_cfg.enable,
            f"{_OVERLONG}.enable is false",
        )
    yield from SANDBOX_UNUSED
    yield UnusedKey("trainer.test_freq", lambda settings: settings.data.val_files is None, "data.val_files is null")
    yield UnusedKey(
        "trainer.keep_best",
        _never_ranks_checkpoints,
        "it needs a validation (data.val_files, trainer.test_freq) and a bound (trainer.max_actor_ckpt_to_keep)",
    )


UNUSED_KEYS = {
    unused.key: unused
    for unused in (
        *_of_advantages(), *_of_losses(), *_of_rollouts(), *_of_rewards_and_runs(), *CORRECTION_UNUSED, *REFERENCE_UNUSED,
        *unused_keys(),
    )
}  # fmt: skip
"""Key -> when giving it asks for something that does not happen, and why."""


def warn_unused(unused: UnusedKey, value: Any, if_not_given: Any) -> None:
    """Log that a key which the user set has no effect, unless it holds what it would hold anyway.

    Args:
        unused: says why the key has no effect.
        value: of the key.
        if_not_given: what the key would hold if the user had not set it.
    """
    if value != if_not_given or unused.key == _NAMED_ON_SIGHT:
        logger.warning("%s=%s has no effect here: %s.", unused.key, shown(value), unused.because)
