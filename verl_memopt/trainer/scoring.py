"""Scorers, which give each answer its reward: by a reward function, by a reward model, or by code of a recipe."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, Self

import torch

from verl_memopt.agents.loop import FAILED, Conversation
from verl_memopt.algorithms.kl import overlong_penalty
from verl_memopt.config.schema import Actor, RewardKwargs, RewardModel, Settings
from verl_memopt.data.batch import Ragged, RolloutBatch, rollout_batch
from verl_memopt.data.dataset import PromptRow, PromptRows
from verl_memopt.data.encoder import RENDER_ERRORS, Spans, moved, special_tokens_of, tokenize
from verl_memopt.data.messages import render
from verl_memopt.errors import ConfigError, DataError, RewardError
from verl_memopt.memory.token_budget import LearnedBudget
from verl_memopt.model.packing_check import REWARD_KEY
from verl_memopt.observe.phase import REWARD_IN_ROLLOUT, PhaseClock
from verl_memopt.rewards.python_functions import ENVIRONMENT_REWARD, RM_SCORE, RM_SCORES
from verl_memopt.rewards.runner import MANAGERS, RewardRunner, Round
from verl_memopt.rewards.score import RewardResult, RewardRow
from verl_memopt.rollout.engine import FinishedRows
from verl_memopt.run.environment import Environment
from verl_memopt.trainer.micro_batching import Budget
from verl_memopt.trainer.rollouts import ForwardPass, RowAnswers, StepBatch
from verl_memopt.worker.group import Pending, TimedGroup
from verl_memopt.worker.roles import RolePlan
from verl_memopt.worker.worker import Worker

Scored = tuple[list[RewardResult], dict[str, float]]
"""The reward of each answer, and the scorer's metrics under their full names."""


class Scorer(Protocol):
    """Gives each answer its reward. It is called once per step, when everything that it reads has been computed."""

    @property
    def reads(self) -> frozenset[str]:
        """The inputs besides the text: ``old_log_probs`` or ``ref_log_probs`` of the batch."""

    @property
    def learned_budget(self) -> LearnedBudget | None:
        """The token budget of the scorer's forward pass; None = the budget does not adapt to measured peaks."""

    def begin(self, answers: RowAnswers) -> Pending[list[float]] | None:
        """Begin to score answers, if the scorer has its own devices. The caller stores the result in ``answers.model_scores``.

        Returns:
            None if the scorer has no devices of its own.
        """

    def score_answers(self, answers: RowAnswers, batch: StepBatch | None) -> Scored:
        """Return the reward of each answer.

        ``batch``: the batch of the training step; None in a validation, which computes no log-probs.
        """


class PreparedRecipe(Protocol):
    """A recipe's part of one run, checked before a worker starts."""

    @property
    def role(self) -> RolePlan | None:
        """The role that each worker builds for the recipe; None = the recipe needs no role."""

    def scorer(self, workers: TimedGroup) -> Scorer: ...


class RecipeHooks(Protocol):
    def datasets(self, settings: Settings, tokenizer: Any) -> tuple[PromptRows, PromptRows | None]: ...

    def prepare(self, settings: Settings, environment: Environment, datasets: Sequence[PromptRows | None]) -> PreparedRecipe:
        """Check the recipe's models and rows, and return its part of the run.

        Raises:
            ConfigError, DataError: The user must correct something.
        """


def shaped_by_dapo(settings: RewardKwargs, results: Sequence[RewardResult], lengths: Sequence[int]) -> list[RewardResult]:
    """Shape scores like the reward manager ``dapo``: subtract a penalty for long responses.

    A failed row keeps its fallback score. If the reward function returns a plain number, the score before the penalty is
    reported as ``acc``, as in verl.
    """
    buffer, longest = settings.overlong_buffer_cfg, settings.max_resp_len
    penalties = [0.0] * len(results)
    if buffer.enable and results:
        assert longest is not None, "it follows data.max_response_length"
        tokens = torch.tensor(lengths, dtype=torch.int64)
        penalties = overlong_penalty(tokens, longest, buffer.len, buffer.penalty_factor).tolist()
    shaped = []
    for result, penalty in zip(results, penalties, strict=True):
        logged = {"overlong_reward": penalty, "overlong": penalty < 0} if buffer.enable and buffer.log else {}
        extra = {**(result.extra or {"acc": result.score}), **logged}
        shaped.append(result if result.failed else replace(result, score=result.score + penalty, extra=extra))
    return shaped


