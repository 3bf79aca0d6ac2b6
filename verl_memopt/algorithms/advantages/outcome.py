"""Advantages from one reward per response, relative to the other responses to the same prompt.

``rewards [B]`` is fp32. ``group [B]`` is int64: equal for the samples of one prompt, with any values in any order. ``valid [B]``
is bool: a row that is not valid gets advantage 0 and counts in no sum. Arithmetic is fp64, results are fp32.

A group that cannot compare gets exactly 0: one valid member, or valid members with equal rewards. verl gives a group of one its
reward itself as advantage, and so does :func:`without_baseline` in a step whose prompts were all sampled once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from verl_memopt.algorithms.advantages.groups import GroupStatistics, group_statistics
from verl_memopt.algorithms.advantages.whitening import normalize_rows
from verl_memopt.algorithms.rows import dense_ids

STD_EPSILON = 1e-6
"""Added to a group's standard deviation in GRPO. This is verl's value, so that results agree with verl."""


def rloo_advantages(rewards: Tensor, group: Tensor, valid: Tensor, normalize: bool = False) -> Tensor:
    """Return leave-one-out advantages: the reward minus the mean reward of the other valid members of the group.

    This equals n / (n - 1) * (reward - mean). Source: RLOO, arXiv 2402.14740.

    Args:
        rewards: fp32 [B].
        group: int64 [B], the prompt of each row.
        valid: bool [B].
        normalize: Give the valid rows of the whole step mean 0 and standard deviation 1, as :func:`normalize_rows` does. The
            mean is 0 already, since the advantages of a group sum to 0.

    Returns:
        fp32 [B]. Exactly 0 where all members are equal or only one is valid.
    """
    stats = group_statistics(rewards, group, valid)
    scale = stats.count / (stats.count - 1).clamp(min=1)
    advantages = torch.where(stats.informative, scale * (rewards.double() - stats.mean), 0.0)
    return _where_informative(stats, normalize_rows(advantages, valid) if normalize else advantages)


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


def grpo_passk_advantages(rewards: Tensor, group: Tensor, valid: Tensor, normalize_by_std: bool = True) -> Tensor:
    """Return pass@k advantages: the best member of a group gets its lead over the second best, all others get 0.

    Source: arXiv 2503.19595, and ``compute_grpo_passk_outcome_advantage`` in verl. Two best members with equal rewards have no
    lead: the whole group gets 0.

    Args:
        rewards: fp32 [B].
        group: int64 [B], the prompt of each row.
        valid: bool [B].
        normalize_by_std: Divide by (std + 1e-6) of the group.

    Returns:
        fp32 [B].
    """
    stats = group_statistics(rewards, group, valid)
    member, values = dense_ids(group), torch.where(valid, rewards.double(), -torch.inf)
    lowest = torch.full_like(values, -torch.inf)
    best = lowest.scatter_reduce(0, member, values, "amax")[member]
    is_best = valid & (values == best)
    num_best = torch.zeros_like(values).index_add(0, member, is_best.double())[member]
    second = lowest.scatter_reduce(0, member, torch.where(is_best, -torch.inf, values), "amax")[member]
    lead = torch.where(is_best & (num_best == 1), best - second, 0.0)
    return _where_informative(stats, lead / (stats.std + STD_EPSILON) if normalize_by_std else lead)


def gpg_advantages(rewards: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """Return GPG's advantages: alpha * (reward - mean of the group), where alpha makes up for the rows without a gradient.

    alpha = valid rows / rows of groups whose rewards differ. Source: GPG, arXiv 2504.02546, with F_norm = 1. verl divides by the
    number of rows with a score other than 0 instead.

    Args:
        rewards: fp32 [B].
        group: int64 [B], the prompt of each row.
        valid: bool [B].

    Returns:
        fp32 [B]. Exactly 0 where all members are equal or only one is valid.
    """
    stats = group_statistics(rewards, group, valid)
    alpha = valid.sum() / stats.informative.sum().clamp(min=1)
    return _where_informative(stats, alpha * (rewards.double() - stats.mean))


def opo_advantages(rewards: Tensor, group: Tensor, valid: Tensor, lengths: Tensor) -> Tensor:
    """Return OPO's advantages: the reward minus the mean reward of the group weighted by response length.

    Source: OPO, arXiv 2505.23585. The weights are those of the baseline with the least variance if all tokens have gradients of
    one size.

    Args:
        rewards: fp32 [B].
        group: int64 [B], the prompt of each row.
        valid: bool [B].
        lengths: int64 [B], response tokens of each row.

    Returns:
        fp32 [B]. Exactly 0 where all members are equal or only one is valid.
    """
    stats, member = group_statistics(rewards, group, valid), dense_ids(group)
    weights = torch.where(valid, lengths.double(), 0.0)
    zeros = torch.zeros_like(weights)
    weighted = zeros.index_add(0, member, torch.where(valid, weights * rewards.double(), 0.0))[member]
    baseline = weighted / zeros.index_add(0, member, weights)[member].clamp(min=1)
    return _where_informative(stats, rewards.double() - baseline)


def without_baseline(rewards: Tensor, valid: Tensor, normalize_by_std: bool = False, normalize: bool = False) -> Tensor:
    """Return the advantages of responses that have nothing to compare with: the rewards themselves, as in verl.

    Args:
        rewards: fp32 [B].
        valid: bool [B].
        normalize_by_std: Divide by (1 + 1e-6), the standard deviation that verl gives a group of one.
        normalize: As in :func:`rloo_advantages`.

    Returns:
        fp32 [B].
    """
    alone = normalize_rows(rewards, valid) if normalize else torch.where(valid, rewards.double(), 0.0)
    return (alone / (1 + STD_EPSILON) if normalize_by_std else alone).float()


ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    "rloo": rloo_advantages,
    "rloo_vectorized": rloo_advantages,
    "grpo": grpo_advantages,
    "grpo_vectorized": grpo_advantages,
    "grpo_passk": grpo_passk_advantages,
    "gpg": gpg_advantages,
}
"""Estimators that need a reward, a group and no more, by their value of ``algorithm.adv_estimator``."""

STD_OPTION = frozenset({"grpo", "grpo_vectorized", "grpo_passk"})
"""Estimators that take ``normalize_by_std`` (``algorithm.norm_adv_by_std_in_grpo``)."""

NORMALIZE_OPTION = frozenset({"rloo", "rloo_vectorized"})
"""Estimators that take ``normalize`` (``algorithm.normalize_advantages``)."""


def _where_informative(stats: GroupStatistics, advantages: Tensor) -> Tensor:
    return torch.where(stats.informative, advantages, 0.0).float()
