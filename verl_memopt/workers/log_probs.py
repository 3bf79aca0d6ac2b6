"""The log-prob pass: log-probs of every response token, without gradients. The policy and the reference run it alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_memopt.config.schema import Rollout
from verl_memopt.data.batch import RolloutBatch, scatter_tokens
from verl_memopt.memory.logits.chunked_logprob import SumPiSquared
from verl_memopt.models.pack import Pack
from verl_memopt.models.policy_model import PolicyModel
from verl_memopt.ops.prefix_kv import PrefixKV
from verl_memopt.workers.forward_pass import forward_pass


@dataclass(frozen=True)
class LogProbs:
    """The result of a log-prob pass.

    ``log_probs`` is fp32 [R] on the host, in batch order. ``entropy`` and ``sum_pi_squared``, the sum of squared probabilities
    over the vocabulary, have the same form, and are None if not requested.
    """

    log_probs: Tensor
    entropy: Tensor | None
    sum_pi_squared: Tensor | None = None


def scoring_temperature(rollout: Rollout) -> float:
    """Return what log-probs divide the logits by: the temperature of the rollouts, or 1 where the rollouts are greedy."""
    # Greedy rollouts have no distribution that they sample from, and a temperature of 0 would divide by 0.
    return rollout.temperature if rollout.do_sample else 1.0


def pack_log_probs(
    policy: PolicyModel,
    pack: Pack,
    temperature: float,
    with_entropy: bool,
    prefix_kv: PrefixKV | None = None,
    sums: SumPiSquared | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs fp32 [R] of a pack's targets and, if requested, their entropies, without gradients.

    ``sums`` is filled with the sums of squared probabilities; None where they are not requested.
    """
    with torch.no_grad():
        return policy(pack, temperature, with_entropy, None, prefix_kv, sum_pi_squared=sums)


def compute_log_probs(
    policy: PolicyModel,
    batch: RolloutBatch,
    micro_batches: Sequence[Sequence[int]],
    temperature: float,
    with_entropy: bool,
    device: torch.device,
    with_sum_pi_squared: bool = False,
) -> LogProbs:
    """Return the log-probs of every response token, without gradients.

    Args:
        policy: The model.
        batch: The batch of this rank.
        micro_batches: Rows of each forward. Together they hold every row once, and all ranks have the same number of them.
        temperature: Divides the logits.
        with_entropy: Compute entropies too.
        device: The device of the model.
        with_sum_pi_squared: Compute the sums of squared probabilities too.
    """

    def forward(pack: Pack, prefix_kv: PrefixKV | None, rows: Sequence[int]) -> LogProbs:
        sums = SumPiSquared() if with_sum_pi_squared else None
        log_probs, entropy = pack_log_probs(policy, pack, temperature, with_entropy, prefix_kv, sums)
        return LogProbs(log_probs, entropy, None if sums is None else sums.values)

    return in_batch_order(forward_pass(policy, batch, micro_batches, device, forward), batch.responses.sizes())


def in_batch_order(parts: Sequence[tuple[Sequence[int], LogProbs]], sizes: Sequence[int]) -> LogProbs:
    """Return the results of parts of a batch as one, in batch order.

    Args:
        parts: (rows, result) of each part. All parts have the same statistics.
        sizes: Response tokens of each row of the batch.
    """

    def together(values: Sequence[Tensor | None]) -> Tensor | None:
        present = [(rows, value) for (rows, _), value in zip(parts, values, strict=True) if value is not None]
        return scatter_tokens(present, sizes) if present else None

    return LogProbs(
        scatter_tokens([(rows, part.log_probs) for rows, part in parts], sizes),
        together([part.entropy for _, part in parts]),
        together([part.sum_pi_squared for _, part in parts]),
    )
