"""What stands between a run and a reward function: signals pass it by, limits are held, it ends as the function's process did."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rewards.conftest import rows
from tests.rewards.processes import gone, wait_until
from verl_memopt.config.schema import CustomReward
from verl_memopt.errors import RewardError
from verl_memopt.rewards.runner import RewardRunner


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_to_every_process_of_a_run_end_no_row(custom: Callable[..., CustomReward], tmp_path: Path, number: int) -> None:
    """Sent to the supervisor and to the function's process in the middle of a row, which is then scored all the same."""
    body = f"""
        import os, pathlib, signal, time
        os.kill(os.getppid(), {number})
        os.kill(os.getpid(), {number})
        time.sleep(0.2)
        return os.getpid()
    """
    with RewardRunner(custom(body), 1) as runner:
        first, second = runner.score(rows("a", "b"))
        assert (first.failed, first.score) == (False, second.score)
        assert os.getsid(runner.pids()[0]) != os.getsid(0)  # Ctrl-C does not reach it


def test_a_program_that_a_reward_function_starts_is_ended_by_signals_as_any_other(custom: Callable[..., CustomReward]) -> None:
    body = """
        import signal, subprocess
        process = subprocess.Popen(["sleep", "60"])
        process.send_signal(signal.SIGTERM)
        return process.wait(20)
    """
    with RewardRunner(custom(body), 1) as runner:
        assert runner.score(rows("a"))[0].score == -signal.SIGTERM


FOUR_THAT_HOLD_MEMORY = """
import os, time
for _ in range(4):
    if not os.fork():
        held = bytearray(2**27)
        for number in range(600):  # a page that rests may be taken out of memory by the machine
            held[::4096] = bytes([number % 256]) * 2**15
            time.sleep(0.1)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("body", "settings", "said"),
    [
        (
            "return len(bytes(2**29))",
            {"memory_gb": 0.25},
            r"raised:.*MemoryError\ncustom_reward_function\.memory_gb=0\.25 limits the memory",
        ),
        (
            FOUR_THAT_HOLD_MEMORY,
            {"memory_gb": 0.2},
            r"ended its process, which held more memory, with the processes it started, than "
            r"custom_reward_function\.memory_gb=0\.2",
        ),
        (
            "import os\nos.fork()\nwhile True: pass",
            {"cpu_seconds": 0.3},
            r"ended its process, which took more processor time than custom_reward_function\.cpu_seconds=0\.3",
        ),
        ("held = []\nwhile True: held.append(open('/dev/null'))", {"open_files": 64}, "Too many open files"),
    ],
)
def test_a_row_that_takes_more_than_its_limit_is_named_with_the_limit(
    custom: Callable[..., CustomReward], body: str, settings: dict[str, float], said: str
) -> None:
    with RewardRunner(custom(f"if solution_str != 'bad': return 1\n{body}", **settings), 1) as runner:
        runner.check()
        with pytest.raises(RewardError, match=rf"(?s)^train\.jsonl:2: .*{said}"):
            runner.score(rows("ok", "bad", "ok"))


def test_a_processor_time_limit_holds_for_a_row_and_not_for_the_batch(custom: Callable[..., CustomReward]) -> None:
    busy = "import time\nend = time.process_time() + 0.4\nwhile time.process_time() < end: pass\nreturn 1"
    with RewardRunner(custom(busy, cpu_seconds=0.9), 1) as runner:
        assert [r.score for r in runner.score(rows("a", "b", "c", "d"))] == [1.0] * 4


def test_a_busy_function_dies_with_its_supervisor(custom: Callable[..., CustomReward], tmp_path: Path) -> None:
    """It holds the interpreter lock for good, so nothing inside its process could notice."""
    body = f"""
        import os, re, signal, pathlib
        pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(os.getpid()))
        os.kill(os.getppid(), signal.SIGKILL)
        re.match('(a*)*b', 'a' * 60)
    """
    with (
        RewardRunner(custom(body), 1) as runner,
        pytest.raises(RewardError, match="ended its process, which was killed by SIGKILL"),
    ):
        runner.score(rows("a"))
    assert wait_until(lambda: gone(int((tmp_path / "pid").read_text())))


def test_a_function_that_crashes_leaves_the_line_it_crashed_in(custom: Callable[..., CustomReward], tmp_path: Path) -> None:
    settings = custom("import ctypes\nctypes.string_at(0)")
    with RewardRunner(settings, 1, tmp_path) as runner, pytest.raises(RewardError, match="was killed by SIGSEGV") as error:
        runner.score(rows("a"))
    assert "in compute_score" in (tmp_path / "process_0.log").read_text()
    assert "its last output" in str(error.value)


def test_what_a_process_leaves_when_it_crashes_is_ended_before_its_end_is_told(
    custom: Callable[..., CustomReward], tmp_path: Path
) -> None:
    body = f"""
        import os, pathlib, subprocess
        process = subprocess.Popen(["sleep", "60"], start_new_session=True)
        pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(process.pid))
        os._exit(3)
    """
    with RewardRunner(custom(body), 1) as runner:
        with pytest.raises(RewardError, match="exited with code 3"):
            runner.score(rows("a"))
        assert gone(int((tmp_path / "pid").read_text()))
