"""Debug modes of a run: the settings that they change, the folders that they write, and rows from a dump or synthetic rows."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from verl_memopt.agents.loop import Conversation
from verl_memopt.algorithms.records import SFT
from verl_memopt.config.debug_modes import MODES, DebugMode, mode_settings
from verl_memopt.config.keys import replaced, shown, value_at
from verl_memopt.config.schema import Settings
from verl_memopt.data.dataset import PromptRow
from verl_memopt.data.encoder import tokenizer_digests
from verl_memopt.data.prompts import StepPrompts
from verl_memopt.errors import DataError
from verl_memopt.observe.samples import Sample, dumped_steps, read_samples
from verl_memopt.rewards.score import RewardResult
from verl_memopt.rollout.engine import Generation
from verl_memopt.run.environment import Environment
from verl_memopt.trainer.rollouts import RowAnswers

ROLLOUTS = "rollouts"
"""Folder inside the run folder for a dump, if no key names another."""
SEED = 0
"""``data.seed`` in the mode ``deterministic``, if the setting is null."""
VAL_ONLY = "val_only"
"""Folder inside the run folder for the record of a run with ``trainer.val_only``."""

logger = logging.getLogger(__name__)


# The settings and folders of a debug mode.


def mode_of(settings: Settings) -> DebugMode:
    # A supervised run has no engine, and scores nothing.
    mode = MODES[settings.debug.mode]
    is_supervised = settings.algorithm.adv_estimator == SFT
    return replace(mode, has_engine=False, scores=False, supervised=True) if is_supervised else mode


def debug_settings(settings: Settings) -> Settings:
    decided = mode_settings(settings.debug.mode)
    if settings.debug.mode == "deterministic" and settings.data.seed is None:
        decided["data.seed"] = SEED
        if settings.actor_rollout_ref.rollout.seed is None:
            decided["actor_rollout_ref.rollout.seed"] = SEED
    mode, trainer = mode_of(settings), settings.trainer
    if mode.default_steps is not None and trainer.total_training_steps is None:
        decided["trainer.total_training_steps"] = mode.default_steps
    changed = {key: value for key, value in decided.items() if value_at(settings, key) != value}
    if not changed:
        return settings
    logger.info(
        "debug.mode=%s sets %s", settings.debug.mode, ", ".join(f"{key}={shown(value)}" for key, value in changed.items())
    )
    return replaced(settings, changed)


def record_folder(settings: Settings, run_dir: Path) -> Path:
    if settings.trainer.val_only:
        return run_dir / VAL_ONLY
    return run_dir if mode_of(settings).is_whole else run_dir / settings.debug.mode


def written_dump(settings: Settings, record: Path) -> Path | None:
    # The folder of the dump that the run writes; None = it writes none. It is never the dump that the run replays.
    mode, folder = settings.debug.mode, settings.trainer.rollout_data_dir
    if mode == "rollout_only":
        return dump_folder(settings)
    own = None if folder is None else Path(folder).expanduser()
    if settings.actor_rollout_ref.rollout.skip_rollout and own in (None, dump_folder(settings)):
        return record / ROLLOUTS if mode == "score_only" else None
    return own


def replay_of(settings: Settings, environment: Environment) -> Replay | Forge | None:
    if settings.debug.mode == "forge":
        return Forge(settings, environment.tokenizer, environment.embedding_rows)
    if not settings.actor_rollout_ref.rollout.skip_rollout:
        return None
    return Replay(settings, tokenizer_digest(environment.tokenizer), environment.embedding_rows)


def replayed_steps(settings: Settings, environment: Environment, done: int) -> int:
    """Return the last step of a run without data: ``trainer.total_training_steps``, at most the last step of the dump.

    Raises:
        DataError: The dump has no step after step ``done``, or its next step cannot be replayed.
    """
    steps, replay = settings.trainer.total_training_steps, replay_of(settings, environment)
    if isinstance(replay, Replay):
        last = replay.last_step(done + 1)
        replay.read(done + 1)  # report a dump that does not fit before a worker starts
        return last if steps is None else min(last, steps)
    assert steps is not None, "a mode without a dump has a default number of steps"
    return done + steps


# Replay.


class NoPrompts:
    epoch = 0

    def give_back(self) -> None:
        """Do nothing, because an abandoned step is read again by its number."""

    def state_dict(self) -> dict[str, Any]:
        # The step number determines which rows a step uses, so there is no position to save.
        return {}

    def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Replayed:
    """A step of a dump.

    Attributes:
        prompts: Each prompt once, with the prompt ids of all its samples.
        answers: The responses.
        results: The score of each response; None = some responses have no score.
    """

    prompts: StepPrompts
    answers: RowAnswers
    results: list[RewardResult] | None


@dataclass(frozen=True)
class Replay:
    """Reads the steps of a dump.

    Attributes:
        settings: Settings of the run, with which each step must agree.
        tokenizer: Hash of the run's tokenizer, see :func:`tokenizer_digest`.
        num_tokens: Token ids must be below this number.
    """

    settings: Settings
    tokenizer: str
    num_tokens: int

    @property
    def folder(self) -> Path:
        return dump_folder(self.settings)

    @property
    def samples(self) -> int:
        return self.settings.actor_rollout_ref.rollout.n

    @property
    def scored(self) -> bool:
        return not mode_of(self.settings).scores

    def last_step(self, first: int) -> int:
        """Return the last step of the dump.

        Raises:
            DataError: The dump has no step from ``first`` on.
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
        samples = read_samples(self.folder, step, self.tokenizer, self.num_tokens)
        self._check(samples)
        firsts = [_prompt_row(sample) for sample in samples[:: self.samples]]
        rows = [firsts[index // self.samples] for index in range(len(samples))]
        prompt_ids = [list(samples[index - index % self.samples].prompt_ids) for index in range(len(samples))]
        log_probs = [sample.rollout_log_probs for sample in samples]
        generation = Generation(
            response_ids=[list(sample.response_ids) for sample in samples],
            log_probs=None if None in log_probs else [list(row or ()) for row in log_probs],
            finish_reasons=[sample.finish_reason for sample in samples],
        )
        conversations = [_conversation(sample) for sample in samples if sample.turns is not None]
        if conversations and len(conversations) < len(samples):
            raise DataError(f"{self.folder}: step {step} has conversations and single turns. Write the dump again.")
        texts = [sample.output for sample in samples]
        if conversations:
            prompt_ids = [list(sample.prompt_ids) for sample in samples]
        answers = RowAnswers(rows, prompt_ids, generation, texts, conversations=conversations or None)
        results = [
            RewardResult(sample.score, dict(sample.extra), sample.failed) for sample in samples if sample.score is not None
        ]
        prompts = StepPrompts(firsts, prompt_ids, 0, 0)
        return Replayed(prompts, answers, results if len(results) == len(samples) else None)

    def _check(self, read: Sequence[Sample]) -> None:
        data, correction = self.settings.data, self.settings.algorithm.rollout_correction
        with_log_probs = correction.bypass_mode or correction.rollout_is is not None or correction.rollout_rs is not None
        num_prompts = data.train_batch_size if mode_of(self.settings).updates else len(read) // self.samples
        for number, sample in enumerate(read):
            first = read[number // self.samples * self.samples]
            if (sample.uid, sample.prompt_ids) != (first.uid, first.prompt_ids):
                raise DataError(
                    f"{sample.address}: it answers another prompt than the first row of its group, but "
                    f"actor_rollout_ref.rollout.n={self.samples}. Set rollout.n to the value of the run that wrote the dump."
                )
            for name, ids, limit in (
                ("prompt", sample.prompt_ids, data.max_prompt_length),
                ("response", sample.response_ids, data.max_response_length),
            ):
                if len(ids) > limit:
                    key = f"data.max_{name}_length"
                    raise DataError(f"{sample.address}: the {name} has {len(ids)} tokens, and {key}={limit}. Raise {key}.")
            if self.scored and sample.score is None:
                raise DataError(f"{sample.address}: it has no score. Score the dump first with debug=score_only.")
            if with_log_probs and sample.rollout_log_probs is None:
                raise DataError(
                    f"{sample.address}: it has no log-probs of the engine, but algorithm.rollout_correction needs them. Write "
                    "the dump with actor_rollout_ref.rollout.calculate_log_probs=true."
                )
        if len(read) % self.samples:
            raise DataError(
                f"{read[-1].address}: the {len(read)} rows of the file cannot be split into groups of {self.samples}. Set "
                "actor_rollout_ref.rollout.n to the value of the run that wrote the dump."
            )
        if len(read) != num_prompts * self.samples:
            raise DataError(
                f"{read[-1].address}: the file ends after {len(read) // self.samples} prompts, but "
                f"data.train_batch_size={num_prompts}. Set data.train_batch_size to the value of the run that wrote the dump."
            )


def check_same_prompts(replayed: Replayed, prompts: StepPrompts) -> None:
    """Check that a dump answers the prompts of the current step.

    Raises:
        DataError: A row answers another prompt.
    """
    dumped, own = replayed.answers.prompt_ids, prompts.prompt_ids
    same = [answered == asked for answered, asked in zip(dumped, own, strict=False)]
    first = same.index(False) if False in same else len(same)
    if first < max(len(dumped), len(own)):
        place = replayed.answers.rows[first].address if first < len(dumped) else "the dump"
        raise DataError(
            f"{place}: it does not answer row {first + 1} of this step. Replay the dump with the data, seed and batch size of "
            "the run that wrote it, or with debug=train_only, which takes the prompts from the dump."
        )


def dump_folder(settings: Settings) -> Path:
    # The folder of the dump that a run replays, or that ``debug=rollout_only`` writes.
    trainer = settings.trainer
    folder = settings.actor_rollout_ref.rollout.skip_dump_dir or trainer.rollout_data_dir
    return Path(str(trainer.default_local_dir)).expanduser() / ROLLOUTS if folder is None else Path(folder).expanduser()


def tokenizer_digest(tokenizer: Any) -> str:
    return hashlib.sha256(json.dumps(tokenizer_digests(tokenizer), sort_keys=True).encode()).hexdigest()[:16]


def _conversation(sample: Sample) -> Conversation:
    log_probs = None if sample.rollout_log_probs is None else list(sample.rollout_log_probs)
    return Conversation.recorded(
        sample.turns or (), list(sample.response_ids), log_probs, sample.conversation or [], sample.address
    )


def _prompt_row(sample: Sample) -> PromptRow:
    # The index is the sample's uid, if that is a number.
    return PromptRow(
        index=int(sample.uid) if sample.uid.isdecimal() else 0,
        text=sample.input,
        data_source=sample.data_source,
        ground_truth=sample.gts,
        extra_info=dict(sample.extra_info),
        address=sample.address,
        messages=sample.messages,
    )


# Forged steps: synthetic rows of the largest allowed lengths, so that a run reaches its highest memory without any data.
#
# The lists of token ids have exactly these lengths. The texts, which a scoring model reads, have about as many tokens.


SOURCE = "forged"
WORD = " the"


@dataclass(frozen=True)
class Forge:
    """Makes the synthetic rows of a step of ``debug.mode=forge``. They depend only on the seed and the step.

    Attributes:
        settings: Settings of the run, with a concrete seed.
        tokenizer: Tokenizer of the run. It measures the lengths of the texts.
        num_tokens: Token ids are below this number.
    """

    settings: Settings
    tokenizer: Any
    num_tokens: int

    @property
    def scored(self) -> bool:
        # False = a reward model scores the rows.
        return not self.settings.reward_model.enable or self.settings.algorithm.adv_estimator == SFT

    def read(self, step: int) -> Replayed:
        # Token ids are random, and scores are random numbers between 0 and 1.
        data, rollout = self.settings.data, self.settings.actor_rollout_ref.rollout
        assert data.seed is not None
        random = np.random.default_rng([data.seed, step])
        num_rows = data.train_batch_size * rollout.n
        # Texts for a recipe that reads them, and for a reward model with its own tokenizer.
        lengths = data.max_prompt_length // 2, data.max_prompt_length // 4, data.max_response_length
        asked, solution, answer = map(self.text_of, lengths)
        prompt_rows, prompt_ids = [], []
        for index in range(data.train_batch_size):
            question = f"{index}{asked}"
            info = {"question": question, "solution": solution, "reasoning_trace": None}
            row = PromptRow(index, question, SOURCE, solution, info, f"forged prompt {index + 1}")
            prompt_rows += [row] * rollout.n
            prompt_ids += [random.integers(self.num_tokens, size=data.max_prompt_length).tolist()] * rollout.n
        response_ids = random.integers(self.num_tokens, size=(num_rows, data.max_response_length)).tolist()
        uniform = [-float(np.log(self.num_tokens))] * data.max_response_length
        generation = Generation(
            response_ids, [uniform] * num_rows if rollout.calculate_log_probs else None, ["length"] * num_rows
        )
        results = [RewardResult(score) for score in random.random(num_rows).tolist()]
        answers = RowAnswers(prompt_rows, prompt_ids, generation, [answer] * num_rows)
        return Replayed(StepPrompts(prompt_rows[:: rollout.n], prompt_ids, 0, 0), answers, results)

    def text_of(self, tokens: int) -> str:
        # A text of about this many tokens, and at least one word.
        per_word = len(self.tokenizer(WORD * 8, add_special_tokens=False)["input_ids"]) / 8
        return WORD * max(1, int(tokens / per_word))
