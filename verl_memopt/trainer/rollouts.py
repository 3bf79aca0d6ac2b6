"""The rollouts of a step: responses from the engines, and the forward passes that compute their log-probs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from verl_memopt.agents.loop import TOKENS, Conversation, Task, loop_metrics
from verl_memopt.algorithms.estimators import AdvantageInputs, check_rewards, estimate, group_counts, has_high_entropy
from verl_memopt.algorithms.kl import KlController, kl_estimate, shaped_rewards, token_level_rewards
from verl_memopt.algorithms.records import ESTIMATORS
from verl_memopt.algorithms.rows import reverse_scan, row_means
from verl_memopt.config.schema import Actor, Algorithm, Distill, Rollout
from verl_memopt.data.batch import Ragged, RolloutBatch, prompt_rows, rollout_batch, shares_prompts, token_index
from verl_memopt.data.dataset import PromptRow
from verl_memopt.data.prompts import StepPrompts
from verl_memopt.errors import RewardError, Stopped
from verl_memopt.model.forest import build_forest
from verl_memopt.rewards.runner import Round
from verl_memopt.rewards.score import RewardResult
from verl_memopt.rollout.engine import Generation, SamplingSettings, row_seed, train_sampling, validation_sampling
from verl_memopt.trainer.micro_batching import Budget, cut_ranks, rows_per_rank, uneven_shares
from verl_memopt.worker.group import Pending, TimedGroup
from verl_memopt.worker.policy import LogProbs, in_batch_order
from verl_memopt.worker.worker import Worker

if TYPE_CHECKING:
    from verl_memopt.trainer.scoring import ScoringFollower


@dataclass(frozen=True)
class RowAnswers:
    """Prompts and their responses; row = prompt * n + sample.

    Attributes:
        rows: Dataset row of each response.
        prompt_ids: Token ids of each row's prompt. Rows of one prompt may share a list object, so do not change a list.
        generation: Token ids and log-probs of the responses.
        texts: Responses, decoded without special tokens.
        begun: The scoring round in which some answers already have their scores; None = no answer is scored yet.
        model_scores: The scores that a reward model on its own devices is computing; None = it has not begun.
        conversations: The conversation of each row; None = each row is a single turn.
        metrics: Metrics of the rollout.
    """

    rows: list[PromptRow]
    prompt_ids: list[list[int]]
    generation: Generation
    texts: list[str]
    begun: Round | None = None
    model_scores: Pending[list[float]] | None = None
    conversations: list[Conversation] | None = None
    metrics: dict[str, float] = field(default_factory=dict)


def join_answers(parts: Sequence[RowAnswers]) -> RowAnswers:
    generations = [part.generation for part in parts]
    return RowAnswers(
        rows=[row for part in parts for row in part.rows],
        prompt_ids=[ids for part in parts for ids in part.prompt_ids],
        generation=_join_generations(generations, all(generation.log_probs is not None for generation in generations)),
        texts=[text for part in parts for text in part.texts],
        conversations=_joined([part.conversations for part in parts]),
        metrics=parts[-1].metrics,
    )


def _joined(parts: Sequence[list[Conversation] | None]) -> list[Conversation] | None:
    return None if None in parts else [conversation for part in parts for conversation in part or ()]


def _join_generations(parts: Sequence[Generation], with_log_probs: bool) -> Generation:
    return Generation(
        response_ids=[ids for part in parts for ids in part.response_ids],
        log_probs=[row for part in parts for row in part.log_probs or ()] if with_log_probs else None,
        finish_reasons=[reason for part in parts for reason in part.finish_reasons],
        cached_tokens=sum(part.cached_tokens for part in parts),
        routes=None if any(part.routes is None for part in parts) else [row for part in parts for row in part.routes or ()],
    )


@dataclass(frozen=True)
class Generator:
    """Generates responses under the settings of ``rollout``.

    Attributes:
        rollout: Number of samples per prompt, sampling settings, and a concrete seed.
        frees_engine: There is an engine, and it releases its memory after each rollout.
        has_engine: The workers have an engine. False = the responses come from elsewhere.
        follower: Scores answers while others are generated; None = all answers are scored after the rollout.
        with_routes: The engine returns the experts of each token of a training response (router replay).
    """

    rollout: Rollout
    tokenizer: Any
    workers: TimedGroup
    frees_engine: bool
    has_engine: bool = True
    follower: ScoringFollower | None = None
    with_routes: bool = False

    def generate(self, prompts: StepPrompts, step: int, earlier_rounds: int = 0, stays_awake: bool = False) -> RowAnswers:
        """Return ``rollout.n`` answers to each prompt of a training step. The engine releases its memory afterwards.

        ``earlier_rounds``: number of earlier calls in the same step. It changes the seeds of a prompt that comes again.
        ``stays_awake``: the engine keeps its memory, because another round may follow.

        Raises:
            Stopped: A stop was requested, and the rollout was abandoned.
        """
        # A later round must not repeat the samples of an earlier round, so the sample numbers continue.
        first, sampling = earlier_rounds * self.rollout.n, replace(train_sampling(self.rollout), routes=self.with_routes)
        try:
            answers = self._answers("gen", prompts.prompts, self.rollout.n, prompts.prompt_ids, sampling, step, first)
        except Stopped:
            self.release_engine()
            raise
        if not stays_awake:
            self.release_engine()
        return answers

    def generate_validation(self, rows: Sequence[PromptRow], prompt_ids: list[list[int]], step: int) -> RowAnswers:
        sampling = validation_sampling(self.rollout)
        return self._answers("testing", rows, self.rollout.val_kwargs.n, prompt_ids, sampling, step, may_stop=False)

    def generate_greedy(self, prompts: StepPrompts, step: int) -> RowAnswers:
        """Return one greedy answer to each prompt of a training step. The engine releases its memory afterwards.

        Raises:
            Stopped: A stop was requested, and the rollout was abandoned.
        """
        sampling = replace(train_sampling(self.rollout), do_sample=False, log_probs=False)
        try:
            return self._answers("gen", prompts.prompts, 1, prompts.prompt_ids[:: self.rollout.n], sampling, step)
        finally:
            self.release_engine()

    def wake_and_release(self) -> None:
        # The engine takes all of its memory, as for a rollout.
        self.workers.all("gen", Worker.wake_engine)
        self.release_engine()

    def release_engine(self) -> None:
        if self.frees_engine:
            self.workers.all("gen", Worker.release_engine)

    def restore_engine(self) -> None:
        # An engine that released its memory has lost the policy's weights.
        if self.frees_engine:
            self.workers.all("update_weights", Worker.update_weights)

    def _answers(
        self,
        phase: str,
        rows: Sequence[PromptRow],
        samples: int,
        prompt_ids: list[list[int]],
        sampling: SamplingSettings,
        step: int,
        first_sample: int = 0,
        may_stop: bool = True,
    ) -> RowAnswers:
        assert self.rollout.seed is not None
        if self.rollout.converses:
            return self._conversations(phase, rows, samples, sampling, step, first_sample, may_stop)
        seeds = sampling_seeds(rows, samples, self.rollout.seed, step, first_sample)
        answered_rows, ranks = [row for row in rows for _ in range(samples)], self.rollout.tensor_model_parallel_size
        # Rounded bounds: the shares of the engines differ by at most one prompt, and no prompt is lost.
        engines = self.workers.world_size // ranks
        bounds = [len(prompt_ids) * index // engines for index in range(engines + 1)]
        follow: AbstractContextManager[tuple[list[str], Round | None]] = nullcontext(([], None))
        if self.follower is not None:
            follow = self.follower.following(answered_rows, bounds[:-1])
        with follow as (files, begun):
            # All ranks of one engine get the same prompts, but only the first of them writes finished answers to the file.
            arguments = [
                (prompt_ids[first:last], seeds[first:last], sampling, may_stop, *(files[engine : engine + (rank == 0)]))
                for engine, (first, last) in enumerate(itertools.pairwise(bounds))
                for rank in range(ranks)
            ]
            # All ranks of one engine return the same answers, so keep those of the first rank.
            answered = self.workers.each(phase, Worker.generate, arguments)[::ranks]
            parts = [generation for generation in answered if generation is not None]
            if len(parts) < len(answered):
                raise Stopped
        generation = _join_generations(parts, sampling.log_probs)
        texts = self.tokenizer.batch_decode(generation.response_ids, skip_special_tokens=True)
        return RowAnswers(answered_rows, prompt_ids, generation, texts, begun)

    def _conversations(
        self,
        phase: str,
        rows: Sequence[PromptRow],
        samples: int,
        sampling: SamplingSettings,
        step: int,
        first_sample: int,
        may_stop: bool,
    ) -> RowAnswers:
        assert self.rollout.seed is not None
        seeds = sampling_seeds(rows, samples, self.rollout.seed, step, first_sample)
        answered, ranks = [row for row in rows for _ in range(samples)], self.rollout.tensor_model_parallel_size
        tasks = [task_of(row, seed) for row, seed in zip(answered, seeds, strict=True)]
        engines = self.workers.world_size // ranks
        bounds = [len(tasks) * index // engines for index in range(engines + 1)]
        shares = [tasks[first:last] for first, last in itertools.pairwise(bounds) for _ in range(ranks)]
        found = self.workers.each(phase, Worker.converse, [(share, sampling, may_stop) for share in shares])[::ranks]
        parts = [part for part in found if part is not None]
        if len(parts) < len(found):
            raise Stopped
        conversations = [conversation for part, _ in parts for conversation in part]
        return conversation_answers(answered, conversations, sampling.log_probs, loop_metrics([times for _, times in parts]))


def task_of(row: PromptRow, seed: int) -> Task:
    assert row.messages is not None, "the dataset refuses rows without messages"
    return Task(row.messages, row.template, row.environment, {**row.extra_info, "prompt": row.messages}, seed, row.address)


def conversation_answers(
    rows: list[PromptRow], conversations: list[Conversation], log_probs: bool, metrics: dict[str, float]
) -> RowAnswers:
    """Return conversations as answers: the response of a row is the sampled tokens of all its turns, one turn after another."""
    outputs = [[token for turn in each.turns for token in turn.output_ids] for each in conversations]
    generation = Generation(
        response_ids=outputs,
        log_probs=[[value for turn in each.turns for value in turn.log_probs or ()] for each in conversations]
        if log_probs
        else None,
        finish_reasons=["length" if each.ended == TOKENS else "stop" for each in conversations],
        cached_tokens=sum(each.cached_tokens for each in conversations),
    )
    prompts = [each.turns[0].prompt_ids if each.turns else [] for each in conversations]
    return RowAnswers(
        rows, prompts, generation, [each.text for each in conversations], conversations=conversations, metrics=metrics
    )


def dataset_answers(rows: Sequence[PromptRow], prompt_ids: list[list[int]], tokenizer: Any) -> RowAnswers:
    # The answer to each prompt is the response in the dataset.
    responses = [list(row.response) for row in rows]
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    return RowAnswers(list(rows), prompt_ids, Generation(responses, None, ["stop"] * len(rows)), texts)


def sampling_seeds(rows: Sequence[PromptRow], samples: int, seed: int, step: int, first_sample: int = 0) -> list[int]:
    """Return one seed per sample of each row. A seed depends only on the run's seed, the step, the prompt and the sample.

    ``first_sample``: number of a prompt's first sample; above 0 if an earlier round of the step may have answered the prompt.
    """
    numbers = range(first_sample, first_sample + samples)
    return [row_seed(seed, step, row.index, sample) for row in rows for sample in numbers]


# The batch of a step: answers, scores, log-probs and advantages, each added by one phase.


Result = TypeVar("Result")

TURN_REWARDS = "turn_rewards"
"""Entry of a reward function's result with a reward for each turn of a conversation, besides the score of the whole."""


