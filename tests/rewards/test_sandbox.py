"""Code tasks, scored by a service that runs their programs over real HTTP on this machine."""

import asyncio
import json
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rewards.sandbox_service import FAILS_INSIDE, Together, answer, not_compiled, runs_it, sandbox_service, says
from tests.rewards.test_judge import fails, reply
from verl_memopt.config.schema import CustomReward, SandboxFusion
from verl_memopt.errors import RewardError
from verl_memopt.rewards.judge import LARGEST_ANSWER_BYTES, Patience
from verl_memopt.rewards.runner import RewardRunner
from verl_memopt.rewards.sandbox import PATIENCE, Grader, Sandbox, check_service, share_out
from verl_memopt.rewards.score import RewardRow

KEY = "reward_model.sandbox_fusion.url"
QUICK = Patience(
    limit_seconds=20, attempt_seconds=10, attempts=3, backoff_seconds=0.001, name="sandbox service", way_out="Mend it."
)
DOUBLES = "```python\nprint(2 * int(input()))\n```"
TASK = json.dumps({"inputs": ["1\n", "2\n", "3\n", "4\n"], "outputs": ["2\n", "4", "6\n\n", "9\n"]})
"""Four cases, of which doubling passes three."""


@pytest.fixture
def service():
    with sandbox_service() as running:
        yield running


@pytest.fixture(scope="module")
def scripted():
    with sandbox_service() as running:
        yield running


def score(service, solution, truth, slots=8, patience=QUICK):
    return asyncio.run(Grader(Sandbox(service.url, slots, 64), patience).score(solution, truth))


def test_the_score_is_the_share_of_test_cases_that_the_program_passes(service):
    assert score(service, f"Doubling does it.\n{DOUBLES}", TASK) == 0.75
    assert score(service, "```python\nprint(6)\n```", TASK) == 0.25
    assert score(service, "```python\nimport sys\nprint(2 * int(input()))\nsys.exit(3)\n```", TASK) == 0.0
    assert score(service, "```python\nprint(1 / 0)\n```", TASK) == 0.0
    assert score(service, "```python\nthis is no program\n```", TASK) == 0.0


def test_a_program_that_does_not_end_passes_nothing(service):
    endless_on_two = "```python\nx = int(input())\nwhile x == 2: pass\nprint(2 * x)\n```"
    assert score(service, endless_on_two, TASK) == 0.5


def test_a_function_is_called_by_name(service):
    task = {"inputs": ["[1, 2]\n3", "[]\n4"], "outputs": ["[1, 2, 3]", "[4]"], "fn_name": "append"}
    solution = (
        "```python\nclass Solution:\n    def append(self, items: List[int], item: int):\n        return [*items, item]\n```"
    )
    assert score(service, solution, task) == 1.0
    assert score(service, solution.replace("append", "other"), task) == 0.0


def test_assertions_run_after_the_program(service):
    task = {"assert_case": ["assert f(1) == 2", "assert f(5) == 6", "assert f(0) == 0"]}
    assert score(service, "```python\ndef f(x): return x + 1\n```", task) == pytest.approx(2 / 3)


EQUALS_ALL = """
class Same(int):
    def __eq__(self, other): return True
    def __hash__(self): return 0
    def __repr__(self): return "2"
    __int__ = __index__ = __str__ = lambda self: 2
def f(x): return Same(7)
"""
PRINTS_WHAT_IT_FINDS = """
import os, re, sys
found = [sys.stdin.read(), str(globals()), str(vars(os))]
for name in ("/proc/self/cmdline", "/proc/self/environ", *sys.argv, globals().get("__file__", "")):
    try:
        found.append(open(name, errors="replace").read())
    except OSError:
        pass
for descriptor in range(3, 20):
    try:
        os.set_blocking(descriptor, False)
        found.append(os.read(descriptor, 99).decode(errors="replace"))
    except OSError:
        pass
for proof in set(re.findall("(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])", "\\n".join(found))):
    print(f"_{proof} True", flush=True)
os._exit(0)
"""
AROUND = "assert abs(f(1) - 2) < 0.1"
EQUAL = "assert f(1) == 2, 'f'"


