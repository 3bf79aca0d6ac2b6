"""What gives each answer its reward: a function or a reward model, followed by the manager, or a recipe's own scorer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import torch

from verl_memopt.algorithms.shaping import overlong_penalty
from verl_memopt.config.schema import RewardKwargs, RewardModel, Settings
from verl_memopt.data.batch import RolloutBatch
from verl_memopt.data.dataset import PromptRows
from verl_memopt.memory.batching.learned_budget import LearnedBudget
from verl_memopt.observe.timing import PhaseClock
from verl_memopt.rewards.rows import RewardResult, RewardRow
from verl_memopt.rewards.runner import RewardRunner
from verl_memopt.trainer.environment import Environment
from verl_memopt.trainer.generation import Answers
from verl_memopt.trainer.model_scores import ModelScores
from verl_memopt.trainer.timed_group import TimedGroup
from verl_memopt.workers.plan import RolePlan

RM_SCORE = "rm_score"
"""Name of the reward model's score among what a reward function receives, and among the entries of a row."""


@dataclass(frozen=True)
class Scored:
    """The rewards of some answers.

    Attributes:
        results: The reward of each answer.
        metrics: What the scorer measured, under whole names.
    """

    results: list[RewardResult]
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Computed:
    """What a training step has computed before its answers are scored.

    Attributes:
        rows: The answers as tensors, with the log-probs that the scorer reads.
        names: Names of the rows, for errors.
    """

    rows: RolloutBatch
    names: list[str]


class Scorer(Protocol):
    """Gives each answer its reward, once a step, when everything that it reads exists."""

    @property
    def reads(self) -> frozenset[str]:
        """What it reads beside the text: ``old_log_probs`` or ``ref_log_probs`` of the batch."""
        ...

    @property
    def learned_budget(self) -> LearnedBudget | None:
        """The token budget of its pass, where that learns from measured peaks."""
        ...

    def score_answers(self, answers: Answers, computed: Computed | None) -> Scored:
        """Return the reward of each answer.

        Args:
            answers: Prompts and answers.
            computed: What the training step has computed; None in a validation, which computes no log-probs.
        """
        ...


class PreparedRecipe(Protocol):
    """A recipe's part of one run, checked before a worker starts."""

    @property
    def role(self) -> RolePlan | None:
        """What each worker builds for the recipe; None for nothing."""
        ...

    def scorer(self, workers: TimedGroup) -> Scorer:
        """Return what scores the answers.

        Args:
            workers: Workers with the recipe's role.
        """
        ...


class RecipeHooks(Protocol):
    """What a recipe of :mod:`verl_memopt.recipes.registry` brings to training."""

    def datasets(self, settings: Settings, tokenizer: Any) -> tuple[PromptRows, PromptRows | None]:
        """Return the training rows and the held-out rows.

        Args:
            settings: Of the run.
            tokenizer: The policy's.
        """
        ...

    def prepare(self, settings: Settings, environment: Environment, datasets: Sequence[PromptRows | None]) -> PreparedRecipe:
        """Check the recipe's models and rows, and return its part of the run.

        Args:
            settings: Of the run.
            environment: Folders and tokenizer on this machine.
            datasets: The rows of each split; None where the run reads none.

        Raises:
            ConfigError, DataError: For what the user must mend.
        """
        ...


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
        clock: Times the functions of a training step; None = nothing is timed.
        reads: Nothing but the text, as :class:`Scorer` has it.
    """

    runner: RewardRunner | None
    dapo: Dapo | None = None
    model: ModelScores | None = None
    model_alone: bool = False
    clock: PhaseClock | None = None
    reads: frozenset[str] = frozenset()

    @property
    def learned_budget(self) -> LearnedBudget | None:
        """The token budget of the reward model, where it learns."""
        return None if self.model is None else self.model.budget.learned

    def score_answers(self, answers: Answers, computed: Computed | None) -> Scored:
        """Return the reward of each answer. Arguments as for :class:`Scorer`; errors as for :meth:`score`."""
        timed = None if computed is None or self.clock is None else self.clock.phase("reward")
        return Scored(self.score(answers, timed))

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
