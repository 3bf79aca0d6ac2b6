"""What teacher and student read and write around a question, an explanation and a solution: tags, paddings, system prompts.

The teacher sees the solution at the start of its own turn and continues with an explanation:
``BEGIN_SOLUTION solution END_SOLUTION delimiter BEGIN_EXPLANATION padding`` | ``explanation END_EXPLANATION``.
The student sees the explanation as its own thought: ``think_prefix BEGIN_THOUGHT padding`` | ``explanation`` |
``END_THOUGHT delimiter BEGIN_SOLUTION`` | ``solution`` | ``END_SOLUTION``.
Tags are plain text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class TagPair:
    """The texts before and after a section."""

    begin: str
    end: str

    def wrap(self, text: str) -> str:
        """Return the text between the tags."""
        return f"{self.begin}{text}{self.end}"

    def unwrap(self, text: str) -> str:
        """Return the text without this pair around it, or the text itself where it is not wrapped."""
        inner = text.strip()
        if len(inner) >= len(self.begin) + len(self.end) and inner.startswith(self.begin) and inner.endswith(self.end):
            return inner[len(self.begin) : len(inner) - len(self.end)]
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
    """Text after the begin tag of an explanation and of a thought. Neither model has to write it."""
    delimiter: str = "\n\n"
    """Text between two sections."""
    think_prefix: str = ""
    """Text before the student's begin tag."""

    @property
    def tags(self) -> tuple[str, ...]:
        """All tags, each once."""
        pairs = (self.explanation, self.thought, self.solution)
        return tuple(dict.fromkeys(tag for pair in pairs for tag in (pair.begin, pair.end)))

    @property
    def forced_prefix(self) -> str:
        """The end of every teacher prompt: the begin tag and the padding."""
        return self.explanation.begin + self.padding

    def teacher_prefill(self, solution: str) -> str:
        """Return the start of the teacher's turn, after which the teacher writes the explanation."""
        return self.solution.wrap(solution) + self.delimiter + self.forced_prefix

    @property
    def student_opening(self) -> str:
        """The start of the student's turn, after which the explanation follows."""
        return self.think_prefix + self.thought.begin + self.padding

    @property
    def bridge(self) -> str:
        """The text between the explanation and the solution in the student's turn."""
        return self.thought.end + self.delimiter + self.solution.begin


def _teacher_system(solution: TagPair, explanation: TagPair) -> str:
    return (
        "You are a teacher. You state the solution of a question first, and then explain how to reach it. Your answer has two "
        f"sections. The solution section is exact and complete: {solution.wrap(' the solution ')}. The explanation section leads "
        "a student from the question to the solution, step by step, with a blank line between steps: it says what is known, "
        "tries ideas, checks each step, corrects mistakes, and never relies on having seen the solution: "
        f"{explanation.wrap(' the explanation ')}."
    )


def _student_system(thought: TagPair, solution: TagPair) -> str:
    return (
        "You think at length before you answer a question. Your answer has two sections. In the thought section you reason step "
        "by step, with a blank line between steps: you say what is known, try ideas, check each step and correct mistakes: "
        f"{thought.wrap(' the thought ')}. In the solution section you give the final solution, exact and complete: "
        f"{solution.wrap(' the solution ')}."
    )


def _with_tags(solution: TagPair, explanation: TagPair, thought: TagPair) -> RltFormat:
    return RltFormat(
        teacher_system=_teacher_system(solution, explanation),
        student_system=_student_system(thought, solution),
        explanation=explanation,
        thought=thought,
        solution=solution,
    )


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
