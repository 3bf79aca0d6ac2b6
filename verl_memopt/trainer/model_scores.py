"""The reward model's score of each answer, computed by the workers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from verl_memopt.config.schema import Actor, RewardModel
from verl_memopt.data.batch import RolloutBatch, rollout_batch
from verl_memopt.data.ragged import Ragged
from verl_memopt.errors import RewardError
from verl_memopt.trainer.conversations import Conversations
from verl_memopt.trainer.experience import run_pass
from verl_memopt.trainer.generation import Answers
from verl_memopt.trainer.passes import Budget, learned_budget
from verl_memopt.trainer.timed_group import TimedGroup
from verl_memopt.workers.worker import Worker

BUDGET_KEY = "reward_model.forward_max_token_len_per_gpu"
END = 0
"""The token that follows each conversation. No model sees it: it only asks for the state of the last token."""


@dataclass(frozen=True)
class ModelScores:
    """Scores answers with the reward model, spread over the ranks.

    Attributes:
        workers: Workers that hold the model.
        conversations: Turns answers into what the model reads.
        budget: How a rank's rows are cut into micro-batches.
        actor: The ``actor`` section of the settings, which says whether rows of a group compute their prompt once.
        balance: Even out tokens over the ranks.
    """

    workers: TimedGroup
    conversations: Conversations
    budget: Budget
    actor: Actor
    balance: bool

    def score(self, answers: Answers) -> list[float]:
        """Return the score of each answer. The phase is ``reward``.

        Raises:
            ConfigError: A conversation alone is over the limit of a micro-batch.
            RewardError: A score is not finite. The message names the row.
        """
        num_rows = len(answers.rows)
        if not num_rows:
            return []
        batch = self._batch(answers)
        names = [row.address for row in answers.rows]
        names += names[:1] * (batch.num_rows - num_rows)
        scores = torch.empty(batch.num_rows)
        for share, part in run_pass(self.workers, "reward", Worker.reward_scores, self.budget, self.balance, (), batch, names):
            scores[share] = part
        for row, score in zip(answers.rows, scores[:num_rows].tolist(), strict=True):
            if not math.isfinite(score):
                raise RewardError(f"{row.address}: the reward model gave the score {score}. Check its weights and its dtype.")
        return scores[:num_rows].tolist()

    def _batch(self, answers: Answers) -> RolloutBatch:
        """Return the conversations, and copies of the first so that each rank gets the same number of rows."""
        before, after, groups = self.conversations.of(answers)
        missing = -len(before) % self.workers.world_size
        rows = [*range(len(before)), *[0] * missing]
        return rollout_batch(
            prompts=Ragged.from_rows([before[row] for row in rows], torch.int64),
            responses=Ragged.from_rows([[*after[row], END] for row in rows], torch.int64),
            group=torch.tensor([*groups, *range(len(before), len(rows))], dtype=torch.int64),
            actor=self.actor,
        )


def reward_budget(reward_model: RewardModel) -> Budget:
    """Return the budget of the reward model's pass."""
    rows, tokens = reward_model.micro_batch_size_per_gpu, reward_model.forward_max_token_len_per_gpu or 0
    by_tokens = bool(reward_model.use_dynamic_bsz)
    learned = learned_budget(reward_model.adaptive_token_budget, by_tokens, tokens)
    return Budget(by_tokens, tokens, rows, BUDGET_KEY, learned)
