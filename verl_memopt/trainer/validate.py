"""Validation: answers every held-out prompt and scores the answers, with its own sampling settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from verl_memopt.data.dataset import PromptDataset, PromptRow
from verl_memopt.data.encoder import PromptEncoder
from verl_memopt.data.expansion import expand
from verl_memopt.observe.validation import ValidationRow, validation_metrics
from verl_memopt.rewards.rows import RewardResult
from verl_memopt.trainer.generation import Answers, Generator
from verl_memopt.trainer.rewarder import Rewarder


@dataclass(frozen=True)
class Validation:
    """The result of a validation.

    Attributes:
        metrics: Metrics under verl's names.
        score: Mean over all answers.
        answers: Answers with their rewards, call by call.
    """

    metrics: dict[str, float]
    score: float
    answers: list[tuple[Answers, list[RewardResult]]]


@dataclass(frozen=True)
class Validator:
    """Validates on the held-out rows.

    Attributes:
        rows: The validation set.
        batch_size: Prompts of one call; None for all at once.
        expansion: ``algorithm.expansion``: prompts are repeated as text or as tokens.
        encoder: Encoder of the prompts.
        generator: Answers the prompts.
        rewards: Scores the answers.
    """

    rows: PromptDataset
    batch_size: int | None
    expansion: str
    encoder: PromptEncoder
    generator: Generator
    rewards: Rewarder

    def validate(self, step: int) -> Validation:
        """Answer the whole validation set and score it."""
        prompts = [self.rows[index] for index in range(len(self.rows))]
        answered = []
        for rows in _batches(prompts, self.batch_size):
            answers = self._answer(rows, step)
            answered.append((answers, self.rewards.score(answers)))
        scored = [
            ValidationRow(str(answers.rows[index].index), answers.rows[index].data_source, result.score, result.extra)
            for answers, results in answered
            for index, result in enumerate(results)
        ]
        samples = self.generator.rollout.val_kwargs.n
        assert len(scored) == len(prompts) * samples, (len(scored), len(prompts), samples)
        return Validation(validation_metrics(scored), sum(row.score for row in scored) / len(scored), answered)

    def _answer(self, rows: list[PromptRow], step: int) -> Answers:
        prompt_ids = expand(rows, self.generator.rollout.val_kwargs.n, self.expansion, self.encoder)
        return self.generator.generate_validation(rows, prompt_ids, step)


def _batches(rows: list[PromptRow], size: int | None) -> Iterator[list[PromptRow]]:
    step = len(rows) if size is None else size
    return (rows[start : start + step] for start in range(0, len(rows), step))
