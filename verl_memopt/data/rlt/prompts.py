"""The texts before an explanation: the teacher's whole prompt, and the student's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError

from verl_memopt.data.rlt.format import RltFormat
from verl_memopt.data.special_tokens import Spans, special_tokens_of
from verl_memopt.errors import DataError

_MARK = "\ufdd3"
"""A noncharacter in place of an answer, to see what a chat template writes after it."""


@dataclass(frozen=True)
class RltPrompts:
    """Renders the prompts of both roles with one tokenizer's chat template.

    Attributes:
        tokenizer: A Hugging Face tokenizer with a chat template.
        rlt_format: Tags and system prompts.
        chat_kwargs: Extra arguments of the chat template.
        allow_special_tokens: Let special tokens inside a question or a solution become tokens. False = they are plain text.
    """

    tokenizer: Any
    rlt_format: RltFormat
    chat_kwargs: dict[str, Any] = field(default_factory=dict)
    allow_special_tokens: bool = False

    def teacher(self, question: str, solution: str) -> tuple[str, Spans]:
        """Return the teacher's prompt, which ends after the forced prefix, and its spans of plain special tokens.

        Raises:
            DataError: The chat template cannot render the messages.
        """
        text, plain = self._chat(self.rlt_format.teacher_system, question)
        turn = self.rlt_format.teacher_prefill(solution)
        return text + turn, (*plain, *_moved(self.plain(turn), len(text)))

    def student(self, question: str) -> tuple[str, Spans]:
        """Return the student's prompt, which ends where the explanation begins, and its spans of plain special tokens.

        Raises:
            DataError: The chat template cannot render the messages.
        """
        text, plain = self._chat(self.rlt_format.student_system, question)
        return text + self.rlt_format.student_opening, plain

    def end_of_turn(self) -> str:
        """Return what the chat template writes after an answer, such as ``<|im_end|>`` and a line break.

        Raises:
            DataError: The chat template drops or changes an answer.
        """
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        text = self._render(messages, add_generation_prompt=False)
        before, mark, after = text.partition(_MARK)
        if not mark or not before:
            raise DataError("the chat template does not write the answer of an assistant. Use the template of a chat model.")
        return after

    def plain(self, text: str) -> Spans:
        """Return the spans of a text of the data whose special tokens are encoded as plain text."""
        return () if self.allow_special_tokens else special_tokens_of(self.tokenizer).find(text)

    def _chat(self, system: str, question: str) -> tuple[str, Spans]:
        user = {"role": "user", "content": question}
        special = special_tokens_of(self.tokenizer)
        hides = bool(self.plain(question))
        shown = special.hide(user) if hides else user
        messages = [{"role": "system", "content": system}, shown] if system else [shown]
        text = self._render(messages, add_generation_prompt=True)
        try:
            return special.reveal(text) if hides else (text, ())
        except ValueError as problem:
            raise _unrenderable(problem) from problem

    def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        arguments = {"tokenize": False, "add_generation_prompt": add_generation_prompt, **self.chat_kwargs}
        try:
            return self.tokenizer.apply_chat_template(messages, **arguments)
        except (TemplateError, ValueError, TypeError) as problem:
            raise _unrenderable(problem) from problem


def _unrenderable(problem: Exception) -> DataError:
    return DataError(
        f"the chat template cannot render a prompt of RLT ({problem}). Set another template with "
        "actor_rollout_ref.model.custom_chat_template, correct data.apply_chat_template_kwargs, or choose the format without "
        "system prompts."
    )


def _moved(spans: Spans, by: int) -> Spans:
    return tuple((start + by, end + by) for start, end in spans)
