"""A conversation on token ids: what the model reads in each turn, and what it sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_memopt.data.encoder import RENDER_ERRORS, Spans, decode, moved, special_tokens_of, tokenize
from verl_memopt.data.messages import Messages, render
from verl_memopt.errors import DataError


@dataclass(frozen=True)
class Turn:
    """One call of the engine."""

    prompt_ids: list[int]
    """All tokens that the model read."""
    output_ids: list[int]
    """The tokens that it sampled."""
    log_probs: list[float] | None
    """The engine's log-probs of the sampled tokens. None = not requested."""
    routes: Any = None
    """The experts of all tokens but the last, a tensor as in :class:`Generation`. None = not requested."""


@dataclass
class Transcript:
    """The messages of a conversation, and the token ids of its last turn.

    The prompt of the next turn keeps the ids of everything that the chat template writes as before, so that the model reads the
    ids that it sampled. Only new text is encoded. If the template changes or drops what came before, such as old thoughts, the
    ids up to the last special token before the change are kept, and the rest is encoded. The earlier turns stay what they were:
    the conversation forks.

    Attributes:
        tokenizer: A tokenizer of transformers.
        messages: The messages so far.
        arguments: Arguments of the chat template, with the tools.
        allow_special: Special tokens within messages become tokens (``data.allow_special_tokens``).
        address: File and row, for errors.
    """

    tokenizer: Any
    messages: Messages
    arguments: Mapping[str, Any]
    allow_special: bool = False
    address: str = ""
    ids: list[int] = field(default_factory=list)
    """Token ids of the last turn: its prompt and its output."""
    _raw: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Number of a message -> the same turn as the text that the model wrote."""

    def add_output(self, output_ids: Sequence[int], message: dict[str, Any], text: str) -> None:
        """Add the model's turn.

        Args:
            output_ids: The sampled tokens.
            message: The turn as a message, with its tool calls.
            text: The turn as the model wrote it, without the end token.
        """
        self.ids = [*self.ids, *output_ids]
        self._raw[len(self.messages)] = {"role": message["role"], "content": text}
        self.messages.append(message)

    def prompt(self) -> list[int]:
        """Return the ids that the model reads next, and remember them as the ids of the turn that begins.

        Raises:
            DataError: The chat template cannot render the conversation.
        """
        before = decode(self.tokenizer, self.ids) if self.ids else ""
        text, plain = self._rendered(before)
        kept = len(self.ids) if text.startswith(before) else self._common(before, text)
        known = len(decode(self.tokenizer, self.ids[:kept])) if kept else 0
        rest = tuple(span for span in moved(plain, -known) if span[0] >= 0)
        self.ids = self.ids[:kept] + tokenize(self.tokenizer, [text[known:]], [rest])[0]
        return list(self.ids)

    def _rendered(self, before: str) -> tuple[str, Spans]:
        # A template writes calls in its own form. If the model wrote them in another one, such as with other spaces, the text of
        # the model takes their place, because it continues what the model has read.
        as_written = [self._raw.get(number, message) for number, message in enumerate(self.messages)]
        first: tuple[str, Spans] | None = None
        problem: Exception | None = None
        for messages in (self.messages, as_written) if self._raw else (self.messages,):
            try:
                special = special_tokens_of(self.tokenizer)
                hides = special.count([messages, self.arguments.get("tools")]) > 0 and not self.allow_special
                made = render(special, self.tokenizer, messages, hides, {"add_generation_prompt": True, **self.arguments})
            except RENDER_ERRORS as error:
                problem = problem or error
                continue
            if made[0].startswith(before):
                return made
            first = first or made
        if first is None:
            raise DataError(
                f"{self.address}: the chat template cannot render this conversation ({problem}). Set another template with "
                "actor_rollout_ref.model.custom_chat_template."
            ) from problem
        return first

    def _common(self, before: str, text: str) -> int:
        """Return how many of the ids are kept: up to the last special token in the text that both begin with."""
        shared = next(
            (place for place, pair in enumerate(zip(before, text, strict=False)) if pair[0] != pair[1]),
            min(len(before), len(text)),
        )
        special = {number for number, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        kept = length = start = 0
        for place, number in enumerate(self.ids):
            if number in special:
                length += len(decode(self.tokenizer, self.ids[start : place + 1]))
                start = place + 1
                if length > shared:
                    break
                kept = start
        return kept
