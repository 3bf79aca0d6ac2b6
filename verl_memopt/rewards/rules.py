"""Rule rewards: small functions of a response and its ground truth, selected by ``data_source``."""

from __future__ import annotations

import ast
import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from importlib.util import find_spec
from typing import Any

from verl_memopt.config.reward_limits import CASES, URL
from verl_memopt.errors import DataError, RewardError
from verl_memopt.rewards.math_answers import math_answer

Rule = Callable[[str, Any], Any]
"""From a response and its ground truth to a score, or to a dict with ``score``."""

LAST_CHARACTERS = 300
"""Characters at the end of a response that verl's rules for GSM8K and DAPO's problems read."""

_STRICT_ANSWER = re.compile(r"#### (-?[0-9.,]+)")
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
    """Return 1.0 when the last ``#### x`` in the last 300 characters is the ground truth, apart from commas; else 0.0.

    This is verl's rule: a currency sign, a final dot or another form of the number scores 0.0.
    """
    answers = _STRICT_ANSWER.findall(solution[-LAST_CHARACTERS:])
    return float(bool(answers) and answers[-1].replace(",", "") == str(ground_truth))


def tolerant_gsm8k(solution: str, ground_truth: Any) -> float:
    """Return 1.0 when the last ``#### x`` is the ground truth, apart from commas, a currency sign and a final dot; else 0.0."""
    return float(final_answer(solution) == _plain_number(str(ground_truth)))


def final_answer_format(solution: str, ground_truth: Any) -> float:
    """Return 1.0 when the response has exactly one ``#### x`` and ends with it, right or wrong; else 0.0."""
    matches = list(_FINAL_ANSWER.finditer(solution))
    return float(len(matches) == 1 and not solution[matches[0].end() :].strip())


def think_format(solution: str, ground_truth: Any) -> float:
    """Return 1.0 when the response is one ``<think>..</think>`` and then one ``<answer>..</answer>``; else 0.0."""
    return float(_THINK_THEN_ANSWER.fullmatch(solution) is not None)


def boxed_answer(solution: str, ground_truth: Any) -> float:
    r"""Return 1.0 when the last ``\boxed{...}`` of a response is the ground truth, both in one form of LaTeX; else 0.0.

    This is verl's rule for MATH, from the data set's own code (arXiv 2103.03874). Texts are compared, not values:
    ``\frac12`` is ``1/2`` and ``0.5``, but ``\frac{2}{4}`` is neither.
    """
    _, spaced, rest = solution.rpartition("\\boxed ")
    answer, expected = rest.partition("$")[0] if spaced else _last_box(solution), str(ground_truth)
    if answer is None:
        return 0.0
    try:
        return float(_one_form(answer) == _one_form(expected))
    except ValueError:
        return float(answer == expected)


def _last_box(text: str, command: str = "\\boxed") -> str | None:
    r"""Return what stands in the last box of a text, None where it is not closed. Boxes are searched by ``command``."""
    start, depth = text.rfind(command), 0
    if start < 0 or not text.startswith("\\boxed{", start):
        return None
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if text[place] == "}" and depth == 0:
            return text[start + len("\\boxed{") : place]
    return None


