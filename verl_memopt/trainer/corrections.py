"""The rollout correction of a step: weights and rejected tokens before the update, or the update of bypass mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verl_memopt.algorithms.rollout_correction import bounded_weights, correct, mean_weight
from verl_memopt.config.schema import RolloutCorrection
from verl_memopt.data.batch import RolloutBatch, scatter_tokens
from verl_memopt.data.ragged import token_index
from verl_memopt.trainer.experience import StepBatch
from verl_memopt.trainer.log_prob_mismatch import MismatchCheck
from verl_memopt.trainer.passes import Budget
from verl_memopt.trainer.timed_group import TimedGroup
from verl_memopt.trainer.update import PolicyUpdate
from verl_memopt.workers.policy import Updated
from verl_memopt.workers.trained_model import ACTOR, MiniBatch
from verl_memopt.workers.worker import Worker


def correct_before_update(rows: RolloutBatch, settings: RolloutCorrection) -> dict[str, float]:
    """Add the importance weights and the kept tokens to a batch, and return the metrics ``rollout_corr/*``.

    All tokens of the step are seen at once, so nothing depends on mini-batches, micro-batches or ranks.

    Args:
        rows: Batch of the step, with the engine's log-probs and the trainer's.
        settings: The section ``algorithm.rollout_correction``, in decoupled mode.
    """
    engine, trainer = rows.rollout_log_probs, rows.old_log_probs
    assert engine is not None, "the rollout correction needs the engine's log-probs"
    assert trainer is not None, "the rollout correction needs old log-probs"
    if not engine.numel():
        return {}
    correction = correct(trainer, engine, rows.response_row(), rows.responses.lengths, settings)
    rows.weights, rows.kept = correction.weights, correction.kept
    return correction.metrics


def divergence_metrics(rows: RolloutBatch) -> dict[str, float]:
    """Return ``rollout_corr/*`` of how far the trainer's log-probs are from the engine's, whether or not they are corrected.

    Args:
        rows: Batch of the step, with the trainer's log-probs. Without the engine's there is nothing to compare.
    """
    engine, trainer = rows.rollout_log_probs, rows.old_log_probs
    if engine is None or trainer is None or not engine.numel():
        return {}
    return correct(trainer, engine, rows.response_row(), rows.responses.lengths, RolloutCorrection()).metrics


@dataclass(frozen=True)
class BypassUpdate:
    """The update of bypass mode, in which the engine's log-probs are the old ones.

    No pass computes log-probs before the update. Its own forward returns them, for the metrics. The importance weights follow
    from the policy's present log-probs. ``rollout_is_batch_normalize`` needs their mean over a mini-batch before its backward,
    which takes one more log-prob pass per mini-batch.

    Attributes:
        workers: Workers that hold the policy.
        policy_update: Cuts the batch for the optimizer steps.
        mismatch: Compares the engine's log-probs with the trainer's.
        settings: The section ``algorithm.rollout_correction``.
    """

    workers: TimedGroup
    policy_update: PolicyUpdate
    mismatch: MismatchCheck
    settings: RolloutCorrection

    def old_log_probs(self, batch: StepBatch, update_follows: bool) -> None:
        """Take the engine's log-probs as those before the update."""
        batch.rows.old_log_probs = batch.rows.rollout_log_probs

    def budgets(self) -> dict[str, Budget]:
        """Return the token budget of the update."""
        return {"update_actor": self.policy_update.cutter.budget}

    def update(self, batch: StepBatch) -> None:
        """Take the optimizer steps of a training step, and add their metrics and the policy's log-probs to the batch."""
        rows, names = batch.for_update()
        per_rank = self.policy_update.cut(rows, names, batch.step)
        updates, mean_weights = self._run([list(minis) for minis in zip(*per_rank, strict=True)])
        self.policy_update.cutter.learn(per_rank, self.workers.figures)
        batch.metrics |= _over_mini_batches([self._metrics(ranks, batch.step) for ranks in updates])
        log_probs, first = self._log_probs(rows, updates, batch.step)
        batch.metrics |= self._corrections(rows, log_probs, first, batch.step)
        if mean_weights:
            batch.metrics["rollout_corr/rollout_is_batch_norm_factor"] = sum(mean_weights) / len(mean_weights)
        batch.keep_log_probs(log_probs)

    def _run(self, mini_batches: list[list[MiniBatch]]) -> tuple[list[list[Updated]], list[float]]:
        """Return the results per mini-batch and rank, and the mean weight of each mini-batch where weights are normalised."""
        settings = self.settings
        if settings.loss_type != "reinforce" or settings.rollout_is is None or not settings.rollout_is_batch_normalize:
            arguments = [(list(minis),) for minis in zip(*mini_batches, strict=True)]
            return [list(ranks) for ranks in zip(*self._call(arguments), strict=True)], []
        updates, means = [], []
        for ranks in mini_batches:
            means.append(self.mean_weight(ranks))
            normalised = [replace(mini, counts=replace(mini.counts, mean_weight=means[-1])) for mini in ranks]
            updates.append([updated for (updated,) in self._call([([mini],) for mini in normalised])])
        return updates, means

    def _call(self, arguments: Sequence[tuple[list[MiniBatch]]]) -> list[list[Updated]]:
        return self.workers.each("update_actor", Worker.update_bypass, arguments)

    def mean_weight(self, ranks: Sequence[MiniBatch]) -> float:
        """Return the mean importance weight of a mini-batch under the present policy.

        Args:
            ranks: The share of each rank.
        """
        level = self.settings.rollout_is
        assert level is not None
        arguments = [(mini.batch, mini.micro_batches, False) for mini in ranks]
        results = self.workers.each("old_log_prob", Worker.old_log_probs, arguments)
        log_ratios = []
        for mini, result in zip(ranks, results, strict=True):
            assert mini.batch.rollout_log_probs is not None, "bypass mode needs the engine's log-probs"
            log_ratios.append(result.log_probs - mini.batch.rollout_log_probs)
        log_ratio = torch.cat(log_ratios)
        lengths = torch.cat([mini.batch.responses.lengths for mini in ranks])
        row = torch.repeat_interleave(torch.arange(lengths.shape[0]), lengths)
        _, weights = bounded_weights(log_ratio, row, lengths, level, self.settings.rollout_is_threshold)
        return mean_weight(weights, row, lengths, level)

    def _metrics(self, ranks: Sequence[Updated], step: int) -> dict[str, float]:
        return self.policy_update.metrics([updated.metrics for updated in ranks], step)

    def _log_probs(self, rows: RolloutBatch, updates: Sequence[Sequence[Updated]], step: int) -> tuple[Tensor, Tensor]:
        """Return the policy's log-probs of all rows, fp32 [R], and the tokens of the first mini-batch.

        Those of a row are from the forward of its first optimizer step. Only in the first mini-batch has the policy the weights
        that the engine had.
        """
        cutter = self.policy_update.cutter
        mini_batches = cutter.mini_batch_rows(rows, step)
        once = len(mini_batches) // self.policy_update.actor.ppo_epochs
        parts: list[tuple[Sequence[int], Tensor]] = []
        for chosen, ranks in zip(mini_batches[:once], updates[:once], strict=True):
            shares = cutter.shares(rows, chosen)
            parts += [(share, updated.log_probs) for share, updated in zip(shares, ranks, strict=True)]
        sizes = rows.responses.sizes()
        return scatter_tokens(parts, sizes), token_index(sizes, mini_batches[0])

    def _corrections(self, rows: RolloutBatch, log_probs: Tensor, first: Tensor, step: int) -> dict[str, float]:
        """Return how engine and trainer differ, and the metrics ``rollout_corr/*`` over all rows."""
        engine = rows.rollout_log_probs
        assert engine is not None, "bypass mode needs the engine's log-probs"
        metrics = self.mismatch.compare(engine[first], log_probs[first], step)
        if not engine.numel():
            return metrics
        settings = replace(self.settings, rollout_is_batch_normalize=False)
        return metrics | correct(log_probs, engine, rows.response_row(), rows.responses.lengths, settings).metrics


def _over_mini_batches(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over mini-batches, or the sum for those that count steps or bytes."""
    totals = {name: sum(each[name] for each in metrics) for name in metrics[0]}
    return {name: total if _is_total(name) else total / len(metrics) for name, total in totals.items()}


def _is_total(name: str) -> bool:
    return name in ACTOR.counts or name.startswith("memory/")
