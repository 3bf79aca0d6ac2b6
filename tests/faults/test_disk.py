"""A disk that fills up at any moment costs at most the step that was being saved, and says so."""

import pytest

from tests.end_to_end.runs import learned, metrics
from tests.faults.conftest import SHORT

FEW = (3, 30, 60, 150, 210, 260, 330, 500)
"""Changes after which the disk of the quick test is full: at the start, in a log line, in each part of a save, at the end."""


def assert_survives(machine, toy, run_dir, uninterrupted, changes):
    """A run whose disk fills up says so; with room again it ends as one whose disk never was full."""
    machine.fill_after(changes)
    run = machine.train(toy, run_dir, *SHORT)
    assert run.returncode in (1, 2), (changes, run.stdout[-3000:])
    assert "Traceback" not in run.stdout, (changes, run.stdout[-3000:])
    assert "No space left" in run.stdout, (changes, run.stdout[-3000:])
    machine.fill_after(0)
    rerun = machine.train(toy, run_dir, *SHORT)
    assert rerun.returncode == 0, (changes, rerun.stdout[-3000:])
    one, other = metrics(run_dir), metrics(uninterrupted)
    assert [learned(row) for row in one.values()] == [learned(row) for row in other.values()], changes


@pytest.mark.parametrize("changes", [pytest.param(each, marks=pytest.mark.slow if FEW.index(each) % 2 else ()) for each in FEW])
def test_a_disk_that_is_full_is_named_and_a_rerun_with_room_ends_as_if_it_never_was(
    healthy, toy, run_dir, uninterrupted, changes
):
    assert_survives(healthy, toy, run_dir, uninterrupted, changes)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_change_to_the_disk_may_be_the_first_that_fails(healthy, toy, run_dir, uninterrupted):
    healthy.fill_after(0)
    assert healthy.train(toy, run_dir / "counted", *SHORT).returncode == 0
    total = healthy.changes()
    # Each change of the first two saves; then every seventh, for the later steps do the same again.
    moments = [*range(1, total // 2), *range(total // 2, total, 7)]
    for changes in moments:
        assert_survives(healthy, toy, run_dir / str(changes), uninterrupted, changes)
