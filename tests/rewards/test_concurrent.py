"""Async reward functions: many rows at a time, a limit for each, and the name of the one at which the process hangs."""

import functools
import logging
import re

import pytest

from tests.rewards.conftest import rows, scored
from verl_memopt.errors import RewardError
from verl_memopt.rewards.runner import RewardRunner
from verl_memopt.rewards.scorer import is_async

HEAD = """
import asyncio
import os
import time

at_once = most = 0
arrived = asyncio.Event()

async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
"""


@pytest.fixture
def waits(custom):
    return functools.partial(custom, head=HEAD)


async def plain(): ...


class AsyncObject:
    async def __call__(self): ...


def test_functions_partials_and_objects_are_recognised():
    assert is_async(plain)
    assert is_async(functools.partial(functools.partial(plain)))
    assert is_async(AsyncObject())
    assert not is_async(len)
    assert not is_async(functools.partial(print))


COUNTED = """
global at_once, most
at_once += 1
most = max(most, at_once)
if at_once == {needed}:
    arrived.set()
await arrived.wait()
await asyncio.sleep(0)
at_once -= 1
return {{"score": extra_info["index"], "most": most}}
"""


@pytest.mark.parametrize("bound", [1, 64])
def test_rows_run_at_a_time_up_to_the_bound_and_come_in_order(waits, bound):
    """No row ends before as many as may run have begun."""
    settings = waits(COUNTED.format(needed=min(bound, 9)))
    with RewardRunner(settings, 1, max_concurrent=bound) as runner:
        results = runner.score(rows(*"abcdefghi"))
        assert [r.score for r in results] == list(range(9))
        assert max(r.extra["most"] for r in results) == min(bound, 9)
        assert [r.score for r in runner.score(rows("x", "y"))] == [0, 1]


def test_rows_share_one_event_loop_from_step_to_step(waits):
    body = "await asyncio.sleep(0)\nreturn id(asyncio.get_running_loop()) % 1000003"
    with RewardRunner(waits(body), 1) as runner:
        assert len({r.score for _ in range(3) for r in runner.score(rows("a", "b"))}) == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("await asyncio.sleep(0)\nreturn 1 / (solution_str != 'bad')", r"raised:.*in compute_score.*ZeroDivisionError"),
        ("return 1 / (solution_str != 'bad')", "raised:.*ZeroDivisionError"),
        ("if solution_str == 'bad': raise asyncio.CancelledError\nreturn 1", "raised:.*CancelledError"),
        ("if solution_str == 'bad': raise SystemExit(3)\nreturn 1", "raised:.*SystemExit: 3"),
        ("if solution_str == 'bad': os._exit(7)\nawait asyncio.sleep(0.01)\nreturn 1", "exited with code 7"),
    ],
)
def test_a_row_that_fails_is_named_and_no_other_fails(waits, body, message, caplog):
    caplog.set_level(logging.WARNING)
    assert [r.score for r in scored(waits(body, on_error="score", fallback_score=-1.0), "ok", "ok", "bad", "ok")] == [1, 1, -1, 1]
    assert re.search(rf"(?s)failed on 1 of 4 rows.*the first is train\.jsonl:3: .*{message}", caplog.text)


def test_a_row_that_waits_too_long_is_cancelled_and_the_process_lives(waits):
    body = """
        if solution_str == 'bad': await asyncio.sleep(600)
        if solution_str == 'worse': await asyncio.Event().wait()
        return os.getpid()
    """
    with RewardRunner(waits(body, timeout_seconds=0.3, on_error="score"), 1) as runner:
        results = runner.score(rows("ok", "bad", "ok", "worse"))
        assert [r.failed for r in results] == [False, True, False, True]
        assert len({r.score for r in results if not r.failed} | {r.score for r in runner.score(rows("ok"))}) == 1
    with (
        RewardRunner(waits(body, timeout_seconds=0.3), 1) as runner,
        pytest.raises(RewardError, match=r"^train\.jsonl:2: .*took longer than custom_reward_function\.timeout_seconds=0\.3"),
    ):
        runner.score(rows("ok", "bad"))


def test_a_row_whose_own_code_never_waits_is_the_one_that_is_named(waits):
    """It stops the event loop, so every other row hangs with it; they are scored again."""
    body = "await asyncio.sleep(0)\nif solution_str == 'bad': time.sleep(600)\nawait asyncio.sleep(0.01)\nreturn 1"
    results = scored(waits(body, timeout_seconds=0.5, on_error="score"), "ok", "ok", "bad", "ok")
    assert [r.failed for r in results] == [False, False, True, False]


STOPS_THE_LOOP = "async def blocks(): time.sleep(600)\nawait asyncio.gather(blocks())\nreturn 1"
REFUSES = "while True:\n    try: await asyncio.sleep(600)\n    except asyncio.CancelledError: pass"


@pytest.mark.parametrize("body", [STOPS_THE_LOOP, REFUSES], ids=["a task stops the loop", "it refuses to be cancelled"])
def test_a_row_that_cannot_be_cancelled_ends_its_process(waits, body):
    with pytest.raises(RewardError, match="took longer"):
        scored(waits(body, timeout_seconds=0.2), "a")
