import contextlib
import io
import os
import threading

import pytest
import torch
from blake3 import blake3

from verl_memopt.distributed import file_records
from verl_memopt.distributed.file_records import (
    HASH_BESIDE_BYTES,
    FileRecord,
    HashedFile,
    digest_of,
    file_fault,
    hashed_file,
    record_file,
    record_folder,
    sync_folder,
    sync_folders,
    sync_tree,
)


def digest(data):
    return blake3(data).hexdigest()


@pytest.mark.parametrize("sizes", [[0], [1, 2, 3], [HASH_BESIDE_BYTES], [5, HASH_BESIDE_BYTES + 3, 7, 2 * HASH_BESIDE_BYTES]])
def test_what_was_hashed_while_writing_is_what_lies_on_disk(tmp_path, sizes):
    records = {}
    pieces = [os.urandom(size) for size in sizes]
    with hashed_file(tmp_path / "f", records, "f") as file:
        for piece in pieces:
            assert file.write(piece) == len(piece)
        assert file.tell() == sum(sizes)
    whole = (tmp_path / "f").read_bytes()
    assert whole == b"".join(pieces)
    assert records == {"f": FileRecord(len(whole), digest(whole))} == {"f": record_file(tmp_path / "f")}


def test_memory_that_is_reused_after_a_write_does_not_change_the_checksum(tmp_path):
    memory = bytearray(b"a" * HASH_BESIDE_BYTES)
    with (tmp_path / "f").open("wb") as raw:
        file = HashedFile(raw)
        file.write(memory)
        memory[:] = b"b" * HASH_BESIDE_BYTES
        file.write(memory)
        file.flush()
        assert file.record.digest == digest(b"a" * HASH_BESIDE_BYTES + b"b" * HASH_BESIDE_BYTES)
        file.close()


def test_torch_writes_through_a_hashed_file_what_it_reads_back_and_no_thread_is_left(tmp_path):
    records, before = {}, threading.active_count()
    tensor = torch.arange(2**19, dtype=torch.float32)
    with hashed_file(tmp_path / "f", records, "f") as file:
        torch.save({"x": tensor}, file)
    assert threading.active_count() == before
    assert torch.equal(torch.load(tmp_path / "f", weights_only=True)["x"], tensor)
    assert records["f"] == record_file(tmp_path / "f")


def test_a_file_that_was_not_finished_has_no_record(tmp_path):
    records = {}

    def interrupted():
        with hashed_file(tmp_path / "f", records, "f") as file:
            file.write(b"part")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted()
    assert records == {}


def test_a_hashed_file_is_on_disk_before_it_has_a_record(tmp_path, monkeypatch):
    records, synced = {}, []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append((os.fstat(descriptor).st_size, dict(records))))
    with hashed_file(tmp_path / "f", records, "f") as file:
        file.write(b"12345")
    assert synced == [(5, {})]


def test_a_folders_records_are_named_from_its_root_with_every_file_forced_to_disk(tmp_path, monkeypatch):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "f").write_bytes(b"f")
    (tmp_path / "a" / ".hidden").write_bytes(b"h")
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    assert record_folder(tmp_path / "a", tmp_path) == {
        "a/.hidden": FileRecord(1, digest(b"h")),
        "a/b/f": FileRecord(1, digest(b"f")),
    }
    assert set(synced) == {(tmp_path / "a" / "b" / "f").stat().st_ino, (tmp_path / "a" / ".hidden").stat().st_ino}
    assert record_folder(tmp_path / "nothing", tmp_path) == {}


def test_a_file_longer_than_one_chunk_has_the_checksum_of_the_whole(tmp_path):
    whole = os.urandom(2**20 + 7)
    (tmp_path / "f").write_bytes(whole)
    assert record_file(tmp_path / "f") == FileRecord(len(whole), digest(whole))


def test_each_fault_of_a_file_has_its_text(tmp_path):
    path, record = tmp_path / "f", FileRecord(3, digest(b"abc"))
    assert file_fault(path, record) == "is missing"
    path.write_bytes(b"ab")
    assert file_fault(path, record) == "has 2 bytes of 3"
    path.write_bytes(b"abd")
    assert file_fault(path, record) == "has other contents than were written"
    assert file_fault(path, record, contents=False) is None
    path.write_bytes(b"abc")
    assert file_fault(path, record) is None


