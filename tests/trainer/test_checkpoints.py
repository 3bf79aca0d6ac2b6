import json
import os

import pytest
import torch
from blake3 import blake3

from verl_memopt.errors import CheckpointError
from verl_memopt.trainer.checkpoints import TRACKER, CheckpointStore, find_fault, read_checkpoint


def save(store, step, size=10):
    folder = store.begin(step)
    (folder / "actor").mkdir()
    (folder / "actor" / "shard").write_bytes(b"x" * size)
    return store.commit(step, {"step": step, "seed": 5}, world_size=2)


def names(root):
    return sorted(path.name for path in root.iterdir())


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "run", None)


def test_what_was_committed_is_found_again_with_its_driver_state(store):
    final = save(store, 3)
    found = CheckpointStore(store.root, None).newest()
    assert (found.folder, found.step, found.driver) == (final, 3, {"step": 3, "seed": 5})
    assert (final / "actor" / "shard").read_bytes() == b"x" * 10


def test_a_folder_counts_as_nothing_until_it_is_committed(store):
    store.begin(4)
    assert store.newest() is None
    assert store.steps() == []


def test_beginning_again_forgets_what_was_written_before(store):
    (store.begin(4) / "left over").write_text("x")
    assert list(store.begin(4).iterdir()) == []


def test_the_manifest_lists_every_file_with_its_size_its_checksum_and_who_wrote_it(store):
    folder = save(store, 2, size=7)
    manifest = json.loads((folder / "meta.json").read_text())
    sizes = {name: record["size"] for name, record in manifest["files"].items()}
    assert sizes == {"actor/shard": 7, "data.pt": (folder / "data.pt").stat().st_size}
    assert manifest["files"]["actor/shard"]["digest"] == blake3(b"x" * 7).hexdigest()
    assert (manifest["format"], manifest["algorithm"]) == (2, "blake3")
    assert (manifest["step"], manifest["world_size"], manifest["torch"]) == (2, 2, torch.__version__)


def test_the_tracker_file_holds_the_last_step_and_leaves_nothing_beside_it(store):
    save(store, 2)
    save(store, 10)
    assert (store.root / TRACKER).read_text().strip() == "10"
    assert names(store.root) == ["global_step_10", "global_step_2", TRACKER]


def test_the_newest_are_kept_in_order_of_number(tmp_path):
    store = CheckpointStore(tmp_path, 2)
    for step in (8, 9, 10):
        save(store, step)
    assert store.steps() == [9, 10]


def test_one_kept_checkpoint_is_the_last(tmp_path):
    store = CheckpointStore(tmp_path, 1)
    save(store, 1)
    save(store, 2)
    assert store.steps() == [2]


def test_how_many_are_kept_counts_those_of_the_run_that_was_resumed(tmp_path):
    before = CheckpointStore(tmp_path, None)
    for step in (1, 2, 3):
        save(before, step)
    resumed = CheckpointStore(tmp_path, 2)
    save(resumed, 4)
    assert resumed.steps() == [3, 4]


def test_a_new_save_removes_what_a_kill_left_half_written(store):
    store.begin(3)
    save(store, 4)
    assert names(store.root) == ["global_step_4", TRACKER]


def test_saving_a_step_again_replaces_it(store):
    save(store, 3, size=10)
    folder = save(store, 3, size=20)
    assert (folder / "actor" / "shard").stat().st_size == 20
    assert find_fault(folder) is None


@pytest.mark.parametrize("keep", [None, 1])
def test_a_run_that_goes_back_to_an_earlier_step_keeps_and_resumes_its_own(tmp_path, keep):
    before = CheckpointStore(tmp_path, None)
    for step in (4, 6, 8):
        save(before, step)
    again = CheckpointStore(tmp_path, keep)
    save(again, 5)
    assert again.newest().step == 5
    assert {"global_step_6", "global_step_8"} <= set(names(tmp_path))


def test_without_a_tracker_file_the_highest_number_is_the_newest(store):
    save(store, 6)
    save(store, 8)
    (store.root / TRACKER).unlink()
    assert store.newest().step == 8


def test_a_checkpoint_removed_by_hand_is_not_missed(store):
    for step in (6, 8):
        folder = save(store, step)
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()
    assert store.newest().step == 6


