"""Forged steps: synthetic rows of the largest lengths, so that a run meets its highest memory without any data.

The token ids have exactly those lengths. The texts, which a model that scores reads, have about as many tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_memopt.algorithms.records import SFT
from verl_memopt.config.schema import Settings
from verl_memopt.data.dataset import PromptRow
from verl_memopt.data.prefetcher import StepPrompts
from verl_memopt.rewards.rows import RewardResult
from verl_memopt.rollout.engine import Generation
from verl_memopt.trainer.generation import Answers
from verl_memopt.trainer.replay import Replayed

SOURCE = "forged"
WORD = " the"


@dataclass(frozen=True)
class Forge:
    """Makes the rows of a step. They depend on the seed and the step alone.

    Attributes:
        prompts: ``data.train_batch_size``, prompts of a step.
        samples: ``rollout.n``, responses to each prompt.
        prompt_tokens: Tokens of each prompt, ``data.max_prompt_length``.
        response_tokens: Tokens of each response, ``data.max_response_length``.
        num_tokens: Token ids are below it.
        seed: Of the run.
        question: The question of every prompt, for a recipe that reads it.
        solution: Its solution.
        answer: The text of every response, for a reward model with a tokenizer of its own.
        log_probs: Forge log-probs of the engine as well.
        scored: The forged scores are the rewards. False = a reward model scores the rows.
    """

    prompts: int
    samples: int
    prompt_tokens: int
    response_tokens: int
    num_tokens: int
    seed: int
    question: str
    solution: str
    answer: str
    log_probs: bool
    scored: bool = True

    def read(self, step: int) -> Replayed:
        """Return the rows of a step. Their token ids are random, and their scores lie between 0 and 1."""
        random = np.random.default_rng([self.seed, step])
        num_rows = self.prompts * self.samples
        prompt_rows, prompt_ids = [], []
        for index in range(self.prompts):
            question = f"{index}{self.question}"
            info = {"question": question, "solution": self.solution, "reasoning_trace": None}
            row = PromptRow(index, question, SOURCE, self.solution, info, f"forged prompt {index + 1}")
            prompt_rows += [row] * self.samples
            prompt_ids += [random.integers(self.num_tokens, size=self.prompt_tokens).tolist()] * self.samples
        response_ids = random.integers(self.num_tokens, size=(num_rows, self.response_tokens)).tolist()
        uniform = [-float(np.log(self.num_tokens))] * self.response_tokens
        generation = Generation(response_ids, [uniform] * num_rows if self.log_probs else None, ["length"] * num_rows)
        results = [RewardResult(score) for score in random.random(num_rows).tolist()]
        answers = Answers(prompt_rows, prompt_ids, generation, [self.answer] * num_rows)
        return Replayed(StepPrompts(prompt_rows[:: self.samples], prompt_ids, 0, 0), answers, results)


def text_of(tokenizer: Any, tokens: int) -> str:
    """Return a text of about so many tokens, and at least one word."""
    per_word = len(tokenizer(WORD * 8, add_special_tokens=False)["input_ids"]) / 8
    return WORD * max(1, int(tokens / per_word))


def build_forge(settings: Settings, tokenizer: Any, num_tokens: int) -> Forge:
    """Return what makes the rows of ``debug.mode=forge``.

    Args:
        settings: Of the run, with a concrete seed.
        tokenizer: Tokenizer of the run.
        num_tokens: Rows of the embedding.
    """
    data, rollout = settings.data, settings.actor_rollout_ref.rollout
    assert data.seed is not None
    return Forge(
        prompts=data.train_batch_size,
        samples=rollout.n,
        prompt_tokens=data.max_prompt_length,
        response_tokens=data.max_response_length,
        num_tokens=num_tokens,
        seed=data.seed,
        question=text_of(tokenizer, data.max_prompt_length // 2),
        solution=text_of(tokenizer, data.max_prompt_length // 4),
        answer=text_of(tokenizer, data.max_response_length),
        log_probs=rollout.calculate_log_probs,
        scored=not settings.reward_model.enable or settings.algorithm.adv_estimator == SFT,
    )