@dataclass(frozen=True)
class Advantages:
    """The advantages of a batch of B rows with R response tokens.

    Attributes:
        per_token: fp32 [R].
        returns: fp32 [R], the sum of rewards from each token on; equal to ``per_token`` if an estimator scores whole responses.
        rewards: fp32 [B], with the KL subtracted if the settings say so.
        kl_mean: Mean of the subtracted KL over the tokens of each response, then over responses; None = no KL is subtracted.
        counts: Reason -> number of rows or groups from which nothing is learned.
    """

    per_token: Tensor
    returns: Tensor
    rewards: Tensor
    kl_mean: float | None
    counts: dict[str, float]


@dataclass
class StepBatch:
    """The rollouts of one step. Each phase of the step adds its results.

    Attributes:
        rows: The rollouts as ragged tensors. Phases add log-probs and advantages to them.
        entropy: fp32 [R]; None = the log-prob pass does not compute it.
        advantages: None before the phase that computes them.
        baselines: fp32 [B], the score of the greedy response to each row's prompt; None without ReMax.
        statistics: Name -> fp32 [R], a statistic of each token's distribution that the estimator reads.
        drawn: The rows of the update, if PF-PPO draws them; None = all rows, once each.
        values: fp32 [R], the values that a critic on its own devices is computing; None = it has not begun.
        corrected: The rollout correction of the settings has been applied.
        teacher_shares: fp32 [R], the share of a token in the estimate of its divergence from the teacher, if tokens answer for
            runs; None = each token has its own estimate.
    """

    step: int
    prompts: StepPrompts
    answers: RowAnswers
    rows: RolloutBatch
    results: list[RewardResult] = field(default_factory=list)
    entropy: Tensor | None = None
    advantages: Advantages | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    baselines: Tensor | None = None
    statistics: dict[str, Tensor] = field(default_factory=dict)
    drawn: list[int] | None = None
    values: Pending[Tensor] | None = None
    corrected: bool = False
    teacher_shares: Tensor | None = None

    def for_update(self) -> tuple[RolloutBatch, list[str]]:
        names = self.names
        if self.drawn is None:
            return self.rows, names
        rows = self.rows.select(self.drawn)
        if len(set(self.rows.prompt_groups())) == self.rows.num_rows:  # each row computes its own prompt
            rows.prompt_group = None
        return rows, [names[row] for row in self.drawn]

    def keep_log_probs(self, log_probs: Tensor) -> None:
        """Store the log-probs that the update computed, fp32 [tokens of its rows]. Other rows keep their log-probs."""
        if self.drawn is None:
            self.rows.old_log_probs = log_probs
        elif self.rows.old_log_probs is not None:
            kept = self.rows.old_log_probs.clone()
            kept[token_index(self.rows.responses.sizes(), self.drawn)] = log_probs
            self.rows.old_log_probs = kept

    @property
    def names(self) -> list[str]:
        return [f"{row.address} (sample of step {self.step})" for row in self.answers.rows]

    @property
    def scores(self) -> Tensor:  # [B]
        # The rewards as the reward function returned them, fp32. NaN = nothing is scored.
        scores = [result.score for result in self.results] or [math.nan] * self.rows.num_rows
        return torch.tensor(scores, dtype=torch.float32)

    def estimate(self, algorithm: Algorithm, controller: KlController, distill: Distill | None = None) -> Advantages:
        """Compute the advantages. If the KL is part of the reward, the batch must have old and reference log-probs.

        If the batch has the teacher's log-probs, ``distill`` says how they change the advantages.

        An estimator may read rewards per token. Then each token has its KL as a penalty, and the last token also has the score.

        Raises:
            RewardError: A score is infinite, or a reward has no number under a name of ``algorithm.gdpo_reward_keys``.
        """
        rows, scores, components, baselines = self.rows, self.scores, self._components(algorithm), self.baselines
        valid = check_rewards(scores, self.names)
        if components is not None:
            valid = valid & ~components.isnan().all(1)
        if algorithm.reward_clip_range is not None:
            scores = scores.clamp(*algorithm.reward_clip_range)
            baselines = None if baselines is None else baselines.clamp(*algorithm.reward_clip_range)
        row, lengths, beta = rows.response_row(), rows.responses.lengths, controller.coefficient
        turns = self._turn_rewards()
        rewards, kl, kl_mean = scores, None, None
        if algorithm.use_kl_in_reward:
            assert rows.old_log_probs is not None, "the KL in the reward needs old log-probs"
            assert rows.ref_log_probs is not None, "the KL in the reward needs the reference's log-probs"
            kl = kl_estimate(rows.old_log_probs, rows.ref_log_probs, algorithm.kl_penalty)
            if rows.kept is not None:
                # As in verl, the KL of a rejected token counts. If it is not finite, set it to 0, or the row loses its reward.
                kl = kl.where(rows.kept | kl.isfinite(), 0.0)
            rewards = shaped_rewards(scores, kl, row, beta)
            # As in verl, average over the tokens of each response first, so that a long response counts no more than a short one.
            kl_mean = float(row_means(kl, row, lengths).mean()) if kl.numel() else 0.0
        token_rewards = token_level_rewards(scores, row, lengths, kl, beta)
        if turns is not None:
            # The estimators that score whole conversations see the sum.
            token_rewards = token_rewards + turns
            rewards = rewards + torch.zeros_like(rewards).index_add(0, row, turns)
        inputs = AdvantageInputs(
            rewards=rewards,
            group=rows.group,
            valid=valid,
            row=row,
            lengths=lengths,
            token_rewards=token_rewards,
            values=rows.old_values,
            baselines=baselines,
            components=components,
            old_log_probs=rows.old_log_probs,
            ref_log_probs=rows.ref_log_probs,
            rollout_log_probs=rows.rollout_log_probs,
            statistics=self.statistics,
            weights=rows.weights,
        )
        advantages, returns = estimate(inputs, algorithm)
        if rows.teacher_log_probs is not None:
            advantages = advantages - self._teacher_term(distill)
        if algorithm.top_entropy_quantile < 1:
            assert self.entropy is not None, "the pass for old log-probs computes the entropies"
            advantages = advantages.where(has_high_entropy(self.entropy, rows.kept, algorithm.top_entropy_quantile), 0.0)
        return Advantages(advantages, returns, rewards, kl_mean, group_counts(rewards, rows.group, valid))

    def _teacher_term(self, distill: Distill | None) -> Tensor:
        """Return what the teacher subtracts from the advantages, fp32 [R]: the estimate of KL(policy to teacher) at each token.

        With a discount it also has the discounted estimates of the later tokens of the response. Source: Tinker's recipe for
        on-policy distillation (``kl_discount_factor``).
        """
        rows = self.rows
        assert distill is not None
        assert distill.coef is not None, "derived from the estimator"
        assert rows.old_log_probs is not None, "the sampled divergence needs old log-probs"
        assert rows.teacher_log_probs is not None
        estimate = rows.old_log_probs - rows.teacher_log_probs
        if rows.kept is not None:
            estimate = estimate.where(rows.kept, 0.0)
        if rows.teacher_weights is not None:
            estimate = estimate * rows.teacher_weights
        counted = estimate if self.teacher_shares is None else estimate * self.teacher_shares
        self.metrics["distill/kl_mean"] = float(counted.mean()) if estimate.numel() else 0.0
        if distill.discount:
            estimate = reverse_scan(estimate.double(), rows.response_row(), distill.discount).float()
        return distill.coef * estimate

    def _turn_rewards(self) -> Tensor | None:
        """Return the rewards of turns at the last token of each turn, fp32 [R]. None = no row has any.

        Raises:
            RewardError: A row has not one finite number per turn.
        """
        conversations = self.answers.conversations
        if conversations is None or not any(TURN_REWARDS in result.extra for result in self.results):
            return None
        found: list[float] = []
        for each, result, name in zip(conversations, self.results, self.names, strict=True):
            given = result.extra.get(TURN_REWARDS, [0.0] * len(each.turns))
            numbers = isinstance(given, list | tuple) and all(
                isinstance(one, int | float) and math.isfinite(one) for one in given
            )
            if not numbers or len(given) != len(each.turns):
                raise RewardError(
                    f"{TURN_REWARDS} of {name} must have one number for each of its {len(each.turns)} turns, but it is "
                    f"{given!r:.100}. Correct the reward function."
                )
            for turn, reward in zip(each.turns, given, strict=True):
                tokens = len(turn.output_ids)
                found += [*[0.0] * (tokens - 1), float(reward)] if tokens else []
        return torch.tensor(found, dtype=torch.float32)

    def _components(self, algorithm: Algorithm) -> Tensor | None:
        """Return the K rewards that ``algorithm.gdpo_reward_keys`` names, fp32 [B, K]. None = the estimator reads none of them.

        A reward that does not apply to a row is NaN in that row. If the reward function failed on a row, all its rewards are NaN.
        """
        if "components" not in ESTIMATORS[algorithm.adv_estimator].inputs:
            return None
        rows = zip(self.results, self.names, strict=True)
        numbers = [[_component(result, key, name) for key in algorithm.gdpo_reward_keys or ()] for result, name in rows]
        components = torch.tensor(numbers, dtype=torch.float32)
        failed = torch.tensor([result.failed for result in self.results])
        return components.where(~(failed & components.isnan().any(1))[:, None], math.nan)


