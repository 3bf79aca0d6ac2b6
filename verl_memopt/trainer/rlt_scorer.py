"""Scores explanations with the student of RLT, spread over the ranks. It needs no optimizer and no engine."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl_memopt.config.schema import RltReward
from verl_memopt.data.batch import scatter_tokens
from verl_memopt.data.encoder import tokenize
from verl_memopt.data.ragged import Ragged
from verl_memopt.data.rlt.prompts import RltPrompts
from verl_memopt.memory.batching.learned_budget import LearnedBudget
from verl_memopt.memory.batching.row_tokens import RowTokens
from verl_memopt.memory.batching.token_budget import split_to_count
from verl_memopt.rewards.rlt.formula import RltScores, rlt_scores
from verl_memopt.rewards.rlt.status import SKIPPED
from verl_memopt.rewards.rlt.student_rows import THINK, StudentEncoder, StudentRows, needs_teacher_pass, reused_log_probs
from verl_memopt.rewards.rows import RewardResult
from verl_memopt.trainer.passes import Budget, cut_ranks, uneven_shares
from verl_memopt.trainer.rank_check import RankCheck
from verl_memopt.trainer.timed_group import TimedGroup
from verl_memopt.workers.rlt_scores import StudentLogProbs, join_log_probs, student_batch, student_micro_batches, teacher_batch

PREFIX, MEASURED = "rlt/", "perf/student_"
"""Starts of the names of RLT's metrics: of what a step computed, and of what was measured of it."""


@dataclass(frozen=True)
class Explained:
    """What is scored: N responses of a teacher.

    Attributes:
        questions: The question of each row.
        solutions: Its solution, without tags.
        responses: int64, the teacher's tokens after the forced prefix.
        addresses: File and row of each question, for errors.
    """

    questions: Sequence[str]
    solutions: Sequence[str]
    responses: Ragged
    addresses: Sequence[str]

    @classmethod
    def of(cls, infos: Sequence[dict[str, Any]], response_ids: Sequence[Sequence[int]], addresses: Sequence[str]) -> Explained:
        """Return the rows of a dataset of RLT with their responses.

        Args:
            infos: ``extra_info`` of each row.
            response_ids: Tokens of each response.
            addresses: File and row of each question.
        """
        questions, solutions = ([info[name] for info in infos] for name in ("question", "solution"))
        return cls(questions, solutions, Ragged.from_rows(list(response_ids), torch.int64), addresses)


@dataclass(frozen=True)
class RltScored:
    """The result of a scoring pass.

    Attributes:
        scores: Rewards and what they consist of.
        rows: What the student read.
        student: Its log-probs of explanations and solutions.
        teacher: fp32 [tokens of all explanations], the teacher's log-probs. None where the reward does not read them.
        performance: Metrics of the student's pass, and of the check of a quantised student, under their whole names.
    """

    scores: RltScores
    rows: StudentRows
    student: StudentLogProbs
    teacher: Tensor | None
    performance: dict[str, float]

    def metrics(self) -> dict[str, float]:
        """Return the metrics of rewards, statuses and performance."""
        return {PREFIX + name: value for name, value in self.scores.metrics().items()} | self.performance

    def results(self) -> list[RewardResult]:
        """Return the reward of each row with its parts. A skipped row has the score NaN, and no parts."""
        scores, results = self.scores, []
        columns = {"r_ss": scores.r_ss, "r_kl": scores.r_kl, "match": scores.match, "think_tokens": scores.num_think}
        values = zip(*(column.tolist() for column in columns.values()), strict=True)
        rewards, statuses = scores.training_rewards().tolist(), scores.status.tolist()
        for reward, status, row in zip(rewards, statuses, values, strict=True):
            parts = {} if status == SKIPPED else dict(zip(columns, row, strict=True))
            results.append(RewardResult(reward, {"status": status, **parts}))
        return results


