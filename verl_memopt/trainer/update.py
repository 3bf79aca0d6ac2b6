"""The update of a step: mini-batches cut for the ranks, and the metrics of their optimizer steps over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_memopt.algorithms.records import LOSSES, load
from verl_memopt.config.schema import Actor, PolicyLoss
from verl_memopt.data.batch import RolloutBatch, scatter_tokens
from verl_memopt.data.ragged import token_index
from verl_memopt.errors import TrainingError
from verl_memopt.trainer.checkpoints import CheckpointStore
from verl_memopt.trainer.mini_batches import MiniBatchCutter
from verl_memopt.trainer.update_guard import way_back
from verl_memopt.workers.trained_model import ACTOR, MiniBatch, Role

SEEDS = 2**63
"""Number of seeds that a generator takes."""


@dataclass(frozen=True)
class PolicyUpdate:
    """Plans the optimizer steps of a training step, and reads their results.

    Attributes:
        cutter: Cuts the batch for the optimizer steps.
        actor: Settings of the update.
        store: Checkpoints, one of which an error names as the way back.
    """

    cutter: MiniBatchCutter
    actor: Actor
    store: CheckpointStore

    def cut(self, batch: RolloutBatch, names: Sequence[str], step: int) -> list[list[MiniBatch]]:
        """Return for each rank its shares of the mini-batches, in the order of the optimizer steps.

        Args:
            batch: Batch of the training step.
            names: Names of the rows, for errors.
            step: Number of the training step; seeds the shuffle.
        """
        return self.cutter.cut(batch, names, step, lambda rows, seed: with_selection(batch, rows, self.actor.policy_loss, seed))

    def gather_log_probs(self, batch: RolloutBatch, per_rank: Sequence[Tensor], step: int) -> Tensor:
        """Return the log-probs of the whole batch, fp32 [R], from those of each rank's share of the only mini-batch."""
        (rows,) = self.cutter.mini_batch_rows(batch, step)
        return scatter_tokens(list(zip(self.cutter.shares(batch, rows), per_rank, strict=True)), batch.responses.sizes())

    def metrics(self, per_rank: Sequence[dict[str, float]], step: int) -> dict[str, float]:
        """Return the metrics of the update over all ranks.

        Raises:
            TrainingError: A skipped update had already changed some weights.
        """
        metrics = global_metrics(per_rank, ACTOR)
        refuse_partial(metrics, ACTOR, step, way_back(ACTOR, self.actor.optim.lr, self.store))
        if self.actor.use_kl_loss:
            metrics["actor/kl_coef"] = self.actor.kl_loss_coef
        return metrics


def with_selection(batch: RolloutBatch, rows: Sequence[int], loss: PolicyLoss, seed: int) -> RolloutBatch:
    """Return the batch with the tokens of one mini-batch that its loss acts on, or the batch itself if the loss selects none.

    The tokens are chosen here, from the whole mini-batch, so that they depend neither on micro-batches nor on ranks.

    Args:
        batch: Batch of the training step, with old log-probs and advantages.
        rows: Rows of the mini-batch.
        loss: The section ``actor.policy_loss``.
        seed: Seed of a random choice.
    """
    selects = LOSSES[loss.loss_mode].selects
    if selects is None:
        return batch
    assert batch.old_log_probs is not None, f"{loss.loss_mode} selects tokens by their old log-probs"
    assert batch.advantages is not None
    tokens = token_index(batch.responses.sizes(), rows)
    generator = torch.Generator().manual_seed(seed % SEEDS)
    selected = torch.zeros(batch.advantages.shape[0], dtype=torch.bool)
    selected[tokens] = load(selects)(batch.old_log_probs[tokens], batch.advantages[tokens], loss, generator)
    marked: RolloutBatch = batch.clone(recurse=False)
    marked.selected = selected
    return marked


def global_metrics(per_rank: Sequence[dict[str, float]], role: Role) -> dict[str, float]:
    """Return the metrics of a role's update over all ranks: the sum of the ranks' shares, and once what every rank knows."""
    assert len({metrics[role.skipped] for metrics in per_rank}) == 1, [metrics[role.skipped] for metrics in per_rank]
    first = per_rank[0]
    return {name: first[name] if name in role.same_on_all_ranks else sum(metrics[name] for metrics in per_rank) for name in first}


def refuse_partial(metrics: dict[str, float], role: Role, step: int, way_out: str) -> None:
    """Take the count of partial updates out of the metrics, and stop the run where there is one.

    Args:
        metrics: Metrics of an update over all ranks.
        role: The role that took it.
        step: Number of the training step.
        way_out: How to continue.

    Raises:
        TrainingError: A skipped update had already changed some weights.
    """
    if metrics.pop(role.partial, 0.0):
        raise TrainingError(
            f"{role.key}.optim.in_backward=true: in step {step} a gradient was not finite after other parameters had been "
            f"updated, and that cannot be taken back. With in_backward=false such an update is skipped. {way_out}"
        )
