"""Statistics of the samples of each prompt, and the groups that carry a training signal.

``rewards [B]`` is fp32. ``group [B]`` is int64: equal for the samples of one prompt, with any values in any order. ``valid [B]``
is bool: a row that is not valid counts in no sum. Arithmetic is fp64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_memopt.algorithms.rows import dense_ids
from verl_memopt.errors import RewardError


@dataclass(frozen=True)
class GroupStatistics:
    """Statistics of each row's group over its valid members, one value per row: all ``[B]`` fp64."""

    count: Tensor
    mean: Tensor
    std: Tensor
    """Unbiased standard deviation; 0 for fewer than two members."""
    informative: Tensor
    """Bool: the row is valid and its group has two valid members with different rewards."""


def group_statistics(rewards: Tensor, group: Tensor, valid: Tensor) -> GroupStatistics:
    """Return the statistics of each row's group over its valid members. ``group`` alone decides the membership.

    Args:
        rewards: fp32 [B].
        group: int64 [B], the prompt of each row.
        valid: bool [B].
    """
    member = dense_ids(group)
    values = torch.where(valid, rewards.double(), 0.0)
    zeros = torch.zeros_like(values)
    count = zeros.index_add(0, member, valid.double())[member]
    mean = zeros.index_add(0, member, values)[member] / count.clamp(min=1)
    squares = torch.where(valid, (values - mean) ** 2, 0.0)
    std = (zeros.index_add(0, member, squares)[member] / (count - 1).clamp(min=1)).sqrt()
    lowest = torch.full_like(values, torch.inf).scatter_reduce(0, member, torch.where(valid, values, torch.inf), "amin")
    highest = torch.full_like(values, -torch.inf).scatter_reduce(0, member, torch.where(valid, values, -torch.inf), "amax")
    return GroupStatistics(count, mean, std, valid & (lowest < highest)[member])


def check_rewards(rewards: Tensor, addresses: Sequence[str]) -> Tensor:
    """Return the valid mask, bool [B] on the driver: a NaN reward (no reward function applied) makes a row invalid.

    Args:
        rewards: fp32 [B].
        addresses: File and row of each prompt, for errors.

    Raises:
        RewardError: A reward is infinite. The message names the first such row.
    """
    infinite = torch.isinf(rewards).nonzero().flatten().tolist()
    if infinite:
        row = infinite[0]
        raise RewardError(
            f"{addresses[row]}: the reward is {rewards[row].item()}. Return a finite number, or NaN where no score applies."
        )
    return ~torch.isnan(rewards)


def has_signal(metric: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """Return True for the rows of groups that a step keeps under ``algorithm.filter_groups``, bool [B].

    A group is kept if two of its valid members differ in the metric. A group that was sampled once has nothing to compare and
    is kept as well. A group of several rows of which one or none is valid is not. Source: dynamic sampling of DAPO, arXiv
    2503.14476, and its trainer in verl.

    Args:
        metric: fp32 [B], the score or another number of each row.
        group: int64 [B], the prompt of each row.
        valid: bool [B].
    """
    member = dense_ids(group)
    ones, zeros = torch.ones_like(metric, dtype=torch.float64), torch.zeros_like(metric, dtype=torch.float64)
    size = zeros.index_add(0, member, ones)[member]
    num_informative = zeros.index_add(0, member, group_statistics(metric, group, valid).informative.double())[member]
    return (num_informative > 0) | ((size == 1) & valid)


def group_counts(rewards: Tensor, group: Tensor, valid: Tensor) -> dict[str, float]:
    """Count the rows and groups without a training signal, on the driver.

    Args:
        rewards: fp32 [B].
        group: int64 [B], the prompt of each row.
        valid: bool [B].

    Returns:
        ``invalid_rows``; ``single_valid_groups``, the groups with one valid member; and ``equal_groups_share``, the share of
        groups whose valid members all have the same reward.
    """
    stats = group_statistics(rewards, group, valid)
    groups = group.unique().numel()
    equal = groups - group[stats.informative].unique().numel()
    return {
        "invalid_rows": float((~valid).sum()),
        "single_valid_groups": float(group[valid & (stats.count == 1)].unique().numel()),
        "equal_groups_share": equal / groups if groups else 0.0,
    }
