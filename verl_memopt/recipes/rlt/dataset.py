"""The data of RLT: tags, prompts, checked rows, and the dataset of teacher prompts.

The teacher sees the solution at the start of its own turn and continues with an explanation:
``BEGIN_SOLUTION solution END_SOLUTION delimiter BEGIN_EXPLANATION padding`` | ``explanation END_EXPLANATION``.
The student sees the explanation as its own thought: ``think_prefix BEGIN_THOUGHT padding`` | ``explanation`` |
``END_THOUGHT delimiter BEGIN_SOLUTION`` | ``solution`` | ``END_SOLUTION``.
Tags are plain text.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from verl_memopt.config import schema
from verl_memopt.data.dataset import PromptRow, chosen_rows, within_limit
from verl_memopt.data.encoder import RENDER_ERRORS, Spans, end_of_turn, moved, special_tokens_of
from verl_memopt.data.responses import with_responses
from verl_memopt.data.sources import RawRow, read_source
from verl_memopt.data.template_trial import render_bounded
from verl_memopt.errors import DataError


@dataclass(frozen=True)
class TagPair:
    begin: str
    end: str

    def wrap(self, text: str) -> str:
        return f"{self.begin}{text}{self.end}"

    def unwrap(self, text: str) -> str:
        inner = text.strip()
        if len(inner) >= len(self.begin) + len(self.end) and inner.startswith(self.begin) and inner.endswith(self.end):
            return inner[len(self.begin) : len(inner) - len(self.end)]
        # Text without both tags is returned unchanged.
        return text


@dataclass(frozen=True)
class RltFormat:
    """Tags, paddings and system prompts of both roles."""

    teacher_system: str
    """System prompt of the teacher. Empty = no system message."""
    student_system: str
    """System prompt of the student. Empty = no system message."""
    explanation: TagPair
    """Tags of the teacher's explanation."""
    thought: TagPair
    """Tags of the student's thought."""
    solution: TagPair
    """Tags of the solution, for both roles."""
    padding: str = "\n\n"
    """Text after the begin tag of an explanation and of a thought, which neither model has to write."""
    delimiter: str = "\n\n"
    """Text between two sections."""
    think_prefix: str = ""
    """Text before the student's begin tag."""

    @property
    def tags(self) -> tuple[str, ...]:
        pairs = (self.explanation, self.thought, self.solution)
        return tuple(dict.fromkeys(tag for pair in pairs for tag in (pair.begin, pair.end)))

    @property
    def forced_prefix(self) -> str:
        # The last text of every teacher prompt: the begin tag and the padding.
        return self.explanation.begin + self.padding

    def teacher_prefill(self, solution: str) -> str:
        # The given start of the teacher's turn. The teacher continues it with the explanation.
        return self.solution.wrap(solution) + self.delimiter + self.forced_prefix

    @property
    def student_opening(self) -> str:
        # The start of the student's turn. The explanation follows it.
        return self.think_prefix + self.thought.begin + self.padding

    @property
    def bridge(self) -> str:
        # The text between the explanation and the solution in the student's turn.
        return self.thought.end + self.delimiter + self.solution.begin


def _with_tags(solution: TagPair, explanation: TagPair, thought: TagPair) -> RltFormat:
    teacher = (
        "You are a teacher. You state the solution of a question first, and then explain how to reach it. Your answer has two "
        f"sections. The solution section is exact and complete: {solution.wrap(' the solution ')}. The explanation section leads "
        "a student from the question to the solution, step by step, with a blank line between steps: it says what is known, "
        "tries ideas, checks each step, corrects mistakes, and never relies on having seen the solution: "
        f"{explanation.wrap(' the explanation ')}."
    )
    student = (
        "You think at length before you answer a question. Your answer has two sections. In the thought section you reason step "
        "by step, with a blank line between steps: you say what is known, try ideas, check each step and correct mistakes: "
        f"{thought.wrap(' the thought ')}. In the solution section you give the final solution, exact and complete: "
        f"{solution.wrap(' the solution ')}."
    )
    return RltFormat(teacher, student, explanation, thought, solution)


