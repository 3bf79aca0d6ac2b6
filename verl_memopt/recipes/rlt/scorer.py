"""Scores explanations with the student of RLT, spread over the ranks. It needs no optimizer and no engine."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl_memopt.algorithms.records import SFT
from verl_memopt.config.schema import Settings
from verl_memopt.data.batch import Ragged, shares_prompts, token_index
from verl_memopt.data.dataset import PromptRows
from verl_memopt.memory.knob import reference_ranks, sequence_ranks
from verl_memopt.memory.token_budget import LearnedBudget
from verl_memopt.memory.token_packing import alike
from verl_memopt.model.folder import TOKENIZER_FILES, read_tokenizer
from verl_memopt.model.packing_check import REWARD_KEY
from verl_memopt.recipes.rlt.dataset import FORMATS, RltDataset, RltPrompts, teacher_rows
from verl_memopt.recipes.rlt.formula import RltScores, rlt_scores
from verl_memopt.recipes.rlt.settings import RltReward
from verl_memopt.recipes.rlt.student import (
    Student,
    StudentLogProbs,
    StudentPlan,
    StudentReply,
    check_same_shape,
    check_same_tokenizer,
    find_student,
    join_log_probs,
    student_batch,
    student_micro_batches,
    teacher_batch,
)
from verl_memopt.recipes.rlt.student_rows import SKIPPED, THINK, StudentEncoder, StudentRows, needs_teacher_pass, reused_log_probs
from verl_memopt.rewards.score import RewardResult
from verl_memopt.run.environment import Environment
from verl_memopt.trainer.micro_batching import Budget, budgets, uneven_shares
from verl_memopt.trainer.rollouts import LogProbPass, RowAnswers, StepBatch
from verl_memopt.trainer.scoring import Scored
from verl_memopt.worker.group import TimedGroup
from verl_memopt.worker.worker import Worker

logger = logging.getLogger(__name__)

PREFIX, MEASURED = "rlt/", "perf/student_"
"""Prefixes of RLT's metrics: the first for the results of a step, the second for its speed."""


@dataclass(frozen=True)
class ExplanationBatch:
    """N responses of a teacher that are to be scored.

    Attributes:
        questions: The question of each row.
        solutions: The solution of each question, without tags.
        responses: int64, the teacher's tokens after the forced prefix.
        addresses: File and row of each question, for errors.
    """

    questions: Sequence[str]
    solutions: Sequence[str]
    responses: Ragged
    addresses: Sequence[str]

    @classmethod
    def of(
        cls, infos: Sequence[dict[str, Any]], response_ids: Sequence[Sequence[int]], addresses: Sequence[str]
    ) -> ExplanationBatch:
        questions, solutions = ([info[name] for info in infos] for name in ("question", "solution"))
        return cls(questions, solutions, Ragged.from_rows(list(response_ids), torch.int64), addresses)


@dataclass(frozen=True)
class RltScored:
    """The result of a scoring pass.

    Attributes:
        scores: Rewards and their parts.
        rows: The sequences that the student scored.
        student: The student's log-probs of explanations and solutions.
        teacher: fp32 [tokens of all explanations], the teacher's log-probs. None if the reward does not need them.
        performance: Metrics of the student's pass, and of the check of a quantised student, under their full names.
    """

    scores: RltScores
    rows: StudentRows
    student: StudentLogProbs
    teacher: Tensor | None
    performance: dict[str, float]

    def metrics(self) -> dict[str, float]:
        return {PREFIX + name: value for name, value in self.scores.metrics().items()} | self.performance

    def results(self) -> list[RewardResult]:
        scores, results = self.scores, []
        columns = {"r_ss": scores.r_ss, "r_kl": scores.r_kl, "match": scores.match, "think_tokens": scores.num_think}
        values = zip(*(column.tolist() for column in columns.values()), strict=True)
        rewards, statuses = scores.training_rewards().tolist(), scores.status.tolist()
        for reward, status, row in zip(rewards, statuses, values, strict=True):
            # A skipped row has the score NaN, and no parts.
            parts = {} if status == SKIPPED else dict(zip(columns, row, strict=True))
            results.append(RewardResult(reward, {"status": status, **parts}))
        return results


# Quantisation must not change the order of the explanations of a question. Random tokens cannot show this when the student is
# loaded: they show the error of a log-prob, but not whether it is smaller than the differences between real explanations. So the
# check of a quantised student waits for the first explanations of the policy.