@pytest.mark.parametrize(
    ("assertion", "cheat"),
    [
        (EQUAL, "import os; os._exit(0)"), (EQUAL, EQUALS_ALL), (EQUAL, PRINTS_WHAT_IT_FINDS), ("assert 2 == f(1)", EQUALS_ALL),
        (AROUND, "raise SystemExit(0)"), (AROUND, PRINTS_WHAT_IT_FINDS),
        ("for x in [1, 2]:\n    assert f(x) == x + 1", EQUALS_ALL),
    ],
)  # fmt: skip
def test_an_assertion_is_passed_by_what_it_asserts_alone(service, assertion, cheat):
    assert score(service, f"```python\n{cheat}\n```", {"assert_case": [assertion]}) == 0.0
    assert score(service, "```python\ndef f(x): return x + 1.0\n```", {"assert_case": [assertion]}) == 1.0


@pytest.mark.parametrize(
    ("returned", "asserted"),
    [
        ("collections.Counter('aa')", "{'a': 2}"),
        ("frozenset([1, (2, None)])", "{1, (2, None)}"),
        ("collections.namedtuple('P', 'x y')(1, True)", "(1, 1.0)"),
        ("'\\u00e4\\ud800\\n'", "'\\u00e4\\ud800\\n'"),
        ("type('A', (), {'tolist': lambda self: [1, -2.5e-7]})()", "[1, -2.5e-7]"),
    ],
)
def test_what_equals_an_asserted_value_passes_whatever_its_type(service, returned, asserted):
    code = f"```python\nfrom __future__ import annotations\nimport collections\ndef f(): return {returned}\n```"
    assert score(service, code, {"assert_case": [f"import math\nassert f() == {asserted}", "assert callable(f)"]}) == 1.0


IS_ALL = """
class Same:
    __hash__ = lambda self: 0
    __int__ = __index__ = __len__ = lambda self: 1
    __float__ = lambda self: 1.0
for name in "eq ne lt le gt ge bool contains instancecheck".split():
    setattr(Same, f"__{name}__", lambda *given: True)
for name in "add radd sub rsub mul mod neg abs round call getitem getattr enter".split():
    setattr(Same, f"__{name}__", lambda *given, **named: Same())
import builtins, math
for name in ("abs", "all", "any", "len", "round", "set", "sorted", "sum"):
    setattr(builtins, name, lambda *given, **named: Same())
math.isclose = lambda *given, **named: True
"""
"""Passes whatever is compared beside it."""
CHECK = "def check(candidate):\n    for x in [1, 2]:\n        assert candidate(x) == x + 1, 'wrong'\ncheck(f)"
UNITTEST = (
    "import unittest\nclass Test(unittest.TestCase):\n    def test(self):\n"
    "        self.assertEqual(f(1), 2)\nunittest.main(argv=['t'])"
)
IN_PLACE = "items, right = [3, 1, 2], [1, 2]\nnumbers = [3, 1, 2]\nk = f(numbers, 3)\nassert k == len(right)\n" + (
    "for place in range(k):\n    assert numbers[place] == right[place]"
)
RAISES = (
    "def refuses(x):\n    try:\n        f(x)\n    except ValueError:\n        return True\nassert refuses(-1) and not refuses(1)"
)
MET = [
    ("def f(x): return x + 1", "def f(x): return 2", CHECK),
    ("def f(x): return x + 1", "def f(x): return x", UNITTEST),
    ("def f(x): return x + 0.9999999999", "def f(x): return x", "assert math.isclose(f(1), 2.0)"),
    ("def f(x): yield from range(x)", "def f(x): yield x", "assert list(f(3)) == list(range(3))"),
    ("def f(g, x): return g(x)", "def f(g, x): return x", "assert all(f(lambda y: y + 1, x) == x + 1 for x in range(3))"),
    ("def f(x):\n    if x < 0: raise ValueError", "def f(x): pass", RAISES),
    (
        "class S:\n    def __init__(self): self.n = 0\n    def add(self, x): self.n += x; return self",
        "class S:\n    n = 0\n    def add(self, x): return self",
        "s = S()\ns.add(2)\ns.add(3)\nassert isinstance(s, S) and s.n in (5, 6)\nassert s.add(1).n == 2 * 3",
    ),
    (
        "def f(items, x):\n    items[:] = sorted(each for each in items if each != x)\n    return len(items)",
        "def f(items, x): return 2",
        IN_PLACE,
    ),
]  # fmt: skip
"""A right program, a wrong one, and an assertion that compares with more than a literal."""


