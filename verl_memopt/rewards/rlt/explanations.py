"""Where the explanation lies in each response: K, the longest run of tokens before the end tag."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verl_memopt.data.ragged import Ragged
from verl_memopt.rewards.rlt.token_bytes import TokenBytes


@dataclass(frozen=True)
class Explanations:
    """The explanations of N responses. An explanation starts with its response.

    Attributes:
        lengths: int64 [N], tokens of each explanation, K. A token that holds the first byte of the end tag is not one of them.
        matched: bool [N], whether there is an end tag.
        has_text_after: bool [N], whether other text than white space follows the end tag.
        texts: The bytes of each explanation, up to the end tag. They may end inside the token after K.
    """

    lengths: Tensor
    matched: Tensor
    has_text_after: Tensor
    texts: tuple[bytes, ...]


def locate_explanations(responses: Ragged, token_bytes: TokenBytes, end_tag: str, stop_ids: Collection[int]) -> Explanations:
    """Return where the explanation of each response lies.

    Only what comes before the first stop token counts. The first end tag decides. Without one, all of it is the explanation.

    Args:
        responses: int64, the tokens after the forced prefix.
        token_bytes: The bytes of the tokens.
        end_tag: The end tag of an explanation.
        stop_ids: Tokens that end a response, and padding.
    """
    tag = end_tag.encode()
    stops = torch.isin(responses.flat, torch.tensor(sorted(stop_ids), dtype=torch.int64)).split(responses.sizes())
    found_in = [_locate(ids[: _first(is_stop)], token_bytes, tag) for ids, is_stop in zip(responses.rows(), stops, strict=True)]
    lengths, matched, after, texts = zip(*found_in, strict=True) if found_in else ((), (), (), ())
    return Explanations(
        lengths=torch.tensor(lengths, dtype=torch.int64),
        matched=torch.tensor(matched, dtype=torch.bool),
        has_text_after=torch.tensor(after, dtype=torch.bool),
        texts=tuple(texts),
    )


def _first(is_stop: Tensor) -> int:
    """Return the place of the first True, or the length where there is none."""
    places = is_stop.nonzero()
    return int(places[0]) if len(places) else len(is_stop)


def _locate(ids: Tensor, token_bytes: TokenBytes, tag: bytes) -> tuple[int, bool, bool, bytes]:
    """Return the tokens of an explanation, whether it has an end tag, whether text follows it, and its bytes."""
    text = token_bytes.spell(ids)
    place = text.find(tag)
    if place < 0:
        return len(ids), False, False, text
    length = int(np.searchsorted(token_bytes.ends(ids), place, side="right"))
    return length, True, bool(text[place + len(tag) :].strip()), text[:place]
