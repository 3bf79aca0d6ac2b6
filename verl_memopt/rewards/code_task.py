"""Code tasks: finds the program in a response, reads the test cases, and judges one run of the program."""

from __future__ import annotations

import ast
import builtins
import json
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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
"""Modules that are imported for a program whose function is called by name, as in verl. If two define a name, the later wins."""

LARGEST_TOLD = 2**20
"""Largest number of characters of the recorded values that are passed on to an assertion."""

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
    stdin: str | None
    """Text on the program's standard input."""
    expected: str | None
    """Text that the program must print, apart from line breaks at the end. None = any text, if it ends without an error."""
    assertion: str = ""
    """Code that runs after the program, and must end without an error."""


@dataclass(frozen=True)
class CodeTask:
    cases: tuple[Case, ...]
    """The first ten cases. Further cases do not count."""
    function: str | None = None
    """Name of a function, or of a method of a class ``Solution``. Each line of the standard input is one argument in JSON. The
    result of the function is printed. None = the program reads its input and prints its output itself."""

    @classmethod
    def read(cls, ground_truth: Any) -> CodeTask:
        """Read a ground truth as a code task.

        Args:
            ground_truth: A dict, or its JSON: ``inputs`` and ``outputs``, lists of equal length, and optionally ``fn_name``. Or
                ``assert_case``, a list of code that runs after the program; ``inputs`` and ``outputs`` may then be left out.

        Raises:
            RewardError: The ground truth has another form, or no test case. verl gives every response 0 in this case.
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
            raise _unreadable("inputs, outputs and assert_case differ in length")
        cases = (
            Case(None if stdin is None else str(stdin), None if expected is None else str(expected), code)
            for stdin, expected, code in zip(inputs[:CASES], outputs[:CASES], assertions[:CASES], strict=True)
        )
        return cls(tuple(cases), str(function) if function else None)

    def trial(self, code: str, case: Case) -> Trial:
        right = prints(case.expected)
        if not case.assertion.strip():
            return Trial(self._whole(f"{code}\n\n{case.assertion}"), case.stdin, right)
        mark = f"_{secrets.token_hex(16)}"
        compared = _compared(case.assertion, mark)
        if compared is not None:
            shown, values = compared
            return Trial(self._whole(f"{code}\n\n{shown}"), case.stdin, partial(_shows, mark, values, right))
        recorded, replayed = _recorded(case.assertion, mark)
        return Trial(
            self._whole(f"{code}\n\n{recorded}"),
            case.stdin,
            lambda printed: right(_parted(printed, mark)[1]),
            lambda printed: Trial(replayed, "\n".join(_parted(printed, mark)[0])[:LARGEST_TOLD], prints(None)),
        )

    def _whole(self, tested: str) -> str:
        if self.function is None:
            return tested
        stars = "".join(f"from {module} import *\n" for module in PREDEFINED)
        modules = "".join(f"import {module}\n" for module in PREDEFINED)
        return f"{stars}{modules}\n{tested}\n{_CALL.format(name=self.function)}"


@dataclass(frozen=True)
class Trial:
    program: str
    stdin: str | None
    """Text on the program's standard input."""
    passes: Callable[[str], bool]
    """Printed text -> whether the case is passed. Called only if the program ended without an error."""
    then: Callable[[str], Trial] | None = None
    """Printed text -> a second trial, which decides if this one has passed. None = this trial alone decides."""


def prints(expected: str | None) -> Callable[[str], bool]:
    return lambda printed: expected is None or printed.rstrip("\n") == expected.rstrip("\n")


# A response could cheat if the assertion ran in its own program: the program could exit early, change a function that the
# assertion calls, or return an object that equals everything. So the program only prints plain values, which are compared
# elsewhere. If each assertion says that a value equals a literal, the values are compared in this process. Otherwise a second
# program gets the assertion and the values, but no code of the response.


_SHOW = """
class {mark}i(float):
    __repr__ = lambda self: "1e999" if self > 0 else "-1e999"


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
            value = plain(value)
            return {mark}i(value) if kind is float and value == value and value - value != 0 else value
    if value is None or type(value) in (bytes, complex):
        return value
    return {{type(value).__name__: {mark}(getattr(value, "__dict__", {{}}))}}


"""
"""Code that reduces a value to plain data. An object of the program's own class could print any text as its representation."""

