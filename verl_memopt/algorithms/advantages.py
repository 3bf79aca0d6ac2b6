"""Advantages of sampled responses relative to the other samples of the same prompt.

``rewards [B]`` is fp32. ``group [B]`` is int64: equal for the samples of one prompt, with any values in any order. ``valid [B]``
is bool: a row that is not valid gets advantage 0 and counts in no sum. Arithmetic is fp64, results are fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_memopt.errors import RewardError

STD_EPSILON = 1e-6
"""Added to a group's standard deviation in GRPO. This is verl's value, so that results agree with verl."""


@dataclass(frozen=True)
class GroupStatistics:
    """Statistics of each row's group over its valid members, one value per row: all ``[B]`` fp64."""

    count: Tensor
    mean: Tensor
    std: Tensor
    """Unbiased standard deviation; 0 for fewer than two members."""
    informative: Tensor
    """Bool: the row is valid and its group has two valid members with different rewards."""


def rloo_advantages(rewards: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """Return leave-one-out advantages: the reward minus the mean reward of the other valid members of the group.

    This equals n / (n - 1) * (reward - mean). Source: RLOO, arXiv 2402.14740.

    Args:
        rewards: fp32 [B].
        group: int64 [B], the prompt of each row.
        valid: bool [B].

    Returns:
        fp32 [B]. Exactly 0 where all members are equal or only one is valid.
    """
    stats = group_statistics(rewards, group, valid)
    scale = stats.count / (stats.count - 1).clamp(min=1)
    return _where_informative(stats, scale * (rewards.double() - stats.mean))


def grpo_advantages(rewards: Tensor, group: Tensor, valid: Tensor, normalize_by_std: bool = True) -> Tensor:
    """Return group-relative advantages: (reward - mean) / (std + 1e-6) over the valid members of the group.

    The standard deviation is unbiased. Source: GRPO, arXiv 2402.03300; without the division, Dr. GRPO, arXiv 2503.20783.

    Args:
        rewards: fp32 [B].
        group: int64 [B], the prompt of each row.
        valid: bool [B].
        normalize_by_std: Divide by the standard deviation.

    Returns:
        fp32 [B]. Exactly 0 where all members are equal or only one is valid.
    """
    stats = group_statistics(rewards, group, valid)
    centred = rewards.double() - stats.mean
    return _where_informative(stats, centred / (stats.std + STD_EPSILON) if normalize_by_std else centred)


ADVANTAGES: dict[str, Callable[..., Tensor]] = {"rloo": rloo_advantages, "grpo": grpo_advantages}
"""Values of ``algorithm.adv_estimator``."""


def group_statistics(rewards: Tensor, group: Tensor, valid: Tensor) -> GroupStatistics:
    """Return the statistics of each row's group over its valid members. ``group`` alone decides the membership."""
    member = _dense_ids(group)
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


def group_counts(rewards: Tensor, group: Tensor, valid: Tensor) -> dict[str, float]:
    """Count the rows and groups without a training signal, on the driver.

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


def _where_informative(stats: GroupStatistics, advantages: Tensor) -> Tensor:
    return torch.where(stats.informative, advantages, 0.0).float()


def _dense_ids(group: Tensor) -> Tensor:
    """Renumber group ids to 0, 1, ... without a data-dependent shape."""
    ordered, order = torch.sort(group, stable=True)
    is_new = torch.cat([torch.zeros_like(ordered[:1]), (ordered[1:] != ordered[:-1]).long()])
    return torch.empty_like(group).scatter(0, order, is_new.cumsum(0))
