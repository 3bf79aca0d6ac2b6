"""Rule rewards: small functions of a response and its ground truth, selected by ``data_source``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from typing import Any

from verl_memopt.config.sandbox_rules import URL
from verl_memopt.errors import DataError, RewardError
from verl_memopt.rewards.code_task import CODE_SOURCES

Rule = Callable[[str, Any], float]

MATH_SECONDS = 2
"""Longest time in which math-verify must read an answer, and compare it."""

_FINAL_ANSWER = re.compile(r"####\s*(\$?-?[0-9][0-9.,]*)")
_THINK_THEN_ANSWER = re.compile(r"\s*<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*", re.DOTALL)


def exact_match(solution: str, ground_truth: Any) -> float:
    """Return 1.0 when the response equals the ground truth, apart from surrounding white space; else 0.0."""
    return float(solution.strip() == str(ground_truth).strip())


def final_answer(solution: str) -> str | None:
    """Return the number of the last ``#### x`` in a text, or None.

    Thousands separators, a currency sign and a final dot are removed.
    """
    answers = _FINAL_ANSWER.findall(solution)
    return _plain_number(answers[-1]) if answers else None


def gsm8k(solution: str, ground_truth: Any) -> float:
    """Return 1.0 when the last ``#### x`` of the response is the ground truth; an answer in any other form scores 0.0."""
    return float(final_answer(solution) == _plain_number(str(ground_truth)))


def final_answer_format(solution: str, ground_truth: Any) -> float:
    """Return 1.0 when the response has exactly one ``#### x`` and ends with it, right or wrong; else 0.0."""
    matches = list(_FINAL_ANSWER.finditer(solution))
    return float(len(matches) == 1 and not solution[matches[0].end() :].strip())


def think_format(solution: str, ground_truth: Any) -> float:
    """Return 1.0 when the response is one ``<think>..</think>`` and then one ``<answer>..</answer>``; else 0.0."""
    return float(_THINK_THEN_ANSWER.fullmatch(solution) is not None)


def math_answer(solution: str, ground_truth: Any) -> float:
    r"""Return 1.0 when the last answer of a response equals the ground truth mathematically, else 0.0.

    math-verify reads the last ``\boxed{...}``, else the last formula or number, and compares it with sympy:
    ``\frac{2}{4}`` is ``0.5``, and ``x^2+2x+1`` is ``(x+1)^2``. An answer that takes longer than ``MATH_SECONDS`` to read or to
    compare, such as a tower of powers, scores 0.0.

    Args:
        solution: The response.
        ground_truth: The answer as LaTeX without ``\boxed{}``, or as a number.

    Raises:
        RewardError: The ground truth cannot be read.
    """
    from math_verify import LatexExtractionConfig, parse, verify

    boxed = f"\\boxed{{{ground_truth}}}"
    expected = parse(boxed, extraction_config=[LatexExtractionConfig()], parsing_timeout=MATH_SECONDS)
    if not expected:
        raise RewardError(
            f"cannot score this row: math-verify cannot read the ground truth {ground_truth!r} as LaTeX. Correct it."
        )
    # math-verify would join several boxes to a set, so an answer that the response revised would count.
    answer = parse(solution[max(solution.rfind("\\boxed"), 0) :], parsing_timeout=MATH_SECONDS)
    return float(verify(expected, answer, timeout_seconds=MATH_SECONDS))


_NUMINA = ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads")
"""Sources of mathematical problems in the data sets Eurus-2-RL and NuminaMath."""

RULES: dict[str, Rule] = {
    "toy/arithmetic": exact_match,
    "openai/gsm8k": gsm8k,
    "format/final_answer": final_answer_format,
    "format/think": think_format,
    "math/answer": math_answer,
    "lighteval/MATH": math_answer,
    "DigitalLearningGmbH/MATH-lighteval": math_answer,
    "HuggingFaceH4/MATH-500": math_answer,
    **{f"numina_{name}": math_answer for name in _NUMINA},
}
"""Rules by data source."""


def check_sources(sources: Iterable[tuple[str, str]], sandbox: bool = False) -> None:
    """Check that each data source has a rule. For runs without a custom function.

    Args:
        sources: (data_source, address) of each row.
        sandbox: There is a service that runs the programs of code tasks.

    Raises:
        DataError: A data source has no rule, or what its rule needs is missing. The message names the first such row.
    """
    for source, address in sources:
        if source in CODE_SOURCES:
            if not sandbox:
                raise DataError(f"{address}: {_no_sandbox(source)}")
            continue
        if source not in RULES:
            raise DataError(f"{address}: {_no_rule(source)}")
        if RULES[source] is math_answer and find_spec("math_verify") is None:
            raise DataError(
                f"{address}: data_source {source!r} needs math-verify, which is not installed. "
                "Install it (pip install 'verl-memopt[math]'), or set custom_reward_function.path."
            )


def score_by_rule(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None) -> float:
    """Return the score by the rule of ``data_source``.

    Raises:
        RewardError: There is no such rule.
    """
    if data_source not in RULES:
        missing = _no_sandbox(data_source) if data_source in CODE_SOURCES else _no_rule(data_source)
        raise RewardError(f"cannot score this row: {missing}")
    return RULES[data_source](solution_str, ground_truth)


def score_batch_by_rule(
    data_sources: Sequence[str], solution_strs: Sequence[str], ground_truths: Sequence[Any], extra_infos: Sequence[Any]
) -> list[float]:
    """Return the score of each row by the rule of its data source.

    Raises:
        RewardError: There is no such rule.
    """
    return list(map(score_by_rule, data_sources, solution_strs, ground_truths, extra_infos))


def _no_rule(source: str) -> str:
    return (
        f"data_source {source!r} has no rule. There are rules for {', '.join([*RULES, *CODE_SOURCES])}. "
        "Use one of these, or set custom_reward_function.path."
    )


def _no_sandbox(source: str) -> str:
    return (
        f"data_source {source!r} is of code tasks, and programs of responses are run by a sandbox service only. Set {URL} to the "
        "address of a SandboxFusion service, or set custom_reward_function.path."
    )


def _plain_number(text: str) -> str:
    return text.strip().replace(",", "").replace("$", "").rstrip(".")