_RECORD = """
def {mark}_(place, call):
    try:
        value = call()
    except Exception as error:
        print("{mark}", ascii((place, [each.__name__ for each in type(error).__mro__], None)))
        raise
    if hasattr(value, "__next__"):
        value = list(zip(range(100_000), value))
        print("{mark}", ascii((place, None, [{mark}(each) for _, each in value])))
        return iter([each for _, each in value])
    print("{mark}", ascii((place, None, {mark}(value))))
    return value


"""
"""Code that prints what the program returns at one place of the assertion: the plain value, or the names of the exception's
classes."""

_REPLAY = """
import ast as {mark}a, builtins as {mark}b, collections as {mark}c, sys as {mark}s

{mark}told = {mark}c.defaultdict({mark}c.deque)
for {mark}line in {mark}s.stdin:
    {mark}place, *{mark}rest = {mark}a.literal_eval({mark}line)
    {mark}told[{mark}place].append({mark}rest)


def {mark}_(place):
    if not {mark}told[place]:
        {mark}s.exit("the program did not come to this place")
    raised, value = {mark}told[place].popleft()
    if raised is None:
        return value
    raise next(vars({mark}b)[name] for name in raised if name in vars({mark}b))


"""
"""Code that returns to the assertion, at each place, the value that was recorded there, or raises the recorded exception."""


def _compared(assertion: str, mark: str) -> tuple[str, list[Any]] | None:
    """Return code that prints each value that is asserted to equal a literal, and the literals in the same order.

    Each printed line begins with ``mark``. Return None if an assertion has another form.
    """
    try:
        tree = ast.parse(assertion)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    values, lines = list[Any](), list[str]()
    for node in tree.body:
        if not isinstance(node, ast.Assert):
            if any(isinstance(inner, ast.Assert) for inner in ast.walk(node)):
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


OF_TYPES = ("callable", "hasattr", "isinstance", "issubclass")
"""Functions whose result cannot be computed from plain values."""


class _Places(ast.NodeTransformer):
    """Replaces each expression of an assertion that uses the program, such as ``f(1)``, by a call with the number of its place.

    With ``record``, the call gets the expression too, and an ``assert`` is reduced to these calls. So the program cannot read the
    expected result in any text.
    """

    def __init__(self, names: set[str], function: str, record: bool) -> None:
        self._names, self._function, self._record = names, function, record
        self._calls: list[ast.expr] = []

    def visit(self, node: ast.AST) -> Any:
        if not (isinstance(node, ast.expr) and _root(node) in self._names):
            return super().visit(node)
        place: list[ast.expr] = [ast.Constant(len(self._calls))]
        if self._record:
            place.append(ast.parse(f"lambda: ({ast.unparse(node)})", mode="eval").body)
        self._calls.append(ast.Call(ast.Name(self._function, ast.Load()), place, []))
        return self._calls[-1]

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        first = len(self._calls)
        # The message is removed, because it may contain the expected result.
        node.test, node.msg = self.visit(node.test), None
        if not self._record:
            return node
        whole = any(map(self._leads_on, _own(node.test, self._function)))
        return ast.Expr(node.test if whole else ast.Tuple(self._calls[first:], ast.Load()))

    def _leads_on(self, node: ast.AST) -> bool:
        """Return whether a part of a test may evaluate a recorded call again: a comprehension, a lambda or another call."""
        harmless = {*dir(builtins), *sys.stdlib_module_names, self._function}
        return isinstance(node, ast.comprehension | ast.Lambda) or (isinstance(node, ast.Call) and _root(node) not in harmless)


def _own(test: ast.expr, function: str) -> Iterator[ast.AST]:
    """Yield the nodes of a test that are not inside a recorded expression."""
    if not (isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id == function):
        yield test
        for part in ast.iter_child_nodes(test):
            yield from _own(part, function) if isinstance(part, ast.expr) else ast.walk(part)


def _root(node: ast.AST) -> str | None:
    """Return the name that an expression like ``name.attribute[index](argument)`` begins with. None = the name is not read."""
    if isinstance(getattr(node, "ctx", None), ast.Store | ast.Del):
        return None
    while isinstance(node, ast.Call | ast.Attribute | ast.Subscript):
        if not isinstance(node, ast.Call):
            node = node.value
        elif isinstance(node.func, ast.Name) and node.func.id in OF_TYPES and node.args:
            node = node.args[0]
        else:
            node = node.func
    return node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) else None


