"""Answers that are compared by their mathematical value. The only file that imports math-verify."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Any

from verl_memopt.errors import RewardError

MATH_SECONDS = 2
"""Time limit of math-verify to read an answer, and the same limit to compare it."""

UNREADABLE = "[unparseable]"
"""Text in place of an answer that math-verify cannot read, as in TRL."""


def math_seconds() -> int | None:
    # math-verify limits time by an alarm signal, which works in the main thread only.
    if threading.current_thread() is threading.main_thread():
        return MATH_SECONDS
    for name in ("math_verify.parser", "math_verify.grader"):  # both would warn of the missing limit
        logging.getLogger(name).setLevel(logging.ERROR)
    return None


def math_answer(solution: str, ground_truth: Any) -> float:
    r"""Return 1.0 if the last answer of a response equals the ground truth mathematically, else 0.0.

    math-verify reads the last ``\boxed{...}``, or without one the last formula or number, and compares it with sympy:
    ``\frac{2}{4}`` is ``0.5``, and ``x^2+2x+1`` is ``(x+1)^2``. An answer that takes longer than ``MATH_SECONDS`` to read or to
    compare, such as a tower of powers, scores 0.0.

    Args:
        solution: The response.
        ground_truth: The answer as LaTeX without ``\boxed{}``, or as a number.

    Raises:
        RewardError: The ground truth cannot be read.
    """
    from math_verify import LatexExtractionConfig, parse, verify

    boxed = f"\\boxed{{{str(ground_truth).strip().removesuffix('.')}}}"
    expected = parse(boxed, extraction_config=[LatexExtractionConfig()], parsing_timeout=math_seconds())
    if not expected:
        raise RewardError(
            f"cannot score this row: math-verify cannot read the ground truth {ground_truth!r} as LaTeX. Correct it."
        )
    # math-verify would join several boxes to a set, so an earlier answer that the response has corrected would still count.
    answer = parse(solution[max(solution.rfind("\\boxed"), 0) :], parsing_timeout=math_seconds())
    return float(verify(expected, answer, timeout_seconds=math_seconds()))


@dataclass(frozen=True)
class LatexAnswer:
    score: float | None
    """1.0 or 0.0. None = the solution cannot be read."""
    solution: str
    answer: str


def latex_answer(text: str, solution: str) -> LatexAnswer:
    """Compare the LaTeX in a text with a solution.

    Source: ``accuracy_reward`` of TRL. The boxed answer is tried first. A text without LaTeX has no answer.
    """
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    seconds = math_seconds()
    expected = parse(solution, parsing_timeout=seconds)
    if not expected:
        return LatexAnswer(None, UNREADABLE, "[skipped]")
    latex = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    )
    answer = parse(text, extraction_config=[latex], extraction_mode="first_match", parsing_timeout=seconds)
    score = float(verify(expected, answer, timeout_seconds=seconds))
    return LatexAnswer(score, str(expected), str(answer) if answer else UNREADABLE)