def with_environment(
    results: Sequence[RewardResult], conversations: Sequence[Conversation], failed_reward: float | None, alone: bool
) -> list[RewardResult]:
    """Add the reward that the environment gives to the score of each conversation, as in TRL.

    ``failed_reward`` is the score if the environment failed, None = NaN. ``alone``: there is no other reward, so a conversation
    whose environment gives none has no score.
    """
    scored = []
    for result, each in zip(results, conversations, strict=True):
        if each.ended == FAILED:
            score = math.nan if failed_reward is None else failed_reward
            scored.append(replace(result, score=score, failed=True))
        elif each.reward is None:
            scored.append(replace(result, score=math.nan) if alone else result)
        else:
            score = each.reward if alone or math.isnan(result.score) else result.score + each.reward
            scored.append(replace(result, score=score, extra={**result.extra, ENVIRONMENT_REWARD: each.reward}))
    return scored


@dataclass(frozen=True)
class Rewarder:
    """Scores answers in training and in validation.

    Attributes:
        runner: The reward processes; None = nothing is scored.
        dapo: Settings of the manager ``dapo``; None = another manager.
        model: The reward model; None = there is no reward model.
        model_alone: The model's score is the reward. False = the reward function reads the score and returns the reward.
        clock: Times the reward functions in a training step; None = nothing is timed.
        reads: Empty, because only the text is read, see :class:`Scorer`.
        failed_reward: Reward of a conversation whose environment failed. None = it has no reward.
        environment_alone: The environments of conversations give the reward, and there is no reward function.
        unscored: No answer gets a score.
    """

    runner: RewardRunner | None
    dapo: RewardKwargs | None = None
    model: ModelScores | None = None
    model_alone: bool = False
    clock: PhaseClock | None = None
    reads: frozenset[str] = frozenset()
    failed_reward: float | None = None
    environment_alone: bool = False
    unscored: bool = False

    @property
    def learned_budget(self) -> LearnedBudget | None:
        return None if self.model is None else self.model.budget.learned

    def begin(self, answers: RowAnswers) -> Pending[list[float]] | None:
        return None if self.model is None or not self.model.workers.is_apart else self.model.begin(answers)

    def score_answers(self, answers: RowAnswers, batch: StepBatch | None) -> Scored:
        """Return the reward of each answer. In a training step this times the reward functions; workers time the reward model.

        Raises:
            RewardError: The reward function failed on a row, or the model gave no finite score.
            Stopped: A stop was requested.
        """
        model_scores, further = None, {}
        if self.model is not None:
            model_scores = (answers.model_scores or self.model.begin(answers)).result()
            further = self.model.further_scores(answers)
        timed: AbstractContextManager[None] = nullcontext()
        if batch is not None and self.clock is not None:
            timed = self.clock.phase("reward")
            if answers.begun is not None:
                self.clock.add(REWARD_IN_ROLLOUT, answers.begun.busy_seconds)
        with timed:
            if self.unscored:
                results = [RewardResult(math.nan)] * len(answers.rows)
            elif self.environment_alone:
                results = [RewardResult(0.0)] * len(answers.rows)
            elif model_scores is not None and self.model_alone:
                results = [RewardResult(score) for score in model_scores]
            else:
                results = self._by_function(answers, model_scores, further)
            if answers.conversations is not None:
                results = with_environment(results, answers.conversations, self.failed_reward, self.environment_alone)
            if self.dapo is not None:
                results = shaped_by_dapo(self.dapo, results, [len(ids) for ids in answers.generation.response_ids])
        return results, {}

    def _by_function(
        self, answers: RowAnswers, model_scores: list[float] | None, further: Mapping[str, list[float]]
    ) -> list[RewardResult]:
        read: list[dict[str, Any]] = [{}] * len(answers.rows)
        if model_scores is not None:
            read = [{RM_SCORE: score} for score in model_scores]
        if further:
            scores_of_rows = (dict(zip(further, row, strict=True)) for row in zip(*further.values(), strict=True))
            read = [{**row, RM_SCORES: named} for row, named in zip(read, scores_of_rows, strict=True)]
        assert self.runner is not None, "this debug mode scores nothing"
        conversations: Sequence[Conversation | None] = answers.conversations or [None] * len(answers.rows)
        answered = zip(answers.rows, answers.texts, answers.generation.response_ids, read, conversations, strict=True)
        # A conversation that failed has no environment, which the function may read, and gets no score anyway.
        failed = [each is not None and each.ended == FAILED for each in conversations]
        rows = [reward_row(self.runner, *answer) for answer, skip in zip(answered, failed, strict=True) if not skip]
        found = iter(self.runner.score(rows, answers.begun) if rows else ())
        results = [RewardResult(math.nan, failed=True) if skip else next(found) for skip in failed]
        return [replace(result, extra={**score, **result.extra}) for result, score in zip(results, read, strict=True)]


