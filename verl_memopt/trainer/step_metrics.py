"""Metrics that are computed from the batch of a step, under verl's names."""

from __future__ import annotations

from dataclasses import dataclass

from verl_memopt.algorithms.losses import explained_variance
from verl_memopt.observe.metrics import critic_metrics, length_metrics, reward_metrics, summary_of
from verl_memopt.trainer.experience import StepBatch
from verl_memopt.trainer.update_guard import BAD_LOG_PROBS


@dataclass(frozen=True)
class StepMetrics:
    """Computes metrics from the batch of a finished step.

    Attributes:
        max_prompt_length: Limit of a prompt in tokens.
        max_response_length: Limit of a response in tokens.
        truncates: Prompts over the limit are cut, and the lost tokens are counted.
        rewards: The answers are scored. False = they are the dataset's own.
    """

    max_prompt_length: int
    max_response_length: int
    truncates: bool
    rewards: bool = True

    def describe(self, batch: StepBatch, kl_coefficient: float) -> dict[str, float]:
        """Return metrics of rewards, advantages, lengths and counts.

        Args:
            batch: Batch of the step.
            kl_coefficient: Coefficient of the KL in the reward of this step.
        """
        lengths = batch.rows.prompts.lengths, batch.rows.responses.lengths
        metrics = length_metrics(*lengths, self.max_prompt_length, self.max_response_length)
        if self.rewards:
            metrics |= self._rewards(batch, kl_coefficient)
        if self.truncates:
            metrics["data/tokens_dropped"] = float(batch.prompts.tokens_dropped)
            metrics["data/rows_truncated"] = float(batch.prompts.rows_truncated)
        return metrics

    def _rewards(self, batch: StepBatch, kl_coefficient: float) -> dict[str, float]:
        """Return metrics of the rollouts, rewards and advantages. A row without a score (NaN) counts in no mean."""
        advantages = batch.advantages
        assert advantages is not None
        assert batch.rows.old_log_probs is not None
        scores, rewards = (values[~values.isnan()] for values in (batch.scores, advantages.rewards))
        metrics = {BAD_LOG_PROBS: float((~batch.rows.old_log_probs.isfinite()).sum())}
        metrics |= critic_metrics(scores, rewards, advantages.per_token, advantages.returns)
        if batch.rows.old_values is not None:
            metrics |= summary_of("critic/values", batch.rows.old_values)
            metrics["critic/vf_explained_var"] = explained_variance(batch.rows.old_values, advantages.returns)
        metrics |= {f"reward/{name}": value for name, value in advantages.counts.items()}
        metrics |= reward_metrics(result.extra for result in batch.results)
        metrics["reward/failed_rows"] = float(sum(result.failed for result in batch.results))
        if batch.entropy is not None and batch.entropy.numel():
            metrics["actor/entropy"] = summary_of("entropy", batch.entropy)["entropy/mean"]
        if advantages.kl_mean is not None:
            metrics |= {"actor/reward_kl_penalty": advantages.kl_mean, "actor/reward_kl_penalty_coeff": kl_coefficient}
        cached = batch.answers.generation.cached_tokens
        metrics["rollout/prefix_cache_hit_rate"] = cached / int(batch.rows.prompts.lengths.sum())
        return metrics
