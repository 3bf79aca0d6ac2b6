"""Combinations of the rollout correction, ReMax, the optimal token baselines and PF-PPO that are refused or have no effect."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

from verl_memopt.algorithms.records import STATISTICS, WITH_STATISTICS, with_input
from verl_memopt.config.keys import belongs, idle, other_than, refused
from verl_memopt.config.schema import Settings
from verl_memopt.errors import ConfigError
from verl_memopt.memory.knob import Refusal, UnusedKey

# The bounds that the text settings of ``algorithm.rollout_correction`` spell.

KEY = "algorithm.rollout_correction"

REJECTIONS = (
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1", "seq_mean_k2", "seq_mean_k3",
    "seq_max_k2", "seq_max_k3",
)  # fmt: skip
"""Values of ``rollout_rs``, of which several may stand in one setting."""


def importance_bounds(threshold: float | str) -> tuple[float | None, float]:
    """Return the lower bound, or None, and the upper bound that ``rollout_is_threshold`` spells.

    Args:
        threshold: One number, or ``lower_upper``.

    Raises:
        ConfigError: A bound is not a positive number, or the lower is above the upper.
    """
    try:
        bounds = [float(part) for part in str(threshold).split("_")]
    except ValueError:
        bounds = []
    positive = all(0 < bound < math.inf for bound in bounds)
    if len(bounds) not in (1, 2) or not positive or bounds[0] > bounds[-1]:
        raise ConfigError(
            f"{KEY}.rollout_is_threshold={threshold}: give one positive number, or lower_upper with lower <= upper, as 0.5_5.0."
        )
    return (bounds[0] if len(bounds) == 2 else None), bounds[-1]


def rejection_bounds(names: str, threshold: float | str | None) -> dict[str, tuple[float, float]]:
    """Return the lower and the upper bound of each rejection, in the units of its divergence.

    k1 reads ``lower_upper`` as bounds of a ratio, and one number as an upper bound whose reciprocal is the lower one. k2 and k3
    read one number; their lower bound is minus infinity.

    Args:
        names: ``rollout_rs``, names separated by commas.
        threshold: ``rollout_rs_threshold``, one for each name or one for all.

    Raises:
        ConfigError: A name is unknown, a bound is missing, is not a positive number or is in the wrong form.
    """
    rejections = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    unknown = [name for name in rejections if name not in REJECTIONS]
    if unknown or not rejections:
        raise ConfigError(f"{KEY}.rollout_rs={names}: give names out of {', '.join(REJECTIONS)}, separated by commas.")
    specs = [part.strip() for part in str(threshold).split(",") if part.strip()]
    if threshold is None or len(specs) not in (1, len(rejections)):
        raise ConfigError(
            f"{KEY}.rollout_rs_threshold={threshold}: give one threshold for all of {names}, or one for each, "
            "separated by commas."
        )
    specs = specs * len(rejections) if len(specs) == 1 else specs
    return {name: _bounds(name, spec) for name, spec in zip(rejections, specs, strict=True)}


def _bounds(name: str, spec: str) -> tuple[float, float]:
    """Return the bounds of one rejection from its part of the setting."""
    try:
        numbers = [float(part) for part in spec.split("_")]
    except ValueError:
        numbers = []
    ratio = name.endswith("k1")
    fits = len(numbers) in ((1, 2) if ratio else (1,)) and all(0 < number < math.inf for number in numbers)
    if not fits or numbers[0] > numbers[-1] or (ratio and len(numbers) == 1 and numbers[0] < 1):
        form = "lower_upper with lower <= upper, as 0.5_2.0, or one number of at least 1" if ratio else "one positive number"
        raise ConfigError(f"{KEY}.rollout_rs_threshold={spec}: {name} needs {form}.")
    if not ratio:
        return -math.inf, numbers[0]
    lower = numbers[0] if len(numbers) == 2 else 1 / numbers[0]
    return math.log(lower), math.log(numbers[-1])


_ROLLOUT, _ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
_WEIGHTS, _WEIGHTS_BOUND = f"{KEY}.rollout_is", f"{KEY}.rollout_is_threshold"
_REJECTION, _REJECTION_BOUND = f"{KEY}.rollout_rs", f"{KEY}.rollout_rs_threshold"
_BYPASS, _BYPASS_LOSS = f"{KEY}.bypass_mode", f"{KEY}.loss_type"
_ESTIMATOR = "algorithm.adv_estimator"
_SWITCHED = tuple((f"{_ACTOR}.{each.key}", with_input(each.name), each.help) for each in STATISTICS.values() if each.key)
"""Key, the estimators that require it, and what it makes a pass compute."""


def _fault(read: Callable[..., Any], *values: Any) -> str | None:
    """Return what is wrong with the text of a setting, without its address; None if it can be read."""
    try:
        read(*values)
    except ConfigError as error:
        return str(error).partition(": ")[2].rstrip(".")
    return None


def _weights_fault(settings: Settings) -> str | None:
    correction = settings.algorithm.rollout_correction
    return None if correction.rollout_is is None else _fault(importance_bounds, correction.rollout_is_threshold)


def _rejection_fault(settings: Settings) -> str | None:
    given = settings.algorithm.rollout_correction
    return None if given.rollout_rs is None else _fault(rejection_bounds, given.rollout_rs, given.rollout_rs_threshold)


def _corrects(settings: Settings) -> bool:
    correction = settings.algorithm.rollout_correction
    return bool(correction.rollout_is or correction.rollout_rs or correction.bypass_mode)


_bypasses = attrgetter(_BYPASS)


def _refusals() -> Iterator[Refusal]:
    """Yield the rules that refuse."""
    yield Refusal(
        (_WEIGHTS_BOUND,),
        lambda settings: _weights_fault(settings) is not None,
        "it does not spell one bound or two",
        "",
        lambda settings: str(_weights_fault(settings)),
    )
    yield Refusal(
        (_REJECTION, _REJECTION_BOUND),
        lambda settings: _rejection_fault(settings) is not None,
        "a rejection is unknown, or its threshold cannot be read",
        "",
        lambda settings: str(_rejection_fault(settings)),
    )
    returned, mode, temperature = (f"{_ROLLOUT}.{key}" for key in ("calculate_log_probs", "logprobs_mode", "temperature"))
    compared, way_out = f"{KEY} compares with the engine's log-probs", f"Set {returned}=true, or remove the correction."
    yield refused({returned: False}, compared, way_out, _corrects)
    yield refused(
        {mode: "raw_logprobs", temperature: other_than(1)},
        f"{KEY} needs the log-probs of the distribution that was sampled, and raw ones are of temperature 1",
        f"Set {mode}=processed_logprobs.",
        _corrects,
    )
    for switch, estimators, what in _SWITCHED:
        reads = {_ESTIMATOR: estimators.__contains__, switch: False}
        yield refused(reads, f"this estimator reads {what} at each token", f"Set {switch}=true.")
    left_out = "this estimator reads a log-prob pass, which bypass mode leaves out"
    yield refused({_ESTIMATOR: WITH_STATISTICS.__contains__, _BYPASS: True}, left_out, f"Set {_BYPASS}=false.")


def _reports_weights_alone(settings: Settings) -> bool:
    correction = settings.algorithm.rollout_correction
    return correction.rollout_is is not None and correction.bypass_mode and correction.loss_type == "ppo_clip"


def _unused() -> Iterator[UnusedKey]:
    """Yield the rules about settings without effect."""
    yield from idle(_WEIGHTS, None, _WEIGHTS_BOUND, f"{KEY}.rollout_is_batch_normalize")
    yield from idle(_REJECTION, None, _REJECTION_BOUND)
    yield from idle(_BYPASS, False, _BYPASS_LOSS)
    yield UnusedKey(
        _WEIGHTS,
        _reports_weights_alone,
        f"with {_BYPASS} the ratio of {_BYPASS_LOSS}=ppo_clip is the correction already, and weights are only reported",
    )
    for key in ("calculate_entropy", "old_log_prob_pass"):
        yield UnusedKey(f"{_ACTOR}.{key}", _bypasses, f"{_BYPASS} leaves out the pass for old log-probs")
    for switch, estimators, _ in _SWITCHED:
        yield belongs(switch, _ESTIMATOR, estimators, f"it belongs to {' and '.join(estimators)}")
    yield from idle("algorithm.use_pf_ppo", False, "algorithm.pf_ppo.reweight_method", "algorithm.pf_ppo.weight_pow")


CORRECTION_RULES: tuple[Refusal, ...] = tuple(_refusals())
"""The combinations that are refused, for :mod:`verl_memopt.config.checks`."""

CORRECTION_UNUSED: tuple[UnusedKey, ...] = tuple(_unused())
"""The settings without effect, for :mod:`verl_memopt.config.checks`."""
