"""Prompt texts to token ids: nothing is added, and nothing is cut without being counted."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

from verl_memopt.data.special_tokens import Spans, special_tokens_of
from verl_memopt.errors import ConfigError, DataError

logger = logging.getLogger(__name__)


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
"""How to cut a prompt over the limit, by the name of the part that is lost. None refuses the prompt."""


def tokenize(tokenizer: Any, texts: Sequence[str], plain: Sequence[Spans] = ()) -> list[list[int]]:
    """Return the token ids of each text, without adding tokens and without a length limit.

    Args:
        tokenizer: A Hugging Face tokenizer.
        texts: Any number of texts.
        plain: For each text, the spans whose special tokens are encoded as plain text. Elsewhere they become tokens.
    """
    if not texts:
        return []
    if any(plain):
        return special_tokens_of(tokenizer).encode(texts, plain)
    encoded = tokenizer(list(texts), add_special_tokens=False, truncation=False, return_attention_mask=False, verbose=False)
    return encoded["input_ids"]


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of token ids as the tokenizer has it: with special tokens, and with no spaces cleaned up.

    Args:
        tokenizer: A Hugging Face tokenizer.
        ids: Token ids.
    """
    text: str = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


class PromptEncoder:
    """Encodes prompts and counts what truncation removes.

    ``rows_truncated`` and ``tokens_dropped`` grow over the encoder's life. A prompt that is repeated n times counts once.

    Args:
        tokenizer: A Hugging Face tokenizer.
        max_prompt_length: Largest number of tokens of a prompt.
        truncation: What to do with longer prompts, a key of ``TRUNCATIONS``.
        embedding_rows: Rows of the model's embedding. A prompt with a larger token id is refused. None = unknown.

    Raises:
        ConfigError: ``truncation`` is unknown.
    """

    def __init__(self, tokenizer: Any, max_prompt_length: int, truncation: str, embedding_rows: int | None = None) -> None:
        """Check ``truncation`` and start both counts at 0."""
        if truncation not in TRUNCATIONS:
            raise ConfigError(f"data.truncation={truncation}: unknown truncation. Use one of {', '.join(TRUNCATIONS)}.")
        self.tokenizer = tokenizer
        self.max_prompt_length = max_prompt_length
        self.truncation = truncation
        self.embedding_rows = embedding_rows
        self.rows_truncated = 0
        self.tokens_dropped = 0

    def encode(
        self, texts: Sequence[str], addresses: Sequence[str], copies: int = 1, plain: Sequence[Spans] = ()
    ) -> list[list[int]]:
        """Return the token ids of each text, at most ``max_prompt_length`` of them.

        Args:
            texts: The rendered prompts.
            addresses: File and row of each text, for errors.
            copies: How many times in a row each prompt appears.
            plain: For each text, the spans whose special tokens are encoded as plain text.

        Raises:
            DataError: A prompt is empty, is too long with ``truncation=error``, or has a token id that the model does not have.
        """
        rows = tokenize(self.tokenizer, texts, plain)
        return [self.fit(ids, addresses[i], counted=i % copies == 0) for i, ids in enumerate(rows)]

    def fit(self, ids: list[int], address: str, counted: bool = True) -> list[int]:
        """Return the ids of a prompt within ``max_prompt_length``. The first prompt that is cut earns a warning.

        Args:
            ids: Token ids of the prompt.
            address: File and row, for errors.
            counted: Count what is cut. False for a further copy of a prompt.

        Raises:
            DataError: As :meth:`encode` raises it.
        """
        if not ids:
            raise DataError(f"{address}: the prompt has no tokens. Remove the row, or add a prompt.")
        if self.embedding_rows is not None and max(ids) >= self.embedding_rows:
            raise DataError(
                f"{address}: the prompt has the token id {max(ids)}, but the model's embedding has {self.embedding_rows} rows. "
                "Use the tokenizer that belongs to the model, or remove the row."
            )
        if len(ids) <= self.max_prompt_length:
            return ids
        cut = TRUNCATIONS[self.truncation]
        if cut is None:
            raise overlong(address, len(ids), self.max_prompt_length)
        if counted:
            if not self.rows_truncated:
                logger.warning(
                    "data.truncation=%s: %s has %d tokens and keeps %d (data.max_prompt_length). data/tokens_dropped counts what "
                    "each step loses.", self.truncation, address, len(ids), self.max_prompt_length,
                )  # fmt: skip
            self.rows_truncated += 1
            self.tokens_dropped += len(ids) - self.max_prompt_length
        return cut(ids, self.max_prompt_length)


def overlong(address: str, length: int, limit: int, others: int = 0) -> DataError:
    """Return the error for a prompt over the limit.

    Args:
        address: File and row of the prompt.
        length: Its tokens.
        limit: ``data.max_prompt_length``.
        others: Further prompts over the limit.
    """
    more = f" ({others} more rows are too long as well)" if others else ""
    return DataError(
        f"{address}: the prompt has {length} tokens, but data.max_prompt_length is {limit}{more}. Raise data.max_prompt_length, "
        "set data.filter_overlong_prompts=true to remove such rows, or set data.truncation to left, right or middle to cut them."
    )


TOKENIZER_PARTS = ("vocabulary", "merges", "added tokens", "normalizer", "pre-tokenizer")
"""What decides the ids of a text."""


def tokenizer_digests(tokenizer: Any) -> dict[str, str]:
    """Return a hash of each part of a tokenizer that decides the ids of a text, by the names in ``TOKENIZER_PARTS``.

    Args:
        tokenizer: A Hugging Face tokenizer with a fast backend.
    """
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    added = sorted((token["id"], token["content"], token["special"]) for token in described["added_tokens"])
    added_names = {name for _, name, _ in added}
    vocabulary = described["model"].pop("vocab", None)
    if isinstance(vocabulary, dict):  # some tokenizers list their added tokens here too, and some do not
        vocabulary = {name: number for name, number in vocabulary.items() if name not in added_names}
    merges = described["model"].pop("merges", None)
    values = (vocabulary, merges, added, described.get("normalizer"), described.get("pre_tokenizer"))
    return {part: _digest(value) for part, value in zip(TOKENIZER_PARTS, values, strict=True)}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
