"""The critic in a training step: the pass that computes values, and the update that learns the returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from verl_memopt.config.schema import Critic
from verl_memopt.data.batch import RolloutBatch, scatter_tokens
from verl_memopt.run.checkpoints import CheckpointStore
from verl_memopt.trainer.micro_batching import Budget, MiniBatchCutter, global_metrics, refuse_partial
from verl_memopt.trainer.rollouts import ForwardPass, LogProbPass
from verl_memopt.trainer.update_guard import recovery_advice
from verl_memopt.worker.group import TimedGroup
from verl_memopt.worker.trained_model import CRITIC
from verl_memopt.worker.worker import Worker


@dataclass(frozen=True)
class CriticTraining:
    """What a step does with the critic.

    Attributes:
        workers: Workers that hold the critic.
        critic: Settings of the critic.
        cutter: Cuts the batch for the optimizer steps.
        budget: How a rank's rows are cut into the micro-batches of the values pass.
        warmup: Steps at the start that train only the critic.
        warmup_pass: The pass for old log-probs in those steps, which have no update that would compute them.
        store: Checkpoints, one of which an error names as the way back.
    """

    workers: TimedGroup
    critic: Critic
    cutter: MiniBatchCutter
    budget: Budget
    warmup: int
    warmup_pass: LogProbPass
    store: CheckpointStore

    def warms_up(self, step: int) -> bool:
        """Return whether the critic is trained alone in a step."""
        return step <= self.warmup

    def values(self, batch: RolloutBatch, names: Sequence[str]) -> Tensor:
        """Return the value before each response token, fp32 [R]."""
        parts = ForwardPass(self.workers, "values", Worker.values, self.budget, self.cutter.balance).run(batch, names)
        return scatter_tokens(parts, batch.responses.sizes())

    def update(self, batch: RolloutBatch, names: Sequence[str], step: int) -> dict[str, float]:
        """Take the optimizer steps on the workers, and return their metrics over all ranks.

        Raises:
            TrainingError: A skipped update had already changed some weights.
        """
        per_rank = self.cutter.cut(batch, names, step)
        results = self.workers.each("update_critic", Worker.update_critic, [(minis,) for minis in per_rank])
        self.cutter.learn(per_rank, self.workers.figures)
        metrics = global_metrics(results, CRITIC)
        refuse_partial(metrics, CRITIC, step, recovery_advice(CRITIC, self.critic.optim.lr, self.store))
        return metrics
