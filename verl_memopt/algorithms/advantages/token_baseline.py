"""The optimal token baseline: one baseline per prompt and place in the response, weighted by the size of the gradients so far."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_memopt.algorithms.advantages.groups import group_statistics
from verl_memopt.algorithms.advantages.token_level import discounted_returns
from verl_memopt.algorithms.reductions import row_sums
from verl_memopt.algorithms.rows import dense_ids, positions, reverse_scan


def optimal_token_baseline_advantages(
    token_rewards: Tensor,
    group: Tensor,
    valid: Tensor,
    row: Tensor,
    lengths: Tensor,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    weights: Tensor | None = None,
    zero_tail: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the rewards from each token on, G, minus a baseline per group and place, and G itself, both fp32 [R].

    The baseline at place t of a group is sum(G[t] * W[t]) / sum(W[t]) over the valid rows that reach place t, where W[t] is the
    sum of (1 - 2 * p + sum of p^2 over the vocabulary) from the first token to t, a stand-in for the squared norm of the
    gradients. Source: ``compute_optimal_token_baseline_advantage`` in verl. A group with one valid row gets 0, and so does a
    place where all G are equal.

    Args:
        token_rewards: fp32 [R].
        group: int64 [rows], the prompt of each row.
        valid: bool [rows].
        row: int64 [R].
        lengths: int64 [rows].
        old_log_probs: fp32 [R], log p of each sampled token.
        sum_pi_squared: fp32 [R], the sum of p^2 over the vocabulary at each token.
        weights: fp32 [R], importance weights of the rollout correction, whose squares multiply the terms of W. None = 1.
        zero_tail: At places that only one row of the group reaches, use baseline 0 (True, the default of verl 0.9) or that row's
            own G (False), which makes its advantage 0.
    """
    known = valid[row]
    returns = discounted_returns(token_rewards, row, valid, 1.0)
    energy = 1 - 2 * old_log_probs.double().exp() + sum_pi_squared.double()
    if weights is not None:
        energy = energy * weights.double().square()
    after = reverse_scan(energy, row, 1.0)
    energy_so_far = row_sums(energy, row, lengths.shape[0])[row] - after + energy
    energy_so_far = torch.where(known, energy_so_far.clamp(min=0), 0.0)

    place = dense_ids(dense_ids(group)[row] * row.shape[0] + positions(row, lengths))
    zeros = torch.zeros_like(returns)
    total = zeros.index_add(0, place, energy_so_far)[place]
    baseline = zeros.index_add(0, place, returns * energy_so_far)[place] / total.where(total > 0, 1.0)
    lowest = torch.full_like(returns, torch.inf).scatter_reduce(0, place, returns.where(known, torch.inf), "amin")[place]
    highest = torch.full_like(returns, -torch.inf).scatter_reduce(0, place, returns.where(known, -torch.inf), "amax")[place]
    num_rows_here = zeros.index_add(0, place, known.double())[place]
    alone = num_rows_here == 1
    advantages = torch.where(lowest < highest, returns - baseline, 0.0)
    if zero_tail:
        advantages = torch.where(alone, returns, advantages)
    has_peers = group_statistics(valid.double(), group, valid).count[row] > 1
    return torch.where(known & has_peers, advantages, 0.0).float(), returns.float()
