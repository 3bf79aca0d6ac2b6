"""The dataset of an RLT run: teacher prompts, each with the question and the solution that the reward needs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from verl_memopt.config import schema
from verl_memopt.data.dataset import PromptRow, chosen_rows
from verl_memopt.data.encoder import overlong, tokenize
from verl_memopt.data.rlt.format import FORMATS
from verl_memopt.data.rlt.prompts import RltPrompts
from verl_memopt.data.rlt.records import RltRecord, read_records
from verl_memopt.data.rlt.source import read_source
from verl_memopt.errors import DataError

logger = logging.getLogger(__name__)

DATA_SOURCE = "rlt"
TOO_LONG = "the teacher's prompt is over data.max_prompt_length"


class RltDataset:
    """Teacher prompts that end after the forced prefix. Supports ``len``, indexing and iteration.

    A row's ``ground_truth`` is the solution, and its ``extra_info`` holds ``question``, ``solution`` and ``reasoning_trace``.

    Args:
        files: As :func:`read_source` takes them: paths, or ``hub:`` and the id of a dataset.
        data: The ``data`` section of the settings.
        tokenizer: The teacher's tokenizer, with a chat template.
        split: ``train`` or ``val``. It selects ``{split}_max_samples`` and the keys that errors name.
        tag_format: A key of ``FORMATS``.

    Raises:
        DataError: A file is wrong, every row is rejected, a prompt is too long, or ``data.truncation`` would cut prompts.
    """

    def __init__(self, files: Any, data: schema.Data, tokenizer: Any, split: str, tag_format: str = "stratos") -> None:
        """Read, check and render all rows."""
        if data.truncation != "error":
            raise DataError(
                f"data.truncation={data.truncation}: a prompt of RLT ends with the solution and a tag, and cannot be cut. Set "
                "data.truncation=error, and data.filter_overlong_prompts=true to drop long prompts."
            )
        rlt_format = FORMATS[tag_format]
        records = read_records(read_source(files, split, f"data.{split}_files"), rlt_format)
        self.rejected = dict(records.rejected)
        """Reason -> number of rows that were rejected."""
        prompts = RltPrompts(tokenizer, rlt_format, data.apply_chat_template_kwargs, data.allow_special_tokens)
        rows = [_as_row(prompts, record) for record in chosen_rows(records.rows, data, split)]
        self._rows = self._within_limit(rows, data, tokenizer)

    def __len__(self) -> int:
        """Return the number of prompts."""
        return len(self._rows)

    def __getitem__(self, index: int) -> PromptRow:
        """Return the prompt at ``index``."""
        return self._rows[index]

    def __iter__(self) -> Iterator[PromptRow]:
        """Iterate over the prompts in order."""
        return iter(self._rows)

    def _within_limit(self, rows: list[PromptRow], data: schema.Data, tokenizer: Any) -> list[PromptRow]:
        """Return the numbered rows within ``max_prompt_length``. Longer ones are dropped and counted, or refused."""
        lengths = [len(ids) for ids in tokenize(tokenizer, [row.text for row in rows], [row.plain for row in rows])]
        too_long = [place for place, length in enumerate(lengths) if length > data.max_prompt_length]
        if too_long and (len(too_long) == len(rows) or not data.filter_overlong_prompts):
            first = too_long[0]
            raise overlong(rows[first].address, lengths[first], data.max_prompt_length, others=len(too_long) - 1)
        if too_long:
            self.rejected[TOO_LONG] = len(too_long)
            logger.warning("rejected %d of %d rows: %s=%d", len(too_long), len(rows), TOO_LONG, data.max_prompt_length)
        dropped = set(too_long)
        kept = [row for place, row in enumerate(rows) if place not in dropped]
        return [replace(row, index=index) for index, row in enumerate(kept)]


def _as_row(prompts: RltPrompts, record: RltRecord) -> PromptRow:
    try:
        text, plain = prompts.teacher(record.question, record.solution)
    except DataError as problem:
        raise DataError(f"{record.address}: {problem}") from problem
    return PromptRow(
        index=-1,
        text=text,
        data_source=DATA_SOURCE,
        ground_truth=record.solution,
        extra_info={"question": record.question, "solution": record.solution, "reasoning_trace": record.reasoning_trace},
        address=record.address,
        plain=plain,
    )
