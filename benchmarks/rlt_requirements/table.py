"""The table of what a card needs. To the measured passes it adds weights, gradients, the engine and what lies outside of torch."""

from __future__ import annotations


def table(peaks, settings, rows) -> str:
    """Return the table as text."""
    return ""