@dataclass(frozen=True)
class ForwardPass(Generic[Result]):
    """A forward pass over a whole batch, spread over the ranks.

    Attributes:
        phase: Name under which time and memory are recorded.
        method: Method of the worker. It is called with the rank's rows and micro-batches.
        budget: Cuts the rows of a rank into micro-batches.
        even_rows: Each rank gets about the same number of rows. False = about the same number of tokens, in any number of rows.
        routed: The model replays or records experts, if the batch says so. False = it chooses them itself.
    """

    workers: TimedGroup
    phase: str
    method: Callable[..., Result]
    budget: Budget
    balance: bool
    options: tuple[Any, ...] = ()
    even_rows: bool = True
    routed: bool = False

    def begin(self, batch: RolloutBatch, names: Sequence[str]) -> Pending[list[tuple[list[int], Result]]]:
        """Begin the pass, see :meth:`TimedGroup.begin`. The result has one pair (row numbers, result of ``method``) per rank.

        Ranks that share their micro-batches count as one rank. ``names``: names of the rows for errors.
        """
        batch = batch if self.routed else batch.unrouted()
        tokens, parts = batch.row_tokens(), self.budget.shares(self.workers.world_size)
        rows = range(batch.num_rows)
        shares = rows_per_rank(tokens, rows, parts, self.balance) if self.even_rows else uneven_shares(tokens, parts)
        rank_tokens = [tokens.select(share) for share in shares]
        bins = cut_ranks(rank_tokens, [[names[r] for r in share] for share in shares], self.budget)
        arguments = [(batch.select(share), cut, *self.options) for share, cut in zip(shares, bins, strict=True)]

        def learn(results: list[Result]) -> list[tuple[list[int], Result]]:
            self.budget.learn(zip(rank_tokens, bins, strict=True), self.workers.figures)
            return list(zip(shares, results, strict=True))

        return self.workers.begin(self.phase, self.method, arguments).then(learn)


