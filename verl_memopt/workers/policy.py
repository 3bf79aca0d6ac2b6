"""The policy: log-probs of a batch, and update steps on the policy's loss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.config.schema import Actor, RolloutCorrection
from verl_memopt.data.batch import RolloutBatch, scatter_tokens
from verl_memopt.models.policy_model import PolicyModel
from verl_memopt.ops.prefix_kv import PrefixKV
from verl_memopt.workers.log_probs import LogProbs, compute_log_probs
from verl_memopt.workers.micro_batches import MicroBatch
from verl_memopt.workers.objective import Objective
from verl_memopt.workers.trained_model import ACTOR, LossOf, MiniBatch, SavedTensorHooks, TrainedModel


@dataclass(frozen=True)
class Updated:
    """The result of an optimizer step that also returns the log-probs of its forward.

    ``log_probs`` is fp32 [R] on the host, in batch order.
    """

    metrics: dict[str, float]
    log_probs: Tensor


class Policy:
    """The trained policy. All ranks call the same methods in the same order.

    Args:
        model: The model, sharded and filled.
        actor: The ``actor`` section of the settings.
        optimizer_steps: Optimizer steps of the whole run, for the schedule.
        world_size: Number of ranks.
        device: The device of the model.
        offload: Offloads its activations. None = they stay on the device.

    Attributes:
        trained: The model with its optimizer.
        bypass: The rollout correction in bypass mode. None = decoupled mode, or no correction.
    """

    def __init__(
        self,
        model: PolicyModel,
        actor: Actor,
        optimizer_steps: int,
        world_size: int,
        device: torch.device,
        offload: SavedTensorHooks | None = None,
    ) -> None:
        """Build optimizer and schedule."""
        self.model = model
        self.bypass: RolloutCorrection | None = None
        self.actor = actor
        self.trained = TrainedModel(ACTOR, model, actor.optim, actor.fsdp_config, optimizer_steps, world_size, device, offload)
        self._log_probs: list[Tensor] | None = None

    def compute_log_probs(
        self,
        batch: RolloutBatch,
        micro_batches: Sequence[Sequence[int]],
        temperature: float,
        with_entropy: bool,
        with_sum_pi_squared: bool = False,
    ) -> LogProbs:
        """Return the log-probs of a batch under the present weights.

        Args:
            batch: The batch of this rank.
            micro_batches: Rows of each forward.
            temperature: Divides the logits.
            with_entropy: Compute entropies too.
            with_sum_pi_squared: Compute the sums of squared probabilities too.
        """
        options = temperature, with_entropy, self.trained.device, with_sum_pi_squared
        return compute_log_probs(self.model, batch, micro_batches, *options)

    def update(self, mini_batches: Sequence[MiniBatch], temperature: float) -> dict[str, float]:
        """Take one optimizer step per mini-batch and return the mean of their metrics, as :meth:`TrainedModel.update`.

        Args:
            mini_batches: One per optimizer step.
            temperature: Divides the logits.
        """
        return self.trained.update(mini_batches, self.loss_at(temperature))

    def update_on_policy(self, mini: MiniBatch, temperature: float) -> Updated:
        """Take one optimizer step, and return its metrics with the log-probs of its forward.

        A mini-batch without old log-probs is strictly on-policy.

        Args:
            mini: The mini-batch.
            temperature: Divides the logits.
        """
        self._log_probs = []
        metrics = self.update([mini], temperature)
        # Those of forwards that an out-of-memory error made void come first.
        parts, self._log_probs = self._log_probs[-len(mini.micro_batches) :], None
        return Updated(metrics, scatter_tokens(list(zip(mini.micro_batches, parts, strict=True)), mini.batch.responses.sizes()))

    def accumulate(self, micro_batches: Iterable[MicroBatch], counts: GlobalCounts, temperature: float) -> dict[str, Tensor]:
        """Add the gradient of a mini-batch, micro-batch by micro-batch, and return the summed metrics.

        Args:
            micro_batches: The micro-batches, read one at a time.
            counts: Tokens and sequences of the mini-batch over all ranks.
            temperature: Divides the logits.
        """
        return self.trained.accumulate(micro_batches, counts, self.loss_at(temperature))

    def loss_at(self, temperature: float) -> LossOf:
        """Return the policy's loss of a micro-batch, whose log-probs divide the logits by ``temperature``."""

        def loss(micro: MicroBatch, counts: GlobalCounts, prefix_kv: PrefixKV | None) -> tuple[Tensor, dict[str, Tensor]]:
            objective = Objective(micro, counts, self.actor, self.bypass)
            token_gradient = objective.token_gradient(self.trained.world_size)
            # With a token_gradient the head computes its gradient in this forward. The backward() of the loss, which
            # TrainedModel runs, then only hands it on to the blocks.
            log_probs, entropy = self.model(micro.pack, temperature, objective.with_entropy, token_gradient, prefix_kv)
            if self._log_probs is not None:
                # Detached, because the list outlives the graph of the micro-batch.
                self._log_probs.append(log_probs.detach())
            return objective.loss(log_probs, entropy)

        return loss
