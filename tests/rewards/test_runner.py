"""Scoring in processes: order, failures with names, time limits, and no process left behind."""

import functools
import logging
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.rewards.conftest import HEAD, rows, scored
from tests.rewards.processes import STARTS_OTHERS, all_gone, gone, wait_until
from verl_memopt.config.schema import CustomReward
from verl_memopt.config.values import choices
from verl_memopt.distributed import threads
from verl_memopt.errors import RewardError, Stopped
from verl_memopt.rewards.runner import MANAGERS, RewardRunner, num_processes
from verl_memopt.rewards.score import RewardResult


def test_every_manager_of_the_settings_has_its_number_of_processes():
    assert set(MANAGERS) == set(choices()["reward_model.reward_manager"])
    for manager in ("naive", "batch", "dapo"):
        assert [num_processes(manager, number) for number in (1, 3)] == [1, 3]
    assert num_processes("rlt", 3) == 0  # a student scores in the workers
    cores = min(64, len(os.sched_getaffinity(0)))
    assert [num_processes("prime", number) for number in (1, cores + 5)] == [cores, cores + 5]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_results_come_in_the_order_of_the_rows(custom, num_workers):
    slow_ones_first = """
        import time
        time.sleep(0.02 if extra_info["index"] < 3 else 0)
        return {"score": extra_info["index"], "who": solution_str}
    """
    with RewardRunner(custom(slow_ones_first), num_workers) as runner:
        results = runner.score(rows(*"abcdefghijklmnop"))
        assert [(r.score, r.extra["who"], r.failed) for r in results] == [(i, c, False) for i, c in enumerate("abcdefghijklmnop")]
        assert runner.score([]) == []


def test_the_function_gets_what_the_row_holds_and_its_fixed_arguments(custom):
    body = 'return {"score": kwargs["bonus"], "seen": [data_source, solution_str, ground_truth, extra_info]}'
    (result,) = scored(custom(body, reward_kwargs={"bonus": 0.25}), "x")
    assert result == RewardResult(0.25, {"seen": ["mine", "x", "4", {"index": 0}]})


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("1 / 0", "compute_score of .*reward.py raised:.*Traceback.*ZeroDivisionError"),
        ("os._exit(7)", "ended its process, which exited with code 7"),
        ("os.kill(os.getpid(), 11)", "which was killed by SIGSEGV"),
        ("sys.exit(3)", "SystemExit: 3"),
    ],
)
def test_a_row_that_fails_stops_the_run_with_its_name_and_the_reason(custom, bad, message):
    settings = custom(f"import os, sys\nreturn {bad} if solution_str == 'bad' else 1")
    with pytest.raises(RewardError, match=rf"(?s)^train\.jsonl:3: .*{message}") as error:
        scored(settings, "ok", "ok", "bad", "ok")
    assert "custom_reward_function.on_error=score" in str(error.value)


def test_failed_rows_take_the_fallback_and_the_others_their_scores(custom, caplog):
    """One hangs, one raises and one ends its process."""
    body = "import os, time\nwhile solution_str == 'hang': time.sleep(0.01)\nreturn eval(solution_str)"
    settings = custom(body, timeout_seconds=0.5, on_error="score", fallback_score=-1.0)
    with RewardRunner(settings, 2) as runner, caplog.at_level(logging.WARNING):
        results = runner.score(rows("1", "hang", "1", "1", "1 / 0", "1", "os._exit(1)", "1"))
        assert [r.score for r in results] == [1, -1, 1, 1, -1, 1, -1, 1]
        assert [r.failed for r in results] == [r.score == -1 for r in results]
    assert "failed on 3 of 8 rows" in caplog.text
    assert "train.jsonl:2" in caplog.text


def test_a_process_killed_between_rows_is_replaced_and_blames_no_row(custom):
    with RewardRunner(custom("import os\nreturn os.getpid()"), 1) as runner:
        pid = int(runner.score(rows("a"))[0].score)
        os.kill(pid, signal.SIGKILL)
        results = runner.score(rows("a", "b"))
        assert not any(r.failed for r in results)
        assert results[0].score != pid