STRATOS = _with_tags(
    solution=TagPair("<|begin_of_solution|>", "<|end_of_solution|>"),
    explanation=TagPair("<|begin_of_explanation|>", "<|end_of_explanation|>"),
    thought=TagPair("<|begin_of_thought|>", "<|end_of_thought|>"),
)
"""The tags of the dataset Bespoke-Stratos-17k."""
R1 = _with_tags(
    solution=TagPair("<solution>", "</solution>"),
    explanation=TagPair("<explanation>", "</explanation>"),
    thought=TagPair("<think>", "</think>"),
)
"""Tags in angle brackets, as in DeepSeek-R1."""
FORMATS = {"stratos": STRATOS, "r1": R1, "short": replace(R1, teacher_system="", student_system="")}
"""Formats by the value of ``tag_format``. ``short`` has no system prompts, for tiny models."""


@dataclass(frozen=True)
class RltPrompts:
    """Renders the prompts of both roles with one tokenizer's chat template.

    Attributes:
        tokenizer: A Hugging Face tokenizer with a chat template.
        rlt_format: Tags and system prompts.
        chat_kwargs: Extra arguments of the chat template.
        allow_special_tokens: Special tokens inside a question or a solution become tokens. False = they are plain text.
    """

    tokenizer: Any
    rlt_format: RltFormat
    chat_kwargs: dict[str, Any] = field(default_factory=dict)
    allow_special_tokens: bool = False

    def teacher(self, question: str, solution: str) -> tuple[str, Spans]:
        """Return the teacher's prompt, which ends after the forced prefix, and the spans of special tokens that are plain text.

        Raises:
            DataError: The chat template cannot render the messages.
        """
        text, plain = self._chat(self.rlt_format.teacher_system, question)
        turn = self.rlt_format.teacher_prefill(solution)
        return text + turn, (*plain, *moved(self.plain(turn), len(text)))

    def student(self, question: str) -> tuple[str, Spans]:
        """Return the student's prompt, which ends before the explanation, and the spans of special tokens that are plain text.

        Raises:
            DataError: The chat template cannot render the messages.
        """
        text, plain = self._chat(self.rlt_format.student_system, question)
        return text + self.rlt_format.student_opening, plain

    def end_of_turn(self) -> str:
        return end_of_turn(self.tokenizer, self.chat_kwargs)

    def plain(self, text: str) -> Spans:
        # The spans of the special tokens in a text from the data that must be encoded as plain text.
        return () if self.allow_special_tokens else special_tokens_of(self.tokenizer).find(text)

    def _chat(self, system: str, question: str) -> tuple[str, Spans]:
        user = {"role": "user", "content": question}
        special = special_tokens_of(self.tokenizer)
        hides = bool(self.plain(question))
        shown = special.hide(user) if hides else user
        messages = [{"role": "system", "content": system}, shown] if system else [shown]
        try:
            text = render_bounded(self.tokenizer, messages, **{"add_generation_prompt": True, **self.chat_kwargs})
            return special.reveal(text) if hides else (text, ())
        except RENDER_ERRORS as problem:
            raise DataError(
                f"the chat template cannot render a prompt of RLT ({problem}). Set another template with "
                "actor_rollout_ref.model.custom_chat_template, correct data.apply_chat_template_kwargs, or choose the format "
                "without system prompts."
            ) from problem


logger = logging.getLogger(__name__)

EMPTY_QUESTION = "the question is empty"
EMPTY_SOLUTION = "the solution is empty"
TAG_IN_QUESTION = "the question contains a tag"
TAG_IN_SOLUTION = "the solution contains a tag"
TAG_IN_TRACE = "the reasoning trace contains a tag"
NOT_TWO_TURNS = "the conversation is not one turn of the user and one of the assistant"
NO_SECTIONS = "the assistant's turn does not hold one tagged thought and one tagged solution"

