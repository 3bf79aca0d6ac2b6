import pytest

from verl_memopt.run.checkpoints import MANIFEST, TRACKER, Manifest, read_history, write_manifest


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
