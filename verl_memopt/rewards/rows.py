"""Input and result of a reward function for one row."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RewardRow:
    """One response with what its reward function receives."""

    data_source: str
    """Selects the rule when there is no custom function."""
    solution: str
    """The response, decoded without special tokens."""
    ground_truth: Any
    """The reference answer of the dataset row."""
    extra_info: dict[str, Any]
    """The dataset row's extra_info."""
    address: str
    """File and row of the prompt, for errors."""


@dataclass(frozen=True)
class RewardResult:
    """The score of one row."""

    score: float
    """A finite number."""
    extra: dict[str, Any] = field(default_factory=dict)
    """The other entries, when the function returned a dict."""
    failed: bool = False
    """The function failed on this row, and ``score`` is the fallback score."""