ROLES = {"user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}


@dataclass(frozen=True)
class RltRecord:
    question: str
    """The question, as the student and the teacher read it."""
    solution: str
    """The solution without tags."""
    reasoning_trace: str | None
    """A complete reasoning without tags, from which a teacher learns in the warm-up. None = the row has none."""
    address: str
    """File and row, counted from 1."""


@dataclass(frozen=True)
class Records:
    rows: list[RltRecord]
    rejected: dict[str, int]
    """Reason -> number of rows that were rejected for it."""


def read_records(rows: Iterable[RawRow], rlt_format: RltFormat) -> Records:
    """Return the records of rows, and how many rows were rejected for which reason.

    ``rlt_format``: the format whose tags must not appear inside a text.

    Raises:
        DataError: A row does not have the columns of any accepted form, or every row is rejected.
    """
    records, rejected, alias_at, first = [], Counter[str](), "", ""
    for address, columns in rows:
        if "prompt" in columns and "question" not in columns and not alias_at:
            alias_at = address
        record = _record(address, columns)
        record = record if isinstance(record, str) else _checked(record, rlt_format)
        if isinstance(record, RltRecord):
            records.append(record)
        else:
            first = first or f"{address}: {record}"
            rejected[record] += 1
    if alias_at:
        logger.warning("%s: the column 'prompt' is read as 'question'. Rename it.", alias_at)
    if rejected:
        counts = ", ".join(f"{reason} ({count})" for reason, count in rejected.most_common())
        total = len(records) + sum(rejected.values())
        if not records:
            raise DataError(f"{first}. All {total} rows were rejected: {counts}. Correct the rows, or choose another format.")
        logger.warning("rejected %d of %d rows: %s. The first is %s", sum(rejected.values()), total, counts, first)
    return Records(records, dict(rejected))


def _record(address: str, columns: dict[str, Any]) -> RltRecord | str:
    # The record of a row, or the reason why its conversation gives none.
    if "conversations" in columns:
        if {"question", "solution"} & columns.keys():
            raise DataError(f"{address}: there are columns 'conversations' and 'question' or 'solution'. Remove one form.")
        return _conversation_record(address, columns["conversations"])
    if "question" in columns and "prompt" in columns:
        raise DataError(f"{address}: there are columns 'question' and 'prompt', which mean the same. Remove one.")
    question = _text(address, columns, "question" if "question" in columns else "prompt", "question")
    solution = _text(address, columns, "solution", "solution")
    trace = None if columns.get("reasoning_trace") is None else _text(address, columns, "reasoning_trace", "reasoning_trace")
    return RltRecord(question, solution, trace, address)


def _text(address: str, columns: dict[str, Any], column: str, name: str) -> str:
    if column not in columns:
        raise DataError(
            f"{address}: there is no column {name!r}. The row has {', '.join(sorted(columns))}. Add question and solution, or "
            "conversations as in Bespoke-Stratos-17k."
        )
    if not isinstance(columns[column], str):
        raise DataError(f"{address}: {column} must be a string, but it is {columns[column]!r:.200}. Correct the row.")
    return columns[column]


def _conversation_record(address: str, turns: Any) -> RltRecord | str:
    if not isinstance(turns, list | tuple) or not all(isinstance(turn, dict) for turn in turns):
        raise DataError(f"{address}: conversations must be a list of {{from, value}}, but it is {turns!r:.200}. Correct the row.")
    roles = [ROLES.get(str(turn.get("from"))) for turn in turns]
    if roles != ["user", "assistant"] or not all(isinstance(turn.get("value"), str) for turn in turns):
        return NOT_TWO_TURNS
    sections = _sections(turns[1]["value"])
    return NO_SECTIONS if sections is None else RltRecord(turns[0]["value"], sections[1], sections[0], address)


def _sections(answer: str) -> tuple[str, str] | None:
    # The thought and the solution of an answer; None if a tag is missing, repeated or out of order.
    tags = (STRATOS.thought.begin, STRATOS.thought.end, STRATOS.solution.begin, STRATOS.solution.end)
    if any(answer.count(tag) != 1 for tag in tags):
        return None
    places = [answer.index(tag) for tag in tags]
    if places != sorted(places):
        return None
    begin_thought, end_thought, begin_solution, end_solution = places
    thought = answer[begin_thought + len(tags[0]) : end_thought]
    return thought, answer[begin_solution + len(tags[2]) : end_solution]


def _checked(record: RltRecord, rlt_format: RltFormat) -> RltRecord | str:
    # Remove the tags around the texts of a record. Return the record, or the reason why it cannot be used.
    solution, trace = rlt_format.solution.unwrap(record.solution), record.reasoning_trace
    if trace is not None:
        trace = rlt_format.thought.unwrap(rlt_format.explanation.unwrap(trace))
    if not record.question.strip():
        return EMPTY_QUESTION
    if not solution.strip():
        return EMPTY_SOLUTION
    texts = {TAG_IN_QUESTION: record.question, TAG_IN_SOLUTION: solution, TAG_IN_TRACE: trace or ""}
    fault = next((reason for reason, text in texts.items() if any(tag in text for tag in rlt_format.tags)), None)
    return fault or replace(record, solution=solution, reasoning_trace=trace)


DATA_SOURCE = "rlt"
TOO_LONG = "the teacher's prompt is over data.max_prompt_length"


class RltDataset(list[PromptRow]):
    """Teacher prompts that end after the forced prefix.

    A row's ``ground_truth`` is the solution, and its ``extra_info`` holds ``question``, ``solution`` and ``reasoning_trace``.

    Args:
        files: Paths, or ``hub:`` and the id of a dataset. See :func:`verl_memopt.data.sources.read_source`.
        data: The ``data`` section of the settings.
        tokenizer: The teacher's tokenizer, with a chat template.
        split: ``train`` or ``val``. It selects ``{split}_max_samples`` and the keys that errors name.
        tag_format: A key of ``FORMATS``.

    Raises:
        DataError: A file is wrong, every row is rejected, a prompt is too long, or ``data.truncation`` would cut prompts.
    """

    def __init__(self, files: Any, data: schema.Data, tokenizer: Any, split: str, tag_format: str = "stratos") -> None:
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
        kept = within_limit(rows, data, tokenizer)
        if num_too_long := len(rows) - len(kept):
            self.rejected[TOO_LONG] = num_too_long
            logger.warning("rejected %d of %d rows: %s=%d", num_too_long, len(rows), TOO_LONG, data.max_prompt_length)
        super().__init__(replace(row, index=index) for index, row in enumerate(kept))


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


NO_TRACE = "there is no reasoning trace to learn from"


def teacher_rows(files: Any, data: schema.Data, tokenizer: Any, split: str, tag_format: str) -> list[PromptRow]:
    """Return the rows that have a reasoning trace, with this trace and an end tag as the response, for the warm-up of a teacher.

    The arguments are those of :class:`RltDataset`.

    Raises:
        DataError: A file is wrong, no row is left, or a response is too long and ``data.filter_overlong_prompts`` is false.
    """
    dataset = RltDataset(files, data, tokenizer, split, tag_format)
    prompts = RltPrompts(tokenizer, FORMATS[tag_format], data.apply_chat_template_kwargs, data.allow_special_tokens)
    taught = [row for row in dataset if row.extra_info["reasoning_trace"] is not None]
    key, missing = f"data.{split}_files", len(dataset) - len(taught)
    if not taught:
        raise DataError(f"{key}: no row can be learned from: {NO_TRACE}. Name a file with the column reasoning_trace.")
    if missing:
        logger.warning("%s: left out %d rows: %s", key, missing, NO_TRACE)
    end, padding = prompts.rlt_format.explanation.end + prompts.end_of_turn(), prompts.rlt_format.padding
    responses = [(row.extra_info["reasoning_trace"].removeprefix(padding), end) for row in taught]
    return with_responses(taught, responses, data, tokenizer, split)
