"""From prompt texts to token ids: one tokenizer call, nothing added, nothing cut in silence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from verl_memopt.data.special_tokens import Spans, special_tokens_of
from verl_memopt.errors import ConfigError, DataError


def _keep_end(ids: list[int], limit: int) -> list[int]:
    return ids[len(ids) - limit :]


def _keep_start(ids: list[int], limit: int) -> list[int]:
    return ids[:limit]


def _keep_both_ends(ids: list[int], limit: int) -> list[int]:
    head = limit // 2
    return ids[:head] + ids[len(ids) - (limit - head) :]


TRUNCATIONS: dict[str, Callable[[list[int], int], list[int]] | None] = {
    "error": None,
    "left": _keep_end,
    "right": _keep_start,
    "middle": _keep_both_ends,
}
"""What is done to a prompt over the limit, by the name of the side (or middle) that is lost; None refuses it."""


def tokenize(tokenizer: Any, texts: Sequence[str], plain: Sequence[Spans] = ()) -> list[list[int]]:
    """Return the ids of each text as it stands: no token is added, no length is enforced.

    Special tokens in a text are recognised, except those in its spans of ``plain``, which are encoded as text.
    """
    if not texts:
        return []
    if any(plain):
        return special_tokens_of(tokenizer).encode(texts, plain)
    encoded = tokenizer(list(texts), add_special_tokens=False, truncation=False, return_attention_mask=False, verbose=False)
    return encoded["input_ids"]


class PromptEncoder:
    """Encodes prompts and keeps count of what truncation took from them.

    ``rows_truncated`` and ``tokens_dropped`` grow over the encoder's life; a prompt repeated n times counts once.
    """

    def __init__(self, tokenizer: Any, max_prompt_length: int, truncation: str, embedding_rows: int | None = None) -> None:
        """embedding_rows: of the model; a prompt with an id beyond them is refused. None = not known."""
        if truncation not in TRUNCATIONS:
            raise ConfigError(f"data.truncation={truncation}: not a way to truncate. Use one of {', '.join(TRUNCATIONS)}.")
        self.tokenizer = tokenizer
        self.max_prompt_length = max_prompt_length
        self.truncation = truncation
        self.embedding_rows = embedding_rows
        self.rows_truncated = 0
        self.tokens_dropped = 0

    def encode(
        self, texts: Sequence[str], addresses: Sequence[str], copies: int = 1, plain: Sequence[Spans] = ()
    ) -> list[list[int]]:
        """The ids of each text, at most ``max_prompt_length`` long.

        ``addresses`` name each text's file and row for errors. ``copies`` says that each prompt stands that many times in a
        row, ``plain`` where each text's special tokens are text. Raises DataError for an empty prompt, for one over the limit
        with ``truncation=error``, and for one with an id that the model does not have.
        """
        rows = tokenize(self.tokenizer, texts, plain)
        return [self._fit(ids, addresses[i], counted=i % copies == 0) for i, ids in enumerate(rows)]

    def _fit(self, ids: list[int], address: str, counted: bool) -> list[int]:
        if not ids:
            raise DataError(f"{address}: the prompt has no tokens. Drop the row, or give it a prompt.")
        if self.embedding_rows is not None and max(ids) >= self.embedding_rows:
            raise DataError(
                f"{address}: the prompt has the token id {max(ids)}, and the model's embedding has {self.embedding_rows} rows. "
                "Use the tokenizer that belongs to the model, or drop the row."
            )
        if len(ids) <= self.max_prompt_length:
            return ids
        cut = TRUNCATIONS[self.truncation]
        if cut is None:
            raise overlong(address, len(ids), self.max_prompt_length)
        if counted:
            self.rows_truncated += 1
            self.tokens_dropped += len(ids) - self.max_prompt_length
        return cut(ids, self.max_prompt_length)


def overlong(address: str, length: int, limit: int, others: int = 0) -> DataError:
    """The error for a prompt over the limit, with its length and the ways out; ``others`` counts further such rows."""
    more = f" ({others} more rows are too long as well)" if others else ""
    return DataError(
        f"{address}: the prompt has {length} tokens, data.max_prompt_length is {limit}{more}. Raise data.max_prompt_length, "
        "set data.filter_overlong_prompts=true to drop such rows, or set data.truncation to left, right or middle to cut them."
    )
