"""Combinations of the rollout correction, ReMax, the optimal token baselines and PF-PPO that are refused or have no effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from verl_memopt.algorithms.records import CUSTOM, WITH_SUM_PI_SQUARED
from verl_memopt.config.correction_bounds import KEY, importance_bounds, rejection_bounds
from verl_memopt.errors import ConfigError
from verl_memopt.knobs.knob import Idle, Refusal

_ROLLOUT, _ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
_WEIGHTS, _WEIGHTS_BOUND = f"{KEY}.rollout_is", f"{KEY}.rollout_is_threshold"
_REJECTION, _REJECTION_BOUND = f"{KEY}.rollout_rs", f"{KEY}.rollout_rs_threshold"
_BYPASS, _BYPASS_LOSS = f"{KEY}.bypass_mode", f"{KEY}.loss_type"
_ANY_CORRECTION = (_WEIGHTS, _REJECTION, _BYPASS)
_ESTIMATOR, _SQUARES = "algorithm.adv_estimator", f"{_ACTOR}.calculate_sum_pi_squared"
_OWNERS = " and ".join(WITH_SUM_PI_SQUARED)


def _fault(read: Callable[..., Any], *values: Any) -> str | None:
    """Return what is wrong with the text of a setting, without its address; None if it can be read."""
    try:
        read(*values)
    except ConfigError as error:
        return str(error).partition(": ")[2].rstrip(".")
    return None


def _refusals() -> Iterator[Refusal]:
    """Yield the rules that refuse."""
    yield Refusal(
        (_WEIGHTS_BOUND,),
        lambda threshold, level: level is not None and _fault(importance_bounds, threshold) is not None,
        "it does not spell one bound or two",
        "",
        lambda threshold, level: str(_fault(importance_bounds, threshold)),
        about=(_WEIGHTS,),
    )
    yield Refusal(
        (_REJECTION, _REJECTION_BOUND),
        lambda names, threshold: names is not None and _fault(rejection_bounds, names, threshold) is not None,
        "a rejection is unknown, or its threshold cannot be read",
        "",
        lambda names, threshold: str(_fault(rejection_bounds, names, threshold)),
    )
    returned, mode, temperature = (f"{_ROLLOUT}.{key}" for key in ("calculate_log_probs", "logprobs_mode", "temperature"))
    yield Refusal(
        (returned,),
        lambda log_probs, *corrections: not log_probs and any(corrections),
        f"{KEY} compares with the engine's log-probs",
        f"Set {returned}=true, or remove the correction.",
        about=_ANY_CORRECTION,
    )
    yield Refusal(
        (mode, temperature),
        lambda kind, heat, *corrections: kind == "raw_logprobs" and heat != 1 and any(corrections),
        f"{KEY} needs the log-probs of the distribution that was sampled, and raw ones are of temperature 1",
        f"Set {mode}=processed_logprobs.",
        about=_ANY_CORRECTION,
    )
    yield Refusal(
        (_ESTIMATOR, _SQUARES),
        lambda name, computed: name in WITH_SUM_PI_SQUARED and not computed,
        "this estimator reads the sum of squared probabilities at each token",
        f"Set {_SQUARES}=true.",
    )
    yield Refusal(
        (_ESTIMATOR, _BYPASS),
        lambda name, bypass: name in WITH_SUM_PI_SQUARED and bypass,
        "this estimator reads a log-prob pass, which bypass mode leaves out",
        f"Set {_BYPASS}=false.",
    )


def _idle() -> Iterator[Idle]:
    """Yield the rules about settings without effect."""
    for key in (_WEIGHTS_BOUND, f"{KEY}.rollout_is_batch_normalize"):
        yield Idle(key, (_WEIGHTS,), lambda level: level is None, f"{_WEIGHTS} is null")
    yield Idle(_REJECTION_BOUND, (_REJECTION,), lambda names: names is None, f"{_REJECTION} is null")
    yield Idle(_BYPASS_LOSS, (_BYPASS,), lambda bypass: not bypass, f"{_BYPASS} is false")
    yield Idle(
        _WEIGHTS,
        (_WEIGHTS, _BYPASS, _BYPASS_LOSS),
        lambda level, bypass, loss: level is not None and bypass and loss == "ppo_clip",
        f"with {_BYPASS} the ratio of {_BYPASS_LOSS}=ppo_clip is the correction already, and weights are only reported",
    )
    for key in ("calculate_entropy", "old_log_prob_pass"):
        yield Idle(f"{_ACTOR}.{key}", (_BYPASS,), bool, f"{_BYPASS} leaves out the pass for old log-probs")
    yield Idle(_SQUARES, (_ESTIMATOR,), lambda name: name not in (*WITH_SUM_PI_SQUARED, CUSTOM), f"it belongs to {_OWNERS}")
    for key in ("reweight_method", "weight_pow"):
        yield Idle(f"algorithm.pf_ppo.{key}", ("algorithm.use_pf_ppo",), lambda on: not on, "algorithm.use_pf_ppo is false")


CORRECTION_RULES: tuple[Refusal, ...] = tuple(_refusals())
"""The combinations that are refused, for :mod:`verl_memopt.config.checks`."""

CORRECTION_IDLE: tuple[Idle, ...] = tuple(_idle())
"""The settings without effect, for :mod:`verl_memopt.config.idle`."""
