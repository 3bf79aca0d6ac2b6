import errno
import fcntl
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from verl_memopt import session, train
from verl_memopt.errors import ConfigError
from verl_memopt.run.run_lock import LOCK, RunLock, hold, only_run

HOLDER = """
import sys, time
from pathlib import Path
from verl_memopt.run.run_lock import hold
lock = hold(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.readline()
lock.release()
"""
RACER = """
import sys
from pathlib import Path
from verl_memopt.errors import ConfigError
from verl_memopt.run.run_lock import hold
print("ready", flush=True)
sys.stdin.readline()
try:
    lock = hold(Path(sys.argv[1]))
    print("held", flush=True)
except ConfigError as error:
    print("refused", error, flush=True)
sys.stdin.readline()
"""


def started(code, folder):
    return subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )  # fmt: skip


def told(process, text=""):
    process.stdin.write(text + "\n")
    process.stdin.flush()


@pytest.fixture
def holder(tmp_path):
    process = started(HOLDER, tmp_path)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_process_is_refused_with_the_first_ones_id_and_start_time(holder, tmp_path):
    with pytest.raises(ConfigError) as caught:
        hold(tmp_path)
    assert re.search(rf"process {holder.pid} on \S+, started \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d", str(caught.value))
    assert str(caught.value).startswith(f"trainer.default_local_dir={tmp_path}: another run writes here")
    assert caught.value.exit_code == 2
    assert (tmp_path / LOCK).exists(), "a refused run leaves the file of the one that holds it"


def test_without_the_file_of_the_lock_a_second_run_is_refused_all_the_same(holder, tmp_path):
    (tmp_path / LOCK).unlink()
    with pytest.raises(ConfigError, match=r"another run writes here \(a process whose run\.lock is gone\)"):
        hold(tmp_path)
    told(holder)
    holder.wait()
    hold(tmp_path).release()


def test_a_link_in_the_place_of_the_lock_is_refused_and_not_written_through(tmp_path):
    (tmp_path / "precious").write_text("contents")
    (tmp_path / LOCK).symlink_to(tmp_path / "precious")
    with pytest.raises(ConfigError, match=r"run\.lock: a link"):
        hold(tmp_path)
    assert (tmp_path / "precious").read_text() == "contents"
    (tmp_path / LOCK).unlink()
    hold(tmp_path).release()


def test_the_kernel_releases_the_lock_of_a_process_that_was_killed(holder, tmp_path):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / LOCK).exists()
    hold(tmp_path).release()


def test_a_released_lock_leaves_no_file_and_folders_have_locks_of_their_own(tmp_path):
    for _ in range(2):
        with hold(tmp_path / "new folder"):
            assert (tmp_path / "new folder" / LOCK).exists()
        assert not (tmp_path / "new folder").exists()
    with hold(tmp_path / "a") as one, hold(tmp_path / "b") as other:
        assert one is not other


def test_a_process_that_holds_the_lock_gets_the_one_it_has(tmp_path):
    with hold(tmp_path) as lock:
        assert hold(tmp_path) is lock
        refused = started(RACER, tmp_path)
        refused.stdout.readline()
        told(refused)
        assert refused.stdout.readline().startswith("refused"), "taking it twice must not drop it"
        refused.communicate()


def test_of_processes_that_start_at_one_moment_exactly_one_goes_on(tmp_path):
    racers = [started(RACER, tmp_path) for _ in range(3)]
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        told(racer)
    answers = [racer.stdout.readline() for racer in racers]
    for racer in racers:
        racer.communicate()
    assert [answer.split()[0] for answer in answers].count("held") == 1
    assert [answer.split()[0] for answer in answers].count("refused") == 2


def lives_on(lock, ready):
    lock.release()  # not the child's to release
    ready.send(os.getpid())
    time.sleep(60)


def test_a_forked_child_neither_keeps_the_lock_nor_releases_it(tmp_path):
    context = multiprocessing.get_context("fork")
    parent, child = context.Pipe()
    with hold(tmp_path) as lock:
        process = context.Process(target=lives_on, args=(lock, child))
        process.start()
        parent.recv()
        assert (tmp_path / LOCK).exists()
    try:
        check = started(HOLDER, tmp_path)
        assert check.stdout.readline() == "held\n", "the child outlives the run and must not hold its lock"
        told(check)
        check.communicate()
    finally:
        process.kill()
        process.join()


def test_a_file_that_was_removed_before_it_was_locked_is_not_taken_for_the_lock(tmp_path, monkeypatch):
    real, calls = fcntl.lockf, []

    def removed_meanwhile(descriptor, operation):
        if not calls:
            (tmp_path / LOCK).unlink()  # as the holder does it on release
        calls.append(descriptor)
        return real(descriptor, operation)

    monkeypatch.setattr(fcntl, "lockf", removed_meanwhile)
    with RunLock(tmp_path):
        assert len(calls) == 2
        assert (tmp_path / LOCK).exists()


def test_a_file_system_without_locks_is_told_and_does_not_stop_the_run(tmp_path, monkeypatch, caplog):
    def none(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", none)
    with RunLock(tmp_path):
        assert "No locks available" in caplog.text
        assert "nothing stops a second run" in caplog.text


@pytest.mark.parametrize("text", ["", "{}", "garbage", "[1]"])
def test_a_holder_that_cannot_be_read_is_still_refused_in_words(holder, tmp_path, monkeypatch, text):
    monkeypatch.setattr("verl_memopt.run.run_lock.RECORD_SECONDS", 0.05)
    (tmp_path / LOCK).write_text(text)
    with pytest.raises(ConfigError, match="a process that did not say who it is"):
        hold(tmp_path)


def test_a_folder_that_was_made_for_the_lock_goes_with_it_unless_something_is_in_it(tmp_path):
    hold(tmp_path / "runs" / "first").release()
    assert not (tmp_path / "runs").exists()
    (tmp_path / "mine").mkdir()
    hold(tmp_path / "mine").release()
    lock = hold(tmp_path / "runs" / "second")
    (lock.folder / "file").touch()
    lock.release()
    assert (tmp_path / "mine").is_dir()
    assert sorted(path.name for path in (tmp_path / "runs" / "second").iterdir()) == ["file"]


def test_a_process_has_room_for_one_run_whatever_thread_or_call_asks(tmp_path):
    refused = []

    def another():
        for call in (
            lambda: train("model", [{"prompt": "1"}], run_dir=tmp_path / "a"),
            lambda: session("model", run_dir=tmp_path / "b").__enter__(),
        ):
            with pytest.raises(ConfigError, match=r"session in the thread MainThread is going on in this process") as error:
                call()
            refused.append(str(error.value))

    with only_run("session"):
        thread = threading.Thread(target=another)
        thread.start()
        thread.join()
        another()
    assert [text.split(":")[0] for text in refused] == ["train", "session"] * 2
    assert list(tmp_path.iterdir()) == []
    with only_run("train"):
        pass


def test_a_forked_process_has_room_for_a_run_of_its_own():
    with only_run("train"):
        child = multiprocessing.get_context("fork").Process(target=only_run("train").__enter__)
        child.start()
        child.join()
    assert child.exitcode == 0


@pytest.mark.parametrize("text", ["mine\n", '{"pid": 3', "[1]"])
def test_a_users_own_file_of_the_locks_name_is_left_alone(text, tmp_path):
    (tmp_path / LOCK).write_text(text)
    with pytest.raises(ConfigError, match=r"run\.lock: it is there, and no run wrote it"):
        hold(tmp_path)
    assert (tmp_path / LOCK).read_text() == text
