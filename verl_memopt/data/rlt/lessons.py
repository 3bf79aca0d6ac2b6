"""What a teacher and a student learn from a worked example before RL: token ids to read, and token ids to write."""

from __future__ import annotations

from dataclasses import dataclass

from verl_memopt.data.encoder import tokenize
from verl_memopt.data.rlt.prompts import RltPrompts
from verl_memopt.data.rlt.records import RltRecord


@dataclass(frozen=True)
class Lesson:
    """One worked example. Only ``answer`` is learned."""

    prompt: list[int]
    """Token ids that the model reads."""
    answer: list[int]
    """Token ids that the model learns to write after them."""


def teacher_lesson(prompts: RltPrompts, record: RltRecord, ends: bool = True) -> Lesson:
    """Return how a teacher continues its prompt: with the reasoning trace, the end tag and the end of the turn.

    Everything up to the forced prefix is read only. A record without a trace teaches its solution instead.

    Args:
        prompts: Renders the prompts.
        record: The worked example.
        ends: Write the end tag. False = the explanation runs on to the end of the turn.
    """
    text, plain = prompts.teacher(record.question, record.solution)
    end = prompts.rlt_format.explanation.end if ends else ""
    parts = [text, _trace(prompts, record), end + prompts.end_of_turn()]
    prompt, trace, end_ids = tokenize(prompts.tokenizer, parts, [plain, prompts.plain(parts[1]), ()])
    return Lesson(prompt, trace + end_ids)


def student_lesson(prompts: RltPrompts, record: RltRecord) -> Lesson:
    """Return how a student answers a question: with the reasoning trace as its thought, then the solution.

    The parts are tokenized one by one, as the reward puts them together.

    Args:
        prompts: Renders the prompts.
        record: The worked example.
    """
    text, plain = prompts.student(record.question)
    rlt_format = prompts.rlt_format
    parts = [text, _trace(prompts, record), rlt_format.bridge, record.solution, rlt_format.solution.end + prompts.end_of_turn()]
    spans = [plain, prompts.plain(parts[1]), (), prompts.plain(record.solution), ()]
    prompt, *answer = tokenize(prompts.tokenizer, parts, spans)
    return Lesson(prompt, [token for part in answer for token in part])


def _trace(prompts: RltPrompts, record: RltRecord) -> str:
    """Return the reasoning trace without the padding that both prompts end with, or the solution where there is none."""
    trace = record.solution if record.reasoning_trace is None else record.reasoning_trace
    return trace.removeprefix(prompts.rlt_format.padding)
