"""The text path of the published implementation, for comparisons: a row is written as one text and tokenized again.

The published code then searches for the explanation's and the solution's tokens in the result. Here their places follow from
the bytes of the texts. Where the search succeeds and finds the right place, both agree.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from verl_memopt.data.encoder import tokenize
from verl_memopt.data.special_tokens import Spans
from verl_memopt.rewards.rlt.token_bytes import TokenBytes

Parts = tuple[list[int], list[int], list[int], list[int], list[int]]
"""The ids of the prefix, the explanation, the bridge, the solution and the end of one row."""
Texts = tuple[str, str, str, str, str]
"""The texts of the same parts."""


def retokenized_parts(
    tokenizer: Any, token_bytes: TokenBytes, texts: Texts, plain: tuple[Spans, Spans, Spans, Spans, Spans]
) -> Parts:
    """Return the parts of a row whose texts are tokenized as one.

    A token that reaches over the border of the explanation or of the solution belongs to the part beside it.

    Args:
        tokenizer: A Hugging Face tokenizer.
        token_bytes: The bytes of its tokens.
        texts: The texts of the parts.
        plain: For each text, the spans whose special tokens are encoded as plain text.
    """
    starts = np.cumsum([0, *map(len, texts)])
    spans = tuple(
        (int(start) + first, int(start) + last) for start, of_text in zip(starts, plain, strict=False) for first, last in of_text
    )
    (ids,) = tokenize(tokenizer, ["".join(texts)], [spans])
    ends = token_bytes.ends(np.asarray(ids, dtype=np.int64))
    begins = np.concatenate([[0], ends[:-1]])
    borders = np.cumsum([len(_normalized(tokenizer, text).encode()) for text in texts])
    cuts = [0]
    for border, is_begin in zip(borders[:4], (True, False, True, False), strict=True):
        # A section begins with the first token that starts at its border, and ends with the last that ends there.
        place = np.searchsorted(begins, border, "left") if is_begin else np.searchsorted(ends, border, "right")
        cuts.append(max(cuts[-1], int(place)))
    cuts.append(len(ids))
    prefix, think, bridge, solution, end = (ids[first:last] for first, last in pairwise(cuts))
    return prefix, think, bridge, solution, end


def _normalized(tokenizer: Any, text: str) -> str:
    """Return the text as the tokenizer reads it, in the normal form of Unicode that it uses."""
    normalizer = tokenizer.backend_tokenizer.normalizer
    return text if normalizer is None else normalizer.normalize_str(text)
