"""The update of a step: mini-batches cut for the ranks, the optimizer steps, and their metrics over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verl_memopt.algorithms.reductions import GlobalCounts
from verl_memopt.config.schema import Actor
from verl_memopt.data.batch import RolloutBatch, scatter_tokens
from verl_memopt.errors import TrainingError
from verl_memopt.trainer.checkpoints import CheckpointStore
from verl_memopt.trainer.passes import Budget, cut_ranks, mini_batch_rows, rows_per_rank
from verl_memopt.trainer.timed_group import TimedGroup
from verl_memopt.trainer.update_guard import way_back
from verl_memopt.workers.policy import PARTIAL, SAME_ON_ALL_RANKS, SKIPPED, MiniBatch


@dataclass(frozen=True)
class PolicyUpdate:
    """Takes the optimizer steps of a training step.

    Attributes:
        workers: hold the policy.
        actor: settings of the update.
        samples: responses to each prompt.
        budget: how a rank's share of a mini-batch is cut into micro-batches.
        balance: even out tokens over the ranks.
        on_policy: the one optimizer step also gives the old log-probs.
        store: checkpoints, which an error names as the way back.
    """

    workers: TimedGroup
    actor: Actor
    samples: int
    budget: Budget
    balance: bool
    on_policy: bool
    store: CheckpointStore

    def run(self, batch: RolloutBatch, names: Sequence[str], step: int) -> dict[str, float]:
        """Take the step's optimizer steps on all ranks and return the global metrics.

        Strictly on-policy, ``batch`` gains its old log-probs. ``names``: of the rows, for errors.

        Raises:
            TrainingError: a skipped update had already changed some weights.
        """
        minis = self.mini_batch_rows(batch, step)
        cut = [self.mini_batches(batch, rows, names) for rows in minis]
        per_rank = [list(own) for own in zip(*cut, strict=True)]
        answers = self._on_policy(batch, per_rank, minis[-1]) if self.on_policy else self._off_policy(per_rank)
        metrics = global_metrics(answers)
        if metrics.pop(PARTIAL, 0.0):
            raise TrainingError(
                f"actor_rollout_ref.actor.optim.in_backward=true: in step {step} a gradient was not finite after other "
                "parameters had been updated, and that cannot be taken back. With in_backward=false such an update is skipped. "
                f"{way_back(self.actor.optim.lr, self.store)}"
            )
        if self.actor.use_kl_loss:
            metrics["actor/kl_coef"] = self.actor.kl_loss_coef
        return metrics

    def mini_batch_rows(self, batch: RolloutBatch, step: int) -> list[list[int]]:
        """Return the rows of each mini-batch, over all passes over the batch."""
        actor, found = self.actor, []
        for epoch in range(actor.ppo_epochs):
            seed = actor.data_loader_seed * 1_000_003 + step * 1_009 + epoch if actor.shuffle else None
            found += mini_batch_rows(batch.num_rows // self.samples, self.samples, actor.ppo_mini_batch_size, seed)
        return found

    def shares(self, batch: RolloutBatch, rows: Sequence[int]) -> list[list[int]]:
        """Return each rank's rows of a mini-batch."""
        return rows_per_rank(batch.row_tokens(self.budget.shared), rows, self.workers.world_size, self.balance)

    def mini_batches(self, batch: RolloutBatch, rows: Sequence[int], names: Sequence[str]) -> list[MiniBatch]:
        """Return each rank's share of one mini-batch."""
        tokens, sizes = batch.row_tokens(self.budget.shared), batch.responses.sizes()
        counts = GlobalCounts(tokens=float(max(sum(sizes[row] for row in rows), 1)), sequences=float(len(rows)))
        shares = self.shares(batch, rows)
        micro = cut_ranks([tokens.select(own) for own in shares], [[names[r] for r in own] for own in shares], self.budget)
        return [MiniBatch(batch.select(own), bins, counts) for own, bins in zip(shares, micro, strict=True)]

    def _off_policy(self, per_rank: Sequence[list[MiniBatch]]) -> list[dict[str, float]]:
        return self.workers.each("update_actor", "update_actor", [(minis,) for minis in per_rank])

    def _on_policy(self, batch: RolloutBatch, per_rank: Sequence[list[MiniBatch]], rows: Sequence[int]) -> list[dict[str, float]]:
        """Take the one optimizer step, whose forward gives ``batch`` its old log-probs."""
        answers = self.workers.each("update_actor", "update_on_policy", [tuple(minis) for minis in per_rank])
        found = [(own, answer.log_probs) for own, answer in zip(self.shares(batch, rows), answers, strict=True)]
        batch.old_log_probs = scatter_tokens(found, batch.responses.sizes())
        return [answer.metrics for answer in answers]


def global_metrics(answers: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the metrics over all ranks: of most the sum of the ranks' shares, of some what every rank knows."""
    assert len({answer[SKIPPED] for answer in answers}) == 1, [answer[SKIPPED] for answer in answers]
    return {
        name: answers[0][name] if name in SAME_ON_ALL_RANKS else sum(answer[name] for answer in answers) for name in answers[0]
    }
