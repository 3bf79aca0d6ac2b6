"""The log-prob pass: log-probs of every response token, without gradients. The policy and the reference run it alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_memopt.config.schema import Rollout
from verl_memopt.data.batch import RolloutBatch, scatter_tokens
from verl_memopt.memory.logits.chunked_logprob import SumPiSquared
from verl_memopt.memory.parameters.resharding import reshard_units
from verl_memopt.models.pack import Pack
from verl_memopt.models.policy_model import PolicyModel
from verl_memopt.ops.prefix_kv import PrefixKV
from verl_memopt.workers.micro_batches import micro_batches_of


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
    micros = [micro.to(device) for micro in micro_batches_of(batch, micro_batches, policy.supports_prefix_kv)]
    log_probs, entropies, sums_of_squares = [], [], []
    prefix_kv = None
    for micro in micros:
        if micro.prompt is not None and prefix_kv is None:
            with torch.no_grad():
                prefix_kv = policy.compute_prefix(micro.prompt)
        sums = SumPiSquared() if with_sum_pi_squared else None
        log_prob, entropy = pack_log_probs(policy, micro.pack, temperature, with_entropy, prefix_kv, sums)
        log_probs.append(log_prob)
        entropies.append(entropy)
        sums_of_squares.append(None if sums is None else sums.values)
        prefix_kv = None if micro.ends else prefix_kv
    reshard_units(policy)
    sizes = batch.responses.sizes()

    def in_batch_order(values: Sequence[Tensor | None]) -> Tensor:
        parts = zip(micro_batches, values, strict=True)
        return scatter_tokens([(rows, value) for rows, value in parts if value is not None], sizes)

    return LogProbs(
        in_batch_order(log_probs),
        in_batch_order(entropies) if with_entropy else None,
        in_batch_order(sums_of_squares) if with_sum_pi_squared else None,
    )
