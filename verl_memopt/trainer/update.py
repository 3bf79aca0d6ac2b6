"""The update of a step: mini-batches cut for the ranks, and the metrics of their optimizer steps over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_memopt.algorithms.losses import SELECTIONS
from verl_memopt.algorithms.reductions import GlobalCounts
from verl_memopt.config.schema import Actor, PolicyLoss
from verl_memopt.data.batch import RolloutBatch, scatter_tokens
from verl_memopt.data.ragged import token_index
from verl_memopt.errors import TrainingError
from verl_memopt.trainer.checkpoints import CheckpointStore
from verl_memopt.trainer.passes import Budget, cut_ranks, mini_batch_rows, rows_per_rank
from verl_memopt.trainer.update_guard import way_back
from verl_memopt.workers.policy import PARTIAL, SAME_ON_ALL_RANKS, SKIPPED, MiniBatch

SEEDS = 2**63
"""Number of seeds that a generator takes."""


@dataclass(frozen=True)
class PolicyUpdate:
    """Plans the optimizer steps of a training step, and reads their results.

    Attributes:
        world_size: Ranks that share each mini-batch.
        actor: Settings of the update.
        samples: Responses to each prompt.
        budget: How a rank's share of a mini-batch is cut into micro-batches.
        balance: Even out tokens over the ranks.
        store: Checkpoints, one of which an error names as the way back.
    """

    world_size: int
    actor: Actor
    samples: int
    budget: Budget
    balance: bool
    store: CheckpointStore

    def cut(self, batch: RolloutBatch, names: Sequence[str], step: int) -> list[list[MiniBatch]]:
        """Return for each rank its shares of the mini-batches, in the order of the optimizer steps.

        Args:
            batch: Batch of the training step.
            names: Names of the rows, for errors.
            step: Number of the training step; seeds the shuffle.
        """
        mini_batches = [
            self.mini_batches(with_selection(batch, rows, self.actor.policy_loss, self.seed(step, index)), rows, names)
            for index, rows in enumerate(self.mini_batch_rows(batch, step))
        ]
        return [list(shares) for shares in zip(*mini_batches, strict=True)]

    def mini_batch_rows(self, batch: RolloutBatch, step: int) -> list[list[int]]:
        """Return the rows of each mini-batch, over all passes over the batch."""
        actor, rows = self.actor, []
        for epoch in range(actor.ppo_epochs):
            seed = self.seed(step, epoch) if actor.shuffle else None
            rows += mini_batch_rows(batch.num_rows // self.samples, self.samples, actor.ppo_mini_batch_size, seed)
        return rows

    def seed(self, step: int, index: int) -> int:
        """Return the seed of what is drawn for one part of a training step. Every start of a run draws alike."""
        return self.actor.data_loader_seed * 1_000_003 + step * 1_009 + index

    def shares(self, batch: RolloutBatch, rows: Sequence[int]) -> list[list[int]]:
        """Return each rank's rows of a mini-batch."""
        return rows_per_rank(batch.row_tokens(), rows, self.world_size, self.balance)

    def mini_batches(self, batch: RolloutBatch, rows: Sequence[int], names: Sequence[str]) -> list[MiniBatch]:
        """Return each rank's share of one mini-batch, which has these rows."""
        tokens, sizes = batch.row_tokens(), batch.kept_sizes()
        counts = GlobalCounts(tokens=float(max(sum(sizes[row] for row in rows), 1)), sequences=float(len(rows)))
        shares = self.shares(batch, rows)
        bins = cut_ranks([tokens.select(share) for share in shares], [[names[r] for r in share] for share in shares], self.budget)
        return [MiniBatch(batch.select(share), cut, counts) for share, cut in zip(shares, bins, strict=True)]

    def gather_log_probs(self, batch: RolloutBatch, per_rank: Sequence[Tensor], step: int) -> Tensor:
        """Return the log-probs of the whole batch, fp32 [R], from those of each rank's share of the only mini-batch."""
        (rows,) = self.mini_batch_rows(batch, step)
        return scatter_tokens(list(zip(self.shares(batch, rows), per_rank, strict=True)), batch.responses.sizes())

    def metrics(self, per_rank: Sequence[dict[str, float]], step: int) -> dict[str, float]:
        """Return the metrics of the update over all ranks.

        Raises:
            TrainingError: A skipped update had already changed some weights.
        """
        metrics = global_metrics(per_rank)
        if metrics.pop(PARTIAL, 0.0):
            raise TrainingError(
                f"actor_rollout_ref.actor.optim.in_backward=true: in step {step} a gradient was not finite after other "
                "parameters had been updated, and that cannot be taken back. With in_backward=false such an update is skipped. "
                f"{way_back(self.actor.optim.lr, self.store)}"
            )
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
    if loss.loss_mode not in SELECTIONS:
        return batch
    assert batch.old_log_probs is not None, f"{loss.loss_mode} selects tokens by their old log-probs"
    assert batch.advantages is not None
    tokens = token_index(batch.responses.sizes(), rows)
    generator = torch.Generator().manual_seed(seed % SEEDS)
    selected = torch.zeros(batch.advantages.shape[0], dtype=torch.bool)
    selected[tokens] = SELECTIONS[loss.loss_mode](batch.old_log_probs[tokens], batch.advantages[tokens], loss, generator)
    marked: RolloutBatch = batch.clone(recurse=False)
    marked.selected = selected
    return marked


def global_metrics(per_rank: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the metrics over all ranks: the sum of the ranks' shares, and once what every rank knows."""
    assert len({metrics[SKIPPED] for metrics in per_rank}) == 1, [metrics[SKIPPED] for metrics in per_rank]
    first = per_rank[0]
    return {name: first[name] if name in SAME_ON_ALL_RANKS else sum(metrics[name] for metrics in per_rank) for name in first}
