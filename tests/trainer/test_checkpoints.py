import errno
import json
import os
import random
import shutil
from types import SimpleNamespace

import pytest
import torch
from blake3 import blake3

from tests.distributed.test_sharded_state import Runs
from verl_memopt.distributed.file_records import FileRecord
from verl_memopt.errors import CheckpointError, UserError
from verl_memopt.observe.own_files import MARK
from verl_memopt.observe.run_folder import RunFolder
from verl_memopt.run.checkpoints import (
    TRACKER,
    CheckpointStore,
    Manifest,
    check_driver,
    check_folder,
    find_fault,
    read_checkpoint,
    write_manifest,
)


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
    checkpoint = CheckpointStore(store.root, None).newest()
    assert (checkpoint.folder, checkpoint.step, checkpoint.driver) == (final, 3, {"step": 3, "seed": 5})
    assert (final / "actor" / "shard").read_bytes() == b"x" * 10


def test_a_folder_counts_as_nothing_until_it_is_committed_and_what_a_kill_left_in_it_is_forgotten(store):
    (store.begin(4) / "left over").write_text("x")
    assert (store.newest(), store.steps()) == (None, [])
    assert list(store.begin(4).iterdir()) == []
    save(store, 5)
    left = store.root / "global_step_5.old.partial"  # of a replaced step
    left.mkdir()
    (left / "shard").write_bytes(b"x")
    save(store, 5)
    assert names(store.root) == ["global_step_5", TRACKER]


def test_the_manifest_lists_every_file_with_its_size_its_checksum_and_who_wrote_it(store):
    folder = save(store, 2, size=7)
    manifest = json.loads((folder / "meta.json").read_text())
    sizes = {name: record["size"] for name, record in manifest["files"].items()}
    assert sizes == {"actor/shard": 7, "data.pt": (folder / "data.pt").stat().st_size}
    assert manifest["files"]["actor/shard"]["digest"] == blake3(b"x" * 7).hexdigest()
    assert (manifest["format"], manifest["algorithm"]) == (1, "blake3")
    assert (manifest["step"], manifest["world_size"], manifest["torch"]) == (2, 2, torch.__version__)


def test_the_tracker_file_holds_the_last_step_and_leaves_nothing_beside_it(store):
    save(store, 2)
    save(store, 10)
    assert (store.root / TRACKER).read_text().strip() == "10"
    assert names(store.root) == ["global_step_10", "global_step_2", TRACKER]


def test_the_newest_are_kept_in_order_of_number_and_rotation_leaves_nothing_behind(tmp_path):
    store = CheckpointStore(tmp_path, 2)
    for step in (8, 9, 10):
        save(store, step)
    assert names(tmp_path) == ["global_step_10", "global_step_9", TRACKER]


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


def test_without_a_tracker_file_the_highest_number_is_the_newest_and_all_are_set_aside(store):
    save(store, 6)
    save(store, 8)
    (store.root / TRACKER).unlink()
    assert store.newest().step == 8
    assert names(RunFolder(store.root).set_aside("")) == [MARK, "global_step_6", "global_step_8"]


def test_a_checkpoint_removed_by_hand_is_not_missed_and_not_proven(store):
    for step in (6, 8):
        folder = save(store, step)
    shutil.rmtree(folder)
    assert store.newest().step == 6
    store.prove(8)
    assert store.proven() is None


def damage(folder, name="actor/shard", data=b"x" * 9):
    """Gives a file of a checkpoint other contents; dir puts a folder in its place, None removes it."""
    (folder / name).unlink()
    if data is dir:
        (folder / name).mkdir()
    elif data is not None:
        (folder / name).write_bytes(data)


