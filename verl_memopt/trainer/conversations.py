"""Prompts and answers as the reward model reads them: the policy's ids, or text rendered with the model's own chat template."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from jinja2 import TemplateError

from verl_memopt.data.dataset import PromptRow, PromptRows
from verl_memopt.data.encoder import tokenize
from verl_memopt.data.special_tokens import Spans, special_tokens_of
from verl_memopt.errors import ConfigError, DataError
from verl_memopt.models.reward_folder import REWARD_KEY
from verl_memopt.trainer.generation import Answers

logger = logging.getLogger(__name__)

Ids = list[int]


@dataclass(frozen=True)
class Conversations:
    """Turns answers into the token ids of conversations.

    Attributes:
        tokenizer: The reward model's own tokenizer; None where it reads the policy's ids.
        max_length: Tokens beyond which the end of a conversation is cut off; None where none is cut.
    """

    tokenizer: Any
    max_length: int | None

    def of(self, answers: Answers) -> tuple[list[Ids], list[Ids], list[int]]:
        """Return, for each row, the ids before and after the point where the conversations of its group part, and its group.

        A group is a prompt: its rows compute the ids before that point once.

        Args:
            answers: Prompts and answers; the rows of a prompt follow one another.

        Raises:
            DataError: A conversation cannot be rendered.
        """
        groups = _groups(answers.rows)
        if self.tokenizer is None:
            pairs = zip(answers.prompt_ids, answers.generation.response_ids, strict=True)
            whole = self._cut([[*prompt, *response] for prompt, response in pairs])
        else:
            whole = self._cut(self._encoded(answers))
        members: dict[int, list[Ids]] = {}
        for group, ids in zip(groups, whole, strict=True):
            members.setdefault(group, []).append(ids)
        shared = {group: max(1, _shared(rows)) for group, rows in members.items()}
        before = [ids[: shared[group]] for group, ids in zip(groups, whole, strict=True)]
        after = [ids[shared[group] :] for group, ids in zip(groups, whole, strict=True)]
        return before, after, groups

    def _cut(self, rows: list[Ids]) -> list[Ids]:
        longest = self.max_length
        if longest is None:
            return rows
        num_cut = sum(len(ids) > longest for ids in rows)
        if num_cut:
            logger.warning(
                "reward_model.max_length=%d: the end of %d of %d conversations is cut off", longest, num_cut, len(rows)
            )
        return [ids[:longest] for ids in rows]

    def _encoded(self, answers: Answers) -> list[Ids]:
        rendered = [self._rendered(row, text) for row, text in zip(answers.rows, answers.texts, strict=True)]
        return tokenize(self.tokenizer, [text for text, _ in rendered], [plain for _, plain in rendered])

    def _rendered(self, row: PromptRow, answer: str) -> tuple[str, Spans]:
        """Return a conversation as text, and the spans of special tokens that are plain text: those of messages and answers.

        A prompt that is a text, and no list of messages, is followed by the answer as it is.
        """
        special = special_tokens_of(self.tokenizer)
        if row.messages is None:
            text = row.text + answer
            return text, special.find(text) if special.count(text) else ()
        messages = [*row.messages, {"role": "assistant", "content": answer}]
        hides = special.count(messages) > 0
        shown = special.hide(messages) if hides else messages
        try:
            text = self.tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=False)
            return special.reveal(text) if hides else (text, ())
        except (TemplateError, ValueError, TypeError) as problem:
            raise DataError(
                f"{row.address}: the chat template of the reward model cannot render this conversation ({problem}). "
                "Correct the row, or use another reward model."
            ) from problem

    def check(self, rows: PromptRows) -> None:
        """Check that the tokenizer can render the conversations of a data set.

        Raises:
            ConfigError: The rows have messages, and the tokenizer has no chat template.
        """
        if self.tokenizer is None or self.tokenizer.chat_template is not None:
            return
        if any(rows[index].messages is not None for index in range(len(rows))):
            raise ConfigError(
                f"{REWARD_KEY}.input_tokenizer: the reward model's tokenizer has no chat template, and the prompts are messages. "
                f"Add a template to its folder, or set {REWARD_KEY}.input_tokenizer=null where it shares the policy's tokenizer."
            )


def _shared(rows: Sequence[Ids]) -> int:
    """Return how many ids at their start all rows share."""
    first, last = min(rows), max(rows)  # in the order of lists, so that all others lie between
    return next((place for place, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), len(first))


def _groups(rows: Sequence[PromptRow]) -> list[int]:
    """Return a number for each row. Neighbours with the same prompt have the same number."""
    starts = [index == 0 or rows[index - 1] is not row for index, row in enumerate(rows)]
    return [number - 1 for number in accumulate(map(int, starts))]
