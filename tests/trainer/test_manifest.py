import json

import pytest
from blake3 import blake3

from verl_memopt.distributed.file_records import FileRecord
from verl_memopt.run.checkpoints import (
    MANIFEST,
    TRACKER,
    Manifest,
    ManifestError,
    find_fault,
    read_history,
    read_manifest,
    write_manifest,
)

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
    assert find_fault(folder).startswith(f"{MANIFEST} cannot be read: expected an object, and it is ")


def test_a_manifest_of_a_newer_version_is_told_from_a_damaged_one(folder):
    fields = json.loads((folder / MANIFEST).read_text())
    del fields["digest"]
    bare = json.dumps(fields | {"format": 2}, indent=1)
    whole = json.dumps(json.loads(bare) | {"digest": blake3(bare.encode()).hexdigest()}, indent=1) + "\n"
    (folder / MANIFEST).write_text(whole)
    assert find_fault(folder) == f"{MANIFEST} is of format 2 with {fields['algorithm']}: written by a newer version"


def test_a_manifest_that_cannot_be_opened_is_a_fault(folder):
    (folder / MANIFEST).unlink()
    assert find_fault(folder) == "meta.json is missing"
    (folder / MANIFEST).mkdir()
    assert find_fault(folder) == "meta.json cannot be read: no regular file"


def history(root, commits, tracked=None):
    """Return the lineage of a folder with these commit numbers. None is a damaged manifest."""
    folders = {step: root / f"global_step_{step}" for step in commits}
    for step, folder in folders.items():
        folder.mkdir()
        if commits[step] is None:
            (folder / MANIFEST).write_text("damaged")
        else:
            write_manifest(folder, Manifest(step, commits[step], 1, ""))
    if tracked is not None:
        (root / TRACKER).write_text(tracked)
    return read_history(root, folders)


@pytest.mark.parametrize(
    ("commits", "tracked", "own_steps"),
    [
        ({}, None, []),
        ({2: 1, 4: 2}, "4\n", [2, 4]),
        # The run went back to 4 and saved 5: what lay beyond is another run's, whatever is saved after.
        ({4: 1, 6: 2, 8: 3, 5: 4}, "5\n", [4, 5]),
        ({4: 1, 6: 2, 8: 3, 5: 4, 9: 5}, "9\n", [4, 5, 9]),
        ({4: 1, 8: 3, 5: 4, 6: 5}, "6\n", [4, 5, 6]),
        # A tracker that says something else does not count.
        ({2: 1, 4: 2, 6: 3}, "4\n", [2, 4, 6]),
        ({4: 1, 6: 2, 8: 3, 5: 4}, "8\n", [4, 5]),
        ({2: 1, 4: 2}, "0\n", [2, 4]),
        ({2: 1, 4: 2}, None, [2, 4]),
        # Where the newest one's own manifest is damaged, only the tracker knows it.
        ({4: 1, 6: 2, 8: 3, 5: None}, "5\n", [4, 5]),
        ({2: 1, 4: 2, 6: None}, "6\n", [2, 4, 6]),
        ({2: None, 4: None}, "x", [2, 4]),
        ({2: None, 4: 1, 6: 2}, "6\n", [2, 4, 6]),
    ],
)
def test_the_runs_own_checkpoints_are_told_from_those_left_behind(tmp_path, commits, tracked, own_steps):
    result = history(tmp_path, commits, tracked)
    assert result.steps == own_steps
    assert result.beyond == sorted(commits.keys() - set(own_steps))
    assert result.last_commit == max((commit for commit in commits.values() if commit), default=0)


@pytest.mark.parametrize(
    ("tracked", "doubt"),
    [
        ("4\n", None),
        ("4", None),
        ("6\n", "says step 6"),
        ("4\x0b", "cannot be read"),
        ("", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_a_tracker_that_disagrees_is_doubted_in_words(tmp_path, tracked, doubt):
    result = history(tmp_path, {2: 1, 4: 2}, tracked)
    rest = "and the checkpoint that was committed last is of step 4; that one counts"
    assert result.doubt == (None if doubt is None else f"{tmp_path / TRACKER}: {doubt}, {rest}")


@pytest.mark.parametrize(
    ("commits", "tracked"),
    [({4: 1, 6: 2, 8: 3, 5: 4}, "5\n"), ({2: None, 4: None}, "9\n"), ({2: None, 4: None}, None), ({}, "3\n")],
)
def test_the_step_of_the_last_commit_and_a_folder_without_commit_numbers_raise_no_doubt(tmp_path, commits, tracked):
    assert history(tmp_path, commits, tracked).doubt is None


def test_every_flipped_bit_of_the_tracker_is_noticed_and_changes_nothing(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    history(folder, {2: 1, 4: 2, 6: 3}, "6\n")
    folders = {step: folder / f"global_step_{step}" for step in (2, 4, 6)}
    for place in range(2):
        for bit in range(8):
            damaged = bytearray(b"6\n")
            damaged[place] ^= 1 << bit
            (folder / TRACKER).write_bytes(damaged)
            result = read_history(folder, folders)
            assert result.steps == [2, 4, 6]
            assert result.doubt is not None
