"""Puts the parts of an RLT run together: its data, its student and its scorer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_memopt.config.schema import Data, RltReward, Settings
from verl_memopt.data.batch import shares_prompts
from verl_memopt.data.dataset import PromptRows
from verl_memopt.data.rlt.dataset import RltDataset
from verl_memopt.data.rlt.format import FORMATS
from verl_memopt.data.rlt.prompts import RltPrompts
from verl_memopt.memory.batching.learned_budget import LearnedBudget
from verl_memopt.models.folder import TOKENIZER_FILES, read_tokenizer
from verl_memopt.models.reward_folder import REWARD_KEY
from verl_memopt.models.student_folder import check_same_shape, find_student
from verl_memopt.rewards.rlt.same_tokenizer import check_same_tokenizer
from verl_memopt.rewards.rlt.status import SKIPPED
from verl_memopt.rewards.rlt.student_rows import StudentEncoder
from verl_memopt.trainer.environment import Environment
from verl_memopt.trainer.passes import budgets
from verl_memopt.trainer.rank_check import RankCheck
from verl_memopt.trainer.rlt_scorer import Explained, RltScorer
from verl_memopt.trainer.timed_group import TimedGroup
from verl_memopt.workers.log_probs import scoring_temperature
from verl_memopt.workers.plan import StudentPlan

logger = logging.getLogger(__name__)


def rlt_datasets(data: Data, settings: Settings, tokenizer: Any) -> tuple[RltDataset, RltDataset | None]:
    """Return the training rows and the held-out rows of an RLT run.

    Args:
        data: Names the files.
        settings: Settings of the run.
        tokenizer: The policy's tokenizer.
    """
    tags = settings.reward_model.rlt.tag_format
    train = RltDataset(data.train_files, data, tokenizer, "train", tags)
    return train, None if data.val_files is None else RltDataset(data.val_files, data, tokenizer, "val", tags)


def student_plan(settings: Settings, environment: Environment) -> StudentPlan | None:
    """Return what the workers build to score explanations; None without a student.

    Args:
        settings: Settings of the run.
        environment: Folders and tokenizer on this machine.

    Raises:
        ConfigError: The student cannot be computed here, its tokenizer is not the policy's, or it cannot take the place of the
            reference.
    """
    reward_model, roles = settings.reward_model, settings.actor_rollout_ref
    if not reward_model.by_student:
        return None
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
    """Return the folder of a student of its own, after checking its model."""
    student, data, roles = settings.reward_model.model, settings.data, settings.actor_rollout_ref
    longest = settings.reward_model.rlt.max_student_len or data.max_prompt_length + data.max_response_length
    return find_student(student, roles.model, environment.tokenizer, longest, roles.actor)


def _check_tokenizer(environment: Environment, folder: Path | None, trusted: bool) -> None:
    """Refuse a student with another tokenizer than the policy's. A folder without one is taken to use the policy's."""
    if folder in (None, environment.folder, environment.tokenizer_folder):
        return
    assert folder is not None
    if any((folder / name).is_file() for name in TOKENIZER_FILES):
        check_same_tokenizer(environment.tokenizer, read_tokenizer(folder, f"{REWARD_KEY}.path", trusted), str(folder))


def student_encoder(settings: Settings, environment: Environment) -> StudentEncoder | None:
    """Return what builds the student's sequences; None without a student.

    Args:
        settings: Settings of the run.
        environment: Tokenizer and end tokens.

    Raises:
        ConfigError: The tokenizer is not byte-level.
        DataError: The chat template cannot render an answer.
    """
    if not settings.reward_model.by_student:
        return None
    padding = environment.tokenizer.pad_token_id
    stops = {*environment.eos_token_ids, *([] if padding is None else [padding])}
    return StudentEncoder(rlt_prompts(settings, environment.tokenizer), settings.reward_model.rlt, stops)


def warn_of_no_room(encoder: StudentEncoder, rlt: RltReward, datasets: Sequence[PromptRows | None]) -> None:
    """Warn of rows whose question and solution alone leave no room under ``max_student_len``. They are never scored.

    Args:
        encoder: Builds the student's sequences.
        rlt: Settings of the reward.
        datasets: The rows of each split.

    Raises:
        ConfigError: There is such a row, and ``overlong`` is ``error``. The message names its file and its place.
    """
    if rlt.max_student_len is None:
        return
    for dataset in datasets:
        rows = [] if dataset is None else [dataset[index] for index in range(len(dataset))]
        empty = Explained.of([row.extra_info for row in rows], [[]] * len(rows), [row.address for row in rows])
        encoded = encoder.encode(empty.questions, empty.solutions, empty.responses, empty.addresses)
        without_room = (encoded.status == SKIPPED).nonzero().flatten().tolist()
        if without_room:
            logger.warning(
                "reward_model.rlt.max_student_len=%d: question and solution of %d of %d rows are longer, so these rows are never "
                "scored; the first is %s", rlt.max_student_len, len(without_room), len(rows), rows[without_room[0]].address,
            )  # fmt: skip


def rlt_prompts(settings: Settings, tokenizer: Any) -> RltPrompts:
    """Return what renders the prompts of teacher and student.

    Args:
        settings: Settings of the run.
        tokenizer: The policy's tokenizer.
    """
    data, rlt_format = settings.data, FORMATS[settings.reward_model.rlt.tag_format]
    return RltPrompts(tokenizer, rlt_format, data.apply_chat_template_kwargs, data.allow_special_tokens)


def build_rlt_scorer(settings: Settings, tokenizer: Any, encoder: StudentEncoder, workers: TimedGroup) -> RltScorer:
    """Return what scores explanations.

    Args:
        settings: Settings of the run.
        tokenizer: The policy's tokenizer.
        encoder: Builds the student's sequences.
        workers: Workers that hold the student.
    """
    rlt, roles, quantization = settings.reward_model.rlt, settings.actor_rollout_ref, settings.reward_model.model.quantization
    check = None if quantization == "none" else RankCheck(rlt, quantization, f"{REWARD_KEY}.quantization")
    adaptive = settings.reward_model.adaptive_token_budget
    return RltScorer(
        workers=workers,
        settings=rlt,
        prompts=rlt_prompts(settings, tokenizer),
        encoder=encoder,
        temperature=scoring_temperature(roles.rollout),
        teacher_budget=budgets(roles)[1],
        shares_prompts=shares_prompts(roles.actor),
        rank_check=check,
        learned=LearnedBudget(rlt.max_tokens_per_micro_batch) if adaptive else None,
    )