def _recorded(assertion: str, mark: str) -> tuple[str, str]:
    """Return code that prints, after the mark, each value that an assertion uses, and a program that asserts on these values.

    If the assertion is not Python code, both are the assertion itself, so that the case fails.
    """
    try:
        tree = ast.parse(assertion)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return assertion, assertion
    names, modules = _of_the_program(tree)
    told, asserted = (
        ast.unparse(ast.fix_missing_locations(_Places(names, f"{mark}_", record).visit(ast.parse(assertion))))
        for record in (True, False)
    )
    imports = "".join(f"import {name}\n" for name in sorted(modules))
    return _SHOW.format(mark=mark) + _RECORD.format(mark=mark) + told, f"{_REPLAY.format(mark=mark)}{imports}{asserted}"


def _of_the_program(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Return the names of an assertion that lead to the program, and the modules that the assertion uses without an import.

    A name leads to the program if the assertion does not bind it, binds it to a result of the program, or passes it to the
    program, which may change its value.
    """
    nodes = list(ast.walk(tree))
    read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    functions = {node.name: node.args for node in nodes if isinstance(node, ast.FunctionDef)}
    bound |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.ExceptHandler) and node.name}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {(node.asname or node.name).split(".")[0] for node in nodes if isinstance(node, ast.alias)}
    free = read - bound - set(dir(builtins))
    modules = {
        node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    } & free & sys.stdlib_module_names  # fmt: skip
    names, before = free - modules, set[str]()
    values = {
        node.targets[0].id: node.value for node in nodes if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    while names != before:
        before = set(names)
        names |= {name for name, value in values.items() if _root(value) in names}
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            given = [node.id if isinstance(node, ast.Name) else None for node in call.args]
            if _root(call) in names:
                names |= {name for name in given if name in values and not isinstance(values[name], ast.Constant)}
            elif isinstance(call.func, ast.Name) and call.func.id in functions:
                names |= {node.arg for node, name in zip(functions[call.func.id].args, given, strict=False) if name in names}
    return names, modules


def _parted(printed: str, mark: str) -> tuple[list[str], str]:
    lines = printed.splitlines(keepends=True)
    shown = [line.removeprefix(mark).strip() for line in lines if line.startswith(mark)]
    return shown, "".join(line for line in lines if not line.startswith(mark))


def _literal(text: str) -> list[Any]:
    try:
        return [ast.literal_eval(text)]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []


def _shows(mark: str, values: Sequence[Any], right: Callable[[str], bool], printed: str) -> bool:
    shown, others = _parted(printed, mark)
    if len(shown) != len(values) or not right(others):
        return False
    most = 1000 + 10 * len(ascii(values))  # a text that is much longer cannot be right
    return all(len(text) <= most and _literal(text) == [value] for text, value in zip(shown, values, strict=True))


class Verdict(Enum):
    PASSED = auto()
    FAILED = auto()
    """The program printed a wrong output, ended with an error, or took too much time or memory."""
    NOT_COMPILED = auto()
    """The program could not be compiled, so all further cases fail too."""
    UNKNOWN = auto()
    """The service could not run the program."""


def program_in(response: str) -> str | None:
    """Return the code of a response, or None if it has no code block.

    The code is the last block marked ``python``. If there is none, it is the first block, without its first line if that line is
    a single word. An unclosed block ends with the response. verl chooses in the same way.
    """
    if "```python" in response:
        return response.split("```python")[-1].split("```")[0]
    if "```" not in response:
        return None
    code = response.split("```")[1]
    first, line_break, others = code.partition("\n")
    return others if line_break and first.strip().isalpha() else code


def verdict_of(answer: Any, passes: Callable[[str], bool]) -> Verdict:
    """Return the verdict that an answer of the service gives.

    Raises:
        RewardError: The answer is not from a SandboxFusion service. verl counts the case as failed.
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
    status = result.get("status")
    return status in ("Error", "TimeLimitExceeded") or (status == "Finished" and result.get("return_code") != 0)


def _unreadable(why: str) -> RewardError:
    return RewardError(
        f'its ground truth is no code task: {why}. Give JSON such as {{"inputs": ["1 2\\n"], "outputs": ["3\\n"]}}.'
    )
