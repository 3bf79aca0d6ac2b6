"""A disk that fills up at any moment costs at most the step that was being saved, and says so."""

import pytest

from tests.end_to_end.runs import assert_equal_runs
from tests.faults.conftest import SHORT


def assert_survives(machine, toy, run_dir, uninterrupted, changes):
    """A run whose disk fills up says so; with room again it ends as one whose disk never was full."""
    machine.fill_after(changes)
    run = machine.train(toy, run_dir, *SHORT)
    assert run.returncode in (1, 2), (changes, run.stdout[-3000:])
    assert "Traceback" not in run.stdout, (changes, run.stdout[-3000:])
    assert "No space left" in run.stdout, (changes, run.stdout[-3000:])
    machine.fill_after(0)
    assert_equal_runs(machine.trained(toy, run_dir, *SHORT), uninterrupted)


@pytest.mark.parametrize("changes", [3, 210], ids=["at the start", "in a save"])
def test_a_disk_that_is_full_is_named_and_a_rerun_with_room_ends_as_if_it_never_was(
    healthy, toy, run_dir, uninterrupted, changes
):
    assert_survives(healthy, toy, run_dir, uninterrupted, changes)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_change_to_the_disk_may_be_the_first_that_fails(healthy, toy, run_dir, uninterrupted):
    healthy.fill_after(0)
    assert healthy.train(toy, run_dir / "counted", *SHORT).returncode == 0
    total = healthy.changes() - 10  # a run makes a few more or fewer
    # Each change of the first two saves; then every seventh, for the later steps do the same again.
    moments = [*range(1, total // 2), *range(total // 2, total, 7)]
    for changes in moments:
        assert_survives(healthy, toy, run_dir / str(changes), uninterrupted, changes)
