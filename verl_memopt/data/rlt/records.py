"""Questions with their solutions, read from rows of any of the accepted forms and checked once, when the dataset is built.

A row has the columns ``question`` and ``solution``, and perhaps ``reasoning_trace``. ``prompt`` is another name of ``question``.
Or it has the column ``conversations`` of Bespoke-Stratos-17k: a turn of the user, and a turn of the assistant that holds a
thought and a solution between tags.

A row of another form is an error: the file is not what the user thinks it is. A row whose texts cannot be trained on is rejected,
and the reasons are counted.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from verl_memopt.data.files import RawRow
from verl_memopt.data.rlt.format import STRATOS, RltFormat
from verl_memopt.errors import DataError

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
    """One question with its solution."""

    question: str
    """The question, as the student and the teacher read it."""
    solution: str
    """The solution without tags."""
    reasoning_trace: str | None
    """A worked reasoning without tags, for the warm-up of a teacher. None = the row has none."""
    address: str
    """File and row, counted from 1."""


@dataclass(frozen=True)
class Records:
    """The usable rows, and why the others were rejected."""

    rows: list[RltRecord]
    rejected: dict[str, int]
    """Reason -> number of rows."""


def read_records(rows: Iterable[RawRow], rlt_format: RltFormat) -> Records:
    """Return the records of rows, and how many rows were rejected for which reason.

    Args:
        rows: Rows with their addresses.
        rlt_format: Its tags must not appear inside a text.

    Raises:
        DataError: A row has not the columns of any accepted form, or every row is rejected.
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
    """Return the record of a row, or the reason why a conversation gives none."""
    if "conversations" in columns:
        if {"question", "solution"} & columns.keys():
            raise DataError(f"{address}: there are columns 'conversations' and 'question' or 'solution'. Remove one form.")
        return _of_conversation(address, columns["conversations"])
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


def _of_conversation(address: str, turns: Any) -> RltRecord | str:
    if not isinstance(turns, list | tuple) or not all(isinstance(turn, dict) for turn in turns):
        raise DataError(f"{address}: conversations must be a list of {{from, value}}, but it is {turns!r:.200}. Correct the row.")
    roles = [ROLES.get(str(turn.get("from"))) for turn in turns]
    if roles != ["user", "assistant"] or not all(isinstance(turn.get("value"), str) for turn in turns):
        return NOT_TWO_TURNS
    sections = _sections(turns[1]["value"])
    return NO_SECTIONS if sections is None else RltRecord(turns[0]["value"], sections[1], sections[0], address)


def _sections(answer: str) -> tuple[str, str] | None:
    """Return the thought and the solution of an answer, or None where a tag is missing, repeated or in another place."""
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
    """Return a record without tags around its texts, or the reason why it cannot be used."""
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
