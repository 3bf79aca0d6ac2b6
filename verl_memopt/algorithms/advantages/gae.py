"""Generalised advantage estimation (GAE) over flat rows, for PPO with a critic."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_memopt.algorithms.advantages.whitening import whiten
from verl_memopt.algorithms.rows import is_last, reverse_scan


def gae(token_rewards: Tensor, values: Tensor, row: Tensor, lengths: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return raw advantages and returns, both fp64 [R].

    With delta[t] = reward[t] + gamma * value[t + 1] - value[t] and value 0 after a row's last token, the advantage is the sum
    over l of (gamma * lam)^l * delta[t + l], and the return is advantage + value. Source: GAE, arXiv 1506.02438.

    Args:
        token_rewards: fp32 [R].
        values: fp32 [R], the critic's value before each token.
        row: int64 [R], the row of each token.
        lengths: int64 [rows].
        gamma: Discount of one token.
        lam: Decay of the sum.
    """
    current = values.double()
    following = torch.where(is_last(row, lengths), 0.0, current.roll(-1))
    advantages = reverse_scan(token_rewards.double() + gamma * following - current, row, gamma * lam)
    return advantages, advantages + current


def gae_advantages(
    token_rewards: Tensor, values: Tensor, row: Tensor, lengths: Tensor, valid: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return GAE's advantages, whitened over all valid tokens, and the returns that the critic learns, both fp32 [R].

    The tokens of a row that is not valid get advantage 0, and their value as return, so that the critic's loss there is 0 too.
    They count in no statistic. Source: arXiv 1506.02438 and ``compute_gae_advantage_return`` in verl, which whitens as well.

    Args:
        token_rewards: fp32 [R]. NaN in rows that are not valid.
        values: fp32 [R].
        row: int64 [R].
        lengths: int64 [rows].
        valid: bool [rows].
        gamma: Discount of one token.
        lam: Decay of the sum.
    """
    known = valid[row]
    advantages, returns = gae(torch.where(known, token_rewards, 0.0), values, row, lengths, gamma, lam)
    return whiten(advantages, known).float(), torch.where(known, returns, values.double()).float()
