import time

import pytest

from verl_memopt.run import interrupts
from verl_memopt.run.interrupts import StopFile, never


def test_without_a_file_nothing_is_given_up(tmp_path):
    assert not StopFile(tmp_path / "stop").passed()
    assert not never()


def test_a_rollout_is_given_up_at_the_moment_and_not_before(tmp_path):
    path = tmp_path / "stop"
    StopFile(path).write(time.time() + 1000)
    assert not StopFile(path).passed()
    StopFile(path).write(time.time())
    assert StopFile(path).passed()
    assert [entry.name for entry in tmp_path.iterdir()] == ["stop"]


def test_a_moment_that_was_read_passes_without_another_look(tmp_path):
    path = tmp_path / "stop"
    StopFile(path).write(time.time() + 0.2)
    reader = StopFile(path)
    assert not reader.passed()
    StopFile(path).remove()
    time.sleep(0.25)
    assert reader.passed()


def test_the_disk_is_looked_at_once_a_second_at_most(tmp_path, monkeypatch):
    path = tmp_path / "stop"
    reader = StopFile(path)
    assert not reader.passed()
    StopFile(path).write(0.0)
    assert not reader.passed()
    now = time.monotonic()
    monkeypatch.setattr(interrupts.time, "monotonic", lambda: now + interrupts.POLL_SECONDS)
    assert reader.passed()


def test_removing_takes_the_request_back_and_may_be_done_twice(tmp_path):
    path = tmp_path / "stop"
    file = StopFile(path)
    file.write(0.0)
    file.remove()
    file.remove()
    assert not StopFile(path).passed()


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        StopFile(tmp_path / "no" / "stop").write(0.0)
