"""A reward that random weights earn by chance: how many different characters an answer shows. Groups then differ."""

from __future__ import annotations

from typing import Any

ENOUGH = 16
"""Different characters that earn the whole reward."""


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    return min(len(set(solution_str)) / ENOUGH, 1.0)
