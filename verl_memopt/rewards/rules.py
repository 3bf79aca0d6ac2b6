"""Rule rewards: small functions of a response and its ground truth, selected by ``data_source``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from importlib.util import find_spec
from typing import Any

from verl_memopt.config.reward_limits import CASES, URL
from verl_memopt.errors import DataError, RewardError

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
        if source in CODE_SOURCES and sandbox:
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
        raise RewardError(f"cannot score this row: {_no_rule(data_source)}")
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
    if source in CODE_SOURCES:
        return (
            f"data_source {source!r} is of code tasks, and programs of responses are run by a sandbox service only. Set {URL} to "
            "the address of a SandboxFusion service, or set custom_reward_function.path."
        )
    return (
        f"data_source {source!r} has no rule. There are rules for {', '.join([*RULES, *CODE_SOURCES])}. "
        "Use one of these, or set custom_reward_function.path."
    )


def _plain_number(text: str) -> str:
    return text.strip().replace(",", "").replace("$", "").rstrip(".")


# Code tasks: the program in a response, its test cases, and what one run of it shows.


CODE_SOURCES = ("apps", "codecontests", "codeforces", "taco")
"""Data sources whose rows are code tasks, as in verl."""

PREDEFINED = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools",
    "functools", "operator", "io", "sys", "json", "builtins", "typing",
)  # fmt: skip
"""Modules whose names a function that is called by name finds, as in verl. The later ones win."""

_CALL = """

def _call_by_name(name):
    text = sys.stdin.read()
    arguments = [json.loads(line) for line in text.split("\\n")] if text.strip() else []
    function = globals()[name] if name in globals() else getattr(Solution(), name)
    result = function(*arguments)
    print(json.dumps(result) if result is None or isinstance(result, (bool, dict, list, tuple)) else result)


import json, sys
_call_by_name({name!r})
"""


@dataclass(frozen=True)
class Case:
    """One test case."""

    stdin: str | None
    """What the program reads from its standard input."""
    expected: str | None
    """What it must print, apart from line breaks at the end. None = anything, if it ends without an error."""
    assertion: str = ""
    """Code that runs after the program."""


@dataclass(frozen=True)
class CodeTask:
    """The test cases of a row."""

    cases: tuple[Case, ...]
    """The cases that count: the first ten."""
    function: str | None = None
    """Name of a function, or of a method of a class ``Solution``. It is called with one argument per line of the standard input,
    each as JSON, and its result is printed. None = the program reads and prints by itself."""

    @classmethod
    def read(cls, ground_truth: Any) -> CodeTask:
        """Return the task of a ground truth.

        Args:
            ground_truth: A dict, or its JSON: ``inputs`` and ``outputs``, lists of equal length, and optionally ``fn_name``. Or
                ``assert_case``, a list of code that runs after the program; ``inputs`` and ``outputs`` may then be left out.

        Raises:
            RewardError: The ground truth is something else, or has no test case. verl gives 0 to every response then.
        """
        try:
            task = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
        except ValueError as error:
            raise _unreadable(f"it is no JSON ({error})") from error
        if not isinstance(task, Mapping):
            raise _unreadable(f"it is of type {type(task).__name__}")
        assertions = task.get("assert_case")
        if isinstance(assertions, list):
            task = {"inputs": [""] * len(assertions), "outputs": [None] * len(assertions), **task}
        inputs, outputs, function = (task.get(name) for name in ("inputs", "outputs", "fn_name"))
        if not (isinstance(inputs, list) and isinstance(outputs, list) and inputs):
            raise _unreadable("it has no test case (inputs and outputs, or assert_case)")
        assertions = [""] * len(inputs) if assertions is None else assertions
        if not isinstance(assertions, list) or not all(isinstance(code, str) for code in assertions):
            raise _unreadable("assert_case is no list of code")
        if not len(inputs) == len(outputs) == len(assertions):
            raise _unreadable("it has not as many inputs as outputs, or as assert_case")
        cases = (
            Case(None if stdin is None else str(stdin), None if expected is None else str(expected), code)
            for stdin, expected, code in zip(inputs[:CASES], outputs[:CASES], assertions[:CASES], strict=True)
        )
        return cls(tuple(cases), str(function) if function else None)

    def program(self, code: str, case: Case) -> str:
        """Return the whole program that is run for a test case."""
        tested = f"{code}\n\n{case.assertion}"
        if self.function is None:
            return tested
        stars = "".join(f"from {module} import *\n" for module in PREDEFINED)
        modules = "".join(f"import {module}\n" for module in PREDEFINED)
        return f"{stars}{modules}\n{tested}\n{_CALL.format(name=self.function)}"


class Verdict(Enum):
    """What one run of a program on a test case shows."""

    PASSED = auto()
    FAILED = auto()
    """It printed something else, ended with an error, or took too much time or memory."""
    NOT_COMPILED = auto()
    """It could not be compiled, which concerns the further cases too."""
    UNKNOWN = auto()
    """The service could not run it."""


def program_in(response: str) -> str | None:
    """Return the code of a response, or None if it has no code block.

    It is the last block marked ``python``, else the first block, without a first line that is one word. A block that is not
    closed ends with the response. verl chooses in the same way.
    """
    if "```python" in response:
        return response.split("```python")[-1].split("```")[0]
    if "```" not in response:
        return None
    code = response.split("```")[1]
    first, line_break, others = code.partition("\n")
    return others if line_break and first.strip().isalpha() else code


def verdict_of(answer: Any, expected: str | None) -> Verdict:
    """Return what an answer of the service shows.

    Args:
        answer: The JSON that the service returned.
        expected: What the program must print. None = anything.

    Raises:
        RewardError: The answer is none of a SandboxFusion service. verl counts it as a case that is not passed.
    """
    parts = answer if isinstance(answer, dict) else {}
    run, compiled = ({} if part is None else part for part in (parts.get("run_result"), parts.get("compile_result")))
    if isinstance(run, dict) and isinstance(compiled, dict):
        match parts.get("status"):
            case "SandboxError":
                return Verdict.UNKNOWN
            case "Failed":
                return Verdict.NOT_COMPILED if _went_wrong(compiled) else Verdict.FAILED
            case "Success" if run.get("status") == "Finished":
                printed = str(run.get("stdout") or "")
                right = expected is None or printed.rstrip("\n") == expected.rstrip("\n")
                return Verdict.PASSED if right else Verdict.FAILED
    raise RewardError(f"{json.dumps(answer)[:200]} is no answer of a SandboxFusion service. Correct the address.")


def _went_wrong(result: Mapping[str, Any]) -> bool:
    """Return whether a command did not end well."""
    status = result.get("status")
    return status in ("Error", "TimeLimitExceeded") or (status == "Finished" and result.get("return_code") != 0)


def _unreadable(why: str) -> RewardError:
    return RewardError(
        f'its ground truth is no code task: {why}. Give JSON such as {{"inputs": ["1 2\\n"], "outputs": ["3\\n"]}}.'
    )
