"""The log-prob pass: log-probs of every response token, without gradients. The policy and the reference run it alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_memopt.config.schema import Rollout
from verl_memopt.data.batch import RolloutBatch, scatter_tokens
from verl_memopt.models.pack import Pack
from verl_memopt.models.policy_model import PolicyModel
from verl_memopt.ops.prefix_kv import PrefixKV
from verl_memopt.workers.forward_pass import forward_pass


@dataclass(frozen=True)
class LogProbs:
    """The result of a log-prob pass.

    ``log_probs`` is fp32 [R] on the host, in batch order. ``entropy`` has the same form, and is None if not requested.
    """

    log_probs: Tensor
    entropy: Tensor | None


def scoring_temperature(rollout: Rollout) -> float:
    """Return what log-probs divide the logits by: the temperature of the rollouts, or 1 where the rollouts are greedy."""
    return rollout.temperature if rollout.do_sample else 1.0


def pack_log_probs(
    policy: PolicyModel, pack: Pack, temperature: float, with_entropy: bool, prefix_kv: PrefixKV | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs fp32 [R] of a pack's targets and, if requested, their entropies, without gradients."""
    with torch.no_grad():
        return policy(pack, temperature, with_entropy, None, prefix_kv)


def compute_log_probs(
    policy: PolicyModel,
    batch: RolloutBatch,
    micro_batches: Sequence[Sequence[int]],
    temperature: float,
    with_entropy: bool,
    device: torch.device,
) -> LogProbs:
    """Return the log-probs of every response token, without gradients.

    Args:
        policy: The model.
        batch: The batch of this rank.
        micro_batches: Rows of each forward. Together they hold every row once, and all ranks have the same number of them.
        temperature: Divides the logits.
        with_entropy: Compute entropies too.
        device: The device of the model.
    """

    def forward(pack: Pack, prefix_kv: PrefixKV | None) -> tuple[Tensor, Tensor | None]:
        return pack_log_probs(policy, pack, temperature, with_entropy, prefix_kv)

    scored = forward_pass(policy, batch, micro_batches, device, forward)
    sizes = batch.responses.sizes()
    log_probs = scatter_tokens([(rows, log_prob) for rows, (log_prob, _) in scored], sizes)
    if not with_entropy:
        return LogProbs(log_probs, None)
    return LogProbs(log_probs, scatter_tokens([(rows, entropy) for rows, (_, entropy) in scored if entropy is not None], sizes))
