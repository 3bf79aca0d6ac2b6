"""Types of settings whose numbers have a range: ``Annotated[type, Range]``, read by the check of values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any


@dataclass(frozen=True)
class Range:
    """What a number must be."""

    text: str
    """The end of the sentence "the value ..."."""
    holds: Callable[[Any], bool]
    """Return whether a value, which is not None, is in the range."""


@dataclass(frozen=True)
class Words:
    """The words that a key takes, or each item of its list, where its type does not say so."""

    words: tuple[str, ...]


@dataclass(frozen=True)
class Meanings:
    """What each word of a choice means, for the page of settings."""

    of: tuple[tuple[str, str], ...]
    """(word, meaning)."""


POSITIVE = Range("must be above 0", lambda value: value > 0)
NOT_NEGATIVE = Range("must not be negative", lambda value: value >= 0)
MINUS_ONE_OR_POSITIVE = Range("must be above 0, or -1", lambda value: value > 0 or value == -1)
MINUS_ONE_OR_MORE = Range("must not be negative, except -1", lambda value: value >= -1)
SHARE = Range("must lie between 0 and 1", lambda value: 0 <= value <= 1)
POSITIVE_SHARE = Range("must be above 0 and at most 1", lambda value: 0 < value <= 1)

PositiveInt = Annotated[int, POSITIVE]
PositiveFloat = Annotated[float, POSITIVE]
NaturalInt = Annotated[int, NOT_NEGATIVE]
"""A whole number from 0 up."""
NaturalFloat = Annotated[float, NOT_NEGATIVE]
"""A number from 0 up."""
CountOrMinusOne = Annotated[int, MINUS_ONE_OR_POSITIVE]
Share = Annotated[float, SHARE]
PositiveShare = Annotated[float, POSITIVE_SHARE]