def test_what_a_function_returns_runs_no_code_in_the_run(custom, tmp_path):
    evil = f"""
    class Evil(str):
        def encode(self, *_): return self
        def decode(self, *_): return self
        def __reduce__(self): return open, ({str(tmp_path / "it ran")!r}, "w")
    return dict(score=1.0, pred=Evil("text"), more={{Evil("key"): [True, 1.5, None]}})
    """
    (result,) = scored(custom(evil), "x")
    assert result.extra == {"pred": "text", "more": {"key": [True, 1.5, None]}}
    assert not (tmp_path / "it ran").exists()


@pytest.mark.parametrize("sent", ["pickle.dumps(1)", "b'[[]]'"])
def test_what_a_function_writes_to_the_connection_itself_is_an_error(custom, sent):
    body = f"""
    import gc, pickle
    from multiprocessing.connection import Connection
    next(each for each in gc.get_objects() if isinstance(each, Connection)).send_bytes({sent})
    import time; time.sleep(60)
    """
    with pytest.raises(RewardError, match="sent what is no score"):
        scored(custom(body), "x")


WRITES = """
    import gc, os, struct, time
    from verl_memopt.rewards.score import as_message
    from verl_memopt.rewards.scorer import Serving
    if solution_str == "bad":
        serving = next(each for each in gc.get_objects() if isinstance(each, Serving))
        pipe, here = serving.connection.fileno(), serving.round_number
        {attack}
    return 1.0
"""
ATTACKS = {
    "a header without a body": "os.write(pipe, struct.pack('!4sQI', b'vmr1', here, 100))",
    "a length beyond all bounds": "os.write(pipe, struct.pack('!4sQI', b'vmr1', here, 2**32 - 1))",
    "a score beyond all bounds": "os.write(pipe, as_message(here, [[1, 1e300, {}, None]]))",
    "a row that was not asked for": "os.write(pipe, as_message(here, [[77, 1.0, {}, None]]))",
    "a row twice": "os.write(pipe, as_message(here, [[1, 1.0, {}, None], [1, 1.0, {}, None]]) * 2)",
    "more than may be kept": "return dict(score=1.0, all='x' * 10**6)",
    "an interrupt": "raise KeyboardInterrupt",
    "no position": "os.ftruncate(serving.progress, 0); os._exit(1)",
    "silence": "Serving._flush = lambda self: time.sleep(60)",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_is_wrong_on_the_connection_ends_the_process_and_is_a_fault_of_the_row(attack, custom, monkeypatch):
    monkeypatch.setattr("verl_memopt.rewards.runner.SILENCE_SECONDS", 0.2)
    settings = custom(WRITES.format(attack=ATTACKS[attack]), on_error="score", fallback_score=-1.0, timeout_seconds=0.4)
    with RewardRunner(settings, 1) as runner:
        first = runner.score(rows("good", "bad", "good"))
        again = runner.score(rows("good", "good"))
    if attack not in ("a row twice", "no position"):  # a function may have its row scored, or another blamed, as it likes
        assert [result.score for result in first] == [1.0, -1.0, 1.0]
    assert [result.score for result in again] == [1.0, 1.0]


def test_the_answer_of_a_forked_child_counts_in_no_later_round(custom, tmp_path):
    late = """
    if os.fork() == 0:
            while not os.path.exists({path!r}): time.sleep(0.01)
            os.write(pipe, as_message(here, [[0, -7.0, {{}}, None], [1, -7.0, {{}}, None]]))
            open({path!r} + ".sent", "w").close()
            os._exit(0)
    """.strip().format(path=str(tmp_path / "go"))
    with RewardRunner(custom(WRITES.format(attack=late), on_error="score"), 1) as runner:
        assert [result.score for result in runner.score(rows("good", "bad"))] == [1.0, 1.0]
        (tmp_path / "go").touch()
        while not (tmp_path / "go.sent").exists():
            time.sleep(0.01)
        assert [result.score for result in runner.score(rows("good", "good"))] == [1.0, 1.0]


def test_a_child_that_comes_back_from_the_function_scores_nothing(custom):
    body = "import os, time\nhere = os.getpid()\nif os.fork() == 0: return -7.0\ntime.sleep(0.05)\nreturn 1.0"
    assert [result.score for result in scored(custom(body), *"abc")] == [1.0] * 3


@pytest.mark.parametrize("where", ["in the function", "at the import"])
def test_a_message_of_a_reward_steers_no_terminal(tmp_path, where):
    fault = "raise ValueError('\\x1b[2J\\r\\x9b1m')"
    text = f"{HEAD}    {fault}" if where == "in the function" else fault
    (tmp_path / "reward.py").write_text(text)
    with pytest.raises(RewardError) as caught:
        scored(CustomReward(path=str(tmp_path / "reward.py")), "x")
    assert "ValueError: \\x1b[2J\\x0d\\x9b1m" in str(caught.value)
    assert str(caught.value).replace("\n", "").isprintable()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("absent.py", r"custom_reward_function\.path=.*absent\.py: there is no such file"),
        ("ends.py", r"(?s)does not run.*os\._exit\(5\)"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_reported_before_any_row(tmp_path, name, said):
    (tmp_path / "ends.py").write_text("import os; os._exit(5)")
    settings = CustomReward(path=str(tmp_path / name))
    with RewardRunner(settings, 1) as runner, pytest.raises(RewardError, match=said):
        runner.check()


def test_large_texts_cross_in_both_directions(custom):
    text = "x" * 300_000
    results = scored(custom('return {"score": len(solution_str), "back": solution_str}'), *[text] * 6, num_workers=2)
    assert [(r.score, r.extra["back"] == text) for r in results] == [(300_000.0, True)] * 6


def test_closing_ends_the_processes_even_in_the_middle_of_a_row(custom, tmp_path):
    body = f"""
        import os, pathlib
        pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(os.getpid()))
        while solution_str == "a": pass
        return 1
    """
    message = r"^train\.jsonl:2: .*took longer than custom_reward_function\.timeout_seconds=0\.3"
    with pytest.raises(RewardError, match=message):
        scored(custom(body, timeout_seconds=0.3), "ok", "a")
    assert wait_until(lambda: gone(int((tmp_path / "pid").read_text())))


def test_the_parent_program_is_not_run_again_by_its_reward_processes(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "print('once', flush=True)\n"
        "from verl_memopt.config.schema import CustomReward\n"
        "from verl_memopt.rewards.runner import RewardRunner\n"
        "with RewardRunner(CustomReward(), 2) as runner:\n    runner.check()\n"
    )
    shown = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["once"]


PARENT = """
import sys
from pathlib import Path
from verl_memopt.config.schema import CustomReward
from verl_memopt.rewards.score import RewardRow
from verl_memopt.rewards.runner import RewardRunner
runner = RewardRunner(CustomReward(path=sys.argv[1]), 1, Path(sys.argv[2]))
runner.score([RewardRow("mine", sys.argv[3], "4", {}, "train.jsonl:1")])
print("scored", flush=True)
sys.stdin.read()
runner.close()
"""
"""A run in small: it scores one row, and closes when its input ends."""


@pytest.fixture
def started(tmp_path):
    """Writes a reward function that starts processes, and gives a way to ask for their ids."""
    (tmp_path / "started").mkdir()
    (tmp_path / "reward.py").write_text(STARTS_OTHERS.replace("{folder!r}", repr(str(tmp_path / "started"))))
    return lambda: [int(path.name) for path in (tmp_path / "started").iterdir()]


@pytest.fixture
def parent(tmp_path, started):
    """Starts a run with such a function, and gives it with the ids once they are there."""

    def start(counts):
        command = [sys.executable, "-c", PARENT, str(tmp_path / "reward.py"), str(tmp_path / "logs"), counts]
        running = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert running.stdout.readline() == "scored\n"
        pids = started()
        assert len(pids) == sum(map(int, counts.split()))
        assert not any(gone(pid) for pid in pids)
        return running, pids

    return start


def test_processes_of_a_reward_function_die_with_a_run_that_is_killed(parent):
    running, pids = parent("6 5 5")
    running.kill()
    running.communicate()
    assert all_gone(pids)


def test_processes_of_a_reward_function_are_gone_when_a_run_has_closed(parent):
    running, pids = parent("1 1 1")
    running.communicate()
    assert running.returncode == 0
    assert all(gone(pid) for pid in pids)


def test_processes_of_a_reward_function_are_gone_when_its_row_has_timed_out(tmp_path, started):
    file = tmp_path / "reward.py"
    file.write_text(file.read_text().replace("return 1.0", "time.sleep(300)"))
    settings = CustomReward(path=str(file), timeout_seconds=3.0)
    with RewardRunner(settings, 1) as runner:
        runner.check()
        with pytest.raises(RewardError, match="took longer"):
            runner.score(rows("1 1 1"))
        pids = started()
        assert len(pids) == 3
        assert all(gone(pid) for pid in pids)


def test_processes_of_a_killed_supervisor_are_found_by_their_mark(tmp_path, started, caplog):
    with RewardRunner(CustomReward(path=str(tmp_path / "reward.py")), 1) as runner:
        runner.score(rows("1 1 1"))
        pids = started()
        supervisor = runner.pids()[0]
        os.kill(supervisor, signal.SIGKILL)
        assert wait_until(lambda: gone(supervisor))
        assert runner.score(rows("0 0 0"))[0].score == 1.0
        assert all_gone(pids)
    # The process that ran the function may be among them: it is ended by its supervisor's death, at about the same moment.
    assert re.search("killed [34] processes that code of the user had started and left behind", caplog.text)


def test_a_process_without_its_supervisor_is_given_no_rows(custom):
    outlives_its_supervisor = """
        import ctypes, os
        ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)  # no signal when the supervisor dies
        return {"score": 1.0, "supervisor": os.getppid()}
    """
    with RewardRunner(custom(outlives_its_supervisor), 1) as runner:
        runner.score(rows("a"))
        [killed] = runner.pids()
        os.kill(killed, signal.SIGKILL)
        assert wait_until(lambda: gone(killed))
        [result] = runner.score(rows("b"))
        assert [result.extra["supervisor"]] == runner.pids() != [killed]


def test_what_the_function_prints_lies_in_its_log_and_not_among_what_the_run_prints(custom, tmp_path, capfd):
    body = """
        import subprocess, sys
        print("seen", solution_str)
        print("told", file=sys.stderr)
        return subprocess.call(["echo", "below"])
    """
    with RewardRunner(custom(body), 1, tmp_path / "reward_logs") as runner:
        runner.check()
        assert not (tmp_path / "reward_logs").exists()
        runner.score(rows("a"))
    assert sorted((tmp_path / "reward_logs" / "process_0.log").read_text().split("\n")) == ["", "below", "seen a", "told"]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("end", "seconds"), [("os._exit(3)", 30.0), ("time.sleep(60)", 0.5)])
def test_a_row_that_ends_its_process_or_hangs_quotes_what_was_printed_last(custom, tmp_path, end, seconds):
    settings = custom(f"import os, time\nprint('so far')\n{end}", timeout_seconds=seconds)
    with RewardRunner(settings, 1, tmp_path) as runner:
        runner.check()
        with pytest.raises(RewardError) as error:
            runner.score(rows("a"))
    assert f"\n  its last output ({tmp_path / 'process_0.log'}):\n  so far\nCorrect it" in str(error.value)


@pytest.mark.parametrize("wished", [None, "3"])
def test_a_reward_process_gets_its_share_of_the_cores_or_what_was_asked_for(custom, monkeypatch, wished):
    monkeypatch.setattr(threads, "num_cores", lambda: 9)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if wished is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", wished)
    with RewardRunner(custom("import os; return int(os.environ['OMP_NUM_THREADS'])"), 2) as runner:
        assert [result.score for result in runner.score(rows("a"))] == [4.0 if wished is None else 3.0]


def test_rows_are_given_up_when_the_run_is_asked_to_stop_and_the_processes_end(custom):
    with RewardRunner(custom("import time; time.sleep(600)"), 2) as runner:
        runner.check()
        pids = [process.pid for process in runner._processes]
        began = time.monotonic()
        runner.stopped = lambda: time.monotonic() > began + 0.3
        with pytest.raises(Stopped):
            runner.score(rows("a", "b"))
        assert all(wait_until(lambda pid=pid: gone(pid)) for pid in pids)


BATCH = """
calls = []

def compute_score(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    calls.append(len(solution_strs))
"""


@pytest.fixture
def batch(custom):
    return functools.partial(custom, head=BATCH)


SEES_ALL = """
seen = zip(data_sources, solution_strs, ground_truths, extra_infos)
return [{"score": i["index"], "row": [d, s, t], "calls": list(calls), "more": kwargs} for d, s, t, i in seen]
"""


@pytest.mark.parametrize("num_workers", [3])
def test_the_manager_batch_calls_the_function_once_with_all_rows(batch, num_workers):
    settings = batch(SEES_ALL, reward_kwargs={"bonus": 2})
    with RewardRunner(settings, num_workers, manager="batch") as runner:
        results = runner.score(rows(*"abcdefghij"))
        assert [r.score for r in results] == list(range(10))
        assert results[3].extra == {"row": ["mine", "d", "4"], "calls": [10], "more": {"bonus": 2}}
        assert runner.score([]) == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise ValueError('no')", "raised:.*ValueError: no"),
        ("return [1.0]", "returned 1 scores for 3 rows"),
        ("import os; os._exit(3)", "exited with code 3"),
        ("import time; time.sleep(60)", "took longer than custom_reward_function.timeout_seconds=0.3"),
    ],
)
def test_what_goes_wrong_with_the_one_call_goes_wrong_with_every_row(batch, body, message, caplog):
    settings = batch(body, timeout_seconds=0.3, on_error="score", fallback_score=-1.0)
    with RewardRunner(settings, 1, manager="batch") as runner, caplog.at_level(logging.WARNING):
        assert [(r.score, r.failed) for r in runner.score(rows("a", "b", "c"))] == [(-1.0, True)] * 3
    assert re.search(rf"(?s)failed on 3 of 3 rows.*the first is train\.jsonl:1: .*{message}", caplog.text)


def test_one_bad_score_of_a_batch_fails_its_row_alone_and_a_call_that_fails_names_the_first(batch):
    results = scored(batch("return [1.0, 'one', 2.0]", on_error="score"), "a", "b", "c", manager="batch")
    assert [(r.score, r.failed) for r in results] == [(1.0, False), (0.0, True), (2.0, False)]
    with pytest.raises(RewardError, match=r"^train\.jsonl:1: .*for 3 rows"):
        scored(batch("return [1.0]"), "a", "b", "c", manager="batch")


def test_prime_scores_rows_in_parallel_and_a_slow_one_delays_no_other(custom, tmp_path):
    """The slow row waits until all others have been scored, by the other process."""
    (tmp_path / "done").mkdir()
    body = f"""
        import pathlib, time
        done = pathlib.Path({str(tmp_path / "done")!r})
        if solution_str == "slow":
            while len(list(done.iterdir())) < 20:
                time.sleep(0.01)
        else:
            (done / str(extra_info["index"])).touch()
        return 1
    """
    with RewardRunner(custom(body, timeout_seconds=30.0), 2, manager="prime") as runner:
        assert [r.score for r in runner.score(rows("slow", *["quick"] * 20))] == [1.0] * 21
