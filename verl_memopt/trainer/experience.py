"""The batch of a step: answers, scores, log-probs and advantages, each added by one phase."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from verl_memopt.algorithms.estimators import AdvantageInputs, check_rewards, estimate, group_counts
from verl_memopt.algorithms.kl import KlController, kl_estimate, shaped_rewards, token_level_rewards
from verl_memopt.config.schema import Actor, Algorithm
from verl_memopt.data.batch import RolloutBatch, rollout_batch
from verl_memopt.data.prefetcher import StepPrompts
from verl_memopt.data.ragged import Ragged, token_index
from verl_memopt.data.shared_rows import prompt_rows
from verl_memopt.rewards.rows import RewardResult
from verl_memopt.trainer.generation import Answers
from verl_memopt.trainer.passes import Budget, cut_ranks, rows_per_rank
from verl_memopt.trainer.timed_group import TimedGroup
from verl_memopt.workers.log_probs import LogProbs, in_batch_order

Result = TypeVar("Result")


@dataclass(frozen=True)
class Advantages:
    """The advantages of a batch of B rows with R response tokens.

    Attributes:
        per_token: fp32 [R].
        returns: fp32 [R], the rewards from each token on; equal to ``per_token`` where an estimator scores whole responses.
        rewards: fp32 [B], with the KL subtracted where the settings say so.
        kl_mean: Mean of that KL; None without it.
        counts: Rows and groups from which nothing is learned, by reason.
    """

    per_token: Tensor
    returns: Tensor
    rewards: Tensor
    kl_mean: float | None
    counts: dict[str, float]


@dataclass
class StepBatch:
    """The rollouts of one step, with what each phase adds to them.

    Attributes:
        step: Number of the step, from 1.
        prompts: Prompts of the step.
        answers: Prompts and responses as text and as lists of ids.
        rows: The same as ragged tensors; log-probs and advantages are added to them.
        results: Reward of each row.
        entropy: fp32 [R]; None where the log-prob pass does not compute it.
        advantages: None before the phase that computes them.
        metrics: Metrics of the phases so far.
        baselines: fp32 [B], the score of the greedy response to each row's prompt; None without ReMax.
        sum_pi_squared: fp32 [R], the sum of squared probabilities at each token; None where no estimator reads it.
        drawn: The rows of the update, where PF-PPO draws them; None = all rows, once each.
    """

    step: int
    prompts: StepPrompts
    answers: Answers
    rows: RolloutBatch
    results: list[RewardResult] = field(default_factory=list)
    entropy: Tensor | None = None
    advantages: Advantages | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    baselines: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    drawn: list[int] | None = None

    def for_update(self) -> tuple[RolloutBatch, list[str]]:
        """Return the rows that the update learns from, and their names for errors."""
        names = self.names
        if self.drawn is None:
            return self.rows, names
        rows = self.rows.select(self.drawn)
        if len(set(self.rows.prompt_groups())) == self.rows.num_rows:  # each row computes its own prompt
            rows.prompt_group = None
        return rows, [names[row] for row in self.drawn]

    def keep_log_probs(self, log_probs: Tensor) -> None:
        """Take over log-probs that the update computed, fp32 [tokens of its rows]. Rows that it did not read keep theirs."""
        if self.drawn is None:
            self.rows.old_log_probs = log_probs
        elif self.rows.old_log_probs is not None:
            kept = self.rows.old_log_probs.clone()
            kept[token_index(self.rows.responses.sizes(), self.drawn)] = log_probs
            self.rows.old_log_probs = kept

    @property
    def names(self) -> list[str]:
        """Return the name of each row for errors."""
        return [f"{row.address} (sample of step {self.step})" for row in self.answers.rows]

    @property
    def scores(self) -> Tensor:  # [B]
        """Return the rewards as the reward function returned them, fp32 [B]; NaN where nothing is scored."""
        scores = [result.score for result in self.results] or [math.nan] * self.rows.num_rows
        return torch.tensor(scores, dtype=torch.float32)


@dataclass(frozen=True)
class LogProbPass:
    """A forward pass over a whole batch that computes its log-probs, spread over the ranks.

    Attributes:
        workers: Workers that hold the model.
        phase: Name under which time and memory are recorded.
        method: Method of the worker.
        budget: How a rank's rows are cut into micro-batches.
        balance: Even out tokens over the ranks.
        options: Further arguments of the method.
    """

    workers: TimedGroup
    phase: str
    method: Callable[..., LogProbs]
    budget: Budget
    balance: bool
    options: tuple[bool, ...] = ()

    def compute(self, batch: RolloutBatch, names: Sequence[str]) -> LogProbs:
        """Return log-probs and further statistics of all tokens, fp32 [R] each, in batch order.

        Args:
            batch: Batch of the step.
            names: Names of the rows, for errors.
        """
        parts = run_pass(self.workers, self.phase, self.method, self.budget, self.balance, self.options, batch, names)
        return in_batch_order(parts, batch.responses.sizes())


def run_pass(
    workers: TimedGroup,
    phase: str,
    method: Callable[..., Result],
    budget: Budget,
    balance: bool,
    options: tuple[Any, ...],
    batch: RolloutBatch,
    names: Sequence[str],
) -> list[tuple[list[int], Result]]:
    """Run a forward pass over a whole batch, spread over the ranks, and return each rank's rows with its result.

    Args:
        workers: Workers that hold the model.
        phase: Name under which time and memory are recorded.
        method: Method of the worker. It gets a rank's rows and its micro-batches.
        budget: How a rank's rows are cut into micro-batches.
        balance: Even out tokens over the ranks.
        options: Further arguments of the method.
        batch: Batch of the step.
        names: Names of the rows, for errors.
    """
    tokens = batch.row_tokens()
    shares = rows_per_rank(tokens, range(batch.num_rows), workers.world_size, balance)
    of_ranks = [tokens.select(share) for share in shares]
    bins = cut_ranks(of_ranks, [[names[r] for r in share] for share in shares], budget)
    arguments = [(batch.select(share), cut, *options) for share, cut in zip(shares, bins, strict=True)]
    results = workers.each(phase, method, arguments)
    budget.learn(zip(of_ranks, bins, strict=True), workers.figures)
    return list(zip(shares, results, strict=True))


def to_batch(answers: Answers, samples: int, actor: Actor) -> RolloutBatch:
    """Return the ragged batch of the answers.

    Args:
        answers: The rollouts of a step: all answers to a prompt, then those to the next.
        samples: Answers to each prompt.
        actor: The ``actor`` section of the settings. It says how the passes compute prompts.
    """
    generation = answers.generation
    log_probs = generation.log_probs
    assert len(answers.prompt_ids) % samples == 0, f"{len(answers.prompt_ids)} rows are no groups of {samples}"
    return rollout_batch(
        prompts=prompt_rows(answers.prompt_ids),
        responses=Ragged.from_rows(generation.response_ids, torch.int64),
        group=torch.arange(len(answers.prompt_ids)) // samples,
        actor=actor,
        rollout_log_probs=None if log_probs is None else Ragged.from_rows(log_probs, torch.float32).flat,
    )


def compute_advantages(
    batch: RolloutBatch,
    scores: Tensor,
    addresses: Sequence[str],
    algorithm: Algorithm,
    controller: KlController,
    baselines: Tensor | None = None,
    sum_pi_squared: Tensor | None = None,
) -> Advantages:
    """Return the advantages of a batch.

    An estimator that reads rewards per token finds the KL at each token, and the score at the last one.

    Args:
        batch: The batch, with old and reference log-probs if the KL is part of the reward.
        scores: fp32 [B].
        addresses: Names of the rows, for errors.
        algorithm: Estimator of the advantages, and the KL in the reward.
        controller: Coefficient of that KL.
        baselines: As in :class:`StepBatch`.
        sum_pi_squared: As in :class:`StepBatch`.

    Raises:
        RewardError: A score is infinite.
    """
    valid = check_rewards(scores, addresses)
    row, lengths, beta = batch.response_row(), batch.responses.lengths, controller.coefficient
    rewards, kl, kl_mean = scores, None, None
    if algorithm.use_kl_in_reward:
        assert batch.old_log_probs is not None, "the KL in the reward needs old log-probs"
        assert batch.ref_log_probs is not None, "the KL in the reward needs the reference's log-probs"
        kl = kl_estimate(batch.old_log_probs, batch.ref_log_probs, algorithm.kl_penalty)
        rewards = shaped_rewards(scores, kl, row, beta)
        kl_mean = float(kl.mean()) if kl.numel() else 0.0
    inputs = AdvantageInputs(
        rewards=rewards,
        group=batch.group,
        valid=valid,
        row=row,
        lengths=lengths,
        token_rewards=token_level_rewards(scores, row, lengths, kl, beta),
        values=batch.old_values,
        baselines=baselines,
        old_log_probs=batch.old_log_probs,
        ref_log_probs=batch.ref_log_probs,
        rollout_log_probs=batch.rollout_log_probs,
        sum_pi_squared=sum_pi_squared,
        weights=batch.weights,
    )
    estimated = estimate(inputs, algorithm)
    return Advantages(estimated.per_token, estimated.returns, rewards, kl_mean, group_counts(rewards, batch.group, valid))