@pytest.mark.parametrize(("right", "wrong", "assertion"), MET)
def test_an_assertion_of_any_form_judges_values_in_a_process_without_the_response(service, right, wrong, assertion):
    def given(code):
        return score(service, f"```python\n{code}\n```", {"assert_case": [assertion]})

    assert given(f"import math\n{right}") == 1.0
    assert given(f"import math\n{wrong}") == 0.0
    assert given(f"{IS_ALL}\nf = S = Same()") == 0.0
    assert given("import os\nos._exit(0)") == 0.0


def test_what_is_right_is_in_no_text_that_the_response_could_read(service):
    task = {"assert_case": ["assert abs(f(1) - 47110815) < 1, 'not 47110815'"]}
    assert score(service, "```python\ndef f(x): return 47110815\n```", task) == 1.0
    of_response, of_assertion = (f"{body['code']}{body['stdin']}" for _, body, _ in service.requests)
    assert of_response.count("47110815") == 1
    assert "def f" not in of_assertion


def test_an_assertion_beside_input_and_output_must_hold_too(service):
    task = {"inputs": ["1\n"], "outputs": ["2\n"], "assert_case": ["assert True and f(3) == 4"]}
    right = "```python\ndef f(x): return x + 1\nprint(f(int(input())))\n```"
    assert score(service, right, task) == 1.0
    assert score(service, right.replace("```python", "```python\nimport atexit, os"), task | {"outputs": ["3"]}) == 0.0
    answers = "```python\nimport os\nprint(int(input()) + 1, flush=True)\n"
    for cheat in ("os._exit(0)", PRINTS_WHAT_IT_FINDS):
        assert score(service, f"{answers}{cheat}\n```", task) == 0.0
    called = {"fn_name": "f", "inputs": ["3"], "outputs": ["4"], "assert_case": ["assert f(1) in (2, 3)"]}
    assert score(service, "```python\ndef f(x): return x + 1\n```", called) == 1.0
    assert score(service, f"```python\nprint(4, flush=True)\n{PRINTS_WHAT_IT_FINDS}\n```", called) == 0.0


def test_the_service_is_told_program_input_and_limits(service):
    score(service, DOUBLES, {"inputs": ["7\n"], "outputs": ["14\n"]})
    [(_, body, _)] = service.requests
    assert body == {
        "code": "\nprint(2 * int(input()))\n\n\n", "language": "python", "stdin": "7\n", "compile_timeout": 10,
        "run_timeout": 10, "memory_limit_MB": 64, "files": {}, "fetch_files": [],
    }  # fmt: skip


ANSWERS = {
    "right": answer("Success", "yes\n"),
    "wrong": answer("Success", "no\n"),
    "raised": answer("Failed", "yes\n", 1),
    "endless": answer("Failed", None, None, "TimeLimitExceeded"),
    "not compiled": not_compiled(),
    "not compiled in time": not_compiled("TimeLimitExceeded"),
}


def share_passed(outcomes):
    """The definition: each of the first ten cases has a code, a compile error holds for all after it, and passes are averaged."""
    codes = [{"right": 1, "not compiled": -4, "not compiled in time": -4}.get(outcome, 0) for outcome in outcomes]
    if -4 in codes:
        first = codes.index(-4)
        codes[first:] = [-4] * len(codes[first:])
    counted = codes[:10]
    return sum(1 for code in counted if code == 1) / min(len(outcomes), 10)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from(sorted(ANSWERS)), min_size=1, max_size=13))
