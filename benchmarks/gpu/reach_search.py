"""Which length to try next, and what is known so far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

STEP = 64
"""Lengths are multiples of this."""

FINE = 16
"""The search ends when what fits and what does not are within 1 / FINE of the length."""


@dataclass(frozen=True)
class Known:
    """The longest length that fits (0 where none is known to), and the shortest that does not."""

    fits: int
    fails: int | None

    @classmethod
    def of(cls, outcomes: Iterable[tuple[int, bool]]) -> Known:
        """Gives what outcomes (length, fits) say together."""
        pairs = list(outcomes)
        fits = max((length for length, fitted in pairs if fitted), default=0)
        return cls(fits, min((length for length, fitted in pairs if not fitted and length > fits), default=None))


def next_length(known: Known, start: int, most: int) -> int | None:
    """Gives the length to try next: powers of two up, then halves of what is open; None when the search is done."""
    start, most = min(start, most), most // STEP * STEP
    if known.fails is None:
        if known.fits >= most:
            return None
        return min(max(2 * known.fits, start), most)
    if known.fits == 0:
        return STEP if known.fails > STEP else None
    if known.fails - known.fits <= max(STEP, known.fails // FINE):
        return None
    return (known.fits + known.fails) // (2 * STEP) * STEP
