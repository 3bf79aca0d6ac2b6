"""The bytes that each token of a byte-level tokenizer stands for.

A text is the concatenation of its tokens' bytes, so the place of a tag in a response is found without decoding prefixes. Decoding
prefixes is quadratic, and it loses what is no valid UTF-8.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from torch import Tensor

from verl_memopt.errors import ConfigError
from verl_memopt.models.pack import ranges

_PROBE = "a b\n\n7\u00e9\U0001f642<x>"
"""A text with a space, line breaks, a digit, characters of two and four bytes, and brackets."""


class TokenBytes:
    """The bytes of each token of a vocabulary.

    Args:
        tokenizer: A Hugging Face tokenizer with a byte-level vocabulary, as those of GPT-2, Qwen and Llama 3.

    Raises:
        ConfigError: The tokenizer is not byte-level.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Read the vocabulary."""
        spelled = _spelled(tokenizer)
        self._bytes = np.frombuffer(b"".join(spelled), dtype=np.uint8)
        # One more token without bytes: every id that the tokenizer does not have, such as padding of the embedding.
        self._sizes = np.array([*map(len, spelled), 0], dtype=np.int64)
        self._starts = np.cumsum(self._sizes) - self._sizes
        ids = tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
        if self.spell(np.asarray(ids, dtype=np.int64)) != _PROBE.encode():
            raise _not_byte_level(tokenizer)

    def spell(self, ids: Tensor | np.ndarray) -> bytes:
        """Return the bytes of some tokens, one after another. A token that the tokenizer does not have has none.

        Args:
            ids: int64 [T].
        """
        known = self._known(ids)
        return self._bytes[ranges(self._starts[known], self._sizes[known])].tobytes()

    def ends(self, ids: Tensor | np.ndarray) -> np.ndarray:
        """Return int64 [T]: the number of bytes up to the end of each token.

        Args:
            ids: int64 [T].
        """
        return np.cumsum(self._sizes[self._known(ids)])

    def _known(self, ids: Tensor | np.ndarray) -> np.ndarray:
        unknown = len(self._sizes) - 1
        values = np.asarray(ids, dtype=np.int64)
        return np.where((values >= 0) & (values < unknown), values, unknown)


def _spelled(tokenizer: Any) -> list[bytes]:
    """Return the bytes of each id. Added tokens are spelled as they are, all others with one character a byte."""
    if not _has_byte_level_decoder(tokenizer):
        raise _not_byte_level(tokenizer)
    byte_of = _byte_of_character()
    added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items()}
    spelled = []
    for number, text in enumerate(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))):
        if number in added or text is None:
            spelled.append(added.get(number, "").encode())
        elif all(character in byte_of for character in text):
            spelled.append(bytes(byte_of[character] for character in text))
        else:
            raise _not_byte_level(tokenizer)
    return spelled


def _has_byte_level_decoder(tokenizer: Any) -> bool:
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return False
    description = json.loads(decoder.__getstate__())
    parts = [description, *description.get("decoders", ())]
    return any(part.get("type") == "ByteLevel" for part in parts)


def _byte_of_character() -> dict[str, int]:
    """Return character -> byte as byte-level vocabularies spell them.

    A printable byte of Latin-1 is its own character. The others take the characters from 256 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


def _not_byte_level(tokenizer: Any) -> ConfigError:
    return ConfigError(
        f"actor_rollout_ref.model.path: the tokenizer ({type(tokenizer).__name__}) is not byte-level, so the end of an "
        "explanation cannot be located in its tokens. RLT needs one as those of Qwen or Llama 3. Choose another model."
    )
