"""Compares the engine's log-probs with the trainer's, and stops a run where they differ too much."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verl_memopt.config.schema import Fsdp, Rollout
from verl_memopt.errors import RolloutError
from verl_memopt.models.policy_model import dtype_of

LIMIT_FP32 = 1e-3
LIMIT_HALF = 0.2
LIMIT_FP8_CACHE = 1.0
"""Nats, on average. How they were measured: docs/decisions/log_prob_agreement.md."""


def log_prob_limit(rollout: Rollout, fsdp: Fsdp) -> float | None:
    """Return the largest mean difference in nats that ``rollout.max_logprob_diff`` allows; None for any.

    ``auto`` depends on the coarsest dtype among the engine's weights, its KV cache and the trainer's compute (``fsdp``).
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
    """Return whether engine and trainer compute log-probs of the same distribution, so that a difference is a fault."""
    if not rollout.do_sample:
        return False
    if rollout.logprobs_mode == "raw_logprobs":
        return rollout.temperature == 1.0
    return rollout.top_p == 1.0 and rollout.top_k <= 0 and rollout.repetition_penalty == 1.0


def mismatch_metrics(engine: Tensor, trainer: Tensor) -> dict[str, float]:
    """Return how log-probs and probabilities differ.

    Args:
        engine: Log-probs fp32 [R], R > 0.
        trainer: The same.
    """
    difference = (engine - trainer).abs()
    engine_probs, trainer_probs = engine.exp(), trainer.exp()
    probs = (engine_probs - trainer_probs).abs()
    metrics = {
        "rollout/logprob_diff_mean": float(difference.mean()),
        "rollout/logprob_diff_max": float(difference.max()),
        "training/rollout_probs_diff_valid": 1.0,
        "training/rollout_probs_diff_mean": float(probs.mean()),
        "training/rollout_probs_diff_max": float(probs.max()),
        "training/rollout_probs_diff_std": float(probs.std(correction=0)),
    }
    if engine_probs.numel() > 1 and float(engine_probs.std()) > 0 and float(trainer_probs.std()) > 0:
        correlation = torch.corrcoef(torch.stack([engine_probs, trainer_probs]))[0, 1]
        metrics["training/rollout_actor_probs_pearson_corr"] = float(correlation)
    return metrics


@dataclass(frozen=True)
class MismatchCheck:
    """Compares the log-probs of each step.

    Attributes:
        rollout: Settings of the engine.
        fsdp: Dtypes of the trainer.
    """

    rollout: Rollout
    fsdp: Fsdp

    def compare(self, engine: Tensor | None, trainer: Tensor, step: int) -> dict[str, float]:
        """Return how much the engine's log-probs differ from the trainer's.

        With sampling filters the two are different distributions, so the limit does not apply. Nor does it apply where the
        trainer's own log-probs are not finite: then the weights are at fault, and not the weight sync. Such a step updates
        nothing, and :class:`~verl_memopt.trainer.update_guard.UpdateGuard` counts it.

        Args:
            engine: fp32 [R]; None where the engine returned none.
            trainer: fp32 [R], under the weights that the engine had.
            step: Number of the step, for the error.

        Raises:
            RolloutError: The mean difference is above the limit.
        """
        if engine is None or not engine.numel():
            return {}
        metrics = mismatch_metrics(engine, trainer)
        limit, mean = log_prob_limit(self.rollout, self.fsdp), metrics["rollout/logprob_diff_mean"]
        weights_at_fault = not bool(trainer.isfinite().all())
        if limit is not None and not weights_at_fault and not mean <= limit and same_distribution(self.rollout):
            raise RolloutError(self._message(limit, mean, step))
        return metrics

    def _message(self, limit: float, mean: float, step: int) -> str:
        shown = f"auto ({limit} for these dtypes)" if self.rollout.max_logprob_diff == "auto" else str(limit)
        return (
            f"actor_rollout_ref.rollout.max_logprob_diff={shown}: in step {step} the engine's log-probs "
            f"are {mean:.4g} nats from the trainer's on average: the weight sync is stale or wrong, or their precisions "
            "differ too much. Compare rollout.dtype with actor.fsdp_config.dtype; raise the limit only if the difference is "
            "expected."
        )
