"""Dynamic sampling: keep only groups with a training signal, and generate for more prompts until a step has enough groups."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_memopt.algorithms.estimators import check_rewards, has_signal
from verl_memopt.algorithms.kl import pf_ppo_weights
from verl_memopt.config.schema import PfPpo
from verl_memopt.data.prompts import StepPrompts
from verl_memopt.errors import RewardError, TrainingError
from verl_memopt.rewards.score import RewardResult
from verl_memopt.rollout.engine import Generation
from verl_memopt.trainer.micro_batching import SEEDS
from verl_memopt.trainer.rollouts import RowAnswers, StepBatch, join_answers

logger = logging.getLogger(__name__)

SCORES = ("score", "seq_reward", "seq_final_reward")
"""Values of ``algorithm.filter_groups.metric`` that mean the score. They all exclude a KL in the reward, which is not yet known
when groups are filtered."""


WARNED_ROUNDS = 8
"""Number of rounds after which a step logs a warning. It logs another one each time the number has doubled."""


@dataclass(frozen=True)
class Kept:
    prompts: StepPrompts
    answers: RowAnswers
    results: list[RewardResult]


@dataclass(frozen=True)
class GroupFilter:
    """Fills a step with groups whose responses differ in a metric. Source: DAPO, arXiv 2503.14476.

    Attributes:
        max_rounds: Most rounds of generation per step; 0 = no limit. A step that would need more rounds is an error.
    """

    num_prompts: int
    samples: int
    metric: str | None
    max_rounds: int

    def fill(self, scored: Callable[[int], StepBatch], step: int) -> tuple[Kept, dict[str, float]]:
        """Return the first ``num_prompts`` groups with a training signal, and metrics of the filter.

        ``scored``: called with the number of earlier rounds, returns the scored answers of the next round.

        Raises:
            TrainingError: The limit of rounds is reached before the step has enough groups.
            RewardError: A score is infinite, or a result does not have the metric.
        """
        rounds: list[Kept] = []
        num_kept = num_generated = 0
        while num_kept < self.num_prompts:
            if len(rounds) == self.max_rounds > 0:
                raise TrainingError(
                    f"algorithm.filter_groups.max_num_gen_batches={self.max_rounds}: in step {step} only {num_kept} of "
                    f"{num_generated} groups had rewards that differ, but data.train_batch_size needs {self.num_prompts}. "
                    "Raise the limit or data.gen_batch_size, set 0 for no limit, or use prompts that are neither too easy nor "
                    "too hard."
                )
            if len(rounds) >= WARNED_ROUNDS and len(rounds).bit_count() == 1:
                logger.warning(
                    "algorithm.filter_groups: step %d has %d of %d groups after %d rounds of generation: in %d of %d groups all "
                    "rewards are equal. Use prompts that are neither too easy nor too hard, or limit the rounds with "
                    "algorithm.filter_groups.max_num_gen_batches.",
                    step, num_kept, self.num_prompts, len(rounds), num_generated - num_kept, num_generated,
                )  # fmt: skip
            batch = scored(len(rounds))
            values, valid = self.values(batch), check_rewards(batch.scores, batch.names)
            keeps = has_signal(values, batch.rows.group, valid & ~values.isnan())
            chosen = keeps[:: self.samples].nonzero().flatten().tolist()
            num_generated += len(batch.prompts.prompts)
            rounds.append(select(batch, chosen[: self.num_prompts - num_kept], self.samples))
            num_kept += len(chosen)
        metrics = {
            "train/num_gen_batches": float(len(rounds)),
            "reward/filtered_groups_share": 1 - num_kept / num_generated,
        }
        return joined(rounds), metrics

    def values(self, batch: StepBatch) -> Tensor:
        """Return the metric of each row, fp32 [B]. NaN = the row's reward function failed.

        Raises:
            RewardError: A result does not have the metric.
        """
        if self.metric is None or self.metric in SCORES:
            return batch.scores
        values = [self._value(result, name) for result, name in zip(batch.results, batch.names, strict=True)]
        return torch.tensor(values, dtype=torch.float32)

    def _value(self, result: RewardResult, name: str) -> float:
        if result.failed:
            return math.nan
        value = result.extra.get(str(self.metric))
        if not isinstance(value, int | float):
            raise RewardError(
                f"algorithm.filter_groups.metric={self.metric}: the reward of {name} has no number of this name. Return it from "
                "the reward function, or set score."
            )
        return float(value)


def select(batch: StepBatch, prompts: Sequence[int], samples: int) -> Kept:
    rows = [prompt * samples + sample for prompt in prompts for sample in range(samples)]
    answers, generation = batch.answers, batch.answers.generation
    prompt_ids = [answers.prompt_ids[row] for row in rows]
    # Cached tokens are counted per round. The kept rows get a part in proportion to their prompt tokens.
    share = sum(map(len, prompt_ids)) / max(sum(map(len, answers.prompt_ids)), 1)
    kept = Generation(
        response_ids=[generation.response_ids[row] for row in rows],
        log_probs=None if generation.log_probs is None else [generation.log_probs[row] for row in rows],
        finish_reasons=[generation.finish_reasons[row] for row in rows],
        cached_tokens=round(generation.cached_tokens * share),
        routes=None if generation.routes is None else [generation.routes[row] for row in rows],
    )
    chosen = [batch.prompts.prompts[index] for index in prompts]
    return Kept(
        StepPrompts(chosen, prompt_ids, batch.prompts.rows_truncated, batch.prompts.tokens_dropped),
        RowAnswers(
            [answers.rows[row] for row in rows],
            prompt_ids,
            kept,
            [answers.texts[row] for row in rows],
            conversations=None if answers.conversations is None else [answers.conversations[row] for row in rows],
            metrics=answers.metrics,
        ),
        [batch.results[row] for row in rows],
    )


def joined(rounds: Sequence[Kept]) -> Kept:
    prompts, answers = [kept.prompts for kept in rounds], join_answers([kept.answers for kept in rounds])
    every = StepPrompts(
        [row for part in prompts for row in part.prompts],
        answers.prompt_ids,
        sum(part.rows_truncated for part in prompts),
        sum(part.tokens_dropped for part in prompts),
    )
    return Kept(every, answers, [result for kept in rounds for result in kept.results])


# PF-PPO: the rows of the update are drawn from the batch with replacement. A weight per row depends on its score.


def draw_rows(batch: StepBatch, settings: PfPpo, seed: int) -> None:
    batch.drawn = drawn_rows(batch.scores, settings, seed)
    batch.metrics["pf_ppo/drawn_rows_share"] = len(set(batch.drawn)) / len(batch.drawn)


def drawn_rows(scores: Tensor, settings: PfPpo, seed: int) -> list[int]:
    """Draw the rows of a batch by their weight, with replacement. A row may be drawn several times or never.

    Rows without a score are never drawn. If no row has a score, each row is taken once.

    ``scores``: fp32 [B] from the reward function; NaN = no score. ``seed``: seed of the draw. The driver draws, so that the
    result does not depend on ranks.
    """
    valid = ~scores.isnan()
    if not valid.any():
        return list(range(scores.shape[0]))
    weights = pf_ppo_weights(scores, valid, settings.reweight_method, settings.weight_pow)
    generator = torch.Generator().manual_seed(seed % SEEDS)
    return torch.multinomial(weights, weights.shape[0], replacement=True, generator=generator).tolist()
