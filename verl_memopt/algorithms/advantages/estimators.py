"""All advantage estimators by name: each maps the rewards of a step to an advantage and a return per token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from verl_memopt.algorithms.advantages.gae import gae_advantages
from verl_memopt.algorithms.advantages.outcome import ADVANTAGES, NORMALIZE_OPTION, STD_OPTION, opo_advantages, without_baseline
from verl_memopt.algorithms.advantages.token_baseline import optimal_token_baseline_advantages
from verl_memopt.algorithms.advantages.token_level import (
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    remax_advantages,
)
from verl_memopt.knobs.values import WITHOUT_BASELINE


@dataclass(frozen=True)
class AdvantageInputs:
    """What estimators read: B rows with R response tokens, flat, row after row."""

    rewards: Tensor
    """fp32 [B], the score of each row minus the KL in the reward. NaN where ``valid`` is False."""
    group: Tensor
    """int64 [B], the prompt of each row."""
    valid: Tensor
    """bool [B]."""
    row: Tensor
    """int64 [R], the row of each token."""
    lengths: Tensor
    """int64 [B], response tokens of each row."""
    token_rewards: Tensor | None = None
    """fp32 [R], see :func:`verl_memopt.algorithms.kl.token_level_rewards`."""
    gamma: float | None = None
    """``algorithm.gamma``, the discount of one token."""
    lam: float | None = None
    """``algorithm.lam``, GAE's decay."""
    normalize_by_std: bool | None = None
    """``algorithm.norm_adv_by_std_in_grpo``."""
    normalize_advantages: bool = False
    """``algorithm.normalize_advantages``."""
    values: Tensor | None = None
    """fp32 [R], of the critic."""
    baselines: Tensor | None = None
    """fp32 [B], the score of the greedy response to each row's prompt."""
    old_log_probs: Tensor | None = None
    """fp32 [R]."""
    sum_pi_squared: Tensor | None = None
    """fp32 [R], the sum of squared probabilities over the vocabulary."""
    weights: Tensor | None = None
    """fp32 [R], importance weights of the rollout correction."""
    sampled_once: bool = False
    """Every prompt of the step has one row, so that no group gives a baseline."""


@dataclass(frozen=True)
class TokenAdvantages:
    """The result of an estimator."""

    per_token: Tensor
    """fp32 [R]."""
    returns: Tensor
    """fp32 [R]; equal to the advantages where an estimator scores whole responses."""


def _outcome(name: str, inputs: AdvantageInputs) -> TokenAdvantages:
    options = {}
    if name in STD_OPTION:
        assert inputs.normalize_by_std is not None, f"{name} needs algorithm.norm_adv_by_std_in_grpo"
        options = {"normalize_by_std": inputs.normalize_by_std}
    if name in NORMALIZE_OPTION:
        options = {"normalize": inputs.normalize_advantages}
    if inputs.sampled_once and name in WITHOUT_BASELINE:
        return _spread(without_baseline(inputs.rewards, inputs.valid, **options), inputs)
    return _spread(ADVANTAGES[name](inputs.rewards, inputs.group, inputs.valid, **options), inputs)


def _opo(inputs: AdvantageInputs) -> TokenAdvantages:
    return _spread(opo_advantages(inputs.rewards, inputs.group, inputs.valid, inputs.lengths), inputs)


def _gae(inputs: AdvantageInputs) -> TokenAdvantages:
    assert inputs.token_rewards is not None, "gae needs token_rewards"
    assert inputs.values is not None, "gae needs the values of a critic"
    assert inputs.gamma is not None, "gae needs algorithm.gamma"
    assert inputs.lam is not None, "gae needs algorithm.lam"
    rewards, values = inputs.token_rewards, inputs.values
    return TokenAdvantages(*gae_advantages(rewards, values, inputs.row, inputs.lengths, inputs.valid, inputs.gamma, inputs.lam))


def _reinforce_plus_plus(inputs: AdvantageInputs) -> TokenAdvantages:
    assert inputs.token_rewards is not None, "reinforce_plus_plus needs token_rewards"
    assert inputs.gamma is not None, "reinforce_plus_plus needs algorithm.gamma"
    return TokenAdvantages(*reinforce_plus_plus_advantages(inputs.token_rewards, inputs.row, inputs.valid, inputs.gamma))


def _reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> TokenAdvantages:
    advantages = reinforce_plus_plus_baseline_advantages(inputs.rewards, inputs.group, inputs.valid, inputs.row)
    return TokenAdvantages(advantages, advantages)


def _remax(inputs: AdvantageInputs) -> TokenAdvantages:
    assert inputs.token_rewards is not None, "remax needs token_rewards"
    assert inputs.baselines is not None, "remax needs the scores of greedy responses"
    return TokenAdvantages(*remax_advantages(inputs.token_rewards, inputs.baselines, inputs.row, inputs.valid))


def _optimal_token_baseline(inputs: AdvantageInputs) -> TokenAdvantages:
    assert inputs.token_rewards is not None, "optimal_token_baseline needs token_rewards"
    assert inputs.old_log_probs is not None, "optimal_token_baseline needs old log-probs"
    assert inputs.sum_pi_squared is not None, "optimal_token_baseline needs actor.calculate_sum_pi_squared"
    return TokenAdvantages(
        *optimal_token_baseline_advantages(
            inputs.token_rewards, inputs.group, inputs.valid, inputs.row, inputs.lengths, inputs.old_log_probs,
            inputs.sum_pi_squared, inputs.weights,
        )
    )  # fmt: skip


def _spread(per_row: Tensor, inputs: AdvantageInputs) -> TokenAdvantages:
    """Give each token the advantage of its row."""
    per_token = per_row[inputs.row]
    return TokenAdvantages(per_token, per_token)


ESTIMATORS: dict[str, Callable[[AdvantageInputs], TokenAdvantages]] = {
    **{name: partial(_outcome, name) for name in ADVANTAGES},
    "opo": _opo,
    "gae": _gae,
    "reinforce_plus_plus": _reinforce_plus_plus,
    "reinforce_plus_plus_baseline": _reinforce_plus_plus_baseline,
    "remax": _remax,
    "optimal_token_baseline": _optimal_token_baseline,
    "tir_optimal_token_baseline": _optimal_token_baseline,
}
"""Values of ``algorithm.adv_estimator``, in verl's spelling. A response of one turn makes the two token baselines one."""

NEEDS: dict[str, tuple[str, ...]] = {
    "gae": ("values",),
    "remax": ("baselines",),
    "optimal_token_baseline": ("old_log_probs", "sum_pi_squared"),
    "tir_optimal_token_baseline": ("old_log_probs", "sum_pi_squared"),
}
"""Inputs that cost a pass of their own: those of a critic, of a greedy rollout, or of the old log-prob pass."""
