"""The loss of the policy on one micro-batch, and its gradient per token before any backward."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from verl_memopt.algorithms.kl import kl_estimate
from verl_memopt.algorithms.losses import (
    LossAndMetrics,
    LossSettings,
    LossTokens,
    policy_loss,
    with_shared_metrics,
)
from verl_memopt.algorithms.records import LOSSES
from verl_memopt.algorithms.rollout_correction import bypass_loss, is_token_local, kept_lengths
from verl_memopt.algorithms.rows import GlobalCounts, aggregate
from verl_memopt.config.schema import Actor, RolloutCorrection
from verl_memopt.memory.logits.chunked_logprob import TokenGradient
from verl_memopt.workers.micro_batches import MicroBatch

EVERYTHING = slice(None)


@dataclass(frozen=True)
class Objective:
    """The loss of a micro-batch, as this rank's share of a mini-batch whose sizes are ``counts``.

    Without ``old_log_probs`` the policy is strictly on-policy, and its own log-probs take their place. ``bypass`` is the rollout
    correction in bypass mode, where the engine's log-probs are the old ones; None = decoupled mode, or no correction.
    """

    micro: MicroBatch
    counts: GlobalCounts
    actor: Actor
    bypass: RolloutCorrection | None = None

    @property
    def with_entropy(self) -> bool:
        """True if the loss has an entropy term."""
        return self.actor.entropy_coeff != 0

    def loss(self, log_probs: Tensor, entropy: Tensor | None) -> LossAndMetrics:
        """Return the share of the loss (scalar, with gradient) and of its metrics (scalars, without).

        Args:
            log_probs: fp32 [R], in the order of ``pack.targets``.
            entropy: fp32 [R], required if ``with_entropy``.
        """
        loss, parts = self._policy(log_probs, self._old(log_probs, EVERYTHING), EVERYTHING)
        metrics = {f"actor/{name}": value for name, value in parts.items()}
        for weight, name, value in self._penalties(log_probs, entropy, EVERYTHING):
            metrics[f"actor/{name}"] = value.detach()
            loss = loss + weight * value
        metrics["actor/loss"] = loss.detach()
        return loss, metrics

    def token_gradient(self, scale: float) -> TokenGradient | None:
        """Return a function from log-probs and entropies of some tokens to their gradients of ``scale`` times the loss.

        Returns:
            The function, or None if a token's gradient depends on other tokens' log-probs: a ratio of sequences, off-policy.
        """
        on_policy = self.micro.old_log_probs is None
        if not on_policy and not self._is_token_local:
            return None
        known_before = on_policy and (self.bypass is not None or LOSSES[self.actor.policy_loss.loss_mode].of_ratio)
        on_policy_gradient = self._on_policy_gradient() if known_before else None

        def gradient(rows: slice, log_probs: Tensor, entropy: Tensor | None) -> tuple[Tensor, Tensor | None]:
            with torch.enable_grad():
                # Leaves of a small graph of their own: the head's graph does not exist yet when this is called.
                log_probs = log_probs.detach().requires_grad_()
                entropy = None if entropy is None else entropy.detach().requires_grad_()
                if on_policy_gradient is None:
                    loss, _ = self._policy(log_probs, self._old(log_probs, rows), rows)
                else:
                    loss = (log_probs * on_policy_gradient[rows]).sum()
                for weight, _, value in self._penalties(log_probs, entropy, rows):
                    loss = loss + weight * value
                # Backward starts from the loss times the number of ranks, so the gradient that is computed before it has the
                # same factor.
                loss = loss * scale
            if entropy is None:
                return torch.autograd.grad(loss, log_probs)[0], None
            log_probs_gradient, entropy_gradient = torch.autograd.grad(loss, (log_probs, entropy))
            return log_probs_gradient, entropy_gradient

        return gradient

    def _policy(self, log_probs: Tensor, old: Tensor, rows: slice) -> LossAndMetrics:
        micro = self.micro
        assert micro.advantages is not None
        fields = (micro.weights, micro.kept, micro.selected)
        weights, kept, selected = (None if field is None else field[rows] for field in fields)
        row, counts, advantages = micro.pack.row[rows], self.counts, micro.advantages[rows]
        if self.bypass is None:
            tokens = LossTokens(log_probs, old, advantages, row, self._lengths, counts, weights, kept, selected)
            return policy_loss(tokens, self.actor)
        tokens = LossTokens(log_probs, old, advantages, row, self._lengths, counts)
        return with_shared_metrics(tokens, *bypass_loss(tokens, LossSettings.of(self.actor), self.bypass))

    @property
    def _is_token_local(self) -> bool:
        if self.bypass is not None:
            return is_token_local(self.bypass, self.actor.loss_agg_mode)
        return LOSSES[self.actor.policy_loss.loss_mode].token_local

    @cached_property
    def _lengths(self) -> Tensor:
        """The response tokens of each row that count, int64 [rows]: those that were not rejected before the update."""
        pack, kept = self.micro.pack, self.micro.kept
        return pack.row_lengths if kept is None else kept_lengths(kept, pack.row, pack.row_lengths)

    def _old(self, log_probs: Tensor, rows: slice) -> Tensor:
        old = self.micro.old_log_probs
        # Detached: strictly on-policy the ratio has the value 1, and its gradient is that of the new log-prob alone.
        return log_probs.detach() if old is None else old[rows]

    def _penalties(self, log_probs: Tensor, entropy: Tensor | None, rows: slice) -> list[tuple[float, str, Tensor]]:
        """Return (weight, name, value) of the terms that are added to the policy's loss, each summed over ``rows``."""
        actor, pack, kept = self.actor, self.micro.pack, self.micro.kept
        penalties = []

        def mean(values: Tensor) -> Tensor:
            mode, scale_factor = actor.loss_agg_mode, actor.loss_scale_factor
            # Set to 0 before the sum. A product with a mask would keep a NaN of a rejected token.
            values = values if kept is None else values.where(kept[rows], 0.0)
            return aggregate(values, pack.row[rows], self._lengths, mode, self.counts, scale_factor)

        if entropy is not None:
            penalties.append((-actor.entropy_coeff, "entropy", mean(entropy)))
        if actor.use_kl_loss:
            assert self.micro.ref_log_probs is not None
            divergence = kl_estimate(log_probs, self.micro.ref_log_probs[rows], actor.kl_loss_type)
            penalties.append((actor.kl_loss_coef, "kl_loss", mean(divergence)))
        return penalties

    def _on_policy_gradient(self) -> Tensor:
        """Return the on-policy gradient of the log-probs, fp32 [R].

        On-policy every ratio is 1 whatever the log-probs are, so zeros take their place.
        """
        assert self.micro.advantages is not None
        with torch.enable_grad():
            log_probs = torch.zeros_like(self.micro.advantages, requires_grad=True)
            loss, _ = self._policy(log_probs, log_probs.detach(), EVERYTHING)
        return torch.autograd.grad(loss, log_probs)[0]