ACCEPTED = {"int8": 0.98, "nf4": 0.95}
"""Lowest mean in-group Spearman correlation of a quantised student that causes no warning."""


@dataclass(frozen=True)
class RankCorrelation:
    """Spearman correlations of two scorings of the same rows.

    Attributes:
        mean: Mean of the correlations over groups; NaN without a group.
        lowest: The lowest correlation of a group; NaN without a group.
        num_groups: Number of groups with an order: they have at least two rows, and not all rewards are equal.
    """

    mean: float
    lowest: float
    num_groups: int

    def warning(self, quantization: str, key: str) -> str | None:
        if not self.num_groups or self.mean >= ACCEPTED[quantization]:
            return None
        return (
            f"{key}={quantization}: the student orders the explanations of a question differently than its unquantised weights "
            f"do: the rank correlation is {self.mean:.3f} (mean over {self.num_groups} groups; {ACCEPTED[quantization]} is "
            "expected). "
            f"Set {key}={'int8 or none' if quantization == 'nf4' else 'none'}."
        )


def rank_correlation(rewards: Tensor, exact: Tensor, group: Sequence[Hashable]) -> RankCorrelation:
    """Compute the rank correlation of two scorings inside each group. Rows without a reward (NaN) are left out.

    ``rewards``: [N], from the quantised student. ``exact``: [N], from its unquantised weights.
    """
    members: dict[Hashable, list[int]] = {}
    for row, name in enumerate(group):
        if math.isfinite(float(rewards[row])) and math.isfinite(float(exact[row])):
            members.setdefault(name, []).append(row)
    correlations = [spearman(rewards[rows], exact[rows]) for rows in members.values()]
    ordered = [value for value in correlations if math.isfinite(value)]
    if not ordered:
        return RankCorrelation(math.nan, math.nan, 0)
    return RankCorrelation(sum(ordered) / len(ordered), min(ordered), len(ordered))


def spearman(left: Tensor, right: Tensor) -> float:
    """Return Spearman's rank correlation of two vectors. Equal values share their mean rank. NaN if one is constant."""
    first, second = (_ranks(values) for values in (left, right))
    first, second = first - first.mean(), second - second.mean()
    length = (first.square().sum() * second.square().sum()).sqrt()
    return float((first * second).sum() / length) if length > 0 else math.nan


def _ranks(values: Tensor) -> Tensor:
    below = (values[:, None] > values[None, :]).sum(1)
    equal = (values[:, None] == values[None, :]).sum(1)
    return below.double() + (equal - 1).double() / 2


MOST_GROUPS = 16
"""Largest number of groups that the check scores a second time, with the unquantised weights."""


@dataclass
class RankCheck:
    """Compares the rewards of a quantised student with those of its unquantised weights, once per start.

    Attributes:
        settings: Settings of the reward.
        quantization: The student's quantisation, a key of ``ACCEPTED``.
        key: The setting that chooses it.
        done: True = the check was made.
    """

    settings: RltReward
    quantization: str
    key: str
    done: bool = False

    def check(
        self,
        rows: StudentRows,
        scores: RltScores,
        teacher: Tensor | None,
        addresses: Sequence[str],
        exact: Callable[[StudentRows], StudentLogProbs],
    ) -> dict[str, float]:
        """Return ``rank_correlation``, and warn if it is too low. After the first check nothing is returned.

        If no group has an order, because it has only one scored row or its rewards are equal, the next batch is checked instead.

        Args:
            rows: The sequences that the student scored.
            scores: Rewards from the quantised student.
            teacher: The teacher's log-probs, fp32 [tokens of all explanations]; None if the reward does not need them.
            addresses: File and row of the question of each row. Rows with the same address are a group.
            exact: Returns the log-probs of some rows under the unquantised weights.
        """
        chosen = [] if self.done else _some_groups(rows, addresses)
        if not chosen:
            return {}
        subset, names = rows.select(chosen), [addresses[row] for row in chosen]
        chosen_teacher = None if teacher is None else teacher[token_index(rows.parts[:, THINK].tolist(), chosen)]
        log_probs = exact(subset)
        unquantised = rlt_scores(self.settings, subset, log_probs.think, chosen_teacher, log_probs.solution, names)
        agreement = rank_correlation(scores.training_rewards()[chosen], unquantised.training_rewards(), names)
        if not agreement.num_groups:
            return {}
        self.done = True
        warning = agreement.warning(self.quantization, self.key)
        if warning is not None:
            logger.warning("%s", warning)
        logger.info(
            "%s=%s: on the first explanations, the rank correlation with the unquantised weights is %.3f "
            "(mean over %d groups, lowest %.3f)", self.key, self.quantization, agreement.mean, agreement.num_groups,
            agreement.lowest,
        )  # fmt: skip
        return {"rank_correlation": agreement.mean}


