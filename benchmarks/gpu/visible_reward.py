"""A reward that random weights earn by chance: the share of an answer's characters that differ. Groups then differ."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    return len(set(solution_str)) / max(len(solution_str), 1)
