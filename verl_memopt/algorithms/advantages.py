"""Advantages of sampled responses relative to the other samples of the same prompt.

``rewards [B]`` fp32, ``group [B]`` int64 (equal for the samples of one prompt, any values in any order) and ``valid [B]``
bool. A row that is not valid gets advantage 0 and counts in no sum. Arithmetic is fp64, results are fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_memopt.errors import RewardError

STD_EPSILON = 1e-6
"""Added to a group's standard deviation in GRPO; verl's value, so that its results carry over."""


@dataclass(frozen=True)
class GroupStatistics:
    """Statistics of each row's group over its valid members, spread back over the rows: all ``[B]`` fp64."""

    count: Tensor
    mean: Tensor
    std: Tensor
    """Unbiased; 0 for fewer than two members."""
    informative: Tensor
    """Bool: the row is valid and its group has two valid members with different rewards."""


def rloo_advantages(rewards: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """Gives leave-one-out advantages ``[B]`` fp32: the reward minus the mean of the other valid members' rewards.

    n / (n - 1) * (r - mean); exactly 0 when all members are equal or only one is valid. Source: RLOO, arXiv 2402.14740.
    """
    stats = group_statistics(rewards, group, valid)
    scale = stats.count / (stats.count - 1).clamp(min=1)
    return _where_informative(stats, scale * (rewards.double() - stats.mean))


def grpo_advantages(rewards: Tensor, group: Tensor, valid: Tensor, normalize_by_std: bool = True) -> Tensor:
    """Gives group-relative advantages ``[B]`` fp32: (r - mean) / (std + 1e-6), or r - mean without ``normalize_by_std``.

    The standard deviation is unbiased; exactly 0 when all members are equal or only one is valid.
    Source: GRPO, arXiv 2402.03300; without the division, Dr. GRPO, arXiv 2503.20783.
    """
    stats = group_statistics(rewards, group, valid)
    centred = rewards.double() - stats.mean
    return _where_informative(stats, centred / (stats.std + STD_EPSILON) if normalize_by_std else centred)


ADVANTAGES: dict[str, Callable[..., Tensor]] = {"rloo": rloo_advantages, "grpo": grpo_advantages}
"""Values of ``algorithm.adv_estimator``."""


def group_statistics(rewards: Tensor, group: Tensor, valid: Tensor) -> GroupStatistics:
    """Gives count, mean and unbiased std of each row's group over the valid members. Membership comes from ``group`` alone."""
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
    """Gives the valid mask ``[B]`` bool on the driver: a NaN reward (no reward function applied) makes a row invalid.

    Errors: RewardError naming the first row whose reward is infinite.
    """
    infinite = torch.isinf(rewards).nonzero().flatten().tolist()
    if infinite:
        row = infinite[0]
        raise RewardError(
            f"{addresses[row]}: the reward is {rewards[row].item()}. Return a finite number, or NaN where no score applies."
        )
    return ~torch.isnan(rewards)


def group_counts(rewards: Tensor, group: Tensor, valid: Tensor) -> dict[str, float]:
    """Gives, on the driver, how many rows and groups teach nothing and why: invalid rows, groups with a single valid
    member, and the share of groups whose valid members all have one reward.
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
    """Renumbers group ids to 0, 1, ... without a data-dependent shape."""
    ordered, order = torch.sort(group, stable=True)
    is_new = torch.cat([torch.zeros_like(ordered[:1]), (ordered[1:] != ordered[:-1]).long()])
    return torch.empty_like(group).scatter(0, order, is_new.cumsum(0))