def _one_form(text: str) -> str:
    """Return LaTeX in one of the forms that mean the same.

    A ValueError says that a fraction, a root or a unit has no end.
    """
    text = text.replace("\n", "").replace("\\!", "").replace("\\\\", "\\").replace("tfrac", "frac").replace("dfrac", "frac")
    for part in ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$"):
        text = text.replace(part, "")
    text, *units = text.split("\\text{ ")  # only units begin with a space
    if len(units) > 1:
        raise ValueError("two units")
    text = text.replace("\\\\%", "").replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    text = "0" + text if text[0] == "." else text
    name, *values = text.split("=")
    if len(values) == 1 and len(name) <= 2:
        text = values[0]
    if text.endswith("\\sqrt"):
        raise ValueError("a root of nothing")
    text = _with_fractions(re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", text).replace(" ", ""))
    if text == "0.5":
        return "\\frac{1}{2}"
    ratio = re.fullmatch(r"(0|-?[1-9][0-9]*)/(0|-?[1-9][0-9]*)", text)
    return text if ratio is None else f"\\frac{{{ratio[1]}}}{{{ratio[2]}}}"


def _with_fractions(text: str) -> str:
    r"""Return LaTeX in which ``\frac12`` is ``\frac{1}{2}``."""
    first, *others = text.split("\\frac")
    parts = [first]
    for other in others:
        if not other:
            raise ValueError("a fraction of nothing")
        if other[0] == "{":
            parts.append(other)
        elif len(other) < 2:
            return text
        else:
            parts.append(f"{{{other[0]}}}" + (other[1:] if other[1] == "{" else f"{{{other[1]}}}{other[2:]}"))
    return "\\frac".join(parts)


def dapo_answer(solution: str, ground_truth: Any) -> dict[str, Any]:
    r"""Return the score of DAPO's problems: 1.0 for a right answer and -1.0 for a wrong one, with ``acc`` and ``pred``.

    The answer is the last ``Answer: x`` in the last 300 characters, in one form of LaTeX; where there is none, what stands in
    the last ``\boxed{}`` of the last 100. Source: verl's ``math_dapo``, after Minerva (arXiv 2206.14858, appendix D.1).
    """
    expected, tail = str(ground_truth), solution[-LAST_CHARACTERS:]
    answers = re.findall(r"(?i)Answer\s*:\s*([^\n]+)", tail)
    answer = _minerva_form(answers[-1]) if answers else "[INVALID]"
    right = answer == _minerva_form(expected)
    box = _last_box(tail[-100:], "\\boxed{") if answer == "[INVALID]" else None
    if box is not None:
        answer, right = box, box == expected
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": answer}


_MINERVA_REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"), (",\\text{and}", ","),
    ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
_MINERVA_REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points", "feet",
    "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students", "childrentickets",
    "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}",
    "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots",
)  # fmt: skip
_MINERVA_PATTERNS = (
    (r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$"), (r"(\\text\{)(.*?)(\})", r"\2"), (r"(\\textbf\{)(.*?)(\})", r"\2"),
    (r"(\\overline\{)(.*?)(\})", r"\2"), (r"(\\boxed\{)(.*)(\})", r"\2"), (r"(frac)([^{])(.)", r"frac{\2}{\3}"),
    (r"(sqrt)([^{])", r"sqrt{\2}"),
)  # fmt: skip
"""What Minerva's code makes of an answer, in this order: words of units and of filling go, and LaTeX takes one form."""


def _minerva_form(answer: str) -> str:
    """Return an answer in Minerva's form."""
    answer = answer.split("=")[-1]
    for before, after in (*_MINERVA_REPLACED, *((word, "") for word in _MINERVA_REMOVED)):
        answer = answer.replace(before, after)
    for pattern, after in _MINERVA_PATTERNS:
        answer = re.sub(pattern, after, answer)
    answer = answer.replace("$", "")
    return (answer.replace(",", "") if answer.replace(",", "").isdigit() else answer).strip()


_NUMINA = ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads")
"""Sources of mathematical problems in the data sets Eurus-2-RL and NuminaMath."""

_MATH = ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500")
"""Names of the data set MATH."""

RULES: dict[str, Rule] = {
    "toy/arithmetic": exact_match,
    "openai/gsm8k": gsm8k,
    "format/final_answer": final_answer_format,
    "format/think": think_format,
    "math/answer": math_answer,
    **dict.fromkeys(_MATH, boxed_answer),
    **dict.fromkeys(("math_dapo", "math", "math_dapo_reasoning"), dapo_answer),
    **{f"numina_{name}": math_answer for name in _NUMINA},
}
"""Rules by data source. Those of verl's sources are verl's, except for NuminaMath's. Sources that begin with ``aime`` are
scored as ``math_dapo``, as in verl."""

TOLERANT_RULES: dict[str, Rule] = {"openai/gsm8k": tolerant_gsm8k, **dict.fromkeys(_MATH, math_answer)}
"""Rules that forgive more than verl's, by data source."""


def rule_of(source: str, tolerant: bool = False) -> Rule | None:
    """Return the rule of a data source, None where there is none. ``tolerant``: prefer one that forgives more than verl's."""
    if tolerant and source in TOLERANT_RULES:
        return TOLERANT_RULES[source]
    return RULES.get("math_dapo" if source.startswith("aime") else source)


def check_sources(sources: Iterable[tuple[str, str]], sandbox: bool = False, tolerant: bool = False) -> None:
    """Check that each data source has a rule. For runs without a custom function.

    ``sources`` are (data_source, address) of each row. ``sandbox``: there is a service that runs the programs of code tasks.

    Raises:
        DataError: A data source has no rule, or what its rule needs is missing. The message names the first such row.
    """
    for source, address in sources:
        if source in CODE_SOURCES and sandbox:
            continue
        rule = rule_of(source, tolerant)
        if rule is None:
            raise DataError(f"{address}: {_no_rule(source)}")
        if rule is math_answer and find_spec("math_verify") is None:
            raise DataError(
                f"{address}: data_source {source!r} needs math-verify, which is not installed. "
                "Install it (pip install 'verl-memopt[math]'), or set custom_reward_function.path."
            )


def score_by_rule(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None, tolerant: bool = False
) -> Any:
    """Return the score by the rule of ``data_source``, or a dict with ``score``. ``tolerant`` is as in :func:`rule_of`."""
    rule = rule_of(data_source, tolerant)
    if rule is None:
        raise RewardError(f"cannot score this row: {_no_rule(data_source)}")
    return rule(solution_str, ground_truth)


def score_batch_by_rule(
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[Any],
    extra_infos: Sequence[Any],
    tolerant: bool = False,
) -> list[Any]:
    """Return the score of each row by the rule of its data source, as :func:`score_by_rule`."""
    rows = zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)
    return [score_by_rule(*row, tolerant=tolerant) for row in rows]


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
