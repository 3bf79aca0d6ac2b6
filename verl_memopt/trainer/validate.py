"""Validation: answer every held-out prompt with the sampling settings of the validation, and score the answers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from verl_memopt.config.schema import Actor
from verl_memopt.data.dataset import VALIDATION_SET, PromptRows
from verl_memopt.data.encoder import PromptEncoder
from verl_memopt.data.prompts import expand
from verl_memopt.observe.metrics import VAL_LOSS, ValidationRow, validation_metrics
from verl_memopt.rewards.score import RewardResult
from verl_memopt.trainer.rollouts import Generator, LogProbPass, RowAnswers, dataset_answers, join_answers, to_batch
from verl_memopt.trainer.scoring import Scorer


@dataclass(frozen=True)
class Validation:
    """The result of a validation.

    Attributes:
        answers: The answers and their rewards, one pair for each call of the engine.
    """

    metrics: dict[str, float]
    answers: list[tuple[RowAnswers, list[RewardResult]]]


@dataclass(frozen=True)
class Validator:
    rows: PromptRows
    batch_size: int | None
    expansion: str
    encoder: PromptEncoder
    generator: Generator
    scorer: Scorer

    def validate(self, step: int) -> Validation:
        # Means leave out rows without a score (NaN).
        samples, scorer = self.generator.rollout.val_kwargs.n, self.scorer
        calls = (
            self.generator.generate_validation(expanded.prompts, expanded.prompt_ids, step)
            for indices in _batches(len(self.rows), self.batch_size)
            for expanded in [expand(self.rows, indices, samples, self.expansion, self.encoder)]
        )
        if scorer.reads:
            answered = self._scored_at_the_end(list(calls))
        else:
            answered = [(answers, scorer.score_answers(answers, None)[0]) for answers in calls]
        rows = [
            ValidationRow(str(row.index), str(row.extra_info.get(VALIDATION_SET, row.data_source)), result.score, result.extra)
            for answers, results in answered
            for row, result in zip(answers.rows, results, strict=True)
        ]
        assert len(rows) == len(self.rows) * samples, (len(rows), len(self.rows), samples)
        return Validation(validation_metrics([row for row in rows if not math.isnan(row.score)]), answered)

    def _scored_at_the_end(self, answers: list[RowAnswers]) -> list[tuple[RowAnswers, list[RewardResult]]]:
        # Score all answers together, so that each model of the scorer comes to the device only once. The engine sleeps meanwhile,
        # and then gets the policy's weights again.
        self.generator.release_engine()
        results = iter(self.scorer.score_answers(join_answers(answers), None)[0])
        self.generator.restore_engine()
        return [(call, list(islice(results, len(call.rows)))) for call in answers]


@dataclass(frozen=True)
class LossValidator:
    rows: PromptRows
    batch_size: int | None
    encoder: PromptEncoder
    log_probs: LogProbPass
    actor: Actor

    def validate(self, step: int) -> Validation:
        """Return the mean negative log-prob over all tokens of all responses. The score of a row is its mean log-prob."""
        total, tokens, answered = 0.0, 0, []
        for indices in _batches(len(self.rows), self.batch_size):
            expanded = expand(self.rows, indices, 1, "token", self.encoder)
            answers = dataset_answers(expanded.prompts, expanded.prompt_ids, self.encoder.tokenizer)
            batch = to_batch(answers, 1, self.actor)
            sizes, names = batch.responses.sizes(), [row.address for row in answers.rows]
            row_log_probs = self.log_probs.compute(batch, names).log_probs.double().split(sizes)
            total, tokens = total - sum(float(row.sum()) for row in row_log_probs), tokens + sum(sizes)
            answered.append((answers, [RewardResult(float(row.mean())) for row in row_log_probs]))
        return Validation({VAL_LOSS: total / tokens}, answered)


def _batches(num_rows: int, size: int | None) -> Iterator[Sequence[int]]:
    rows, step = range(num_rows), num_rows if size is None else size
    return (rows[start : start + step] for start in range(0, num_rows, step))
