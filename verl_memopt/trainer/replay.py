"""Replay: the prompts, responses and scores of a step come from a dump and not from the engine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verl_memopt.algorithms.records import SFT
from verl_memopt.config.schema import Settings
from verl_memopt.data.dataset import PromptRow
from verl_memopt.data.encoder import tokenizer_digests
from verl_memopt.data.prompts import StepPrompts
from verl_memopt.errors import DataError
from verl_memopt.observe.samples import ReadSample, dumped_steps, read_samples
from verl_memopt.rewards.score import RewardResult
from verl_memopt.rollout.engine import Generation
from verl_memopt.trainer.rollouts import Answers

ROLLOUTS = "rollouts"
"""Folder inside the run's that holds a dump where no key names one."""


class NoPrompts:
    """Stands in for the prompts of a run whose rows come from a dump alone."""

    epoch = 0

    def give_back(self) -> None:
        """Do nothing: an abandoned step is read again."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the number of the step says which rows follow."""
        return {}

    def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Replayed:
    """A step of a dump.

    Attributes:
        prompts: The prompts, each once, with the ids of all their samples.
        answers: The responses.
        results: The score of each response; None for a response without one.
    """

    prompts: StepPrompts
    answers: Answers
    results: list[RewardResult] | None


@dataclass(frozen=True)
class Replay:
    """Reads the steps of a dump.

    Attributes:
        folder: The dump.
        samples: ``rollout.n``, responses to each prompt.
        num_prompts: Prompts of a step; None for any number.
        tokenizer: Hash of the run's tokenizer, as :func:`tokenizer_digest` gives it.
        num_tokens: Token ids are below it.
        max_prompt: Limit of a prompt in tokens.
        max_response: Limit of a response in tokens.
        scored: Each response needs a score.
        with_log_probs: Each response needs the engine's log-probs.
    """

    folder: Path
    samples: int
    num_prompts: int | None
    tokenizer: str
    num_tokens: int
    max_prompt: int
    max_response: int
    scored: bool
    with_log_probs: bool

    def last_step(self, first: int) -> int:
        """Return the last step of the dump.

        Raises:
            DataError: The dump has no such step.
        """
        steps = [step for step in dumped_steps(self.folder) if step >= first]
        if not steps:
            raise DataError(
                f"{self.folder}: there is no dump of step {first} or later. Set actor_rollout_ref.rollout.skip_dump_dir to a "
                "folder that trainer.rollout_data_dir or debug=rollout_only has written."
            )
        return steps[-1]

    def read(self, step: int) -> Replayed:
        """Return a step of the dump.

        Raises:
            DataError: The file is missing, or a row cannot be replayed. The message names file and row.
        """
        read = read_samples(self.folder, step, self.tokenizer, self.num_tokens)
        self._check(read)
        samples = [each.sample for each in read]
        firsts = [_prompt_row(each) for each in read[:: self.samples]]
        rows = [firsts[index // self.samples] for index in range(len(read))]
        prompt_ids = [list(read[index - index % self.samples].sample.prompt_ids) for index in range(len(read))]
        log_probs = [sample.rollout_log_probs for sample in samples]
        generation = Generation(
            response_ids=[list(sample.response_ids) for sample in samples],
            log_probs=None if None in log_probs else [list(each or ()) for each in log_probs],
            finish_reasons=[sample.finish_reason for sample in samples],
        )
        answers = Answers(rows, prompt_ids, generation, [sample.output for sample in samples])
        results = [
            RewardResult(sample.score, dict(sample.extra), sample.failed) for sample in samples if sample.score is not None
        ]
        prompts = StepPrompts(firsts, prompt_ids, 0, 0)
        return Replayed(prompts, answers, results if len(results) == len(samples) else None)

    def _check(self, read: Sequence[ReadSample]) -> None:
        """Refuse rows that do not fit the run's settings."""
        for number, each in enumerate(read):
            sample, first = each.sample, read[number // self.samples * self.samples].sample
            if (sample.uid, sample.prompt_ids) != (first.uid, first.prompt_ids):
                raise DataError(
                    f"{each.address}: it answers another prompt than the row {number % self.samples} before it, but "
                    f"actor_rollout_ref.rollout.n={self.samples}. Set rollout.n to that of the dump."
                )
            for name, ids, limit in (
                ("prompt", sample.prompt_ids, self.max_prompt),
                ("response", sample.response_ids, self.max_response),
            ):
                if len(ids) > limit:
                    key = f"data.max_{name}_length"
                    raise DataError(f"{each.address}: the {name} has {len(ids)} tokens, and {key}={limit}. Raise {key}.")
            if self.scored and sample.score is None:
                raise DataError(f"{each.address}: it has no score. Score the dump first with debug=score_only.")
            if self.with_log_probs and sample.rollout_log_probs is None:
                raise DataError(
                    f"{each.address}: it has no log-probs of the engine, which algorithm.rollout_correction reads. Write the "
                    "dump with actor_rollout_ref.rollout.calculate_log_probs=true."
                )
        if len(read) % self.samples:
            raise DataError(
                f"{read[-1].address}: the {len(read)} rows of the file are no groups of {self.samples}. Set "
                "actor_rollout_ref.rollout.n to that of the dump."
            )
        if self.num_prompts is not None and len(read) != self.num_prompts * self.samples:
            raise DataError(
                f"{read[-1].address}: the file ends after {len(read) // self.samples} prompts, and "
                f"data.train_batch_size={self.num_prompts}. Set data.train_batch_size to that of the dump."
            )


def check_same_prompts(replayed: Replayed, prompts: StepPrompts) -> None:
    """Check that a dump answers the prompts of the present step.

    Raises:
        DataError: A row answers another prompt.
    """
    dumped, own = replayed.answers.prompt_ids, prompts.prompt_ids
    same = [one == other for one, other in zip(dumped, own, strict=False)]
    first = same.index(False) if False in same else len(same)
    if first < max(len(dumped), len(own)):
        place = replayed.answers.rows[first].address if first < len(dumped) else "the dump"
        raise DataError(
            f"{place}: it does not answer row {first + 1} of this step. Replay the dump with the data, seed and batch size of "
            "the run that wrote it, or with debug=train_only, which takes the prompts from the dump."
        )


def dump_folder(settings: Settings) -> Path:
    """Return the folder of the dump that a run replays, or that ``debug=rollout_only`` writes."""
    trainer = settings.trainer
    folder = settings.actor_rollout_ref.rollout.skip_dump_dir or trainer.rollout_data_dir
    return Path(str(trainer.default_local_dir)).expanduser() / ROLLOUTS if folder is None else Path(folder).expanduser()


def tokenizer_digest(tokenizer: Any) -> str:
    """Return a hash of what decides the ids of a text."""
    return hashlib.sha256(json.dumps(tokenizer_digests(tokenizer), sort_keys=True).encode()).hexdigest()[:16]


def build_replay(settings: Settings, tokenizer: Any, num_tokens: int, scored: bool, updates: bool) -> Replay:
    """Return what reads the dump that ``rollout.skip_rollout`` asks for.

    Args:
        settings: Of the run.
        tokenizer: Tokenizer of the run.
        num_tokens: Rows of the embedding.
        scored: Each response needs a score.
        updates: The policy learns from the rows, so a step needs ``data.train_batch_size`` prompts.
    """
    rollout, correction = settings.actor_rollout_ref.rollout, settings.algorithm.rollout_correction
    return Replay(
        folder=dump_folder(settings),
        samples=rollout.n,
        num_prompts=settings.data.train_batch_size if updates else None,
        tokenizer=tokenizer_digest(tokenizer),
        num_tokens=num_tokens,
        max_prompt=settings.data.max_prompt_length,
        max_response=settings.data.max_response_length,
        scored=scored,
        with_log_probs=correction.bypass_mode or correction.rollout_is is not None or correction.rollout_rs is not None,
    )


def _prompt_row(read: ReadSample) -> PromptRow:
    """Return the dataset row of a sample. Its index is the sample's uid where that is a number."""
    sample = read.sample
    return PromptRow(
        index=int(sample.uid) if sample.uid.isdecimal() else 0,
        text=sample.input,
        data_source=sample.data_source,
        ground_truth=sample.gts,
        extra_info=dict(sample.extra_info),
        address=read.address,
        messages=sample.messages,
    )


# Forged steps: synthetic rows of the largest lengths, so that a run meets its highest memory without any data.
#
# The token ids have exactly those lengths. The texts, which a model that scores reads, have about as many tokens.


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