def _some_groups(rows: StudentRows, addresses: Sequence[str]) -> list[int]:
    # The first groups that have at least two scored rows.
    groups: dict[str, list[int]] = {}
    for row, is_scored in enumerate(rows.scored().tolist()):
        if is_scored:
            groups.setdefault(addresses[row], []).append(row)
    ordered = [members for members in groups.values() if len(members) > 1]
    return [row for members in ordered[:MOST_GROUPS] for row in members]


@dataclass(frozen=True)
class RltScorer:
    """Scores explanations.

    Attributes:
        workers: Workers that hold the student. They also hold the teacher if its log-probs are not given.
        settings: Settings of the reward.
        encoder: Builds the student's sequences.
        temperature: Temperature of the rollouts.
        teacher_budget: Cuts a pass of the teacher into micro-batches.
        student_budget: Cuts a pass of the student into micro-batches. A row longer than the budget gets one of its own.
        shares_prompts: Explanations of one question compute their prompt only once.
        rank_check: Compares a quantised student with its unquantised weights once; None if the student is not quantised.
    """

    workers: TimedGroup
    settings: RltReward
    encoder: StudentEncoder
    temperature: float
    teacher_budget: Budget
    student_budget: Budget
    shares_prompts: bool = True
    rank_check: RankCheck | None = None

    @property
    def learned_budget(self) -> LearnedBudget | None:
        return self.student_budget.learned

    @property
    def reads_reference(self) -> bool:
        return self.settings.include_teacher_think_entropy and self.settings.kl_teacher == "reference"

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"ref_log_probs" if self.reads_reference else "old_log_probs"})

    def begin(self, answers: RowAnswers) -> None:
        """Do nothing: the student has no devices of its own, so it cannot score while rollouts run."""

    def score_answers(self, answers: RowAnswers, batch: StepBatch | None) -> Scored:
        """Return the reward of each answer, which is an explanation, and the metrics.

        ``batch``: the teacher's log-probs, and the names of the rows. None = the teacher computes its log-probs here.
        """
        names = [row.address for row in answers.rows] if batch is None else batch.names
        explained = ExplanationBatch.of([row.extra_info for row in answers.rows], answers.generation.response_ids, names)
        teacher = None
        if batch is not None:
            teacher = batch.rows.ref_log_probs if self.reads_reference else batch.rows.old_log_probs
        scored = self.score(explained, teacher)
        return scored.results(), scored.metrics()

    def score(self, explained: ExplanationBatch, response_log_probs: Tensor | None = None) -> RltScored:
        """Compute the rewards of some explanations.

        ``response_log_probs``: fp32 [tokens of all responses], the teacher's log-probs at the temperature of the rollouts.
        None = the teacher computes them in a pass of its own.

        Raises:
            ConfigError: A sequence is longer than ``max_student_len``, and ``overlong`` is ``error``.
            RewardError: A log-prob is not finite. The message names the row.
        """
        rows = self.encoder.encode(explained.questions, explained.solutions, explained.responses, explained.addresses)
        teacher = self._teacher(explained, rows, response_log_probs)
        student, performance = self._student(rows)
        scores = rlt_scores(self.settings, rows, student.think, teacher, student.solution, explained.addresses)
        if self.rank_check is not None:
            agreement = self.rank_check.check(rows, scores, teacher, explained.addresses, self._exact)
            performance |= {PREFIX + name: value for name, value in agreement.items()}
        return RltScored(scores, rows, student, teacher, performance)

    def _teacher(self, explained: ExplanationBatch, rows: StudentRows, response_log_probs: Tensor | None) -> Tensor | None:
        if not self.settings.include_teacher_think_entropy:
            return None
        if response_log_probs is None or needs_teacher_pass(self.settings, self.temperature):
            return self._teacher_pass(explained, rows)
        responses = explained.responses
        return reused_log_probs(Ragged(flat=response_log_probs, lengths=responses.lengths, batch_size=[]), rows.parts[:, THINK])

    def _teacher_pass(self, explained: ExplanationBatch, rows: StudentRows) -> Tensor:
        temperature = self.temperature if self.settings.unbias_teacher_log_probs else 1.0
        batch = teacher_batch(self.encoder.teacher_prompts(explained.questions, explained.solutions), rows)
        phase, method = ("ref", Worker.ref_log_probs) if self.reads_reference else ("old_log_prob", Worker.policy_log_probs)
        teacher = LogProbPass(self.workers, phase, method, self.teacher_budget, True, (temperature,), even_rows=False)
        return teacher.compute(batch, explained.addresses).log_probs

    def _exact(self, rows: StudentRows) -> StudentLogProbs:
        return self._student(rows, exact=True)[0]

    def _student(self, rows: StudentRows, exact: bool = False) -> tuple[StudentLogProbs, dict[str, float]]:
        tokens = student_batch(rows, self.shares_prompts).row_tokens()
        shares = uneven_shares(tokens, self.student_budget.shares(self.workers.world_size))
        rank_tokens = [tokens.select(share) for share in shares]
        cap = self.student_budget.limit if self.learned_budget is None else self.learned_budget.cap
        bins = alike([student_micro_batches(own_tokens, cap) for own_tokens in rank_tokens], rank_tokens)
        # The time of this call minus the longest forward is the time that it takes to copy the weights to the device.
        began = time.perf_counter()
        arguments = [
            (Student.log_probs, rows.select(share), cut, self.temperature, exact) for share, cut in zip(shares, bins, strict=True)
        ]
        replies: list[StudentReply] = self.workers.each("reward", Worker.call_role, arguments)
        if not exact:
            self.student_budget.learn(zip(rank_tokens, bins, strict=True), self.workers.figures)
        seconds, forward = time.perf_counter() - began, max(reply.seconds for reply in replies)
        computed = sum(tokens.select(share).cost(members) for share, cut in zip(shares, bins, strict=True) for members in cut)
        parts = [(share, reply.log_probs) for share, reply in zip(shares, replies, strict=True)]
        return join_log_probs(parts, rows), {
            f"{PREFIX}tokens": float(computed),
            f"{PREFIX}micro_batches": float(len(bins[0])),
            f"{MEASURED}forward_seconds": forward,
            f"{MEASURED}onload_seconds": max(seconds - forward, 0.0),
            f"{MEASURED}tokens_per_second": computed / forward if forward > 0 else math.nan,
        }


