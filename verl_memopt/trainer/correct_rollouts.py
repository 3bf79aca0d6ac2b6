"""The rollout correction of a step: importance weights and rejected tokens before the update, or the update of bypass mode."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from verl_memopt.algorithms.rollout_correction import bounded_weights, correct, mean_weight
from verl_memopt.config.schema import Fsdp, Rollout, RolloutCorrection
from verl_memopt.data.batch import RolloutBatch, scatter_tokens, token_index
from verl_memopt.errors import RolloutError
from verl_memopt.model.packed_model import dtype_of
from verl_memopt.trainer.micro_batching import Budget, PolicyUpdate
from verl_memopt.trainer.rollouts import StepBatch
from verl_memopt.worker.group import TimedGroup
from verl_memopt.worker.policy import Updated
from verl_memopt.worker.trained_model import ACTOR, MiniBatch
from verl_memopt.worker.worker import Worker

logger = logging.getLogger(__name__)


def correct_before_update(rows: RolloutBatch, settings: RolloutCorrection) -> dict[str, float]:
    # Correct all tokens of the step at once, so that the result does not depend on mini-batches, micro-batches or ranks.
    engine, trainer = rows.rollout_log_probs, rows.old_log_probs
    assert engine is not None, "the rollout correction needs the engine's log-probs"
    assert trainer is not None, "the rollout correction needs old log-probs"
    if not engine.numel():
        return {}
    correction = correct(trainer, engine, rows.response_row(), rows.responses.lengths, settings)
    rows.weights, rows.kept = correction.weights, correction.kept
    return correction.metrics


def divergence_metrics(rows: RolloutBatch) -> dict[str, float]:
    engine, trainer = rows.rollout_log_probs, rows.old_log_probs
    if engine is None or trainer is None or not engine.numel():
        return {}
    # The default settings correct nothing, and only measure.
    return correct(trainer, engine, rows.response_row(), rows.responses.lengths, RolloutCorrection()).metrics


@dataclass(frozen=True)
class BypassUpdate:
    """The update of bypass mode, which uses the engine's log-probs as old log-probs.

    No pass computes log-probs before the update. The update's forward computes them, for the importance weights and for the
    metrics. ``rollout_is_batch_normalize`` needs the mean weight of a mini-batch before the backward of the mini-batch. This
    takes one more log-prob pass per mini-batch.
    """

    workers: TimedGroup
    policy_update: PolicyUpdate
    mismatch: MismatchCheck
    settings: RolloutCorrection

    def old_log_probs(self, batch: StepBatch, update_follows: bool) -> None:
        batch.rows.old_log_probs = batch.rows.rollout_log_probs

    def budgets(self) -> dict[str, Budget]:
        return {"update_actor": self.policy_update.cutter.budget}

    def update(self, batch: StepBatch) -> None:
        rows, names = batch.for_update()
        per_rank = self.policy_update.cut(rows, names, batch.step)
        updates, mean_weights = self._run([list(minis) for minis in zip(*per_rank, strict=True)])
        self.policy_update.cutter.learn(per_rank, self.workers.figures)
        metrics = self.policy_update.metrics
        batch.metrics |= _over_mini_batches([metrics([updated.metrics for updated in ranks], batch.step) for ranks in updates])
        log_probs, first = self._log_probs(rows, updates, batch.step)
        engine = rows.rollout_log_probs
        assert engine is not None, "bypass mode needs the engine's log-probs"
        batch.metrics |= self.mismatch.compare(engine[first], log_probs[first], batch.step)
        if engine.numel():
            settings = replace(self.settings, rollout_is_batch_normalize=False)
            batch.metrics |= correct(log_probs, engine, rows.response_row(), rows.responses.lengths, settings).metrics
        if mean_weights:
            batch.metrics["rollout_corr/rollout_is_batch_norm_factor"] = sum(mean_weights) / len(mean_weights)
        batch.keep_log_probs(log_probs)

    def _run(self, mini_batches: list[list[MiniBatch]]) -> tuple[list[list[Updated]], list[float]]:
        """Run the updates. Return results by mini-batch and rank, and the mean weight of each normalised mini-batch."""
        settings = self.settings
        if settings.loss_type != "reinforce" or settings.rollout_is is None or not settings.rollout_is_batch_normalize:
            arguments = [(list(minis),) for minis in zip(*mini_batches, strict=True)]
            updates = self.workers.each("update_actor", Worker.update_bypass, arguments)
            return [list(ranks) for ranks in zip(*updates, strict=True)], []
        updates, means = [], []
        for ranks in mini_batches:
            means.append(self.mean_weight(ranks))
            normalised = [replace(mini, counts=replace(mini.counts, mean_weight=means[-1])) for mini in ranks]
            arguments = [([mini],) for mini in normalised]
            updates.append([updated for (updated,) in self.workers.each("update_actor", Worker.update_bypass, arguments)])
        return updates, means

    def mean_weight(self, ranks: Sequence[MiniBatch]) -> float:
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

    def _log_probs(self, rows: RolloutBatch, updates: Sequence[Sequence[Updated]], step: int) -> tuple[Tensor, Tensor]:
        """Return the policy's log-probs of all rows, fp32 [R], and the token indices of the first mini-batch.

        The log-probs of a row come from the forward of its first optimizer step. Only in the first mini-batch does the policy
        still have the weights of the engine.
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


