"""Cuts the batch of a training step for optimizer steps: into mini-batches, into each rank's share, into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.config.schema import Actor, Critic
from verl_memopt.data.batch import RolloutBatch
from verl_memopt.memory.batching.learned_budget import PassFigures
from verl_memopt.trainer.passes import Budget, cut_ranks, mini_batch_rows, rows_per_rank, updates_per_step
from verl_memopt.workers.trained_model import MiniBatch

Prepare = Callable[[list[int], int], RolloutBatch]
"""Returns the batch with what one mini-batch adds to it, from the rows and the seed of the mini-batch."""


@dataclass(frozen=True)
class MiniBatchCutter:
    """Cuts batches for the optimizer steps of one trained role.

    Attributes:
        world_size: Ranks that share each mini-batch.
        role: Section of the role: size of a mini-batch, passes over the batch, shuffle.
        samples: Responses to each prompt.
        budget: How a rank's share of a mini-batch is cut into micro-batches.
        balance: Even out tokens over the ranks.
    """

    world_size: int
    role: Actor | Critic
    samples: int
    budget: Budget
    balance: bool

    def cut(self, batch: RolloutBatch, names: Sequence[str], step: int, prepare: Prepare | None = None) -> list[list[MiniBatch]]:
        """Return for each rank its shares of the mini-batches, in the order of the optimizer steps.

        Args:
            batch: Batch of the training step.
            names: Names of the rows, for errors.
            step: Number of the training step; seeds the shuffle.
            prepare: Adds to the batch what depends on a mini-batch; None = nothing does.
        """
        mini_batches = []
        for index, rows in enumerate(self.mini_batch_rows(batch, step)):
            prepared = batch if prepare is None else prepare(rows, self.seed(step, index))
            mini_batches.append(self.mini_batches(prepared, rows, names))
        return [list(shares) for shares in zip(*mini_batches, strict=True)]

    def learn(self, per_rank: Sequence[Sequence[MiniBatch]], figures: PassFigures) -> None:
        """Let the budget learn from an update, if it learns.

        Args:
            per_rank: Mini-batches of each rank, as :meth:`cut` returned them.
            figures: What the update took of the devices.
        """
        cut = ((mini.batch.row_tokens(), mini.micro_batches) for minis in per_rank for mini in minis)
        self.budget.learn(cut, figures)

    def mini_batch_rows(self, batch: RolloutBatch, step: int) -> list[list[int]]:
        """Return the rows of each mini-batch, over all passes over the batch."""
        role, rows = self.role, []
        assert role.ppo_epochs is not None, "follows the actor's"
        assert role.ppo_mini_batch_size is not None, "follows the actor's"
        for epoch in range(role.ppo_epochs):
            seed = self.seed(step, epoch) if role.shuffle else None
            rows += mini_batch_rows(batch.num_rows // self.samples, self.samples, role.ppo_mini_batch_size, seed)
        return rows

    def seed(self, step: int, index: int) -> int:
        """Return the seed of what is drawn for one part of a training step. Every start of a run draws alike."""
        return self.role.data_loader_seed * 1_000_003 + step * 1_009 + index

    def shares(self, batch: RolloutBatch, rows: Sequence[int]) -> list[list[int]]:
        """Return each rank's rows of a mini-batch."""
        return rows_per_rank(batch.row_tokens(), rows, self.world_size, self.balance)

    def mini_batches(self, batch: RolloutBatch, rows: Sequence[int], names: Sequence[str]) -> list[MiniBatch]:
        """Return each rank's share of one mini-batch, which has these rows."""
        tokens, sizes = batch.row_tokens(), batch.kept_sizes()
        # At least one token, because the loss of a mini-batch without any would be 0 / 0.
        counts = GlobalCounts(tokens=float(max(sum(sizes[row] for row in rows), 1)), sequences=float(len(rows)))
        shares = self.shares(batch, rows)
        bins = cut_ranks([tokens.select(share) for share in shares], [[names[r] for r in share] for share in shares], self.budget)
        return [MiniBatch(batch.select(share), cut, counts) for share, cut in zip(shares, bins, strict=True)]


def role_updates(role: Actor | Critic, train_batch_size: int) -> int:
    """Return the optimizer steps that a role takes in one training step.

    Args:
        role: Section of the role.
        train_batch_size: Prompts of a training step.
    """
    assert role.ppo_mini_batch_size is not None, "follows the actor's"
    assert role.ppo_epochs is not None, "follows the actor's"
    return updates_per_step(train_batch_size, role.ppo_mini_batch_size, role.ppo_epochs)