def cut_short(folder):
    (folder / "actor" / "shard").write_bytes(b"x" * 9)
    return "actor/shard has 9 bytes of 10"


def file_lost(folder):
    (folder / "data.pt").unlink()
    return "data.pt is missing"


def manifest_lost(folder):
    (folder / "meta.json").unlink()
    return "meta.json is missing"


def manifest_cut(folder):
    text = (folder / "meta.json").read_text()
    (folder / "meta.json").write_text(text[: len(text) // 2])
    return "meta.json cannot be read"


def manifest_foreign(folder):
    (folder / "meta.json").write_text("[]")
    return "meta.json cannot be read"


@pytest.mark.parametrize("damage", [cut_short, file_lost, manifest_lost, manifest_cut, manifest_foreign])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(store, caplog, damage):
    save(store, 6)
    folder = save(store, 8)
    assert find_fault(folder) is None
    expected = damage(folder)
    assert expected in find_fault(folder)
    assert store.newest().step == 6
    assert f"{folder}: not whole ({expected}" in caplog.text


def test_a_folder_without_any_checkpoint_has_none(tmp_path):
    assert CheckpointStore(tmp_path / "nothing here", None).newest() is None
    (tmp_path / "global_step_x").mkdir()
    (tmp_path / "global_step_7").write_text("a file")
    assert CheckpointStore(tmp_path, None).steps() == []


def test_a_failed_save_says_why_and_what_is_left_and_removes_its_part(store):
    save(store, 2)
    (store.begin(4) / "part").write_bytes(b"x")
    error = store.failed(4, "No space left on device")
    text = str(error)
    assert text.startswith(f"trainer.default_local_dir={store.root}: step 4 could not be saved: No space left on device (")
    assert "MiB free; the checkpoint of step 2 is untouched). Free space" in text
    assert error.exit_code == 1
    assert names(store.root) == ["global_step_2", TRACKER]


def test_a_first_save_that_fails_says_that_there_is_nothing_earlier(store):
    assert "there is no earlier checkpoint" in str(store.failed(1, "full"))


def test_a_folder_that_cannot_be_made_is_an_error_for_the_user(tmp_path):
    (tmp_path / "run").write_text("a file where the folder must be")
    with pytest.raises(CheckpointError, match=r"step 1 could not be saved: .*(File exists|Not a directory)"):
        CheckpointStore(tmp_path / "run", None).begin(1)


def test_a_commit_that_fails_leaves_the_earlier_checkpoint_in_force(store):
    save(store, 2)
    aside = store.begin(4)
    (aside / "data.pt").mkdir()
    with pytest.raises(CheckpointError, match=r"step 4 could not be saved.*the checkpoint of step 2 is untouched"):
        store.commit(4, {}, 1)
    assert store.newest().step == 2
    assert (store.root / TRACKER).read_text().strip() == "2"


@pytest.mark.parametrize("shape", ["{}/", "{}/.", "{}/../global_step_3"])
def test_a_checkpoint_is_read_however_its_path_is_written(store, shape):
    folder = save(store, 3)
    assert read_checkpoint(type(folder)(shape.format(folder))).step == 3


def test_a_relative_path_and_a_link_are_followed_to_the_folder_itself(store, monkeypatch):
    folder = save(store, 3)
    monkeypatch.chdir(store.root)
    os.symlink(folder, "latest")
    for path in ("global_step_3", "latest"):
        assert read_checkpoint(type(folder)(path)).folder == folder


@pytest.mark.parametrize("name", ["global_step_9", "other"])
def test_a_path_that_is_no_checkpoint_is_refused(store, name):
    save(store, 3)
    (store.root / "other").mkdir()
    with pytest.raises(CheckpointError, match=f"resume_from_path=.*{name}: not a checkpoint. Give a global_step_N folder"):
        read_checkpoint(store.root / name)


def test_a_damaged_checkpoint_asked_for_by_name_is_refused_with_its_fault(store):
    folder = save(store, 3)
    cut_short(folder)
    with pytest.raises(CheckpointError, match=r"not whole \(actor/shard has 9 bytes of 10\).*resume_mode=auto"):
        read_checkpoint(folder)
