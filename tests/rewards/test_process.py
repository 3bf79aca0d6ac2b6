import os
import signal
import time

import pytest

from verl_memopt.errors import RewardError
from verl_memopt.rewards.process import RewardProcess
from verl_memopt.rewards.score import Limits, RewardRow
from verl_memopt.rewards.scorer import FunctionCall

LIMITS = Limits(memory_gb=16, cpu_seconds=600, open_files=4096)

FUNCTION = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None, factor=1.0):
    if solution_str == "wait":
        time.sleep(60)
    if solution_str == "fail":
        raise ValueError("no")
    return {"score": factor * len(solution_str), "source": data_source}
"""


@pytest.fixture
def process(tmp_path):
    """Starts reward processes from the text of their file."""
    started = []

    def start(text=FUNCTION, **reward_kwargs):
        (tmp_path / "reward.py").write_text(text)
        started.append(RewardProcess(FunctionCall(str(tmp_path / "reward.py"), "compute_score", reward_kwargs), LIMITS))
        return started[-1]

    yield start
    for each in started:
        each.close()


def row(solution):
    return RewardRow("toy", solution, "2", {}, "rows.jsonl:1")


def outcomes(process, count):
    found = []
    while len(found) < count:
        assert process.connection.poll(20)
        found += process.receive()
    return found


def until(holds):
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_rows_come_back_scored_under_the_indices_they_were_sent_with(process):
    running = process(factor=0.5)
    running.send(7, [row("abc"), row("ab")])
    assert outcomes(running, 2) == [(7, 1.5, {"source": "toy"}, None), (8, 1.0, {"source": "toy"}, None)]
    assert running.receive() == []


def test_a_row_that_raises_comes_back_with_its_traceback_and_the_next_is_scored(process):
    running = process()
    running.send(0, [row("fail"), row("ab")])
    first, second = outcomes(running, 2)
    assert first[:3] == (0, 0.0, {})
    assert "ValueError: no" in first[3]
    assert second == (1, 2.0, {"source": "toy"}, None)


def test_the_parent_sees_at_which_row_a_process_is_and_for_how_long(process):
    running = process()
    running.wait_until_loaded()
    assert running.position() == (-1, 0.0)
    running.send(4, [row("ab"), row("wait")])
    until(lambda: running.position()[0] == 5)
    before = running.position()[1]
    until(lambda: running.position()[1] > before)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def compute_score(:", "the file does not run"),
        ("def other(): pass", "the file has no 'compute_score'. It defines other"),
        ("import os\nos._exit(3)", "the process that imports the file exited with code 3"),
    ],
)
def test_a_file_that_gives_no_function_is_reported_on_waiting(process, text, said):
    with pytest.raises(RewardError, match=said):
        process(text).wait_until_loaded()


def test_a_process_that_was_killed_is_seen_to_be_dead_and_how(process):
    running = process()
    running.wait_until_loaded()
    os.kill(running.pid, signal.SIGKILL)
    until(lambda: not running.is_alive())
    assert running.ending() == "was killed by SIGKILL"
    assert running.receive() is None
    running.send(0, [row("a")])


def test_closing_ends_a_process_in_the_middle_of_a_row_and_may_be_repeated(process):
    running = process()
    running.send(0, [row("wait")])
    until(lambda: running.position()[0] == 0)
    running.close()
    running.close()
    assert not running.is_alive()


def test_a_process_has_a_session_of_its_own_so_that_ctrl_c_does_not_reach_it(process):
    assert os.getsid(process().pid) != os.getsid(0)