def student_plan(settings: Settings, environment: Environment) -> StudentPlan:
    """Return the plan by which each worker builds the student.

    Raises:
        ConfigError: The student's model cannot run here, its tokenizer differs from the policy's, or it cannot take the device
            memory of the reference.
    """
    reward_model, roles = settings.reward_model, settings.actor_rollout_ref
    folder = None if reward_model.model.path is None else _student_folder(settings, environment)
    _check_tokenizer(environment, folder or environment.reference_folder, reward_model.model.trust_remote_code)
    residency = reward_model.residency
    if residency == "auto":
        residency = "alias_ref" if folder is None else "separate"
    if residency == "swap":
        assert folder is not None
        assert environment.reference_folder is not None
        check_same_shape(reward_model.model, folder, roles.model, environment.reference_folder)
    return StudentPlan(
        model=reward_model.model,
        rlt=reward_model.rlt,
        residency=residency,
        folder=None if folder is None else str(folder),
        shares_prompts=shares_prompts(roles.actor),
    )


def _student_folder(settings: Settings, environment: Environment) -> Path:
    student, data, roles = settings.reward_model.model, settings.data, settings.actor_rollout_ref
    longest = settings.reward_model.rlt.max_student_len or data.max_prompt_length + data.max_response_length
    sampled = environment.embedding_rows if settings.reward_model.rlt.align == "concat" else 0
    return find_student(student, roles.model, environment.tokenizer, longest, sampled)


def _check_tokenizer(environment: Environment, folder: Path | None, trusted: bool) -> None:
    # A student folder without a tokenizer uses the policy's.
    if folder in (None, environment.folder, environment.tokenizer_folder):
        return
    assert folder is not None
    if any((folder / name).is_file() for name in TOKENIZER_FILES):
        check_same_tokenizer(environment.tokenizer, read_tokenizer(folder, f"{REWARD_KEY}.path", trusted), str(folder))