@dataclass(frozen=True)
class RltScorer:
    """Scores explanations.

    Attributes:
        workers: Workers with the student, and with the teacher where its log-probs are not given.
        settings: Settings of the reward.
        prompts: Renders the prompts of both roles.
        encoder: Builds the student's sequences.
        temperature: Temperature of the rollouts.
        teacher_budget: How a pass of the teacher is cut into micro-batches.
        shares_prompts: Explanations of one question compute their prompts once.
        rank_check: Compares a quantised student with its unquantised weights in the first batch; None where it is not quantised.
        learned: The token budget of the student's pass, where it learns. None = the budget of the settings.
    """

    workers: TimedGroup
    settings: RltReward
    prompts: RltPrompts
    encoder: StudentEncoder
    temperature: float
    teacher_budget: Budget
    shares_prompts: bool = True
    rank_check: RankCheck | None = None
    learned: LearnedBudget | None = None

    @property
    def reads_reference(self) -> bool:
        """Whether the reward compares the student with the reference, and not with the policy."""
        return self.settings.include_teacher_think_entropy and self.settings.kl_teacher == "reference"

    def score(self, explained: Explained, response_log_probs: Tensor | None = None) -> RltScored:
        """Return the rewards of some explanations.

        Args:
            explained: Questions, solutions and responses.
            response_log_probs: fp32 [tokens of all responses], the teacher's at the temperature of the rollouts. None = the
                teacher computes them in a pass of its own.

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

    def _teacher(self, explained: Explained, rows: StudentRows, response_log_probs: Tensor | None) -> Tensor | None:
        """Return the teacher's log-probs of the explanations: those of the responses, or from a pass of its own."""
        if not self.settings.include_teacher_think_entropy:
            return None
        if response_log_probs is None or needs_teacher_pass(self.settings, self.temperature):
            return self._teacher_pass(explained, rows)
        responses = explained.responses
        return reused_log_probs(Ragged(flat=response_log_probs, lengths=responses.lengths, batch_size=[]), rows.parts[:, THINK])

    def _teacher_pass(self, explained: Explained, rows: StudentRows) -> Tensor:
        """Return the teacher's log-probs of the explanations from a pass of its own, fp32."""
        temperature = self.temperature if self.settings.unbias_teacher_log_probs else 1.0
        batch = teacher_batch(self._teacher_prompts(explained), rows)
        tokens = batch.row_tokens()
        shares = uneven_shares(tokens, self.workers.world_size)
        names = [[explained.addresses[row] for row in share] for share in shares]
        bins = cut_ranks([tokens.select(share) for share in shares], names, self.teacher_budget)
        phase, method = ("ref", "ref_log_probs") if self.reads_reference else ("old_log_prob", "policy_log_probs")
        arguments = [(batch.select(share), cut, temperature) for share, cut in zip(shares, bins, strict=True)]
        parts = zip(shares, self.workers.each(phase, method, arguments), strict=True)
        return scatter_tokens([(share, part.log_probs) for share, part in parts], batch.responses.sizes())

    def _teacher_prompts(self, explained: Explained) -> Ragged:
        """Return the teacher's prompt of each row, which ends where the scored explanation begins."""
        rlt_format = self.prompts.rlt_format
        pairs = list(zip(explained.questions, explained.solutions, strict=True))
        rendered = {pair: self.prompts.teacher(*pair) for pair in dict.fromkeys(pairs)}
        texts = [text for text, _ in rendered.values()]
        if self.settings.include_forced_prefix:
            texts = [text.removesuffix(rlt_format.padding) for text in texts]
        ids = dict(zip(rendered, tokenize(self.prompts.tokenizer, texts, [plain for _, plain in rendered.values()]), strict=True))
        return Ragged.from_rows([ids[pair] for pair in pairs], torch.int64)

    def _exact(self, rows: StudentRows) -> StudentLogProbs:
        """Return the log-probs of some rows under the unquantised weights of a quantised student."""
        return self._student(rows, "exact_student_log_probs")[0]

    def _student(self, rows: StudentRows, method: str = "student_log_probs") -> tuple[StudentLogProbs, dict[str, float]]:
        """Return the student's log-probs of all rows, and the performance of the pass."""
        tokens = student_batch(rows, self.shares_prompts).row_tokens()
        shares = uneven_shares(tokens, self.workers.world_size)
        of_ranks = [tokens.select(share) for share in shares]
        bins = self._micro_batches(of_ranks)
        began = time.perf_counter()
        arguments = [(rows.select(share), cut) for share, cut in zip(shares, bins, strict=True)]
        replies = self.workers.each("reward", method, arguments)
        if self.learned is not None and method == "student_log_probs":
            fullest = max((part.cost(members) for part, cut in zip(of_ranks, bins, strict=True) for members in cut), default=0)
            self.learned.learn(fullest, self.workers.figures)
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

    def _micro_batches(self, per_rank: Sequence[RowTokens]) -> list[list[list[int]]]:
        """Return the micro-batches of each rank under the hard cap. All ranks get the same number."""
        limit = self.settings.max_tokens_per_micro_batch if self.learned is None else self.learned.cap
        cut = [student_micro_batches(tokens, limit) for tokens in per_rank]
        count = max(map(len, cut))
        return [split_to_count(bins, count, tokens.each()) for bins, tokens in zip(cut, per_rank, strict=True)]
