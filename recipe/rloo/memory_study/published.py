"""What the published experiment reports, for comparison. Nothing here was measured by this study."""

from __future__ import annotations

LABELS = {"token": "Basic", "lazy": "Lazy generation", "repeat_sampler": "RepeatSampler", "string": "String-level"}
"""The published name of each expansion."""

PEAKS_GIB: dict[tuple[str, int], float | None] = {
    ("token", 2): 14.38,
    ("token", 4): 26.99,
    ("token", 8): None,
    ("lazy", 2): 14.49,
    ("lazy", 4): 27.22,
    ("lazy", 8): None,
    ("repeat_sampler", 2): 14.48,
    ("repeat_sampler", 4): 27.22,
    ("repeat_sampler", 8): None,
    ("string", 2): 6.40,
    ("string", 4): 11.01,
    ("string", 8): 20.25,
}
"""Peak use of the whole device by (expansion, k), in GiB. None = it ran out of memory.

One run a cell, on one RTX 5090, desktop included. The string-level runs had prompts of 1,024 tokens, the others of about 3,015.
"""

LAST_GIB = {("token", 8): 23.87}
"""Figures that the publication gives for runs that ran out of memory: the highest reading before the error, as "Completed"."""

CARD_GIB = 32_607 / 1024
"""Memory of the card."""