def warn_of_no_room(encoder: StudentEncoder, rlt: RltReward, datasets: Sequence[PromptRows | None]) -> None:
    """Warn of rows whose question and solution alone are longer than ``max_student_len``. They are never scored.

    Raises:
        ConfigError: There is such a row, and ``overlong`` is ``error``. The message names its file and row.
    """
    if rlt.max_student_len is None:
        return
    for dataset in datasets:
        rows = [] if dataset is None else [dataset[index] for index in range(len(dataset))]
        empty = ExplanationBatch.of([row.extra_info for row in rows], [[]] * len(rows), [row.address for row in rows])
        encoded = encoder.encode(empty.questions, empty.solutions, empty.responses, empty.addresses)
        without_room = (encoded.status == SKIPPED).nonzero().flatten().tolist()
        if without_room:
            logger.warning(
                "reward_model.rlt.max_student_len=%d: question and solution of %d of %d rows are longer, so these rows are never "
                "scored; the first is %s", rlt.max_student_len, len(without_room), len(rows), rows[without_room[0]].address,
            )  # fmt: skip


@dataclass(frozen=True)
class PreparedRlt:
    """RLT's part of one run: a :class:`verl_memopt.trainer.scoring.PreparedRecipe`.

    Attributes:
        settings: Settings of the run.
        role: The plan by which each worker builds the student.
        encoder: Builds the student's sequences.
    """

    settings: Settings
    role: StudentPlan
    encoder: StudentEncoder

    def scorer(self, workers: TimedGroup) -> RltScorer:
        reward_model, roles = self.settings.reward_model, self.settings.actor_rollout_ref
        rlt, quantization = reward_model.rlt, reward_model.model.quantization
        check = None if quantization == "none" else RankCheck(rlt, quantization, f"{REWARD_KEY}.quantization")
        student_ranks = sequence_ranks(self.settings, "reward_model" if self.role.residency == "separate" else "ref")
        key = "reward_model.rlt.max_tokens_per_micro_batch"
        student_budget = Budget(True, rlt.max_tokens_per_micro_batch, None, key, ranks=student_ranks)
        teacher_budget = replace(budgets(roles)[1], learned=None)
        if rlt.kl_teacher == "reference":
            teacher_budget = replace(teacher_budget, ranks=reference_ranks(roles))
        return RltScorer(
            workers=workers,
            settings=rlt,
            encoder=self.encoder,
            temperature=roles.rollout.scoring_temperature,
            teacher_budget=teacher_budget,
            student_budget=student_budget.learning(reward_model.adaptive_token_budget),
            shares_prompts=self.role.shares_prompts,
            rank_check=check,
        )


# The functions by which training uses this recipe: those of :class:`verl_memopt.trainer.scoring.RecipeHooks`.


def datasets(settings: Settings, tokenizer: Any) -> tuple[PromptRows, PromptRows | None]:
    data, tags = settings.data, settings.reward_model.rlt.tag_format
    read = teacher_rows if settings.algorithm.adv_estimator == SFT else RltDataset
    train = read(data.train_files, data, tokenizer, "train", tags)
    return train, None if data.val_files is None else read(data.val_files, data, tokenizer, "val", tags)


def prepare(settings: Settings, environment: Environment, datasets: Sequence[PromptRows | None]) -> PreparedRlt:
    """Check the student and the rows.

    Raises:
        ConfigError: A check of :func:`student_plan` or :func:`warn_of_no_room` fails, or the tokenizer is not byte-level.
        DataError: The chat template cannot render an answer.
    """
    data, rlt, tokenizer = settings.data, settings.reward_model.rlt, environment.tokenizer
    plan = student_plan(settings, environment)
    prompts = RltPrompts(tokenizer, FORMATS[rlt.tag_format], data.apply_chat_template_kwargs, data.allow_special_tokens)
    stops = {*environment.eos_token_ids, *([] if tokenizer.pad_token_id is None else [tokenizer.pad_token_id])}
    encoder = StudentEncoder(prompts, rlt, stops)
    warn_of_no_room(encoder, rlt, datasets)
    return PreparedRlt(settings, plan, encoder)
