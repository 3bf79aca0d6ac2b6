"""Keys that have no effect under other keys: giving one earns a warning, since it asks for something that does not happen."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from verl_memopt.config.correction_rules import CORRECTION_IDLE
from verl_memopt.config.problems import shown
from verl_memopt.config.reference_rules import REFERENCE_IDLE
from verl_memopt.config.sandbox_rules import SANDBOX_IDLE
from verl_memopt.knobs.conditions import LOSSES_OF_SEQUENCES, WITHOUT_GROUPS
from verl_memopt.knobs.critic_rules import idles, twin_idle
from verl_memopt.knobs.knob import Idle

logger = logging.getLogger(__name__)

_AR = "actor_rollout_ref"

_PER_SEQUENCE = "actor.policy_loss.loss_mode averages over sequences"
_WITHOUT_CLIP = ("gpg", "kl_cov", "sapo")
_ENGINE, _SAMPLES, _AGG_MODE = f"{_AR}.rollout.name", f"{_AR}.rollout.do_sample", f"{_AR}.actor.loss_agg_mode"
_LOSS_MODE, _KL_LOSS = f"{_AR}.actor.policy_loss.loss_mode", f"{_AR}.actor.use_kl_loss"
_ESTIMATOR = "algorithm.adv_estimator"
_FILTER, _RESPONSES = "algorithm.filter_groups", f"{_AR}.rollout.n"
_DIVIDED_BY_STD = ("grpo", "grpo_passk")
_DISCOUNTED = ("gae", "reinforce_plus_plus")
_KL_REWARD, _KL_TYPE = "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.type"
_REWARD = "custom_reward_function"
_MANAGER, _OVERLONG = "reward_model.reward_manager", "reward_model.reward_kwargs.overlong_buffer_cfg"
_NAMED_ON_SIGHT = "algorithm.norm_adv_by_std_in_grpo"
"""Its default looks like a wish for normalisation, so giving even the default earns the warning."""


def _of_advantages() -> Iterator[Idle]:
    """Yield the rules of estimators, groups and the KL."""
    yield Idle(_NAMED_ON_SIGHT, (_ESTIMATOR,), lambda name: name not in _DIVIDED_BY_STD, "it belongs to grpo and grpo_passk")
    yield Idle("algorithm.normalize_advantages", (_ESTIMATOR,), lambda name: name != "rloo", "it belongs to rloo")
    yield Idle(
        "algorithm.gamma", (_ESTIMATOR,), lambda name: name not in _DISCOUNTED, "it belongs to gae and reinforce_plus_plus"
    )
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
    yield Idle(f"{_AR}.actor.clip_ratio_c", (_LOSS_MODE,), lambda mode: mode != "vanilla", f"it belongs to {_LOSS_MODE}=vanilla")
    for key in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
        yield Idle(f"{_AR}.actor.{key}", (_LOSS_MODE,), lambda mode: mode in _WITHOUT_CLIP, "this loss has no clip")
    for owner, names in (
        ("clip_cov", ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub")),
        ("kl_cov", ("kl_cov_ratio", "ppo_kl_coef")),
    ):
        for name in names:
            yield Idle(
                f"{_AR}.actor.policy_loss.{name}",
                (_LOSS_MODE,),
                lambda mode, owner=owner: mode != owner,
                f"it belongs to {_LOSS_MODE}={owner}",
            )
    yield Idle(
        _LOSS_MODE,
        (_LOSS_MODE, "data.train_batch_size", f"{_AR}.actor.ppo_mini_batch_size", f"{_AR}.actor.ppo_epochs"),
        lambda mode, prompts, mini_batch, epochs: mode == "kl_cov" and prompts == mini_batch and epochs == 1,
        "with one optimizer step a rollout every ratio is 1, where its penalty has no gradient",
    )
    yield Idle(
        _AGG_MODE,
        (_LOSS_MODE, _KL_LOSS, f"{_AR}.actor.entropy_coeff"),
        lambda mode, kl, entropy: mode in (*LOSSES_OF_SEQUENCES, "sapo") and not kl and entropy == 0,
        _PER_SEQUENCE,
    )


def _of_rollouts() -> Iterator[Idle]:
    """Yield the rules of sampling and of the engine."""
    alike = "greedy samples of one prompt are all alike, so every advantage is 0"
    yield Idle(
        _SAMPLES,
        (_SAMPLES, _ESTIMATOR),
        lambda samples, name: not samples and (name not in WITHOUT_GROUPS or name == "remax"),
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