class LogProbPass(ForwardPass[LogProbs]):
    def compute(self, batch: RolloutBatch, names: Sequence[str]) -> LogProbs:
        """Return log-probs and further statistics of all tokens, fp32 [R] each, in batch order."""
        return in_batch_order(self.begin(batch, names).result(), batch.responses.sizes())


def to_batch(answers: RowAnswers, samples: int, actor: Actor) -> RolloutBatch:
    generation, forest = answers.generation, None
    if answers.conversations is not None:
        turns = [each.ids for each in answers.conversations]
        # The turns of a row always share tokens.
        forest = build_forest(turns, None if shares_prompts(actor) else range(len(turns)))
    log_probs = generation.log_probs
    assert len(answers.prompt_ids) % samples == 0, f"{len(answers.prompt_ids)} rows are no groups of {samples}"
    batch = rollout_batch(
        prompts=prompt_rows(answers.prompt_ids),
        responses=Ragged.from_rows(generation.response_ids, torch.int64),
        group=torch.arange(len(answers.prompt_ids)) // samples,
        actor=actor,
        rollout_log_probs=None if log_probs is None else Ragged.from_rows(log_probs, torch.float32).flat,
        forest=forest,
    )
    return batch if not _has_routes(answers) else batch.replaying(_record(batch, answers))


