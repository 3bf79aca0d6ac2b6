"""The same text in the tokens of two tokenizers: which tokens of one stand for which tokens of the other."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""How a tokenizer decodes the bytes of a character that later tokens complete."""


def text_ends(tokenizer: Any, ids: Sequence[int]) -> tuple[str, list[int]]:
    """Return the text of some tokens, and where in it each token ends.

    A token that ends within a character ends where the token before it ends.
    """
    text, ends = "", list[int]()
    first = read = 0  # the tokens from ``first`` to ``read`` are decoded again as the context of what follows
    for place in range(1, len(ids) + 1):
        known, longer = (tokenizer.decode(ids[first:last], skip_special_tokens=False) for last in (read, place))
        if not longer.endswith(UNFINISHED) or place == len(ids):
            text += longer[len(known) :]
            first, read = read, place
        ends.append(len(text))
    return text, ends


def encoded_ends(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """Return the tokens of a text, without special tokens around it, and where in the text each of them ends."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ends, last = [], 0
    for _, end in encoded["offset_mapping"]:
        last = max(last, end)
        ends.append(last)
    if ends:
        ends[-1] = len(text)
    return list(encoded["input_ids"]), ends


def matching(one: Sequence[int], other: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Yield the shortest runs of tokens that stand for the same part of a text, given where the tokens of both sides end."""
    first = second = 0
    for place in sorted({*one} & {*other}):
        last, end = bisect_right(one, place), bisect_right(other, place)
        yield slice(first, last), slice(second, end)
        first, second = last, end
    assert (first, second) == (len(one), len(other)), "both sides end where the text ends"


class Retold:
    """A response of the policy in the tokens of a teacher with another tokenizer.

    Attributes:
        ids: The teacher's tokens.
        runs: Runs of tokens with the same text: those of the policy, and those of the teacher.
    """

    def __init__(self, policy: Any, teacher: Any, ends_of_turn: Collection[int], ids: Sequence[int]) -> None:
        """Tokenize the text of a response again.

        Args:
            policy: The tokenizer of the policy.
            teacher: The tokenizer of the teacher.
            ends_of_turn: Tokens of the policy that end a turn. As the last token of a response they stand for the teacher's
                end-of-sequence token.
            ids: The response.
        """
        ends_turn = bool(ids) and ids[-1] in ends_of_turn
        text, ends = text_ends(policy, ids[: len(ids) - ends_turn])
        self.ids, own = encoded_ends(teacher, text)
        self.runs = list(matching(ends, own)) if text else []
        if ends_turn:
            self.runs.append((slice(len(ends), len(ends) + 1), slice(len(self.ids), len(self.ids) + 1)))
            self.ids = [*self.ids, teacher.eos_token_id]

    def in_runs(self, log_probs: Tensor, of_teacher: Tensor) -> tuple[Tensor, Tensor]:
        """Give each token of the policy the estimate of its whole run.

        Args:
            log_probs: fp32 [n], the policy's.
            of_teacher: fp32 [m], the teacher's, of ``ids``.

        Returns:
            fp32 [n], log-probs whose difference from the policy's is that of the run, and fp32 [n], the share of a token in its
            run: 1 over the number of its tokens.
        """
        found, shares = log_probs.clone(), torch.ones_like(log_probs)
        for own, theirs in self.runs:
            difference = log_probs[own].double().sum() - of_teacher[theirs].double().sum()
            found[own] = (log_probs[own].double() - difference).float()
            shares[own] = 1 / (own.stop - own.start)
        return found, shares
