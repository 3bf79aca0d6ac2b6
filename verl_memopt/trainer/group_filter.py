"""Dynamic sampling: keeps the groups with a training signal, and asks for more prompts until a step is full of them."""

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
"""Values of ``algorithm.filter_groups.metric`` that mean the score. A KL in the reward is not known when groups are filtered."""


WARNED_ROUNDS = 8
"""Rounds of a step after which a warning says how full it is; then each time that they have doubled."""


@dataclass(frozen=True)
class Kept:
    prompts: StepPrompts
    answers: RowAnswers
    results: list[RewardResult]


@dataclass(frozen=True)
class GroupFilter:
    """Fills a step with groups whose responses differ in a metric. Source: DAPO, arXiv 2503.14476.

    Attributes:
        max_rounds: Rounds of generation after which a step that is not full is an error; 0 = no limit.
    """

    num_prompts: int
    samples: int
    metric: str | None
    max_rounds: int

    def fill(self, scored: Callable[[int], StepBatch], step: int) -> tuple[Kept, dict[str, float]]:
        """Return the first ``num_prompts`` groups with a signal, and how many rounds they took.

        ``scored``: returns the scored answers of one round, given the number of rounds before it.

        Raises:
            TrainingError: The limit of rounds is reached before the step is full.
            RewardError: A score is infinite, or a result does not have the metric.
        """
        rounds: list[Kept] = []
        num_kept = num_generated = 0
        while num_kept < self.num_prompts:
            if len(rounds) == self.max_rounds > 0:
                raise TrainingError(
                    f"algorithm.filter_groups.max_num_gen_batches={self.max_rounds}: in step {step} only {num_kept} of "
                    f"{num_generated} groups had responses that differ, and data.train_batch_size asks for {self.num_prompts}. "
                    "Raise the limit or data.gen_batch_size, set 0 for no limit, or use prompts that are neither too easy nor "
                    "too hard."
                )
            if len(rounds) >= WARNED_ROUNDS and len(rounds).bit_count() == 1:
                logger.warning(
                    "algorithm.filter_groups: step %d has %d of %d groups after %d rounds of generation: the rewards of %d of %d "
                    "groups did not differ. algorithm.filter_groups.max_num_gen_batches ends a step with too many; prompts "
                    "that are neither too easy nor too hard need fewer.",
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
        """Return the metric of each row, fp32 [B]; NaN for a row whose reward function failed.

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
    # What the prefix cache saved is counted per round, so it is shared out by prompt tokens.
    share = sum(map(len, prompt_ids)) / max(sum(map(len, answers.prompt_ids)), 1)
    kept = Generation(
        response_ids=[generation.response_ids[row] for row in rows],
        log_probs=None if generation.log_probs is None else [generation.log_probs[row] for row in rows],
        finish_reasons=[generation.finish_reasons[row] for row in rows],
        cached_tokens=round(generation.cached_tokens * share),
    )
    chosen = [batch.prompts.prompts[index] for index in prompts]
    return Kept(
        StepPrompts(chosen, prompt_ids, batch.prompts.rows_truncated, batch.prompts.tokens_dropped),
        RowAnswers([answers.rows[row] for row in rows], prompt_ids, kept, [answers.texts[row] for row in rows]),
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


# PF-PPO: the rows of the update are drawn from the batch by their score, with replacement.


def draw_rows(batch: StepBatch, settings: PfPpo, seed: int) -> None:
    batch.drawn = drawn_rows(batch.scores, settings, seed)
    batch.metrics["pf_ppo/drawn_rows_share"] = len(set(batch.drawn)) / len(batch.drawn)


def drawn_rows(scores: Tensor, settings: PfPpo, seed: int) -> list[int]:
    """Draw the rows of a batch by their weight, with replacement. A row may be drawn several times or never.

    Rows without a score are not drawn. Without any score the rows stay as they are.

    ``scores``: fp32 [B], as the reward function returned them; NaN if there is none. ``seed``: of the draw, which is made on the
    driver, so that it does not depend on ranks.
    """
    valid = ~scores.isnan()
    if not valid.any():
        return list(range(scores.shape[0]))
    weights = pf_ppo_weights(scores, valid, settings.reweight_method, settings.weight_pow)
    generator = torch.Generator().manual_seed(seed % SEEDS)
    return torch.multinomial(weights, weights.shape[0], replacement=True, generator=generator).tolist()
