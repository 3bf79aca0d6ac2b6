"""The bounds that the text settings of ``algorithm.rollout_correction`` spell."""

from __future__ import annotations

import math

from verl_memopt.errors import ConfigError

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