def test_a_file_that_cannot_be_read_is_a_fault(tmp_path):
    (tmp_path / "f").mkdir()
    size = (tmp_path / "f").stat().st_size
    assert file_fault(tmp_path / "f", FileRecord(size, "")) == "cannot be read (no regular file)"


def test_inner_folders_are_forced_to_disk_before_outer_ones(tmp_path, monkeypatch):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "c").mkdir()
    order = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: order.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    sync_folders(tmp_path)
    assert sorted(order) == sorted(map(str, (tmp_path, tmp_path / "a", tmp_path / "a" / "b", tmp_path / "c")))
    assert order[-1] == str(tmp_path)
    assert order.index(str(tmp_path / "a" / "b")) < order.index(str(tmp_path / "a"))


def test_a_tree_is_forced_to_disk_with_every_file_and_every_folder(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    for name in ("a/f", "g"):
        (tmp_path / name).write_bytes(b"1")
    order = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: order.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    sync_tree(tmp_path)
    assert sorted(order[:2]) == [str(tmp_path / "a" / "f"), str(tmp_path / "g")]
    assert order[2:] == [str(tmp_path / "a"), str(tmp_path)]


def test_only_a_disk_that_fails_is_an_error_when_a_folder_is_forced_to_it(tmp_path, monkeypatch):
    def refuse(number):
        def fsync(descriptor):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", fsync)

    refuse(file_records.NO_SYNC[0])
    sync_folder(tmp_path)
    refuse(5)
    with pytest.raises(OSError, match="Input/output error"):
        sync_folder(tmp_path)


class FullDisk(io.BytesIO):
    def write(self, data):
        raise OSError(28, "No space left on device")


def write_and_fail(raw, failure):
    with HashedFile(raw) as file:
        with contextlib.suppress(OSError):  # as torch's writer drops it
            file.write(b"data")
        raise failure


def test_what_the_disk_said_is_told_and_not_what_followed_from_it_and_any_other_error_as_it_is():
    with pytest.raises(OSError, match="No space left"):
        write_and_fail(FullDisk(), RuntimeError("unexpected pos 704 vs 598"))
    with pytest.raises(RuntimeError, match="another"):
        write_and_fail(io.BytesIO(), RuntimeError("another"))


def test_the_checksum_of_a_folder_follows_names_sizes_and_contents_of_a_models_files(tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes(name.encode())
    digests = [digest_of(tmp_path)]
    (tmp_path / "notes.log").write_text("not the model's")
    assert digest_of(tmp_path) == digests[0]
    (tmp_path / "config.json").write_bytes(b"CONFIG.json")
    digests.append(digest_of(tmp_path))
    (tmp_path / "config.json").rename(tmp_path / "generation_config.json")
    digests.append(digest_of(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"model.safetensorS")
    digests.append(digest_of(tmp_path))
    assert len(set(digests)) == 4
    # A file by itself has its checksum whatever its name is.
    alone = [digest_of(file) for file in (tmp_path / "model.safetensors", (tmp_path / "notes.log").rename(tmp_path / "n.txt"))]
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    assert digest_of(tmp_path / "other.safetensors") == alone[0] != alone[1]


def test_links_to_a_models_files_have_the_checksum_of_the_files(tmp_path):
    model, links = tmp_path / "model", tmp_path / "links"
    for folder in (model, links):
        folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (model / name).write_bytes(name.encode())
        (links / name).symlink_to(model / name)
    assert digest_of(links) == digest_of(model)
    assert digest_of(links / "config.json") == digest_of(model / "config.json")


def test_large_weights_are_read_in_places_and_other_large_files_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(file_records, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(file_records, "SAMPLES", 4)
    monkeypatch.setattr(file_records, "SAMPLE_BYTES", 10)
    whole = bytes(1001)
    changed = {name: set() for name in ("model.safetensors", "tokenizer.json", "small.safetensors")}
    for name, places in changed.items():
        data = whole[:1000] if name.startswith("small") else whole
        (tmp_path / name).write_bytes(data)
        before = digest_of(tmp_path / name)
        for place in range(len(data)):
            (tmp_path / name).write_bytes(data[:place] + b"x" + data[place + 1 :])
            if digest_of(tmp_path / name) != before:
                places.add(place)
    assert changed["tokenizer.json"] == set(range(1001))
    assert changed["small.safetensors"] == set(range(1000))
    assert changed["model.safetensors"] == {start + place for start in (0, 250, 500, 750) for place in range(10)}
    (tmp_path / "model.safetensors").write_bytes(bytes(1002))
    assert digest_of(tmp_path / "model.safetensors") != before
