"""How far the policy is from the reference: per-token estimators, their place in the reward, and their coefficient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from verl_memopt.algorithms.reductions import row_sums
from verl_memopt.config.schema import KlControl

MAX_LOG_RATIO = 20.0
"""Log-ratios, of a token or summed over a sequence, are clamped to plus and minus this before an exponential."""

MAX_LOW_VARIANCE_KL = 10.0
"""Cap of one token's k3, as in verl; beyond it the token has no gradient."""


def _k1(log_ratio: Tensor) -> Tensor:
    return log_ratio


def _k2(log_ratio: Tensor) -> Tensor:
    return 0.5 * log_ratio.square()


def _k3(log_ratio: Tensor) -> Tensor:
    inverse = (-log_ratio).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (inverse.exp() - inverse - 1).clamp(max=MAX_LOW_VARIANCE_KL)


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "kl": _k1,
    "k1": _k1,
    "abs": torch.abs,
    "mse": _k2,
    "k2": _k2,
    "low_var_kl": _k3,
    "k3": _k3,
}
"""Values of ``kl_loss_type`` and ``kl_penalty``, each also with a trailing ``+``; functions of log policy - log reference."""


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """Gives a per-token estimate of KL(policy || reference) for tokens drawn from the policy, in nats, of the same shape.

    k1 is unbiased and may be negative; k2 = half its square; k3 = exp(-k1) + k1 - 1 is unbiased and never negative.
    A trailing ``+`` keeps the value and takes k2's gradient, whose expectation is the gradient of the KL.
    Source: Schulman, "Approximating KL divergence" (2020).
    """
    assert kind.removesuffix("+") in KL_ESTIMATORS, kind
    log_ratio = log_probs - ref_log_probs
    value = KL_ESTIMATORS[kind.removesuffix("+")](log_ratio)
    if not kind.endswith("+"):
        return value
    carrier = _k2(log_ratio)
    return value.detach() + (carrier - carrier.detach())


def shaped_rewards(scores: Tensor, kl: Tensor, row: Tensor, beta: float) -> Tensor:
    """Gives ``score - beta * sum of the row's kl``, ``[rows]``; no gradient. ``kl [R]`` is flat; an empty row keeps its score."""
    return scores - beta * row_sums(kl.detach(), row, scores.shape[0])


class KlController:
    """The coefficient of the KL in the reward: fixed, or steered towards ``target_kl`` (Ziegler et al., arXiv 1909.08593)."""

    def __init__(self, settings: KlControl) -> None:
        assert settings.type in ("fixed", "adaptive"), settings.type
        self._settings = settings
        self.coefficient = settings.kl_coef

    def update(self, mean_kl: float, num_sequences: int) -> None:
        """Moves an adaptive coefficient by at most 20 % of ``num_sequences / horizon``; a fixed one stays.

        ``mean_kl`` is the step's mean KL in nats, against which ``target_kl`` is read.
        """
        if self._settings.type == "fixed":
            return
        error = min(max(mean_kl / self._settings.target_kl - 1, -0.2), 0.2)
        self.coefficient *= 1 + error * num_sequences / self._settings.horizon

    def state_dict(self) -> dict[str, float]:
        """Gives what a checkpoint keeps."""
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restores an adaptive coefficient; a fixed one follows the settings of the resumed run."""
        if self._settings.type == "adaptive":
            self.coefficient = state["coefficient"]