def _over_mini_batches(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    # Average each metric over the mini-batches, but sum the metrics that count steps or bytes.
    totals = {name: sum(one_batch[name] for one_batch in metrics) for name in metrics[0]}
    counted = {name for name in totals if name in ACTOR.counts or name.startswith("memory/")}
    return {name: total if name in counted else total / len(metrics) for name, total in totals.items()}


# Compare the engine's log-probs with the trainer's, and stop the run if they differ too much.


FIRST_SHARE = 0.1
"""Share of the limit that rounding can explain in the first rollout. Above it, a model with special features gives a warning."""
LIMIT_FP32 = 1e-3
LIMIT_HALF = 0.2
LIMIT_FP8_CACHE = 1.0
"""Limits of the mean difference, in nats. docs/decisions/rollout_log_probs.md says how they were measured."""


def log_prob_limit(rollout: Rollout, fsdp: Fsdp) -> float | None:
    """Return the largest mean difference, in nats, that ``rollout.max_logprob_diff`` allows. None = no limit.

    ``auto`` depends on the coarsest dtype among the engine's weights, its KV cache, and the trainer's compute (``fsdp``).
    """
    setting = rollout.max_logprob_diff
    if setting is None or isinstance(setting, float):
        return setting
    assert setting == "auto", setting
    if rollout.kv_cache_dtype.startswith("fp8"):
        return LIMIT_FP8_CACHE
    names: list[str] = [rollout.dtype, fsdp.dtype, fsdp.model_dtype]
    names += [rollout.kv_cache_dtype] if rollout.kv_cache_dtype != "auto" else []
    sizes = [dtype_of(name, "dtype").itemsize for name in names]
    return LIMIT_FP32 if min(sizes) == 4 else LIMIT_HALF


def same_distribution(rollout: Rollout) -> bool:
    # Whether engine and trainer compute log-probs of the same distribution. Only then is a difference a fault.
    if not rollout.do_sample:
        return False
    if rollout.logprobs_mode == "raw_logprobs":
        return rollout.temperature == 1.0
    return rollout.repetition_penalty == 1.0


def mismatch_metrics(engine: Tensor, trainer: Tensor) -> dict[str, float]:
    difference = (engine - trainer).abs()
    engine_probs, trainer_probs = engine.exp(), trainer.exp()
    probs = (engine_probs - trainer_probs).abs()
    metrics = {
        "rollout/logprob_diff_mean": float(difference.mean()),
        "rollout/logprob_diff_max": float(difference.max()),
        "training/rollout_probs_diff_valid": 1.0,
        "training/rollout_probs_diff_mean": float(probs.mean()),
        "training/rollout_probs_diff_max": float(probs.max()),
        "training/rollout_probs_diff_std": float(probs.std()) if probs.numel() > 1 else 0.0,
    }
    if engine_probs.numel() > 1 and float(engine_probs.std()) > 0 and float(trainer_probs.std()) > 0:
        correlation = torch.corrcoef(torch.stack([engine_probs, trainer_probs]))[0, 1]
        metrics["training/rollout_actor_probs_pearson_corr"] = float(correlation)
    return metrics


@dataclass(frozen=True)
class MismatchCheck:
    rollout: Rollout
    fsdp: Fsdp
    features: tuple[str, ...] = ()
    """Special features of the policy's forward, as ``field=value``. An engine may leave them out without an error."""
    compared: list[int] = field(default_factory=list)
    """Numbers of the steps that have been compared."""

    def compare(self, engine: Tensor | None, trainer: Tensor, step: int) -> dict[str, float]:
        """Measure how the engine's log-probs differ from the trainer's.

        The limit does not apply in two cases. With a repetition penalty, for example, engine and trainer compute different
        distributions. And if the trainer's log-probs are not finite, the weights are at fault and not the weight sync. Such a
        step updates nothing, and :class:`~verl_memopt.trainer.update_guard.UpdateGuard` counts it.

        ``engine``: fp32 [R]; None = the engine returned no log-probs. ``trainer``: fp32 [R], computed with the weights that the
        engine had.

        Raises:
            RolloutError: The mean difference is above the limit.
        """
        if engine is None or not engine.numel():
            return {}
        metrics = mismatch_metrics(engine, trainer)
        limit, mean = log_prob_limit(self.rollout, self.fsdp), metrics["rollout/logprob_diff_mean"]
        comparable = bool(trainer.isfinite().all()) and same_distribution(self.rollout)
        if comparable and not self.compared:
            self._look_at_first(mean)
        self.compared.append(step)
        if limit is not None and comparable and not mean <= limit:
            shown = f"auto ({limit} for these dtypes)" if self.rollout.max_logprob_diff == "auto" else str(limit)
            raise RolloutError(
                f"actor_rollout_ref.rollout.max_logprob_diff={shown}: in step {step} the engine's log-probs "
                f"are {mean:.4g} nats from the trainer's on average: the weight sync is stale or wrong, or their precisions "
                f"differ too much.{self._special} Compare rollout.dtype with actor.fsdp_config.dtype; raise the limit only if "
                "the difference is expected."
            )
        return metrics

    @property
    def _special(self) -> str:
        return f" The model has {', '.join(self.features)}, which an engine may compute differently." if self.features else ""

    def _look_at_first(self, mean: float) -> None:
        # Before the first update engine and trainer have the same weights, so only their computations differ. A likely cause is a
        # feature of the model that the engine computes in another way.
        rounding = log_prob_limit(replace(self.rollout, max_logprob_diff="auto"), self.fsdp)
        assert rounding is not None
        if self.features and not mean <= FIRST_SHARE * rounding:
            other = "vllm" if self.rollout.name == "hf" else "hf"
            logger.warning(
                "in the first rollout the engine's log-probs are %.2g nats from the trainer's on average; rounding explains "
                "%.2g.%s To find the cause, run again with actor_rollout_ref.rollout.name=%s and compare this difference",
                mean, FIRST_SHARE * rounding, self._special, other,
            )  # fmt: skip
