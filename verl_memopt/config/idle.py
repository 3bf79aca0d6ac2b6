"""Keys that have no effect under other keys: giving one earns a warning, since it asks for something that does not happen."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from verl_memopt.algorithms.records import CUSTOM, ESTIMATORS, LOSSES, RECORDS, WITH_GREEDY_RESPONSES, WITHOUT_GROUPS, with_option
from verl_memopt.config.correction_rules import CORRECTION_IDLE
from verl_memopt.config.problems import shown
from verl_memopt.config.reference_rules import REFERENCE_IDLE
from verl_memopt.config.sandbox_rules import SANDBOX_IDLE
from verl_memopt.knobs.critic_rules import idles, twin_idle
from verl_memopt.knobs.knob import Idle

logger = logging.getLogger(__name__)

_AR = "actor_rollout_ref"

_PER_SEQUENCE = "actor.policy_loss.loss_mode averages over sequences"
_ENGINE, _SAMPLES, _AGG_MODE = f"{_AR}.rollout.name", f"{_AR}.rollout.do_sample", f"{_AR}.actor.loss_agg_mode"
_LOSS_MODE, _KL_LOSS = f"{_AR}.actor.policy_loss.loss_mode", f"{_AR}.actor.use_kl_loss"
_ESTIMATOR = "algorithm.adv_estimator"
_FILTER, _RESPONSES = "algorithm.filter_groups", f"{_AR}.rollout.n"
_KL_REWARD, _KL_TYPE = "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.type"
_REWARD = "custom_reward_function"
_MANAGER, _OVERLONG = "reward_model.reward_manager", "reward_model.reward_kwargs.overlong_buffer_cfg"
_NAMED_ON_SIGHT = "algorithm.norm_adv_by_std_in_grpo"
"""Its default looks like a wish for normalisation, so giving even the default earns the warning."""


def _of_advantages() -> Iterator[Idle]:
    """Yield the rules of estimators, groups and the KL."""
    for key in dict.fromkeys(key for record in ESTIMATORS.values() for key in record.options.values()):
        owners = with_option(key)
        yield Idle(
            f"algorithm.{key}",
            (_ESTIMATOR,),
            lambda name, owners=owners: name not in (*owners, CUSTOM),
            f"it belongs to {' and '.join(owners)}",
        )
    section = "algorithm.custom_estimator"
    yield Idle(f"{section}.name", (f"{section}.path",), lambda path: path is None, f"{section}.path is null")
    yield Idle(f"{_FILTER}.enable", (_RESPONSES,), lambda n: n < 2, "a group of one is always kept")
    for key in ("metric", "max_num_gen_batches"):
        yield Idle(f"{_FILTER}.{key}", (f"{_FILTER}.enable",), lambda on: not on, f"{_FILTER}.enable is false")
    for key in ("algorithm.kl_penalty", _KL_TYPE, "algorithm.kl_ctrl.kl_coef"):
        yield Idle(key, (_KL_REWARD,), lambda on: not on, f"{_KL_REWARD} is false")
    for key in ("algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl"):
        yield Idle(key, (_KL_TYPE,), lambda kind: kind == "fixed", f"{_KL_TYPE} is fixed")
    for key in ("kl_loss_coef", "kl_loss_type"):
        yield Idle(f"{_AR}.actor.{key}", (_KL_LOSS,), lambda on: not on, "actor.use_kl_loss is false")


def _of_losses() -> Iterator[Idle]:
    """Yield the rules of the losses."""
    scale_factor = Idle(
        f"{_AR}.actor.loss_scale_factor",
        (_AGG_MODE,),
        lambda mode: mode != "seq-mean-token-sum-norm",
        "actor.loss_agg_mode is not seq-mean-token-sum-norm",
    )
    yield from (scale_factor, twin_idle(scale_factor))
    for key in dict.fromkeys(key for record in LOSSES.values() for key in record.options):
        owners = with_option(key)
        yield Idle(
            f"{_AR}.actor.{key}",
            (_LOSS_MODE,),
            lambda mode, owners=owners: mode not in (*owners, CUSTOM),
            f"it belongs to {_LOSS_MODE}={owners[0]}" if len(owners) == 1 else "this loss has no clip",
        )
    section = f"{_AR}.actor.policy_loss.custom"
    yield Idle(f"{section}.name", (f"{section}.path",), lambda path: path is None, f"{section}.path is null")
    yield from (idle for record in RECORDS for idle in record.idle)
    yield Idle(
        _AGG_MODE,
        (_LOSS_MODE, _KL_LOSS, f"{_AR}.actor.entropy_coeff"),
        lambda mode, kl, entropy: LOSSES[mode].by_sequence and not kl and entropy == 0,
        _PER_SEQUENCE,
    )


def _of_rollouts() -> Iterator[Idle]:
    """Yield the rules of sampling and of the engine."""
    alike = "greedy samples of one prompt are all alike, so every advantage is 0"
    yield Idle(
        _SAMPLES,
        (_SAMPLES, _ESTIMATOR),
        lambda samples, name: not samples and (name not in WITHOUT_GROUPS or name in WITH_GREEDY_RESPONSES),
        alike,
    )
    for key in ("enable_chunked_prefill", "cudagraph_capture_sizes", "disable_log_stats", "scheduling_policy"):
        yield Idle(f"{_AR}.rollout.{key}", (_ENGINE,), lambda name: name == "hf", f"it belongs to {_ENGINE}=vllm")


def _of_rewards_and_runs() -> Iterator[Idle]:
    """Yield the rules of reward functions, validation and checkpoints."""
    yield Idle(f"{_REWARD}.name", (f"{_REWARD}.path",), lambda path: path is None, f"{_REWARD}.path is null")
    yield Idle(
        f"{_REWARD}.fallback_score", (f"{_REWARD}.on_error",), lambda mode: mode == "raise", f"{_REWARD}.on_error is raise"
    )
    off = f"{_OVERLONG}.enable is false"
    for key in (f"{_OVERLONG}.len", f"{_OVERLONG}.penalty_factor", f"{_OVERLONG}.log", "reward_model.reward_kwargs.max_resp_len"):
        yield Idle(key, (f"{_OVERLONG}.enable",), lambda on: not on, off)
    yield from SANDBOX_IDLE
    yield Idle("trainer.test_freq", ("data.val_files",), lambda files: files is None, "data.val_files is null")
    yield Idle(
        "trainer.keep_best",
        ("data.val_files", "trainer.test_freq", "trainer.max_actor_ckpt_to_keep"),
        lambda files, every, most: files is None or every <= 0 or most is None,
        "it needs a validation (data.val_files, trainer.test_freq) and a bound (trainer.max_actor_ckpt_to_keep)",
    )


IDLE = {
    idle.key: idle
    for idle in (
        *_of_advantages(), *_of_losses(), *_of_rollouts(), *_of_rewards_and_runs(), *CORRECTION_IDLE, *REFERENCE_IDLE, *idles(),
    )
}  # fmt: skip
"""Key -> when giving it asks for something that does not happen, and why."""


def warn_idle(idle: Idle, value: Any, if_not_given: Any) -> None:
    """Log that a key which the user set has no effect, unless it holds what it would hold anyway.

    Args:
        idle: says why the key has no effect.
        value: of the key.
        if_not_given: what the key would hold if the user had not set it.
    """
    if value != if_not_given or idle.key == _NAMED_ON_SIGHT:
        logger.warning("%s=%s has no effect here: %s.", idle.key, shown(value), idle.because)
