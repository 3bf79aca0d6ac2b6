"""Advantage estimators: functions from the rewards of a step to advantages. ``records.py`` has a record of each.

``rewards [B]`` is fp32. ``group [B]`` is int64: equal for the samples of one prompt, with any values in any order. ``valid
[B]`` is bool: a row that is not valid gets advantage 0 and counts in no sum; its rewards may be NaN. Tokens lie flat, row after
row: ``token_rewards [R]`` is fp32, ``row [R]`` int64 is the row of each token, ``lengths [B]`` int64 its number of tokens,
``values [R]`` fp32 the critic's value before each token. ``gamma`` is the discount per token, ``lam`` the decay of GAE's sum.
Arithmetic is fp64, results are fp32.

A group gets advantages of exactly 0 if its valid members have equal rewards, or if only one of several members is valid. If a
prompt has a single response, the reward itself is the advantage in the estimators whose record has ``alone``, as in verl.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from verl_memopt.algorithms.records import CUSTOM, ESTIMATORS, load
from verl_memopt.algorithms.rows import dense_ids, is_last, normalize_rows, positions, reverse_scan, row_sums, whiten
from verl_memopt.config.schema import Algorithm
from verl_memopt.errors import RewardError
from verl_memopt.memory.logit_tiles import Statistic, column_parts

# Statistics of the samples of each prompt, and the groups that carry a training signal.


@dataclass(frozen=True)
class GroupStatistics:
    """Statistics of each row's group over its valid members, one value per row: all ``[B]`` fp64."""

    count: Tensor
    mean: Tensor
    std: Tensor
    """Unbiased standard deviation; 0 for fewer than two members."""
    informative: Tensor
    """Bool: the row is valid and its group has two valid members with different rewards."""


def group_statistics(rewards: Tensor, group: Tensor, valid: Tensor, lone_rewards: bool = False) -> GroupStatistics:
    """Compute the statistics of each row's group over its valid members. Only ``group`` decides which rows belong together.

    ``lone_rewards``: a valid row that is alone in its group counts as informative, with mean 0 and standard deviation 1, as in
    verl.
    """
    member = dense_ids(group)
    # Use where and not a product, because the reward of an invalid row may be NaN, and 0 times NaN is NaN.
    values = torch.where(valid, rewards.double(), 0.0)
    zeros = torch.zeros_like(values)
    count = zeros.index_add(0, member, valid.double())[member]
    mean = zeros.index_add(0, member, values)[member] / count.clamp(min=1)
    squares = torch.where(valid, (values - mean) ** 2, 0.0)
    std = (zeros.index_add(0, member, squares)[member] / (count - 1).clamp(min=1)).sqrt()
    # Compare the extremes and not the std, because rounding can give equal rewards a tiny std other than 0.
    lowest = torch.full_like(values, torch.inf).scatter_reduce(0, member, torch.where(valid, values, torch.inf), "amin")
    highest = torch.full_like(values, -torch.inf).scatter_reduce(0, member, torch.where(valid, values, -torch.inf), "amax")
    informative = valid & (lowest < highest)[member]
    if lone_rewards:
        alone = valid & (zeros.index_add(0, member, torch.ones_like(values))[member] == 1)
        mean, std, informative = mean.where(~alone, 0.0), std.where(~alone, 1.0), informative | alone
    return GroupStatistics(count, mean, std, informative)


def check_rewards(rewards: Tensor, addresses: Sequence[str]) -> Tensor:
    """Return the valid mask, bool [B] on the driver: a NaN reward (no reward function applied) makes a row invalid.

    ``addresses``: file and row of each prompt, for errors.

    Raises:
        RewardError: A reward is infinite. The message names the first such row.
    """
    infinite = torch.isinf(rewards).nonzero().flatten().tolist()
    if infinite:
        row = infinite[0]
        raise RewardError(
            f"{addresses[row]}: the reward is {rewards[row].item()}. Return a finite number, or None where no score applies."
        )
    return ~torch.isnan(rewards)


