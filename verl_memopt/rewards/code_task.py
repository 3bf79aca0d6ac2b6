"""Code tasks: the program in a response, its test cases, and what one run of it shows."""

from __future__ import annotations

import ast
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any

from verl_memopt.config.reward_limits import CASES
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
    """Code that runs after the program, and must come to its end."""


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

    def trial(self, code: str, case: Case) -> Trial:
        """Return the whole program that is run for a test case, and what shows that it passes."""
        right = prints(case.expected)
        if not case.assertion.strip():
            return Trial(self._whole(f"{code}\n\n{case.assertion}"), case.stdin, right)
        mark = f"_{secrets.token_hex(16)}"
        compared = _compared(case.assertion, mark)
        if compared is not None:
            shown, values = compared
            return Trial(self._whole(f"{code}\n\n{shown}"), case.stdin, partial(_shows, mark, values, right))
        # The proof that the program prints at its end is split: half is in its text, and half is the first line of its input.
        half = secrets.randbits(128)
        program = _HIDDEN.format(
            os=f"_{secrets.token_hex(16)}",
            half=f"_{secrets.token_hex(16)}",
            other=half ^ int(mark[1:], 16),
            code=self._whole(f"{code}\n\n{case.assertion}"),
        )
        return Trial(program, f"{half:032x}\n{case.stdin or ''}", partial(_shows, mark, [True], right))

    def _whole(self, tested: str) -> str:
        """Return a program with the modules and the call of a function by name, where the task has one."""
        if self.function is None:
            return tested
        stars = "".join(f"from {module} import *\n" for module in PREDEFINED)
        modules = "".join(f"import {module}\n" for module in PREDEFINED)
        return f"{stars}{modules}\n{tested}\n{_CALL.format(name=self.function)}"


@dataclass(frozen=True)
class Trial:
    """One run of a program on a test case."""

    program: str
    stdin: str | None
    """What the program reads from its standard input."""
    passes: Callable[[str], bool]
    """Whether what a run printed shows that the case is passed, if it ended without an error."""


def prints(expected: str | None) -> Callable[[str], bool]:
    """Return what says whether a text is the expected one, apart from line breaks at the end. None = any text is."""
    return lambda printed: expected is None or printed.rstrip("\n") == expected.rstrip("\n")


# An assertion passes where its program only ends early, or returns an object that equals everything. So a program shows the
# values that are asserted, and they are compared here. Where that cannot be, it must print what it does not know before the end.


_HIDDEN = """\
import os as {os}
{half} = {os}.read(0, 33)
exec(compile({code!r}, "program", "exec"))

print("\\n_%032x" % (int({half}, 16) ^ {other}), True)
"""
"""Keeps a proof from a response that prints what it finds in its text, its input or its files. A response can find both halves,
but only by looking for what this very program does with them: no secret is safe inside the interpreter that knows it."""

_SHOW = """
def {mark}(value):
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {{{mark}(key): {mark}(each) for key, each in dict.items(value)}}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return (set if kind is frozenset else kind)([{mark}(each) for each in kind.__iter__(value)])
    for kind, plain in ((bool, bool), (str, str.__str__), (int, int.__int__), (float, float.__float__)):
        if isinstance(value, kind):
            return plain(value)
    return value


"""
"""Gives the plain data in what a program returned: of a type of its own, the text could say anything."""


def _compared(assertion: str, mark: str) -> tuple[str, list[Any]] | None:
    """Return code that prints each value that is asserted to equal a literal, after the mark, and the literals in that order.

    None where the assertion says something else.
    """
    try:
        tree = ast.parse(assertion)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    values, lines = list[Any](), list[str]()
    for node in tree.body:
        if not isinstance(node, ast.Assert):
            if any(isinstance(each, ast.Assert) for each in ast.walk(node)):
                return None
            lines.append(ast.unparse(node))
            continue
        test = node.test
        if not (isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq)):
            return None
        texts = ast.unparse(test.left), ast.unparse(test.comparators[0])
        shown = next((place for place in (0, 1) if _literal(texts[1 - place])), None)
        if shown is None:
            return None
        values += _literal(texts[1 - shown])
        lines.append(f"print({mark!r}, ascii({mark}({texts[shown]})))")
    return (_SHOW.format(mark=mark) + "\n".join(lines), values) if values else None


def _literal(text: str) -> list[Any]:
    """Return the value of a text in a list, which is empty where the text is no literal."""
    try:
        return [ast.literal_eval(text)]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []


def _shows(mark: str, values: Sequence[Any], right: Callable[[str], bool], printed: str) -> bool:
    """Return whether a program printed all values after the mark, in order, and else what is right."""
    lines = printed.splitlines(keepends=True)
    shown = [line.removeprefix(mark).strip() for line in lines if line.startswith(mark)]
    if len(shown) != len(values) or not right("".join(line for line in lines if not line.startswith(mark))):
        return False
    most = 1000 + 10 * len(ascii(values))  # a text that is far longer is not worth reading
    return all(len(text) <= most and _literal(text) == [value] for text, value in zip(shown, values, strict=True))


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


def verdict_of(answer: Any, passes: Callable[[str], bool]) -> Verdict:
    """Return what an answer of the service shows.

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
                return Verdict.PASSED if passes(str(run.get("stdout") or "")) else Verdict.FAILED
    raise RewardError(f"{json.dumps(answer)[:200]} is no answer of a SandboxFusion service. Correct the address.")


def _went_wrong(result: Mapping[str, Any]) -> bool:
    """Return whether a command did not end well."""
    status = result.get("status")
    return status in ("Error", "TimeLimitExceeded") or (status == "Finished" and result.get("return_code") != 0)


def _unreadable(why: str) -> RewardError:
    return RewardError(
        f'its ground truth is no code task: {why}. Give JSON such as {{"inputs": ["1 2\\n"], "outputs": ["3\\n"]}}.'
    )
