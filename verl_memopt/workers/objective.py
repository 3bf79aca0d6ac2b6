"""What the policy minimises on one micro-batch, and its gradient for each token before there is a backward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verl_memopt.algorithms.kl import kl_estimate
from verl_memopt.algorithms.losses import TOKEN_LOCAL, LossAndMetrics, policy_loss
from verl_memopt.algorithms.reductions import GlobalCounts, aggregate
from verl_memopt.config.schema import Actor
from verl_memopt.memory.logits.chunked_logprob import TokenGradient
from verl_memopt.workers.scorer import MicroBatch

EVERYTHING = slice(None)


@dataclass(frozen=True)
class Objective:
    """The loss of a micro-batch: this rank's share of a mini-batch whose sizes are ``counts``.

    Without ``old_log_probs`` the policy is strictly on-policy and its own log-probs stand for them.
    """

    micro: MicroBatch
    counts: GlobalCounts
    actor: Actor

    @property
    def with_entropy(self) -> bool:
        return self.actor.entropy_coeff != 0

    def loss(self, log_probs: Tensor, entropy: Tensor | None) -> LossAndMetrics:
        """Gives the share of the loss (scalar, with gradient) and of its metrics (scalars, without).

        log_probs, entropy: fp32 [R], in the order of ``pack.targets``; entropy is there if ``with_entropy``.
        """
        loss, parts = self._policy(log_probs, self._old(log_probs, EVERYTHING), EVERYTHING)
        metrics = {f"actor/{name}": value for name, value in parts.items()}
        for weight, name, value in self._penalties(log_probs, entropy, EVERYTHING):
            metrics[f"actor/{name}"] = value.detach()
            loss = loss + weight * value
        metrics["actor/loss"] = loss.detach()
        return loss, metrics

    def token_gradient(self, scale: float) -> TokenGradient | None:
        """Gives a function from some tokens' log-probs and entropies to the gradients of ``scale`` times the loss for them.

        None where a token's gradient depends on the log-probs of others: a ratio of sequences, off-policy.
        """
        on_policy = self.micro.old_log_probs is None
        if not on_policy and self.actor.policy_loss.loss_mode not in TOKEN_LOCAL:
            return None
        precomputed = self._on_policy_gradient() if on_policy else None

        def gradient(rows: slice, log_probs: Tensor, entropy: Tensor | None) -> tuple[Tensor, Tensor | None]:
            with torch.enable_grad():
                log_probs = log_probs.detach().requires_grad_()
                entropy = None if entropy is None else entropy.detach().requires_grad_()
                if precomputed is None:
                    loss, _ = self._policy(log_probs, self._old(log_probs, rows), rows)
                else:
                    loss = (log_probs * precomputed[rows]).sum()
                for weight, _, value in self._penalties(log_probs, entropy, rows):
                    loss = loss + weight * value
                loss = loss * scale
            if entropy is None:
                return torch.autograd.grad(loss, log_probs)[0], None
            of_log_probs, of_entropy = torch.autograd.grad(loss, (log_probs, entropy))
            return of_log_probs, of_entropy

        return gradient

    def _policy(self, log_probs: Tensor, old: Tensor, rows: slice) -> LossAndMetrics:
        pack, advantages = self.micro.pack, self.micro.advantages
        assert advantages is not None
        return policy_loss(log_probs, old, advantages[rows], pack.row[rows], pack.row_lengths, self.counts, self.actor)

    def _old(self, log_probs: Tensor, rows: slice) -> Tensor:
        old = self.micro.old_log_probs
        return log_probs.detach() if old is None else old[rows]

    def _penalties(self, log_probs: Tensor, entropy: Tensor | None, rows: slice) -> list[tuple[float, str, Tensor]]:
        """Gives (weight in the loss, name, value) of what is added to the policy's loss; sums over the tokens of ``rows``."""
        actor, pack, found = self.actor, self.micro.pack, []

        def mean(values: Tensor) -> Tensor:
            mode, scale_factor = actor.loss_agg_mode, actor.loss_scale_factor
            return aggregate(values, pack.row[rows], pack.row_lengths, mode, self.counts, scale_factor)

        if entropy is not None:
            found.append((-actor.entropy_coeff, "entropy", mean(entropy)))
        if actor.use_kl_loss:
            assert self.micro.ref_log_probs is not None
            divergence = kl_estimate(log_probs, self.micro.ref_log_probs[rows], actor.kl_loss_type)
            found.append((actor.kl_loss_coef, "kl_loss", mean(divergence)))
        return found

    def _on_policy_gradient(self) -> Tensor:
        """Gives fp32 [R]: on-policy every ratio is 1 whatever the log-probs are, so zeros do for them."""
        assert self.micro.advantages is not None
        with torch.enable_grad():
            log_probs = torch.zeros_like(self.micro.advantages, requires_grad=True)
            loss, _ = self._policy(log_probs, log_probs.detach(), EVERYTHING)
        return torch.autograd.grad(loss, log_probs)[0]