def reward_row(
    runner: RewardRunner,
    row: PromptRow,
    text: str,
    response_ids: list[int],
    read: Mapping[str, Any] = MappingProxyType({}),
    conversation: Conversation | None = None,
) -> RewardRow:
    # Convert an answer to the input of the reward function. ``read``: scores of reward models that the function reads.
    extra: dict[str, Any] = {**row.extra_info, **read}
    if conversation is not None:
        extra |= conversation.for_rewards()
    if runner.custom.pass_rollout:
        extra |= {"prompt": row.messages or row.text, "completion_ids": response_ids, "trainer_state": runner.trainer_state}
    return RewardRow(row.data_source, text, row.ground_truth, extra, row.address)


# Score finished answers while others are still being generated.


POLL_SECONDS = 0.02
"""Longest time between two checks for newly finished answers."""


@dataclass(frozen=True)
class ScoringFollower:
    """Scores answers in a thread while the engines generate others.

    The score of a row does not depend on the other rows, so only the timing changes. An error is kept, and raised later when the
    caller collects the scores.

    Attributes:
        tokenizer: Decodes the responses. The thread may use it, because the main thread only waits for the engines meanwhile.
        folder: A folder that the driver and all workers can access.
    """

    runner: RewardRunner
    tokenizer: Any
    folder: Path

    @classmethod
    def of(cls, scorer: Scorer, tokenizer: Any, folder: Path) -> Self | None:
        # Scoring cannot begin early if a function is called once for all rows, or if a reward model needs the engine's device.
        if not isinstance(scorer, Rewarder) or scorer.runner is None or scorer.model is not None or scorer.unscored:
            return None
        return None if MANAGERS[scorer.runner.manager].whole_batch else cls(scorer.runner, tokenizer, folder)

    @contextmanager
    def following(self, rows: Sequence[PromptRow], starts: Sequence[int]) -> Iterator[tuple[list[str], Round]]:
        """Score in a background thread while the ``with`` block generates. The thread ends with the block, even after an error.

        Yield a file for each engine, into which the engine writes finished rows, and the scoring round.

        ``rows``: the dataset row of each answer. ``starts``: number of the first answer of each engine.
        """
        files = [FinishedRows(self.folder / f".finished_{engine}") for engine in range(len(starts))]
        round_, over = self.runner.begin(len(rows)), threading.Event()

        def work() -> None:
            try:
                while not over.is_set():
                    for start, file in zip(starts, files, strict=True):
                        if ids := file.read():
                            texts = self.tokenizer.batch_decode(list(ids.values()), skip_special_tokens=True)
                            finished = zip(ids, texts, ids.values(), strict=True)
                            round_.add(
                                {start + at: reward_row(self.runner, rows[start + at], *answer) for at, *answer in finished}
                            )
                    round_.turn(POLL_SECONDS)
            except BaseException as error:  # noqa: BLE001 - raised again by Round.finish, where the rows are scored
                round_.error = error

        thread = threading.Thread(target=work, name="reward-follower", daemon=True)
        try:
            self._remove(files)
            thread.start()
            yield [str(file.path) for file in files], round_
        except BaseException:
            over.set()
            thread.join()
            self.runner.close()
            raise
        finally:
            over.set()
            thread.join()
            self._remove(files)

    def _remove(self, files: Sequence[FinishedRows]) -> None:
        for file in files:
            file.path.unlink(missing_ok=True)


