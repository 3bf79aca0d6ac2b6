"""Changes to rewards and rows before advantages: DAPO's overlong penalty, and PF-PPO's resampling."""

from __future__ import annotations

import torch
from torch import Tensor

MIN_WEIGHT = 1e-8
"""Added to each weight, so that every row can be drawn."""


def overlong_penalty(lengths: Tensor, max_length: int, buffer_length: int, penalty_factor: float) -> Tensor:
    """Return what is added to the reward of a long response: 0 up to the buffer, then linearly down to -``penalty_factor``.

    With e = max_length - buffer_length it is -(length - e) / buffer_length * penalty_factor inside the buffer. Source: soft
    overlong punishment of DAPO, arXiv 2503.14476, equation 13, and ``overlong_buffer_cfg`` in verl.

    Args:
        lengths: int64 [B], response tokens of each row.
        max_length: ``data.max_response_length``.
        buffer_length: ``overlong_buffer_cfg.len``.
        penalty_factor: ``overlong_buffer_cfg.penalty_factor``.

    Returns:
        fp32 [B], 0 or less.
    """
    assert 0 < buffer_length <= max_length, (buffer_length, max_length)
    excess = (lengths - (max_length - buffer_length)).double() / buffer_length
    return (-excess.clamp(0, 1) * penalty_factor).float()


def pf_ppo_weights(scores: Tensor, valid: Tensor, method: str, power: float) -> Tensor:
    """Return the weight with which PF-PPO draws each row, fp64 [B], not normalised. Rows that are not valid get 0.

    ``pow``: abs(score) to the power. ``max_min``: 1 for the best and the worst scores of the batch, else 0. ``max_random``: 0.4
    for the best, 0.1 for the others. 1e-8 is added to each. Equal scores have equal weights: every row is drawn alike. Source:
    PF-PPO, arXiv 2409.06957, and ``compute_pf_ppo_reweight_data`` in verl.

    Args:
        scores: fp32 [B].
        valid: bool [B].
        method: ``algorithm.pf_ppo.reweight_method``.
        power: ``algorithm.pf_ppo.weight_pow``.
    """
    assert method in PF_PPO_METHODS, method
    known = scores.double()
    best = known.where(valid, -torch.inf).amax() if scores.numel() else known.sum()
    worst = known.where(valid, torch.inf).amin() if scores.numel() else known.sum()
    if method == "pow":
        weights = known.abs().pow(power)
    elif method == "max_min":
        weights = ((known == best) | (known == worst)).double()
    else:
        weights = torch.where(known == best, 0.4, 0.1).double()
    return torch.where(valid, weights + MIN_WEIGHT, 0.0)


PF_PPO_METHODS = ("pow", "max_min", "max_random")
"""Values of ``algorithm.pf_ppo.reweight_method``."""


def resample_rows(weights: Tensor, generator: torch.Generator) -> Tensor:
    """Return the rows that take the places of a batch, drawn with replacement by weight, int64 [B].

    Args:
        weights: fp64 [B], of which one is above 0.
        generator: Source of the draw, on the host.
    """
    return torch.multinomial(weights, weights.shape[0], replacement=True, generator=generator)
