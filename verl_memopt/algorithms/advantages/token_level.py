"""Advantages per token without a critic: REINFORCE++, its form with a group baseline, and ReMax.

``token_rewards [R]`` fp32 and ``row [R]`` int64 lie flat, row after row. ``valid [rows]`` is bool: the tokens of a row that is
not valid get advantage 0 and count in no statistic, and their rewards may be NaN. Arithmetic is fp64, results are fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl_memopt.algorithms.advantages.groups import group_statistics
from verl_memopt.algorithms.advantages.whitening import whiten
from verl_memopt.algorithms.rows import reverse_scan


def discounted_returns(token_rewards: Tensor, row: Tensor, valid: Tensor, gamma: float) -> Tensor:
    """Return the discounted sum of the rewards from each token to the end of its row, fp64 [R].

    Args:
        token_rewards: fp32 [R].
        row: int64 [R].
        valid: bool [rows].
        gamma: Discount of one token.
    """
    return reverse_scan(torch.where(valid[row], token_rewards, 0.0), row, gamma)


def reinforce_plus_plus_advantages(token_rewards: Tensor, row: Tensor, valid: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Return REINFORCE++'s advantages, the discounted returns whitened over all tokens, and the returns, both fp32 [R].

    Source: REINFORCE++, arXiv 2501.03262.

    Args:
        token_rewards: fp32 [R].
        row: int64 [R].
        valid: bool [rows].
        gamma: Discount of one token.
    """
    returns = discounted_returns(token_rewards, row, valid, gamma)
    return whiten(returns, valid[row]).float(), returns.float()


def reinforce_plus_plus_baseline_advantages(rewards: Tensor, group: Tensor, valid: Tensor, row: Tensor) -> Tensor:
    """Return (reward - mean of the group) of each token's row, whitened over all tokens, fp32 [R].

    A group of one is its own mean: its centred reward is 0, as that of a group with equal rewards. Both count in the whitening.
    verl keeps the reward itself for a group of one. Source: REINFORCE++-baseline, arXiv 2501.03262.

    Args:
        rewards: fp32 [rows].
        group: int64 [rows], the prompt of each row.
        valid: bool [rows].
        row: int64 [R].
    """
    stats = group_statistics(rewards, group, valid)
    centred = torch.where(stats.informative, rewards.double() - stats.mean, 0.0)
    return whiten(centred[row], valid[row]).float()


def remax_advantages(token_rewards: Tensor, baselines: Tensor, row: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Return ReMax's advantages, the rewards from each token on minus the greedy response's score, and the returns, fp32 [R].

    A group of one is no special case: its baseline comes from the greedy response. A row whose baseline is NaN has nothing to
    compare with and counts as not valid. Source: ReMax, arXiv 2310.10505.

    Args:
        token_rewards: fp32 [R].
        baselines: fp32 [rows], the score of the greedy response to each row's prompt.
        row: int64 [R].
        valid: bool [rows].
    """
    known = valid & ~torch.isnan(baselines)
    returns = discounted_returns(token_rewards, row, known, 1.0)
    advantages = torch.where(known[row], returns - baselines.double()[row], 0.0)
    return advantages.float(), returns.float()