def _has_routes(answers: RowAnswers) -> bool:
    if answers.conversations is None:
        return answers.generation.routes is not None
    return any(turn.routes is not None for each in answers.conversations for turn in each.turns)


def _record(batch: RolloutBatch, answers: RowAnswers) -> list[tuple[Tensor, Tensor]]:
    """Return the engine's choice of experts as parts of a record. Of several answers to a prompt, the first counts."""
    if answers.conversations is not None:
        turns = [[turn for turn in each.turns if turn.output_ids] for each in answers.conversations]
        tokens = batch.record_places([[len(turn.output_ids) for turn in own] for own in turns])
        return [(at, turn.routes) for own, row in zip(tokens, turns, strict=True) for at, turn in zip(own, row, strict=True)]
    routes = answers.generation.routes
    assert routes is not None
    firsts: dict[int, Tensor] = {}
    parts: list[tuple[Tensor, Tensor]] = []
    tokens = batch.record_places([[size] for size in batch.responses.sizes()])
    for group, (at,), (prompt, own) in zip(batch.group.tolist(), tokens, routes, strict=True):
        # Rows that compute their prompt alone replay the first choice too.
        experts = torch.cat([firsts.setdefault(group, prompt), own])
        parts.append((at, experts))
    return parts


def _component(result: RewardResult, key: str, name: str) -> float:
    """Return one named reward component of a row. NaN = the reward function failed, or returned None for the component."""
    value = result.score if key == "score" else math.nan if result.failed else result.extra.get(key)
    if value is None and key in result.extra:
        return math.nan
    if not isinstance(value, int | float) or math.isinf(value):
        raise RewardError(
            f"algorithm.gdpo_reward_keys: the reward of {name} has no finite number {key}; it has "
            f"{', '.join(('score', *result.extra))}. Return {{'score': ..., '{key}': ...}} from the reward function, or remove "
            "the key."
        )
    return float(value)
