"""KL divergence between policy and reference: estimates per token, rewards with a KL penalty, and adaptive coefficients."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from verl_memopt.algorithms.rows import is_last, row_sums
from verl_memopt.config.schema import EntropyControl, KlControl

MAX_LOG_RATIO = 20.0
"""Before an exponential, the log-ratio of a token or of a sequence is clamped to plus or minus this value."""

MAX_LOW_VARIANCE_KL = 10.0
"""Upper limit of one token's k3, as in verl. Beyond it the token has no gradient."""


def _k2(log_ratio: Tensor) -> Tensor:
    return 0.5 * log_ratio.square()


def _k3(log_ratio: Tensor) -> Tensor:
    # Clamp before the exponential, which would otherwise become infinite.
    inverse = (-log_ratio).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (inverse.exp() - inverse - 1).clamp(max=MAX_LOW_VARIANCE_KL)


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys(("kl", "k1"), lambda log_ratio: log_ratio),
    "abs": torch.abs,
    "mse": _k2,
    "k2": _k2,
    "low_var_kl": _k3,
    "k3": _k3,
}
"""Value of ``kl_loss_type`` and ``kl_penalty`` -> function of the log-ratio (log policy - log reference). A value may also have a
trailing ``+``, see :func:`kl_estimate`."""


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) in nats, for tokens sampled from the policy.

    With r = log policy - log reference, the main kinds are::

        k1 = r                  unbiased, may be negative
        k2 = r^2 / 2            never negative
        k3 = exp(-r) + r - 1    unbiased and never negative

    A trailing ``+`` keeps the value, but takes the gradient of ``k2``, whose expectation is the gradient of the KL. Source:
    Schulman, "Approximating KL divergence" (2020).

    Both log-probs are fp32 and have the same shape. ``kind``: a key of ``KL_ESTIMATORS``, optionally with a trailing ``+``.
    """
    assert kind.removesuffix("+") in KL_ESTIMATORS, kind
    log_ratio = log_probs - ref_log_probs
    value = KL_ESTIMATORS[kind.removesuffix("+")](log_ratio)
    if not kind.endswith("+"):
        return value
    carrier = _k2(log_ratio)
    # The difference is 0, so it adds the gradient of k2 and changes no value.
    return value.detach() + (carrier - carrier.detach())


def shaped_rewards(scores: Tensor, kl: Tensor, row: Tensor, beta: float) -> Tensor:
    """Return ``score - beta * (sum of the row's KL)``, fp32 [rows], without a gradient.

    ``kl``: fp32 [R], the estimate of each token. A row without tokens keeps its score.
    """
    return scores - beta * row_sums(kl.detach(), row, scores.shape[0])


def token_level_rewards(scores: Tensor, row: Tensor, lengths: Tensor, kl: Tensor | None = None, beta: float = 0.0) -> Tensor:
    """Return the reward of each token, fp32 [R], without a gradient.

    The reward of every token is ``-beta * kl``, and the last token of a row also gets the row's score. A row without tokens loses
    its score. Source: Ziegler et al., arXiv 1909.08593, and ``apply_kl_penalty`` in verl.

    ``kl``: fp32 [R], the estimate of each token; None = no KL in the reward.
    """
    rewards = torch.where(is_last(row, lengths), scores[row], 0.0)
    return rewards if kl is None else rewards - beta * kl.detach()


class KlController:
    """The coefficient of the KL in the reward: fixed, or adapted towards ``target_kl`` (Ziegler et al., arXiv 1909.08593)."""

    def __init__(self, settings: KlControl) -> None:
        assert settings.type in ("fixed", "adaptive"), settings.type
        self._settings = settings
        self.coefficient = settings.kl_coef

    def update(self, mean_kl: float, num_sequences: int) -> None:
        """Adapt the coefficient by a factor of at most ``1 +- 0.2 * num_sequences / horizon``. A fixed coefficient stays.

        ``mean_kl``: the step's mean KL in nats, which is compared with ``target_kl``.
        """
        if self._settings.type == "fixed":
            return
        error = min(max(mean_kl / self._settings.target_kl - 1, -0.2), 0.2)
        self.coefficient *= 1 + error * num_sequences / self._settings.horizon

    def state_dict(self) -> dict[str, float]:
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, float]) -> None:
        # A fixed coefficient follows the settings of the resumed run.
        if self._settings.type == "adaptive":
            self.coefficient = state["coefficient"]


class EntropyController:
    """Adapts the weight of the entropy bonus to the measured entropy, as ``use_adaptive_entropy`` of TRL does.

    ``num_updates``: Number of optimizer steps per rollout. TRL adapts the weight after each optimizer step. Here all optimizer
    steps of a rollout have the same weight.
    """

    def __init__(self, settings: EntropyControl, weight: float) -> None:
        assert settings.target is not None, "the weight is fixed"
        self._settings, self._target, self.weight = settings, settings.target, weight
        self._last, self.num_updates = math.inf, 1

    @property
    def applied(self) -> float:
        # Above the target the weight is 0. So it is before the first update, when no entropy is known.
        return self.weight if self._last <= self._target else 0.0

    def update(self, entropy: float) -> None:
        """Adapt the weight after an update. ``entropy`` is the mean entropy of the update's tokens, in nats."""
        step, settings = self._settings.delta * self.num_updates, self._settings
        raised, lowered = min(self.weight + step, settings.max), max(self.weight - step, settings.min)
        self._last, self.weight = entropy, raised if entropy <= self._target else lowered

    def state_dict(self) -> dict[str, float]:
        return {"weight": self.weight, "last": self._last}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.weight, self._last = state["weight"], state["last"]


# Changes to rewards and rows before advantages: DAPO's overlong penalty, and PF-PPO's resampling.

MIN_WEIGHT = 1e-8
"""Added to each weight, so that every row can be drawn."""


def overlong_penalty(lengths: Tensor, max_length: int, buffer_length: int, penalty_factor: float) -> Tensor:
    """Return the penalty that is added to each response's reward, fp32 [B]: 0 for short responses, negative for long ones.

    From ``max_length - buffer_length`` tokens on the penalty falls linearly. From ``max_length`` tokens on it is
    ``-penalty_factor``. In between it is::

        -(length - (max_length - buffer_length)) / buffer_length * penalty_factor

    Source: soft overlong punishment of DAPO, arXiv 2503.14476, equation 13, and ``overlong_buffer_cfg`` in verl.
    """
    assert 0 < buffer_length <= max_length, (buffer_length, max_length)
    excess = (lengths - (max_length - buffer_length)).double() / buffer_length
    return (-excess.clamp(0, 1) * penalty_factor).float()


def pf_ppo_weights(scores: Tensor, valid: Tensor, method: str, power: float) -> Tensor:
    """Return the weight with which PF-PPO draws each row, fp64 [B], not normalised. Invalid rows get 0.

    ``pow``: abs(score) ** power. ``max_min``: 1 for the best and the worst scores of the batch, else 0. ``max_random``: 0.4 for
    the best scores, 0.1 for the others. 1e-8 is added to each weight. Equal scores have equal weights. Source: PF-PPO, arXiv
    2409.06957, and ``compute_pf_ppo_reweight_data`` in verl.
    """
    assert method in PF_PPO_METHODS, method
    wide_scores = scores.double()
    best = wide_scores.where(valid, -torch.inf).amax() if scores.numel() else wide_scores.sum()
    worst = wide_scores.where(valid, torch.inf).amin() if scores.numel() else wide_scores.sum()
    if method == "pow":
        weights = wide_scores.abs().pow(power)
    elif method == "max_min":
        weights = ((wide_scores == best) | (wide_scores == worst)).double()
    else:
        weights = torch.where(wide_scores == best, 0.4, 0.1).double()
    return torch.where(valid, weights + MIN_WEIGHT, 0.0)


PF_PPO_METHODS = ("pow", "max_min", "max_random")
"""Values of ``algorithm.pf_ppo.reweight_method``."""
