"""The lessons of a supervised warm-up: a teacher's prompts with the explanations that it learns to write after them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from verl_memopt.config import schema
from verl_memopt.data.batch import RolloutBatch
from verl_memopt.data.dataset import chosen_rows
from verl_memopt.data.ragged import Ragged
from verl_memopt.data.rlt.format import FORMATS
from verl_memopt.data.rlt.lessons import Lesson, teacher_lesson
from verl_memopt.data.rlt.prompts import RltPrompts
from verl_memopt.data.rlt.records import read_records
from verl_memopt.data.rlt.source import read_source
from verl_memopt.errors import DataError

logger = logging.getLogger(__name__)

NO_TRACE = "there is no reasoning trace to learn from"
PROMPT_TOO_LONG = "the prompt is over data.max_prompt_length"
ANSWER_TOO_LONG = "the explanation is over data.max_response_length"


@dataclass(frozen=True)
class LessonSet:
    """Lessons, each with a name for errors, and why other rows gave none."""

    lessons: list[Lesson]
    names: list[str]
    """File and row of each lesson."""
    rejected: dict[str, int]
    """Reason -> number of rows."""

    def __len__(self) -> int:
        """Return the number of lessons."""
        return len(self.lessons)

    def __getitem__(self, index: int) -> Lesson:
        """Return the lesson at ``index``."""
        return self.lessons[index]


def read_lessons(files: Any, data: schema.Data, tokenizer: Any, split: str, tag_format: str) -> LessonSet:
    """Return the teacher's lesson of each row that has a reasoning trace.

    Args:
        files: As :func:`read_source` takes them: paths, or ``hub:`` and the id of a dataset.
        data: The ``data`` section of the settings.
        tokenizer: The teacher's tokenizer, with a chat template.
        split: ``train`` or ``val``. It selects ``{split}_max_samples`` and the keys that errors name.
        tag_format: A key of ``FORMATS``.

    Raises:
        DataError: A file is wrong, no row is left, or a lesson is too long and ``data.filter_overlong_prompts`` is false.
    """
    key = f"data.{split}_files"
    records = read_records(read_source(files, split, key), FORMATS[tag_format])
    prompts = RltPrompts(tokenizer, FORMATS[tag_format], data.apply_chat_template_kwargs, data.allow_special_tokens)
    rejected = dict(records.rejected)
    lessons, names = [], []
    for record in chosen_rows(records.rows, data, split):
        reason = NO_TRACE
        if record.reasoning_trace is not None:
            lesson = teacher_lesson(prompts, record)
            reason = _why_too_long(lesson, data)
            if reason and not data.filter_overlong_prompts:
                raise DataError(
                    f"{record.address}: {reason} ({len(lesson.prompt)} and {len(lesson.answer)} tokens). Raise the limit, or set "
                    "data.filter_overlong_prompts=true to leave such rows out."
                )
            if not reason:
                lessons.append(lesson)
                names.append(record.address)
                continue
        rejected[reason] = rejected.get(reason, 0) + 1
    if not lessons:
        reasons = ", ".join(f"{reason} ({count})" for reason, count in rejected.items())
        raise DataError(f"{key}: no row can be learned from: {reasons}. Name a file with the column reasoning_trace.")
    for reason, count in rejected.items():
        logger.warning("%s: left out %d rows: %s", key, count, reason)
    return LessonSet(lessons, names, rejected)


def lesson_batch(lessons: Sequence[Lesson]) -> RolloutBatch:
    """Return lessons as prompts and responses. Every response token has the advantage 1.

    With the loss -A * log-prob (``loss_mode=gpg``) and the mean over tokens that is the cross entropy over the answers.
    """
    answers = Ragged.from_rows([lesson.answer for lesson in lessons], torch.int64)
    number = torch.arange(len(lessons))
    return RolloutBatch(
        prompts=Ragged.from_rows([lesson.prompt for lesson in lessons], torch.int64),
        responses=answers,
        group=number,
        prompt_group=number,
        advantages=torch.ones(answers.flat.shape[0]),
        batch_size=[],
    )


def _why_too_long(lesson: Lesson, data: schema.Data) -> str:
    if len(lesson.prompt) > data.max_prompt_length:
        return PROMPT_TOO_LONG
    return ANSWER_TOO_LONG if len(lesson.answer) > data.max_response_length else ""
