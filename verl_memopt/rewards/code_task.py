"""Code tasks: the program in a response, its test cases, and what one run of it shows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from verl_memopt.config.sandbox_rules import CASES
from verl_memopt.errors import RewardError

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
        task = _dict_of(ground_truth)
        assertions = task.get("assert_case")
        if isinstance(assertions, list):
            task = {"inputs": [""] * len(assertions), "outputs": [None] * len(assertions)} | task
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
        """Return the whole program that is run for a test case.

        Args:
            code: Code of the response.
            case: The test case.
        """
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


def _dict_of(ground_truth: Any) -> dict[str, Any]:
    if isinstance(ground_truth, str):
        try:
            ground_truth = json.loads(ground_truth)
        except ValueError as error:
            raise _unreadable(f"it is no JSON ({error})") from error
    if not isinstance(ground_truth, Mapping):
        raise _unreadable(f"it is of type {type(ground_truth).__name__}")
    return dict(ground_truth)


def _unreadable(why: str) -> RewardError:
    return RewardError(
        f'its ground truth is no code task: {why}. Give JSON such as {{"inputs": ["1 2\\n"], "outputs": ["3\\n"]}}.'
    )
