import itertools
import re
import threading
import time

import pytest

from verl_memopt.cli import main
from verl_memopt.run.checkpoints import TRACKER, CheckpointStore, find_fault
from verl_memopt.run.export_model import BEST, held_checkpoint
from verl_memopt.run.run_lock import reading


def save(store, step, score=None):
    folder = store.begin(step)
    (folder / "shard").write_bytes(b"x" * 10)
    return store.commit(step, {"step": step, "seed": 5}, 1, score=score)


@pytest.fixture
def store(tmp_path):
    store = CheckpointStore(tmp_path, None)
    save(store, 2, score=0.5)
    store.prove(2)
    save(store, 4, score=0.25)
    return store


def checked(store, capsys):
    code = main(["check", str(store.root)])
    return code, capsys.readouterr().out.splitlines()


def test_whole_checkpoints_are_described_a_line_each_with_exit_code_0(store, capsys):
    code, lines = checked(store, capsys)
    assert code == 0
    facts = "validation score 0.5, best, proven: its weights gave finite gradients"
    assert re.fullmatch(rf"global_step_2: whole, 2 files, [\d,]+ bytes, {facts}", lines[0])
    assert re.fullmatch(r"global_step_4: whole, 2 files, [\d,]+ bytes, validation score 0.25", lines[1])


def test_a_damaged_one_is_named_with_exit_code_1_and_the_others_are_still_checked(store, capsys):
    (store.folder(2) / "shard").write_bytes(b"y" * 10)
    code, lines = checked(store, capsys)
    assert code == 1
    assert lines[0].startswith("global_step_2: NOT WHOLE (shard has other contents than were written), 2 files")
    assert lines[1].startswith("global_step_4: whole")


def test_one_without_its_manifest_is_named(store, capsys):
    (store.folder(4) / "meta.json").unlink()
    assert checked(store, capsys) == (1, [checked(store, capsys)[1][0], "global_step_4: NOT WHOLE (meta.json is missing)"])


def test_another_file_of_the_run_that_is_damaged_is_named_last_with_exit_code_1(store, capsys):
    (store.root / "metrics.jsonl").write_text("no object\n")
    code, lines = checked(store, capsys)
    assert code == 1
    assert lines[-1].startswith("NOT WHOLE: ")
    assert "metrics.jsonl" in lines[-1]


def test_what_was_left_behind_and_a_tracker_in_doubt_are_said(store, capsys):
    save(store, 3)
    (store.root / TRACKER).write_text("4\n")
    code, lines = checked(store, capsys)
    assert code == 0
    assert "says step 4, and the checkpoint that was committed last is of step 3" in lines[0]
    assert lines[-1].endswith("belongs to an earlier run that the newest one does not continue")


def test_a_folder_without_checkpoints_is_a_users_error(tmp_path, capsys):
    assert main(["check", str(tmp_path / "nowhere")]) == 2
    assert "holds no checkpoint" in capsys.readouterr().err


def test_beside_a_run_that_removes_checkpoints_each_that_is_read_stays_and_none_is_called_broken(tmp_path, capsys):
    root, stop, wrong = tmp_path, threading.Event(), []

    def run():
        store = CheckpointStore(root, 2)
        for step in itertools.count(1):
            save(store, step, score=0.5)
            if stop.is_set() and step > 5:
                return

    writer = threading.Thread(target=run)
    writer.start()
    while not (root / TRACKER).exists():
        time.sleep(0.001)
    for look in range(20):
        code, lines = checked(CheckpointStore(root, None), capsys)
        wrong += lines if code else []
        with held_checkpoint(root, (None, BEST)[look % 2]) as checkpoint:
            time.sleep(0.01)
            wrong += [fault] if (fault := find_fault(checkpoint.folder)) else []
    stop.set()
    writer.join()
    assert wrong == []
    save(CheckpointStore(root, 2), 10**6)
    assert len(list(root.glob("global_step_*"))) == 2


def test_what_is_read_is_removed_with_a_later_save(tmp_path):
    store = CheckpointStore(tmp_path, 1)
    save(store, 1)
    with reading(store.folder(1)) as is_there:
        save(store, 2)
        assert is_there
        assert store.steps() == [1, 2]
    save(store, 3)
    assert store.steps() == [3]
    with reading(store.folder(1)) as is_there:
        assert not is_there