@pytest.mark.parametrize(
    ("name", "data", "fault"),
    [
        ("actor/shard", b"x" * 9, "actor/shard has 9 bytes of 10"),
        ("data.pt", None, "data.pt is missing"),
        ("data.pt", dir, "data.pt"),
        ("meta.json", None, "meta.json is missing"),
        ("meta.json", b'{"format": 1, "al', "meta.json cannot be read"),
        ("meta.json", b"[]", "meta.json cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(store, caplog, name, data, fault):
    save(store, 6)
    folder = save(store, 8)
    assert find_fault(folder) is None
    damage(folder, name, data)
    assert fault in find_fault(folder)
    assert store.newest().step == 6
    assert f"{folder}: not whole ({fault}" in caplog.text


def test_a_folder_without_any_checkpoint_has_none(tmp_path):
    assert CheckpointStore(tmp_path / "nothing here", None).newest() is None
    (tmp_path / "global_step_x").mkdir()
    (tmp_path / "global_step_7").write_text("a file")
    assert CheckpointStore(tmp_path, None).steps() == []


@pytest.fixture
def five_mib_free(monkeypatch):
    """A disk with 5 MiB left, which answers for folders that exist."""

    def usage(path):
        assert os.path.isdir(path)
        return SimpleNamespace(free=5 * 2**20)

    monkeypatch.setattr(shutil, "disk_usage", usage)


def test_a_failed_save_says_why_what_is_left_and_what_to_do_and_removes_its_part(store, five_mib_free):
    start = f"trainer.default_local_dir={store.root}: step 4 could not be saved: full (5 MiB free; "
    way_out = (
        "Free space, lower trainer.max_actor_ckpt_to_keep, or set another trainer.default_local_dir; then start again to resume."
    )
    assert str(store.failed(4, "full")) == f"{start}there is no earlier checkpoint). {way_out}"
    save(store, 2)
    (store.begin(4) / "part").write_bytes(b"x")
    error = store.failed(4, "full")
    assert str(error) == f"{start}the checkpoint of step 2 is untouched). {way_out}"
    assert error.exit_code == 1
    assert names(store.root) == ["global_step_2", TRACKER]


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


def test_a_checkpoint_that_is_not_whole_is_refused_under_the_key_that_named_it(store):
    folder = save(store, 3)
    damage(folder)
    fault = "not whole (actor/shard has 9 bytes of 10). Give another step"
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(folder)
    assert str(caught.value) == f"trainer.resume_from_path={folder}: {fault}, or use resume_mode=auto."
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(folder, key="")
    assert str(caught.value) == f"{folder}: {fault}: verl-memopt check lists them."


def test_a_damaged_checkpoint_is_refused_by_name_and_else_passed_over_like_one_that_could_not_be_loaded(store):
    save(store, 6)
    folder, fault = save(store, 8), "actor/shard has 9 bytes of 10"
    checkpoint = store.newest({8: "the loader said no"})
    assert (checkpoint.step, checkpoint.passed_over) == (6, (f"{folder}: not whole (the loader said no)",))
    damage(folder)
    with pytest.raises(CheckpointError, match=rf"not whole \({fault}\).*resume_mode=auto"):
        read_checkpoint(folder)
    assert store.newest().passed_over == (f"{folder}: not whole ({fault})",)
    assert save(store, 9)
    assert store.newest().passed_over == ()


def test_checkpoints_of_a_run_that_was_left_behind_do_not_stand_in_for_the_runs_own(tmp_path):
    store = CheckpointStore(tmp_path, None)
    for step in (6, 8, 5):
        save(store, step)
    damage(store.folder(5))
    with pytest.raises(CheckpointError, match=r"global_step_5: not whole .*global_step_6: belongs to an earlier run that"):
        store.newest()


def test_a_folder_under_another_steps_name_is_not_taken_for_that_step(store):
    save(store, 6)
    os.rename(save(store, 8), store.root / "global_step_7")
    with pytest.raises(CheckpointError, match="it was written as step 8"):
        read_checkpoint(store.root / "global_step_7")


def test_two_hundred_flipped_bits_over_all_files_are_found_and_the_checkpoint_before_is_taken(store):
    save(store, 6, size=300)
    folder = save(store, 8, size=300)
    files = [store.root / TRACKER, *sorted(path for path in folder.rglob("*") if path.is_file())]
    generator = random.Random(11)
    for number in range(200):
        path = files[number % len(files)]
        whole = path.read_bytes()
        damaged = bytearray(whole)
        damaged[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        checkpoint = store.newest()
        if path.name == TRACKER:
            assert store.history().doubt is not None
            assert checkpoint.step == 8
        else:
            assert checkpoint.step == 6
            assert path.name in checkpoint.passed_over[0]
        path.write_bytes(whole)
    assert store.newest().step == 8


def test_the_text_about_no_whole_checkpoint_names_each_and_every_way_out(store):
    damage(save(store, 6))
    damage(save(store, 8), "data.pt", None)
    with pytest.raises(CheckpointError) as caught:
        store.newest()
    assert str(caught.value) == (
        f"trainer.default_local_dir={store.root}: there are checkpoints, and none can be resumed. "
        f"{store.folder(8)}: not whole (data.pt is missing); {store.folder(6)}: not whole (actor/shard has 9 bytes of 10). "
        "Nothing was changed. Put a whole copy in place, name a checkpoint elsewhere with trainer.resume_mode=resume_path, "
        "or start over with trainer.resume_mode=disable, which moves these to previous/."
    )
    assert names(store.root) == ["global_step_6", "global_step_8", TRACKER]


def test_a_proof_that_the_disk_refuses_is_an_error_with_the_file(store, five_mib_free, monkeypatch):
    folder = save(store, 3)

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError) as caught:
        store.prove(3)
    assert str(caught.value) == f"{folder / 'proven'}: cannot be written (No space left on device; 5 MiB free). Free space."


def test_a_folder_that_cannot_be_removed_stops_no_save(tmp_path, monkeypatch):
    def refuse(path, **_):
        raise OSError(errno.EBUSY, "Device or resource busy")

    store = CheckpointStore(tmp_path, 1)
    save(store, 1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "rmdir", refuse)
        save(store, 2)
        save(store, 2)
    assert store.newest().step == 2


def test_what_is_passed_over_and_what_is_in_doubt_is_logged_in_whole_sentences(store, caplog):
    save(store, 6)
    folder = save(store, 8)
    (store.root / TRACKER).write_text("6\n")
    damage(folder)
    assert store.newest().step == 6
    assert [record.message for record in caplog.records] == [
        f"{store.root / TRACKER}: says step 6, and the checkpoint that was committed last is of step 8; that one counts",
        f"{folder}: not whole (actor/shard has 9 bytes of 10); falling back to the one before it",
    ]


def test_a_whole_checkpoint_in_no_doubt_is_resumed_without_a_word_and_can_be_proven(store, caplog):
    save(store, 8)
    again = CheckpointStore(store.root, None)
    assert again.newest().step == 8
    assert caplog.records == []
    again.prove(8)
    proof = (again.folder(8) / "proven").stat()
    again.prove(8)  # what is proven stays as it is
    assert (again.folder(8) / "proven").stat().st_mtime_ns == proof.st_mtime_ns
    assert again.proven() == 8
    assert again.is_proven(8)
    assert find_fault(again.folder(8)) is None


def test_code_in_the_drivers_state_is_not_run(store, tmp_path):
    folder = store.begin(3)
    store.commit(3, {"state": Runs(tmp_path / "it ran")}, 1)
    with pytest.raises(CheckpointError, match=r"data\.pt cannot be read: "):
        read_checkpoint(store.folder(3))
    assert not (tmp_path / "it ran").exists()
    assert not folder.exists()


RECORDS = {"actor/shard": FileRecord(11, "0")}, {"actor/none": FileRecord(1, "0")}


def test_records_of_the_writers_are_trusted_unless_the_disk_holds_another_size_or_no_such_file(store):
    def commit(step, records):
        folder = store.begin(step)
        (folder / "actor").mkdir()
        (folder / "actor" / "shard").write_bytes(b"x" * 10)
        return store.commit(step, {}, 1, records)

    save(store, 2)
    for records in RECORDS:
        with pytest.raises(CheckpointError, match=r"step 3 could not be saved: actor/.* bytes on disk"):
            commit(3, records)
        assert store.newest().step == 2
    final = commit(3, {"actor/shard": FileRecord(10, "0" * 64)})
    assert find_fault(final) == "actor/shard has other contents than were written"


def test_everything_is_forced_to_disk_before_the_folder_gets_its_name(store, monkeypatch):
    events, fsync, replace = [], os.fsync, os.replace

    def synced(descriptor):
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def renamed(source, target):
        events.append(("renamed", str(target)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    final = save(store, 3)
    aside = f"{final}.partial"
    before = events[: events.index(("renamed", str(final)))]
    for part in ("/actor/shard", "/data.pt", "/meta.json", "/actor", ""):
        assert aside + part in before
    assert events[-2:] == [("renamed", str(store.root / TRACKER)), str(store.root)]


def test_each_commit_has_a_larger_number_than_every_one_before_it(store):
    for step in (4, 8, 5):
        save(store, step)
    assert {step: store.history().commits[step] for step in (4, 8, 5)} == {4: 1, 8: 2, 5: 3}


def prove_and_save(store, *steps, scores=None):
    """Saves each step after proving the one before it, as the loop does it."""
    for step in steps:
        if store.present is not None:
            store.prove(store.present)
        folder = store.begin(step)
        (folder / "shard").write_bytes(b"x")
        store.commit(step, {}, 1, score=(scores or {}).get(step))


def test_the_last_proven_checkpoint_stays_until_a_newer_one_is_proven(tmp_path):
    store = CheckpointStore(tmp_path, 1)
    prove_and_save(store, 2, 4)
    assert store.steps() == [2, 4]
    assert store.proven() == 2
    store.prove(4)
    assert store.steps() == [4]
    assert store.proven() == 4


def test_a_run_whose_weights_went_bad_keeps_its_good_checkpoint_through_a_restart(tmp_path):
    store = CheckpointStore(tmp_path, 2)
    prove_and_save(store, 2, 4)
    for step in (6, 8, 10):  # nothing proves these
        save(store, step)
    assert store.steps() == [2, 8, 10]
    again = CheckpointStore(tmp_path, 2)
    assert again.proven() == 2
    assert again.newest().step == 10
    save(again, 12)
    assert again.steps() == [2, 10, 12]


def test_only_the_checkpoint_that_this_run_saved_last_or_began_with_can_be_proven(tmp_path):
    store = CheckpointStore(tmp_path, None)
    for step in (4, 6, 8):
        save(store, step)
    store.prove(4)
    assert store.proven() is None
    again = CheckpointStore(tmp_path, None)
    again.resumed(read_checkpoint(tmp_path / "global_step_4"))
    again.prove(6)  # of the earlier run that this one does not continue
    assert again.proven() is None
    again.prove(4)
    assert again.proven() == 4


def test_a_checkpoint_of_another_folder_proves_none_of_this_one(tmp_path):
    one, other = CheckpointStore(tmp_path / "one", None), CheckpointStore(tmp_path / "other", None)
    save(one, 4)
    save(other, 4)
    here = CheckpointStore(tmp_path / "other", None)
    here.resumed(read_checkpoint(tmp_path / "one" / "global_step_4"))
    here.prove(4)
    assert (one.proven(), other.proven()) == (None, None)


def test_the_best_checkpoint_is_never_rotated_away_and_of_equals_the_newer_is_best(tmp_path):
    store = CheckpointStore(tmp_path, 1, keep_best=True)
    scores = {2: 0.5, 4: 0.9, 6: 0.9, 8: 0.1}
    prove_and_save(store, 2, 4, 6, 8, scores=scores)
    store.prove(8)
    assert store.best() == 6
    assert store.steps() == [6, 8]
    again = CheckpointStore(tmp_path, 1, keep_best=True)
    again.newest()
    prove_and_save(again, 10, 12)
    assert again.steps() == [6, 10, 12]
    other = CheckpointStore(tmp_path / "other", 1)  # without keep_best
    prove_and_save(other, 2, 4, scores={2: 0.9})
    other.prove(4)
    assert other.steps() == [4]


@pytest.mark.parametrize("score", [float("nan"), float("inf"), None])
def test_a_score_that_is_no_number_is_never_the_best(store, score):
    assert store.best() is None
    save(store, 1)
    assert store.best() is None
    prove_and_save(store, 2, 4, scores={2: 0.1, 4: score})
    assert store.best() == 2


def test_a_fresh_start_moves_every_checkpoint_into_a_folder_of_its_own(store):
    assert RunFolder(store.root).set_aside("") is None
    for number in (1, 2):
        save(store, 2)
        save(store, 4)
        aside = RunFolder(store.root).set_aside("")
        assert aside == store.root / "previous" / str(number)
        assert CheckpointStore(aside, None).newest().step == 4
        assert store.newest() is None
    assert names(store.root) == ["previous"]


def test_a_checkpoint_that_vanishes_while_it_is_read_makes_no_unreadable_one_whole(store):
    for step in (1, 2, 3):
        save(store, step)

    class Vanishing(dict):  # of a run that removes its newest checkpoint while this process looks
        def __contains__(self, step):
            shutil.rmtree(store.folder(3), ignore_errors=True)
            return super().__contains__(step)

    assert store.newest(Vanishing({2: "it could not be loaded"})).step == 1


def test_checkpoints_that_are_gone_are_no_start_from_nothing(store, tmp_path):
    store.keep = None
    save(store, 2)
    save(store, 4)
    store.folder(4).rename(tmp_path / "elsewhere")
    store.folder(4).symlink_to(tmp_path / "nowhere")
    assert store.newest().step == 2
    assert store.newest().passed_over == (f"{store.folder(4)}: not whole (meta.json is missing)",)
    shutil.rmtree(store.folder(2))
    with pytest.raises(CheckpointError, match=r"global_step_4: not whole .*resume_mode=disable"):
        store.newest()
    store.folder(4).unlink()
    (store.root / TRACKER).write_bytes(b"4 \xff " + b"x" * 30)  # however it is damaged
    with pytest.raises(CheckpointError) as caught:
        store.newest()
    assert str(caught.value) == (
        f"trainer.default_local_dir={store.root}: {TRACKER} names step 4 \ufffd {'x' * 16}, and there is no checkpoint. Put the "
        "checkpoints back, name one elsewhere with trainer.resume_mode=resume_path, or start over with "
        "trainer.resume_mode=disable."
    )
    RunFolder(store.root).set_aside("")
    assert store.newest() is None


def test_driver_state_that_torch_cannot_read_is_a_fault_like_any_other(store):
    save(store, 6)
    folder = store.begin(8)
    store.commit(8, {}, 1)
    folder = store.folder(8)
    shutil.rmtree(folder)
    folder.mkdir()
    data = b"not what torch wrote"
    (folder / "data.pt").write_bytes(data)
    record = FileRecord(len(data), blake3(data).hexdigest())
    write_manifest(folder, Manifest(8, 2, 1, "2.13.0", None, {"data.pt": record}))
    (store.root / TRACKER).write_text("8\n")
    assert store.newest({}).step == 6


LOADER = {"seed": 0, "epoch": 0, "position": 0, "num_rows": 4, "digest": None}
DRIVER = {"seed": 0, "loader": LOADER, "token_budgets": {}, "settings": {}, "weights": {}}


@pytest.mark.parametrize("loader", [LOADER, {}], ids=["rows", "no rows"])
def test_a_drivers_state_as_a_run_writes_it_is_accepted(store, loader):
    store.begin(1)
    store.commit(1, {**DRIVER, "loader": loader, "more": None}, 1)
    check_driver(store.newest())


@pytest.mark.parametrize(
    ("name", "value"), [("seed", "7"), ("seed", -1), ("epoch", -1), ("position", [1]), ("num_rows", 2.5), ("digest", 3)]
)
def test_a_drivers_state_of_another_form_is_refused_with_its_folder_and_entry(store, name, value):
    store.begin(1)
    store.commit(1, {**DRIVER, "loader": {**LOADER, name: value}}, 1)
    with pytest.raises(
        CheckpointError, match=rf"/global_step_1: no run wrote this .* \(its state\.loader\.{name}: .*\)\. Give an"
    ):
        check_driver(store.newest())


def test_a_drivers_state_without_an_entry_is_refused(store):
    store.begin(1)
    store.commit(1, {"loader": {}}, 1)
    with pytest.raises(CheckpointError, match=r"/global_step_1: no run wrote this checkpoint \(its state\b.*seed"):
        check_driver(store.newest())


# Checkpoints that somebody else made, with valid checksums.


def forged(store, **changes):
    """Writes the manifest of step 8 again, with its checksum, and with entries changed or added."""
    folder = store.folder(8)
    fields = json.loads((folder / "meta.json").read_text())
    del fields["digest"]
    for name, value in changes.items():
        fields[name] = fields[name] | value if isinstance(fields[name], dict) and isinstance(value, dict) else value
    digest = blake3(json.dumps(fields, indent=1).encode()).hexdigest()
    (folder / "meta.json").write_text(json.dumps({**fields, "digest": digest}, indent=1) + "\n")


def a_pipe(store):
    os.mkfifo(store.folder(8) / "actor" / "pipe")
    forged(store, files={"actor/pipe": {"size": 0, "digest": blake3(b"").hexdigest()}})


def a_device(store):
    (store.folder(8) / "actor" / "endless").symlink_to("/dev/zero")
    forged(store, files={"actor/endless": {"size": 0, "digest": blake3(b"").hexdigest()}})


def a_link(store):
    (store.folder(8) / "actor" / "secret").symlink_to("/etc/passwd")


def a_linked_folder(store):
    (store.folder(8) / "other").symlink_to("/etc")


def a_name_outside(store):
    forged(store, files={"../../secret": {"size": 0, "digest": ""}})


def a_manifest_that_is_a_pipe(store):
    (store.folder(8) / "meta.json").unlink()
    os.mkfifo(store.folder(8) / "meta.json")


def state_that_is_a_list(store):
    path = store.folder(8) / "data.pt"
    torch.save([1, 2], path)
    forged(store, files={"data.pt": {"size": path.stat().st_size, "digest": blake3(path.read_bytes()).hexdigest()}})


def of_other_types(**changes):
    return lambda store: forged(store, **changes)


@pytest.mark.parametrize(
    ("attack", "says"),
    [
        (a_pipe, "actor/pipe is no regular file"),
        (a_device, "actor/endless is a link"),
        (a_link, "actor/secret is a link"),
        (a_linked_folder, "other is a link"),
        (a_name_outside, "names a file outside of the checkpoint"),
        (a_manifest_that_is_a_pipe, "no regular file"),
        (state_that_is_a_list, "its state: expected an object"),
        (of_other_types(step="8"), "step: expected a whole number"),
        (of_other_types(commit=None), "commit: expected a whole number"),
        (of_other_types(files=[]), "files: expected an object"),
        (of_other_types(files={"data.pt": 3}), "files.data.pt: expected an object"),
        (of_other_types(score="best"), "score: expected a number"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_checkpoint_that_somebody_made_is_refused_and_the_one_before_it_taken(store, capsys, attack, says):
    save(store, 6)
    save(store, 8)
    attack(store)
    assert CheckpointStore(store.root, None).newest().step == 6
    with pytest.raises(CheckpointError, match=says):
        read_checkpoint(store.folder(8))
    if attack is not state_that_is_a_list:  # which only a resume opens
        assert check_folder(store.root) == 1
        assert says in capsys.readouterr().out


def test_checkpoints_that_the_disk_will_not_move_are_named_and_stay(store):
    save(store, 2)
    (store.root / "previous").write_text("a file in the way")
    with pytest.raises(UserError, match=r"previous/1: cannot be written \(Not a directory"):
        RunFolder(store.root).set_aside("")
    assert store.newest().step == 2
