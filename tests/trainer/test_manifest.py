import json

import pytest
from blake3 import blake3

from verl_memopt.distributed.file_records import FileRecord
from verl_memopt.run.checkpoints import MANIFEST, Manifest, ManifestError, find_fault, read_manifest, write_manifest

CONTENTS = {"data.pt": b"driver", "actor/shard": b"weights"}


@pytest.fixture
def folder(tmp_path):
    """A checkpoint folder of two files with its manifest."""
    for name, data in CONTENTS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    files = {name: FileRecord(len(data), blake3(data).hexdigest()) for name, data in CONTENTS.items()}
    write_manifest(tmp_path, Manifest(7, 3, 2, "2.13.0", 0.5, files))
    return tmp_path


def test_a_manifest_is_read_as_it_was_written(folder):
    manifest = read_manifest(folder)
    assert (manifest.step, manifest.commit, manifest.world_size, manifest.torch, manifest.score) == (7, 3, 2, "2.13.0", 0.5)
    assert manifest.files["actor/shard"] == FileRecord(7, blake3(b"weights").hexdigest())
    assert find_fault(folder) is None


def test_a_flipped_bit_at_every_place_of_a_manifest_is_found(folder):
    path = folder / MANIFEST
    whole = path.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << (place * 5 % 8)
        path.write_bytes(damaged)
        assert MANIFEST in (find_fault(folder, contents=False) or ""), place


@pytest.mark.parametrize("name", CONTENTS)
def test_every_single_flipped_bit_of_a_file_is_found_and_the_file_named(folder, name):
    whole = CONTENTS[name]
    for place in range(len(whole)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << bit
            (folder / name).write_bytes(damaged)
            assert find_fault(folder) == f"{name} has other contents than were written"
            assert find_fault(folder, contents=False) is None


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '"format"', "[" * 100_000, '{"format": 1}', "\x00" * 64, "\xff"])
def test_a_manifest_that_is_something_else_is_refused(folder, text):
    (folder / MANIFEST).write_text(text, encoding="latin-1")
    with pytest.raises(ManifestError, match=MANIFEST):
        read_manifest(folder)


@pytest.mark.parametrize("text", ["[]", "null", '"format"'])
def test_json_that_is_no_object_is_said_to_be_none(folder, text):
    (folder / MANIFEST).write_text(text)
    assert find_fault(folder) == f"{MANIFEST} cannot be read: expected a JSON object"


def test_a_manifest_of_a_newer_version_is_told_from_a_damaged_one(folder):
    fields = json.loads((folder / MANIFEST).read_text())
    del fields["digest"]
    bare = json.dumps(fields | {"format": 2}, indent=1)
    whole = json.dumps(json.loads(bare) | {"digest": blake3(bare.encode()).hexdigest()}, indent=1) + "\n"
    (folder / MANIFEST).write_text(whole)
    assert "written by a newer version" in find_fault(folder)


def test_a_manifest_that_cannot_be_opened_is_a_fault(folder):
    (folder / MANIFEST).unlink()
    assert find_fault(folder) == "meta.json is missing"
    (folder / MANIFEST).mkdir()
    assert find_fault(folder) == "meta.json cannot be read: Is a directory"