def test_the_score_is_that_of_an_independent_definition_for_every_outcome(scripted, outcomes):
    scripted.behaviours = [lambda handler, body: reply(handler, 200, json.dumps(ANSWERS[body["stdin"]]).encode())]
    scripted.requests.clear()
    assert score(scripted, DOUBLES, {"inputs": outcomes, "outputs": ["yes"] * len(outcomes)}) == share_passed(outcomes)
    assert sorted(body["stdin"] for _, body, _ in scripted.requests) == sorted(outcomes[:10])


@pytest.mark.parametrize("trouble", [fails(503), says(FAILS_INSIDE)])
def test_a_service_that_recovers_is_asked_again(service, trouble):
    service.behaviours = [trouble, trouble, runs_it]
    assert score(service, DOUBLES, {"inputs": ["1"], "outputs": ["2"]}) == 1.0
    assert len(service.requests) == 3


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        (fails(500, b"oops"), r"the sandbox service at http.* gave no answer in 3 attempts.*500.*\(oops\)\. Mend it\."),
        (fails(404, b"no such page"), r"refused the request: HTTP status 404 Not Found \(no such page\)"),
        (says({"hello": 1}), r'\{"hello": 1\} is no answer of a SandboxFusion service'),
        (says(FAILS_INSIDE), r"the service failed 3 times to run the program \(no pod is free\)"),
    ],
)
def test_a_service_that_gives_no_verdict_is_an_error_and_no_wrong_answer(service, trouble, reason):
    service.behaviours = [trouble]
    with pytest.raises(RewardError, match=rf"^cannot score this row: {KEY}={service.url.replace('?', '.')}: .*({reason})"):
        score(service, DOUBLES, TASK)


def test_a_program_that_prints_more_than_an_answer_holds_has_failed(service):
    service.behaviours = [says(answer("Success", "x" * LARGEST_ANSWER_BYTES))]
    assert score(service, DOUBLES, {"inputs": ["1"], "outputs": ["2"]}) == 0.0
    assert len(service.requests) == 1


def test_a_ground_truth_that_is_no_code_task_is_an_error_also_for_a_response_without_code(service):
    with pytest.raises(RewardError, match=r"^cannot score this row: its ground truth is no code task: it is no JSON"):
        score(service, "no code", "{")


def test_no_more_programs_are_under_way_than_there_are_slots(service):
    together = Together(3)
    service.behaviours = [together]
    grader = Grader(Sandbox(service.url, 3, 64), QUICK)

    async def three_rows():
        return await asyncio.gather(*(grader.score(DOUBLES, {"inputs": ["1"] * 5, "outputs": ["2"] * 5}) for _ in range(3)))

    assert asyncio.run(three_rows()) == [1.0] * 3
    assert together.most == 3


def test_a_row_that_is_given_up_keeps_its_slot_until_its_call_has_ended(service):
    begun = threading.Event()

    def hangs(handler, body):
        begun.set()
        service.released.wait(60)

    service.behaviours = [hangs, runs_it]
    grader = Grader(Sandbox(service.url, 1, 64), QUICK)

    async def second_row():
        first = asyncio.create_task(grader.score(DOUBLES, TASK))
        await asyncio.to_thread(begun.wait, 60)
        first.cancel()
        second = asyncio.create_task(grader.score(DOUBLES, TASK))
        for _ in range(100):
            await asyncio.sleep(0.001)
        while_first_hangs = len(service.requests)
        service.released.set()
        assert await second == 0.75
        return while_first_hangs

    assert asyncio.run(second_row()) == 1


def test_the_first_error_gives_up_the_calls_of_its_row_that_still_wait(service):
    def waits(handler, body):
        service.released.wait(60)
        runs_it(handler, body)

    service.behaviours = [fails(404), waits]
    grader = Grader(Sandbox(service.url, 1, 64), QUICK)

    async def two_rows():
        with pytest.raises(RewardError, match="404"):
            await grader.score(DOUBLES, TASK)
        service.released.set()
        return await grader.score(DOUBLES, {"inputs": ["1"], "outputs": ["2"]})

    assert asyncio.run(two_rows()) == 1.0
    assert len(service.requests) <= 3  # the one that failed, one that had begun by then, and that of the second row


