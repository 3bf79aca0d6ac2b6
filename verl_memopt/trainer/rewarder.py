"""The reward of each answer: what a function or a reward model gives, then what the manager does to it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Self

import torch

from verl_memopt.algorithms.shaping import overlong_penalty
from verl_memopt.config.schema import RewardKwargs, RewardModel
from verl_memopt.rewards.rows import RewardResult, RewardRow
from verl_memopt.rewards.runner import RewardRunner
from verl_memopt.trainer.generation import Answers
from verl_memopt.trainer.model_scores import ModelScores

RM_SCORE = "rm_score"
"""Name of the reward model's score among what a reward function receives, and among the entries of a row."""


@dataclass(frozen=True)
class Dapo:
    """The manager ``dapo``: reports each score as ``acc``, and subtracts the penalty for long responses.

    Attributes:
        settings: ``reward_model.reward_kwargs``.
    """

    settings: RewardKwargs

    @classmethod
    def of(cls, reward_model: RewardModel) -> Self | None:
        """Return the manager; None where another one is set."""
        return cls(reward_model.reward_kwargs) if reward_model.reward_manager == "dapo" else None

    def shaped(self, results: Sequence[RewardResult], lengths: Sequence[int]) -> list[RewardResult]:
        """Return the results with penalties. A row that failed keeps its fallback score.

        A function that returns a plain number gives no ``acc`` of its own; then the score before the penalty is one, as in verl.

        Args:
            results: Result of each row.
            lengths: Response tokens of each row.
        """
        buffer, longest = self.settings.overlong_buffer_cfg, self.settings.max_resp_len
        penalties = [0.0] * len(results)
        if buffer.enable and results:
            assert longest is not None, "it follows data.max_response_length"
            tokens = torch.tensor(lengths, dtype=torch.int64)
            penalties = overlong_penalty(tokens, longest, buffer.len, buffer.penalty_factor).tolist()
        shaped = []
        for result, penalty in zip(results, penalties, strict=True):
            if result.failed:
                shaped.append(result)
                continue
            extra = result.extra or {"acc": result.score}
            if buffer.enable and buffer.log:
                extra = {**extra, "overlong_reward": penalty, "overlong": penalty < 0}
            shaped.append(replace(result, score=result.score + penalty, extra=extra))
        return shaped


@dataclass(frozen=True)
class Rewarder:
    """Scores answers, in training and in validation alike.

    Attributes:
        runner: The reward processes; None where nothing is scored.
        dapo: What the manager ``dapo`` adds; None with another manager.
        model: The reward model; None where the settings have none.
        model_alone: The model's score is the reward. False = the reward function reads it and returns the reward.
    """

    runner: RewardRunner | None
    dapo: Dapo | None = None
    model: ModelScores | None = None
    model_alone: bool = False

    def score(self, answers: Answers, timed: AbstractContextManager[None] | None = None) -> list[RewardResult]:
        """Return the reward of each answer.

        Args:
            answers: Prompts and answers.
            timed: Entered while functions score. The workers time the reward model themselves.

        Raises:
            RewardError: The reward function failed on a row, or the model gave no finite score.
            Stopped: A stop was requested.
        """
        model_scores = None if self.model is None else self.model.score(answers)
        with timed or nullcontext():
            if model_scores is not None and self.model_alone:
                results = [RewardResult(score) for score in model_scores]
            else:
                results = self._by_function(answers, model_scores)
            if self.dapo is None:
                return results
            return self.dapo.shaped(results, [len(ids) for ids in answers.generation.response_ids])

    def _by_function(self, answers: Answers, model_scores: list[float] | None) -> list[RewardResult]:
        infos = [row.extra_info for row in answers.rows]
        if model_scores is not None:
            infos = [{**info, RM_SCORE: score} for info, score in zip(infos, model_scores, strict=True)]
        rows = [
            RewardRow(row.data_source, text, row.ground_truth, info, row.address)
            for row, text, info in zip(answers.rows, answers.texts, infos, strict=True)
        ]
        assert self.runner is not None, "this debug mode scores nothing"
        results = self.runner.score(rows)
        if model_scores is None:
            return results
        return [
            replace(result, extra={RM_SCORE: score, **result.extra}) for result, score in zip(results, model_scores, strict=True)
        ]
