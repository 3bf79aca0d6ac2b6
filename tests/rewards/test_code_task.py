import json
import subprocess
import sys

import pytest

from tests.rewards.sandbox_service import FAILS_INSIDE, answer, not_compiled
from verl_memopt.errors import RewardError
from verl_memopt.rewards.code_task import Case, CodeTask, Verdict, prints, program_in, verdict_of


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("so\n```python\nprint(1)\n```\ndone", "\nprint(1)\n"),
        ("```python\n1\n```\nno:\n```python\n2\n```", "\n2\n"),
        ("```python\n1\n```\n```cpp\n2\n```", "\n1\n"),
        ("```python\nprint(1)", "\nprint(1)"),
        ("```\nprint(1)\n```", "\nprint(1)\n"),
        ("```py\nprint(1)\n```", "print(1)\n"),
        ("```x = 1\nprint(x)\n```", "x = 1\nprint(x)\n"),
        ("print(1)", None),
        ("", None),
    ],
)
def test_the_program_of_a_response_is_its_last_block_of_python_or_its_first_block(response, code):
    assert program_in(response) == code


def test_a_ground_truth_is_read_as_json_or_as_a_dict():
    truth = {"inputs": ["1\n", None, 3], "outputs": ["2\n", None, 4], "fn_name": None}
    expected = CodeTask((Case("1\n", "2\n"), Case(None, None), Case("3", "4")))
    assert CodeTask.read(truth) == CodeTask.read(json.dumps(truth)) == expected


def test_ten_cases_count():
    task = CodeTask.read({"inputs": list(range(12)), "outputs": list(range(12))})
    assert [case.stdin for case in task.cases] == [str(number) for number in range(10)]


def test_assertions_need_no_inputs_and_run_after_the_program():
    task = CodeTask.read({"assert_case": ["assert f(1) == 2", "assert f(2) == 3"]})
    assert [(case.stdin, case.expected) for case in task.cases] == [("", None), ("", None)]


@pytest.mark.parametrize(
    ("truth", "why"),
    [
        ("{", "it is no JSON"),
        ("[1]", "it is of type list"),
        ({"inputs": [], "outputs": []}, "it has no test case"),
        ({"inputs": ["1"], "outputs": "1"}, "it has no test case"),
        ({"inputs": ["1", "2"], "outputs": ["1"]}, "inputs, outputs and assert_case differ in length"),
        ({"inputs": ["1"], "outputs": ["1"], "assert_case": ["a", "b"]}, "inputs, outputs and assert_case differ in length"),
        ({"inputs": ["1"], "outputs": ["1"], "assert_case": "assert f"}, "assert_case is no list of code"),
    ],
)
def test_a_ground_truth_that_is_no_code_task_is_an_error(truth, why):
    with pytest.raises(RewardError, match=rf'^its ground truth is no code task: {why}.*Give JSON such as \{{"inputs"'):
        CodeTask.read(truth)


def call(code, name, stdin):
    task = CodeTask.read({"inputs": [stdin], "outputs": [""], "fn_name": name})
    program = task.trial(code, task.cases[0]).program
    done = subprocess.run([sys.executable, "-I", "-c", program], input=stdin, capture_output=True, text=True)
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("code", "stdin", "printed"),
    [
        ("def f(a, b): return a + b", "1\n2", "3\n"),
        ("class Solution:\n    def f(self, a): return [a, None]", '"x"', '["x", null]\n'),
        ("def f(a): return (1, a)", "[2]", "[1, [2]]\n"),
        ("def f(a): return a", '"text"', "text\n"),
        ("def f(a: List[int]) -> int: return gcd(*a) + deque(a).pop() + math.floor(1.5)", "[4, 6]", "9\n"),
        ("json = sys = 0\ndef f(a): return a", "1", "1\n"),
    ],
)
def test_a_function_gets_its_arguments_by_line_and_its_result_is_printed(code, stdin, printed):
    assert call(code, "f", stdin) == (0, printed)


@pytest.mark.parametrize("code", ["def f(a): raise ValueError", "def g(a): return a", "f = 3", "def f(): return 1", "def f(:"])
def test_a_function_that_cannot_be_called_ends_with_an_error(code):
    assert call(code, "f", "1")[0] != 0


@pytest.mark.parametrize(
    ("reply", "expected", "verdict"),
    [
        (answer("Success", "3\n"), "3", Verdict.PASSED),
        (answer("Success", "3"), "3\n\n", Verdict.PASSED),
        (answer("Success", " 3"), "3", Verdict.FAILED),
        (answer("Success", "3 \n"), "3", Verdict.FAILED),
        (answer("Success", None), "", Verdict.PASSED),
        (answer("Success", "anything"), None, Verdict.PASSED),
        (answer("Failed", "3", 1), "3", Verdict.FAILED),
        (answer("Failed", None, None, "TimeLimitExceeded"), None, Verdict.FAILED),
        (not_compiled(), None, Verdict.NOT_COMPILED),
        (not_compiled("TimeLimitExceeded"), None, Verdict.NOT_COMPILED),
        (FAILS_INSIDE, None, Verdict.UNKNOWN),
    ],
)
def test_an_answer_shows_what_the_program_did(reply, expected, verdict):
    assert verdict_of(reply, prints(expected)) is verdict


@pytest.mark.parametrize(
    "reply", [None, {}, {"status": "Done"}, {"status": "Success", "run_result": "3"}, answer("Success", "3", 0, "Error")]
)
def test_an_answer_of_another_service_is_an_error(reply):
    with pytest.raises(RewardError, match=r"is no answer of a SandboxFusion service\. Correct the address"):
        verdict_of(reply, prints("3"))