@pytest.mark.parametrize(
    ("most", "processes", "slots"), [(64, 1, [64]), (64, 4, [16] * 4), (25, 64, [13, 12]), (7, 3, [7]), (1, 1, [1])]
)
def test_slots_are_shared_out_over_as_many_processes_as_can_take_a_whole_row(most, processes, slots):
    shares = share_out(SandboxFusion("http://h", most, 32), processes)
    assert shares == [Sandbox("http://h", number, 32) for number in slots]


def code_rows(*solutions):
    return [RewardRow("taco", text, TASK, {}, f"train.jsonl:{place}") for place, text in enumerate(solutions, start=1)]


@pytest.mark.parametrize("manager", ["naive", "batch", "dapo", "prime"])
def test_every_manager_scores_code_beside_other_rules(service, manager):
    rows = [*code_rows(DOUBLES, "no code"), RewardRow("toy/arithmetic", "4", "4", {}, "train.jsonl:3")]
    with RewardRunner(CustomReward(), 1, manager=manager, sandbox=SandboxFusion(service.url)) as runner:
        assert [result.score for result in runner.score(rows)] == [0.75, 0.0, 1.0]
    assert len(service.requests) == 4


def test_a_mathematical_answer_that_takes_too_long_ends_beside_code(service):
    pytest.importorskip("math_verify")
    slow = RewardRow("numina_olympiads", r"\boxed{9^{9^{9^{9}}}}", "4", {}, "train.jsonl:0")
    with RewardRunner(CustomReward(timeout_seconds=30.0), 1, sandbox=SandboxFusion(service.url)) as runner:
        assert [result.score for result in runner.score([slow, *code_rows(DOUBLES)])] == [0.0, 0.75]


def test_processes_share_the_bound(service):
    together = Together(20)
    service.behaviours = [together]
    ten = json.dumps({"inputs": ["1"] * 10, "outputs": ["2"] * 10})
    rows = [RewardRow("apps", DOUBLES, ten, {}, f"train.jsonl:{place}") for place in range(2)]
    with RewardRunner(CustomReward(), 4, sandbox=SandboxFusion(service.url, max_concurrent=20)) as runner:
        assert [result.score for result in runner.score(rows)] == [1.0] * 2
        assert len(runner.pids()) == 2
    assert together.most == 20


def test_a_row_that_the_service_refuses_is_named_or_counted(service):
    service.behaviours = [fails(401, b"who?")]
    sandbox = SandboxFusion(service.url)
    with RewardRunner(CustomReward(), 1, sandbox=sandbox) as runner, pytest.raises(RewardError) as error:
        runner.score(code_rows(DOUBLES))
    assert str(error.value).startswith("train.jsonl:1: the reward function of the rules cannot score this row: " + KEY)
    assert "on_error=score" in str(error.value)
    with RewardRunner(CustomReward(on_error="score", fallback_score=-1.0), 1, sandbox=sandbox) as runner:
        results = runner.score(code_rows(DOUBLES, "no code"))
    assert [(result.score, result.failed) for result in results] == [(-1.0, True), (0.0, False)]


def test_a_service_is_tried_before_a_run_begins(service):
    check_service(SandboxFusion(None))
    assert service.requests == []
    check_service(SandboxFusion(service.url))
    assert len(service.requests) == 1


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        (fails(404), "refused the request: HTTP status 404"),
        (says(answer("Success", "something")), "ran a first program, print.input.. . 2., which failed"),
        (says("hello"), "is no answer of a SandboxFusion service"),
    ],
)
def test_a_service_that_fails_its_first_program_is_an_error_with_key_and_address(service, trouble, reason):
    service.behaviours = [trouble]
    with pytest.raises(RewardError, match=rf"^{KEY}={service.url.replace('?', '.')}: .*{reason}"):
        check_service(SandboxFusion(service.url), QUICK)


def test_a_service_that_is_not_there_is_an_error_with_key_address_and_way_out(service):
    service.server.shutdown()
    service.server.server_close()
    with pytest.raises(RewardError, match=rf"^{KEY}=http.*ConnectionRefusedError"):
        check_service(SandboxFusion(service.url), QUICK)
    assert PATIENCE.way_out == f"Start the service, or correct {KEY}."