# The reward model's score of each answer, computed by the workers.


BUDGET_KEY = "reward_model.forward_max_token_len_per_gpu"
END = 0
"""A placeholder token after each conversation. The pass computes a state before each response token, so the placeholder makes it
compute the state of the last real token. The model does not read the placeholder."""


@dataclass(frozen=True)
class ModelScores:
    """Scores answers with the reward model, spread over the ranks.

    Attributes:
        actor: The ``actor`` settings, which decide whether the rows of a group compute their prompt only once.
    """

    workers: TimedGroup
    conversations: Conversations
    budget: Budget
    actor: Actor
    balance: bool
    further: Mapping[str, Conversations] = field(default_factory=dict)
    """Name of each further reward model -> its conversations, in the order of the workers' models."""

    def further_scores(self, answers: RowAnswers) -> dict[str, list[float]]:
        return {
            name: self._begin(answers, conversations, (place,)).result()
            for place, (name, conversations) in enumerate(self.further.items(), start=1)
        }

    def begin(self, answers: RowAnswers) -> Pending[list[float]]:
        """Begin to score each answer, see :meth:`TimedGroup.begin`. The phase is ``reward``.

        Reading the result raises RewardError if a score is not finite. The message names the row.

        Raises:
            ConfigError: A single conversation exceeds the limit of a micro-batch.
        """
        return self._begin(answers, self.conversations)

    def _begin(self, answers: RowAnswers, conversations: Conversations, options: tuple[int, ...] = ()) -> Pending[list[float]]:
        if not answers.rows:
            return Pending(list)
        batch = self._batch(conversations, answers)
        names = [row.address for row in answers.rows]
        reward_pass = ForwardPass(self.workers, "reward", Worker.reward_scores, self.budget, self.balance, options)

        def in_order(parts: Sequence[tuple[list[int], torch.Tensor]]) -> list[float]:
            scores = torch.empty(batch.num_rows)
            for share, part in parts:
                scores[share] = part
            found: list[float] = scores.tolist()
            for row, score in zip(answers.rows, found, strict=True):
                if not math.isfinite(score):
                    raise RewardError(f"{row.address}: the reward model gave the score {score}. Check its weights and its dtype.")
            return found

        return reward_pass.begin(batch, names).then(in_order)

    def _batch(self, conversations: Conversations, answers: RowAnswers) -> RolloutBatch:
        before, after, groups = conversations.of(answers)
        return rollout_batch(
            prompts=Ragged.from_rows(before, torch.int64),
            responses=Ragged.from_rows([[*row, END] for row in after], torch.int64),
            group=torch.tensor(groups, dtype=torch.int64),
            actor=self.actor,
        )


def reward_budget(reward_model: RewardModel) -> Budget:
    rows, tokens = reward_model.micro_batch_size_per_gpu, reward_model.forward_max_token_len_per_gpu
    ranks = reward_model.model.fsdp_config.sequence_ranks
    budget = Budget(bool(reward_model.use_dynamic_bsz), tokens or 0, rows, BUDGET_KEY, ranks=ranks)
    return budget.learning(reward_model.adaptive_token_budget)


# The input of a reward model: the policy's token ids, or text rendered with the reward model's own chat template.


logger = logging.getLogger(__name__)

Ids = list[int]


