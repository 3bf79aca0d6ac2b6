"""The reward of the arithmetic task."""

import re
from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Return 1.0 if the last number of an answer is the right one, else 0.0."""
    numbers = re.findall(r"-?\d+", solution_str)
    return float(bool(numbers) and numbers[-1] == str(ground_truth))