def has_signal(metric: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """Return which rows ``algorithm.filter_groups`` keeps in a step, bool [B].

    A group is kept if two of its valid members differ in the metric. A group with a single row has nothing to compare, and is
    kept if the row is valid. A group of several rows with at most one valid row is dropped. Source: dynamic sampling of DAPO,
    arXiv 2503.14476, and its trainer in verl.

    ``metric``: fp32 [B], the score or another number of each row.
    """
    member = dense_ids(group)
    ones, zeros = torch.ones_like(metric, dtype=torch.float64), torch.zeros_like(metric, dtype=torch.float64)
    size = zeros.index_add(0, member, ones)[member]
    num_informative = zeros.index_add(0, member, group_statistics(metric, group, valid).informative.double())[member]
    return (num_informative > 0) | ((size == 1) & valid)


def has_high_entropy(entropy: Tensor, kept: Tensor | None, share: float) -> Tensor:
    """Return which tokens are among the ``share`` with the highest entropy, bool [R]. Ties at the quantile are included.

    ``entropy``: fp32 [R]. ``kept``: bool [R], the tokens that count; None = all count. Source: arXiv 2506.01939.
    """
    ordered = (entropy if kept is None else entropy[kept]).sort().values
    if not ordered.numel():
        return torch.zeros_like(entropy, dtype=torch.bool)
    place = (1 - share) * (ordered.numel() - 1)
    lower, upper = ordered[math.floor(place)], ordered[math.ceil(place)]
    high = entropy >= lower + (place - math.floor(place)) * (upper - lower)
    return high if kept is None else high & kept


def group_counts(rewards: Tensor, group: Tensor, valid: Tensor) -> dict[str, float]:
    """Count the rows and groups without a training signal, on the driver.

    ``single_valid_groups`` is the number of groups with one valid member. ``equal_groups_share`` is the share of groups in which
    no two valid members have different rewards.
    """
    stats = group_statistics(rewards, group, valid)
    groups = group.unique().numel()
    equal = groups - group[stats.informative].unique().numel()
    return {
        "invalid_rows": float((~valid).sum()),
        "single_valid_groups": float(group[valid & (stats.count == 1)].unique().numel()),
        "equal_groups_share": equal / groups if groups else 0.0,
    }


# Advantages from one reward per response, relative to the other responses to the same prompt.

STD_EPSILON = 1e-6
"""Added to a group's standard deviation in GRPO. This is verl's value, so that results agree with verl."""


def rloo_advantages(rewards: Tensor, group: Tensor, valid: Tensor, normalize: bool = False) -> Tensor:
    """Leave-one-out advantages, fp32 [B]: the reward minus the mean reward of the other valid members of the group.

    With n valid members this equals n / (n - 1) * (reward - mean). Source: RLOO, arXiv 2402.14740.

    ``normalize``: scale the advantages of the whole step with :func:`normalize_rows`. Their mean is already 0, because the
    advantages of a group sum to 0.
    """
    stats = group_statistics(rewards, group, valid, lone_rewards=True)
    scale = stats.count / (stats.count - 1).clamp(min=1)
    advantages = torch.where(stats.informative, scale * (rewards.double() - stats.mean), 0.0)
    return _where_informative(stats, normalize_rows(advantages, valid) if normalize else advantages)


def grpo_advantages(
    rewards: Tensor,
    group: Tensor,
    valid: Tensor,
    normalize_by_std: bool = True,
    epsilon: float = STD_EPSILON,
    std_of: str = "group",
) -> Tensor:
    """Group-relative advantages, fp32 [B]: (reward - mean) / (std + epsilon) over the valid members of the group.

    The standard deviation is unbiased. Source: GRPO, arXiv 2402.03300. Without the division it is Dr. GRPO, arXiv 2503.20783.

    ``normalize_by_std``: divide by the standard deviation. ``std_of``: the rewards of which it is taken, "group" or "batch" (all
    valid rewards of the step, arXiv 2508.08221).
    """
    return _group_relative(rewards, group, valid, normalize_by_std, epsilon, std_of == "batch").float()


def _group_relative(
    rewards: Tensor, group: Tensor, valid: Tensor, by_std: bool, epsilon: float, by_batch: bool = False
) -> Tensor:
    stats = group_statistics(rewards, group, valid, lone_rewards=True)
    centred = rewards.double() - stats.mean
    std = group_statistics(rewards, torch.zeros_like(group), valid).std if by_batch else stats.std
    return torch.where(stats.informative, centred / (std + epsilon) if by_std else centred, 0.0)


def gdpo_advantages(
    components: Tensor,
    group: Tensor,
    valid: Tensor,
    row: Tensor,
    normalize_by_std: bool = True,
    weights: Sequence[float] | None = None,
    epsilon: float = STD_EPSILON,
    whiten_over: str = "tokens",
) -> Tensor:
    """Weighted sum of the :func:`grpo_advantages` of each reward, whitened over the tokens of the step, fp32 [R].

    Source: GDPO, arXiv 2601.05242, and ``compute_gdpo_outcome_advantage`` in verl.

    ``components``: fp32 [B, K], K rewards of each row. A NaN reward counts in no group, and adds nothing to its row.
    ``weights``: K numbers; None = 1 each. ``whiten_over``: "tokens", or "rows" for :func:`normalize_rows`, as in
    ``normalize_then_sum`` of TRL.
    """
    # Use fp64: where rewards cancel, whitening would enlarge the rounding errors of fp32 to the size of the advantages.
    advantages = [
        _group_relative(rewards, group, valid & ~rewards.isnan(), normalize_by_std, epsilon) for rewards in components.unbind(1)
    ]
    total = sum(weight * values for weight, values in zip(weights or [1.0] * len(advantages), advantages, strict=True))
    assert isinstance(total, Tensor), "there is a reward"
    return (normalize_rows(total, valid)[row] if whiten_over == "rows" else whiten(total[row], valid[row])).float()


def grpo_passk_advantages(rewards: Tensor, group: Tensor, valid: Tensor, normalize_by_std: bool = True) -> Tensor:
    """Pass@k advantages, fp32 [B]: the best member of a group gets its lead over the second best, all others get 0.

    If two members share the best reward, there is no lead, and the whole group gets 0. Source: arXiv 2503.19595, and
    ``compute_grpo_passk_outcome_advantage`` in verl.

    ``normalize_by_std``: divide by (std + 1e-6) of the group.
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


def gpg_advantages(rewards: Tensor, group: Tensor, valid: Tensor, counts: str = "scored") -> Tensor:
    """GPG's advantages, fp32 [B]: alpha * (reward - mean of the group).

    alpha = valid rows / counted rows. It makes up for rows without a gradient. Source: GPG, arXiv 2504.02546, with F_norm = 1.

    ``counts``: which rows are counted. "scored" = rows whose reward is not 0, as in verl. "informative" = rows of groups whose
    rewards differ, as in the paper.
    """
    stats = group_statistics(rewards, group, valid, lone_rewards=True)
    counted = stats.informative if counts == "informative" else valid & (rewards != 0)
    alpha = valid.sum() / counted.sum().clamp(min=1)
    return _where_informative(stats, alpha * (rewards.double() - stats.mean))


def opo_advantages(rewards: Tensor, group: Tensor, valid: Tensor, lengths: Tensor) -> Tensor:
    """OPO's advantages, fp32 [B]: the reward minus the mean reward of the group, in which longer responses have more weight.

    A response's weight is its length. This baseline gives the least variance if the gradients of all tokens have the same size.
    Source: OPO, arXiv 2505.23585.
    """
    stats, member = group_statistics(rewards, group, valid, lone_rewards=True), dense_ids(group)
    weights = torch.where(valid, lengths.double(), 0.0)
    zeros = torch.zeros_like(weights)
    weighted = zeros.index_add(0, member, torch.where(valid, weights * rewards.double(), 0.0))[member]
    baseline = weighted / zeros.index_add(0, member, weights)[member].clamp(min=1)
    alone = stats.informative & (stats.count == 1)
    return _where_informative(stats, rewards.double() - baseline.where(~alone, 0.0))


def _where_informative(stats: GroupStatistics, advantages: Tensor) -> Tensor:
    return torch.where(stats.informative, advantages, 0.0).float()


def sft_advantages(rewards: Tensor) -> Tensor:
    # With advantages of 1 the loss -A * log-prob is the negative log-prob.
    return torch.ones_like(rewards)


def distill_advantages(rewards: Tensor) -> Tensor:
    # The teacher's term is added to the loss, or to these advantages.
    return torch.zeros_like(rewards)


# Generalised advantage estimation (GAE) over flat rows, for PPO with a critic.


def gae(token_rewards: Tensor, values: Tensor, row: Tensor, lengths: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """GAE's advantages before whitening, and the returns, both fp64 [R].

    With value 0 after the last token of a row::

        delta[t] = reward[t] + gamma * value[t + 1] - value[t]
        advantage[t] = sum over l >= 0 of (gamma * lam)^l * delta[t + l]
        return[t] = advantage[t] + value[t]

    Source: GAE, arXiv 1506.02438.
    """
    current = values.double()
    # At the last token of a row, the roll gives a value of the next row, which is another response. Set it to 0.
    following = torch.where(is_last(row, lengths), 0.0, current.roll(-1))
    advantages = reverse_scan(token_rewards.double() + gamma * following - current, row, gamma * lam)
    return advantages, advantages + current


def gae_advantages(
    token_rewards: Tensor, values: Tensor, row: Tensor, lengths: Tensor, valid: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """GAE's advantages, whitened over all valid tokens, and the returns that the critic learns, both fp32 [R].

    Tokens of an invalid row get advantage 0. Their return is their value, so that the critic is not moved away from it. They
    count in no statistic. Source: arXiv 1506.02438 and ``compute_gae_advantage_return`` in verl, which whitens as well.

    ``token_rewards``: fp32 [R], NaN in invalid rows.
    """
    valid_tokens = valid[row]
    advantages, returns = gae(torch.where(valid_tokens, token_rewards, 0.0), values, row, lengths, gamma, lam)
    return whiten(advantages, valid_tokens).float(), torch.where(valid_tokens, returns, values.double()).float()


# Advantages per token without a critic: REINFORCE++, its variant with a group baseline, and ReMax.


def discounted_returns(token_rewards: Tensor, row: Tensor, valid: Tensor, gamma: float) -> Tensor:
    """Discounted sum of the rewards from each token to the end of its row, fp64 [R]."""
    return reverse_scan(torch.where(valid[row], token_rewards, 0.0), row, gamma)


def reinforce_plus_plus_advantages(token_rewards: Tensor, row: Tensor, valid: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """REINFORCE++'s advantages (the discounted returns whitened over all tokens) and the returns, both fp32 [R].

    Source: REINFORCE++, arXiv 2501.03262.
    """
    returns = discounted_returns(token_rewards, row, valid, gamma)
    return whiten(returns, valid[row]).float(), returns.float()


def reinforce_plus_plus_baseline_advantages(rewards: Tensor, group: Tensor, valid: Tensor, row: Tensor) -> Tensor:
    """Each token gets the reward of its row minus the mean of the group, whitened over all tokens, fp32 [R].

    The zeros of groups with equal rewards count in the whitening. Source: REINFORCE++-baseline, arXiv 2501.03262.
    """
    stats = group_statistics(rewards, group, valid, lone_rewards=True)
    centred = torch.where(stats.informative, rewards.double() - stats.mean, 0.0)
    # Spread each row's value over its tokens before the whitening, so that long responses count more, as in verl.
    return whiten(centred[row], valid[row]).float()


def remax_advantages(token_rewards: Tensor, baselines: Tensor, row: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """ReMax's advantages and returns, both fp32 [R].

    The return of a token is the sum of the rewards from this token on. The advantage is the return minus the score of the greedy
    response. A group of one row is no special case, because its baseline is the greedy response. A row whose baseline is NaN
    counts as invalid. Source: ReMax, arXiv 2310.10505.

    ``baselines``: fp32 [rows], the score of the greedy response to each row's prompt.
    """
    comparable = valid & ~torch.isnan(baselines)
    returns = discounted_returns(token_rewards, row, comparable, 1.0)
    advantages = torch.where(comparable[row], returns - baselines.double()[row], 0.0)
    return advantages.float(), returns.float()


# The optimal token baseline: one baseline per prompt and position in the response, weighted by the size of the gradients so far.


def sum_of_squares(log_p: Tensor, scratch: Tensor | None) -> Tensor:
    """Return the sum of squared probabilities [c] of log-probs fp32 [c, v]. The log-probs are not changed.

    ``scratch``: working memory [c, any number of columns]; None = allocate it.
    """
    total = torch.zeros_like(log_p[:, 0])
    for part, room in column_parts(log_p, scratch):
        total += torch.mul(part, 2, out=room).exp_().sum(-1)
    return total


SUM_PI_SQUARED = Statistic(sum_of_squares, lambda squares, share: share.square() * squares)
"""The sum of squared probabilities over the vocabulary."""


def optimal_token_baseline_advantages(
    token_rewards: Tensor,
    group: Tensor,
    valid: Tensor,
    row: Tensor,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the returns G minus a baseline per group and position, and G itself, both fp32 [R].

    G[t] is the sum of the rewards from token t on. The first two sums below are over the valid rows of the group that reach
    position t, and the third is over the tokens of a row::

        baseline[t] = sum(G[t] * W[t]) / sum(W[t])
        W[t] = sum over s <= t of (1 - 2 * p[s] + q[s])

    p[s] is the probability of the sampled token, and q[s] the sum of squared probabilities over the vocabulary. W approximates
    the squared norm of the gradients. Source: ``compute_optimal_token_baseline_advantage`` in verl.

    A group with one valid row gets 0, and so does a position where all G are equal. A position that only one row of the group
    reaches has baseline 0, which is the default of verl 0.9.

    ``old_log_probs``: fp32 [R], log p. ``sum_pi_squared``: fp32 [R], q. ``weights``: fp32 [R], importance weights of the rollout
    correction; their squares multiply the terms of W. None = 1.
    """
    valid_tokens, num_rows = valid[row], valid.shape[0]
    returns = discounted_returns(token_rewards, row, valid, 1.0)
    energy = 1 - 2 * old_log_probs.double().exp() + sum_pi_squared.double()
    if weights is not None:
        energy = energy * weights.double().square()
    after = reverse_scan(energy, row, 1.0)
    # reverse_scan sums only from the end. So the sum up to a token is the sum of the row minus the sum after the token.
    energy_so_far = row_sums(energy, row, num_rows)[row] - after + energy
    # Rounding can make a sum of terms near 0 slightly negative, and a negative weight would distort the baseline.
    energy_so_far = torch.where(valid_tokens, energy_so_far.clamp(min=0), 0.0)

    # One id for each pair of group and position. The factor is larger than any position.
    lengths = row_sums(torch.ones_like(row), row, num_rows)
    place = dense_ids(dense_ids(group)[row] * row.shape[0] + positions(row, lengths))
    zeros = torch.zeros_like(returns)
    total = zeros.index_add(0, place, energy_so_far)[place]
    # Where no row has weight, the baseline would be 0 / 0.
    baseline = zeros.index_add(0, place, returns * energy_so_far)[place] / total.where(total > 0, 1.0)
    lowest = torch.full_like(returns, torch.inf).scatter_reduce(0, place, returns.where(valid_tokens, torch.inf), "amin")[place]
    highest = torch.full_like(returns, -torch.inf).scatter_reduce(0, place, returns.where(valid_tokens, -torch.inf), "amax")[
        place
    ]
    alone = zeros.index_add(0, place, valid_tokens.double())[place] == 1
    advantages = torch.where(alone, returns, torch.where(lowest < highest, returns - baseline, 0.0))
    has_peers = group_statistics(valid.double(), group, valid).count[row] > 1
    return torch.where(valid_tokens & has_peers, advantages, 0.0).float(), returns.float()


# One call for every estimator.


@dataclass(frozen=True)
class AdvantageInputs:
    """The inputs of estimators: B rows with R response tokens, which are stored flat, row after row."""

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
    values: Tensor | None = None
    """fp32 [R], the critic's value before each token."""
    components: Tensor | None = None
    """fp32 [B, K], the rewards that ``algorithm.gdpo_reward_keys`` names. NaN = the reward does not apply to the row."""
    baselines: Tensor | None = None
    """fp32 [B], the score of the greedy response to each row's prompt."""
    old_log_probs: Tensor | None = None
    """fp32 [R], of the policy that sampled the responses."""
    ref_log_probs: Tensor | None = None
    """fp32 [R], of the reference."""
    rollout_log_probs: Tensor | None = None
    """fp32 [R], of the rollout engine."""
    weights: Tensor | None = None
    """fp32 [R], importance weights of the rollout correction."""
    statistics: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> fp32 [R], a statistic of each token's distribution."""

    def named(self, name: str) -> Tensor | None:
        return self.statistics[name] if name in self.statistics else getattr(self, name, None)


def estimate(inputs: AdvantageInputs, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    """Return the advantages of ``algorithm.adv_estimator``, and the returns, both fp32 [R].

    They are equal if an estimator scores whole responses.
    """
    record = ESTIMATORS[algorithm.adv_estimator]
    if record.name == CUSTOM:
        return load(record.function)(inputs, algorithm)
    given = {name: inputs.named(name) for name in record.inputs}
    missing = [name for name, value in given.items() if value is None and name not in OPTIONAL]
    assert not missing, f"{record.name} needs {', '.join(missing)}"
    options = {name: getattr(algorithm, key) for name, key in record.options.items()}
    result = load(record.function)(**given, **options)
    if isinstance(result, tuple):
        return result
    per_token = result if record.per_token else result[inputs.row]
    return per_token, per_token


OPTIONAL = ("weights",)
"""Inputs that may be None."""