@dataclass(frozen=True)
class Conversations:
    """Turns answers into the token ids of conversations.

    Attributes:
        tokenizer: The reward model's own tokenizer; None = the model reads the policy's token ids.
        max_length: Most tokens of a conversation, whose end is cut off beyond them; None = no limit.
    """

    tokenizer: Any
    max_length: int | None

    def of(self, answers: RowAnswers) -> tuple[list[Ids], list[Ids], list[int]]:
        """Return three lists with one entry per row: the shared token ids, the remaining token ids, and the group number.

        Neighbouring rows with the same prompt form a group. Their conversations share the ids up to the point where they
        diverge, and the shared ids are computed once.

        Raises:
            DataError: A conversation cannot be rendered.
        """
        # Neighbouring rows with the same prompt get the same number.
        starts = [index == 0 or answers.rows[index - 1] is not row for index, row in enumerate(answers.rows)]
        groups = [number - 1 for number in accumulate(map(int, starts))]
        if self.tokenizer is None:
            pairs = zip(answers.prompt_ids, answers.generation.response_ids, strict=True)
            whole = self._cut([[*prompt, *response] for prompt, response in pairs])
        else:
            rendered = [self._rendered(row, text) for row, text in zip(answers.rows, answers.texts, strict=True)]
            plain, is_text = [spans for _, spans in rendered], [row.is_text for row in answers.rows]
            whole = self._cut(tokenize(self.tokenizer, [text for text, _ in rendered], plain, is_text))
        members: dict[int, list[Ids]] = {}
        for group, ids in zip(groups, whole, strict=True):
            members.setdefault(group, []).append(ids)
        shared = {group: max(1, _shared(rows)) for group, rows in members.items()}
        before = [ids[: shared[group]] for group, ids in zip(groups, whole, strict=True)]
        after = [ids[shared[group] :] for group, ids in zip(groups, whole, strict=True)]
        return before, after, groups

    def _cut(self, rows: list[Ids]) -> list[Ids]:
        longest = self.max_length
        if longest is None:
            return rows
        num_cut = sum(len(ids) > longest for ids in rows)
        if num_cut:
            logger.warning(
                "reward_model.max_length=%d: the end of %d of %d conversations is cut off", longest, num_cut, len(rows)
            )
        return [ids[:longest] for ids in rows]

    def _rendered(self, row: PromptRow, answer: str) -> tuple[str, Spans]:
        """Return a conversation as text, and the spans in which special tokens are plain text: those in messages and answers.

        If the prompt is a string and not a list of messages, the answer is appended to it. The prompt is encoded as for the
        policy.
        """
        special = special_tokens_of(self.tokenizer)
        if row.messages is None:
            return row.text + answer, (*row.plain, *moved(special.find(answer), len(row.text)))
        messages = [*row.messages, {"role": "assistant", "content": answer}]
        try:
            return render(special, self.tokenizer, messages, special.count(messages) > 0, {"add_generation_prompt": False})
        except RENDER_ERRORS as problem:
            raise DataError(
                f"{row.address}: the chat template of the reward model cannot render this conversation ({problem}). "
                "Correct the row, or use another reward model."
            ) from problem

    def check(self, rows: PromptRows | Sequence[PromptRow]) -> None:
        """Check that the tokenizer can render the conversations of some rows.

        Raises:
            ConfigError: The rows have messages, and the tokenizer has no chat template.
        """
        if self.tokenizer is None or self.tokenizer.chat_template is not None:
            return
        if any(rows[index].messages is not None for index in range(len(rows))):
            raise ConfigError(
                f"{REWARD_KEY}.input_tokenizer: the reward model's tokenizer has no chat template, and the prompts are messages. "
                f"Add a template to its folder, or set {REWARD_KEY}.input_tokenizer=null if it shares the policy's tokenizer."
            )


def _shared(rows: Sequence[Ids]) -> int:
    # The length of the common prefix of all rows.
    first, last = min(rows), max(rows)  # all rows lie between these two in list order, so they share the prefix of these two
    return next((place for place, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), len(first))
