"""What stands between a run and a reward function: signals pass it by, limits are held, it ends as the function's process did."""

import os
import resource
import signal
import subprocess
import sys

import pytest

from tests.rewards.conftest import rows, scored
from tests.rewards.processes import gone, wait_until
from verl_memopt.config.schema import CustomReward
from verl_memopt.errors import RewardError
from verl_memopt.rewards.runner import RewardRunner
from verl_memopt.rewards.score import Limits
from verl_memopt.rewards.supervisor import LOG_BYTES, MOST_PROCESSES, OutputLog, last_lines


def test_signals_to_every_process_of_a_run_end_no_row(custom):
    """Sent to the supervisor and to the function's process in the middle of a row, which is then scored all the same."""
    body = """
        import os, signal, time
        os.kill(os.getppid(), int(solution_str))
        os.kill(os.getpid(), int(solution_str))
        time.sleep(0.2)
        return os.getpid()
    """
    signals = rows(*(str(int(number)) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)))
    with RewardRunner(custom(body), 1) as runner:
        results = runner.score(signals)
        assert not any(result.failed for result in results)
        assert len({result.score for result in [*results, *runner.score(signals[:1])]}) == 1
        assert os.getsid(runner.pids()[0]) != os.getsid(0)  # Ctrl-C does not reach it


def test_a_program_that_a_reward_function_starts_is_ended_by_signals_as_any_other(custom):
    body = """
        import signal, subprocess
        process = subprocess.Popen(["sleep", "60"])
        process.send_signal(signal.SIGTERM)
        return process.wait(20)
    """
    assert scored(custom(body), "a")[0].score == -signal.SIGTERM


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
            "import os, time\nif os.fork(): time.sleep(60)\nwhile True: pass",
            {"cpu_seconds": 0.3},
            r"ended its process, which took more processor time than custom_reward_function\.cpu_seconds=0\.3",
        ),
        ("held = []\nwhile True: held.append(open('/dev/null'))", {"open_files": 64}, "Too many open files"),
        pytest.param(
            f"import os, time\nfor _ in range({MOST_PROCESSES + 50}):\n    if not os.fork(): time.sleep(60)\ntime.sleep(60)",
            {},
            f"ended its process, which started more than {MOST_PROCESSES} processes",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_row_that_takes_more_than_its_limit_is_named_with_the_limit(custom, body, settings, said):
    with RewardRunner(custom(f"if solution_str != 'bad': return 1\n{body}", **settings), 1) as runner:
        runner.check()
        with pytest.raises(RewardError, match=rf"(?s)^train\.jsonl:2: .*{said}"):
            runner.score(rows("ok", "bad", "ok"))


def test_a_processor_time_limit_holds_for_a_row_and_not_for_the_batch(custom):
    busy = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\nreturn 1"
    assert [r.score for r in scored(custom(busy, cpu_seconds=0.7), "a", "b", "c")] == [1.0] * 3


def test_a_busy_function_dies_with_its_supervisor(custom, tmp_path):
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


def test_a_function_that_crashes_leaves_the_line_it_crashed_in(custom, tmp_path):
    settings = custom("import ctypes\nctypes.string_at(0)")
    with pytest.raises(RewardError, match="was killed by SIGSEGV") as error:
        scored(settings, "a", logs=tmp_path)
    assert "in compute_score" in (tmp_path / "process_0.log").read_text()
    assert "its last output" in str(error.value)


def test_what_a_process_leaves_when_it_crashes_is_ended_before_its_end_is_told(custom, tmp_path):
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


def under(limits, program):
    bound = f"from verl_memopt.rewards.score import Limits; {limits!r}.bind_process()\n{program}"
    return subprocess.run([sys.executable, "-c", bound], capture_output=True, text=True, check=False)


def test_a_limit_above_the_machines_own_is_lowered_to_it():
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY:
        pytest.skip("this machine bounds no open files")
    shown = under(Limits(1, 1, hard + 1), "import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))")
    assert shown.stdout.split() == [str(hard)] * 2


def test_torch_can_be_imported_and_used_under_the_default_limits():
    assert Limits.of(CustomReward(timeout_seconds=2)).cpu_seconds == 64, "32 for each second, unless it is set"
    assert Limits.of(CustomReward(timeout_seconds=2, cpu_seconds=5)).cpu_seconds == 5
    shown = under(Limits.of(CustomReward()), "import torch; print(float((torch.ones(512, 512) @ torch.ones(512, 512)).sum()))")
    assert shown.stdout.split() == [str(512.0**3)], shown.stderr


def test_a_log_is_made_at_the_first_write_and_keeps_what_was_there(tmp_path):
    path = tmp_path / "logs" / "a.log"
    log = OutputLog(path)
    assert not path.parent.exists()
    log.write(b"one\n")
    OutputLog(path).write(b"two\n")
    assert path.read_bytes() == b"one\ntwo\n"


def test_a_log_never_grows_past_its_limit_and_keeps_whole_lines_of_the_end(tmp_path):
    log = OutputLog(tmp_path / "a.log")
    lines = [b"%06d %s\n" % (number, b"x" * 992) for number in range(3000)]
    for line in lines:
        log.write(line)
        assert log.path.stat().st_size <= LOG_BYTES
    kept = log.path.read_bytes()
    assert b"".join(lines).endswith(kept)
    assert kept.splitlines(keepends=True)[0] in lines
    assert len(kept) > LOG_BYTES // 2 - 1000
    assert os.listdir(tmp_path) == ["a.log"]


def test_a_disk_that_refuses_loses_the_output_and_says_so_once(tmp_path, capfd):
    (tmp_path / "file").write_text("")
    log = OutputLog(tmp_path / "file" / "a.log")
    log.write(b"lost\n")
    log.write(b"lost\n")
    said = capfd.readouterr().err
    assert said == f"{log.path}: the output of a reward function cannot be written (File exists).\n"


def test_the_last_lines_of_this_process_are_quoted_under_the_name_of_the_log(tmp_path):
    path = tmp_path / "a.log"
    assert last_lines(None) == last_lines(path) == ""
    path.write_text("".join(f"line {number}\n\n" for number in range(9)))
    assert last_lines(path) == f"\n  its last output ({path}):\n  line 4\n  line 5\n  line 6\n  line 7\n  line 8"
    path.write_text("old\n")
    assert last_lines(path, since=4) == ""
    path.write_text("old\nnew\n")
    assert last_lines(path, since=4) == f"\n  its last output ({path}):\n  new"
    path.write_text("cut\n")
    assert "cut" in last_lines(path, since=400)
