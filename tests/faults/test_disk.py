"""A disk that fills up or refuses at any moment costs at most the step that was being saved, and says so."""

import errno
import os
import shutil
import time

import pytest

from tests.end_to_end.runs import arguments, assert_equal_runs, metrics, wait_for_step
from tests.faults.conftest import SHORT

SLOW = pytest.mark.slow


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


def assert_survives_a_rename(machine, toy, run_dir, uninterrupted, number, error):
    machine.refuse_rename(number, error)
    run = machine.train(toy, run_dir, *SHORT)
    assert run.returncode in (1, 2), (number, run.stdout[-3000:])
    assert "Traceback" not in run.stdout, (number, run.stdout[-3000:])
    assert os.strerror(error) in run.stdout, (number, run.stdout[-3000:])
    machine.fill_after(0)
    assert_equal_runs(machine.trained(toy, run_dir, *SHORT), uninterrupted)


@pytest.mark.parametrize(
    ("number", "error"),
    [(4, errno.EXDEV), pytest.param(15, errno.EACCES, marks=SLOW)],
    ids=["of a save", "of an old save"],
)
def test_a_rename_that_is_refused_is_named_and_a_rerun_ends_as_if_it_never_was(
    healthy, toy, run_dir, uninterrupted, number, error
):
    assert_survives_a_rename(healthy, toy, run_dir, uninterrupted, number, error)


@SLOW
@pytest.mark.timeout(7200)
def test_every_rename_may_be_the_one_that_fails(healthy, toy, run_dir, uninterrupted):
    healthy.trained(toy, run_dir / "counted", *SHORT)
    for number in range(1, healthy.renames() + 1):
        error = (errno.EIO, errno.ENOSPC, errno.EXDEV, errno.EACCES)[number % 4]
        assert_survives_a_rename(healthy, toy, run_dir / str(number), uninterrupted, number, error)


LOST = """
import os, sys
from verl_memopt.trainer.main_ppo import main

read, broken = os.pipe()
os.close(read)
for number in {numbers}:
    os.dup2(broken if {pipe} else os.open("/dev/full", os.O_WRONLY), number)
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("numbers", "pipe"), [pytest.param((1,), True, id="| head"), pytest.param((1, 2), False, id="a full log disk", marks=SLOW)]
)
def test_a_lost_console_and_a_home_that_cannot_be_written_end_no_run(healthy, toy, run_dir, uninterrupted, numbers, pipe):
    homeless = {**healthy.env, "HOME": "/proc", "XDG_CACHE_HOME": "/proc/cache"}
    run = healthy.fork(["-c", LOST.format(numbers=numbers, pipe=pipe), *arguments(toy, run_dir, *SHORT)[3:]], homeless).wait()
    assert run.returncode == 0, run.stdout[-3000:]
    assert run.stdout.count("Standard output is lost") == (2 not in numbers)
    assert_equal_runs(run_dir, uninterrupted)


def test_a_folder_that_can_no_longer_be_written_in_the_middle_ends_the_run_with_its_name(healthy, toy, run_dir):
    dumps = run_dir / "dumps"
    run = healthy.start(toy, run_dir, *SHORT, f"trainer.rollout_data_dir={dumps}")
    wait_for_step(run, run_dir, 0)
    # A step is logged before its samples are written, and they are written under another name first.
    while not list(dumps.glob("*.jsonl")) and run.poll() is None:
        time.sleep(0.01)
    shutil.rmtree(dumps)
    dumps.write_text("a file in the way")
    assert run.wait().returncode == 2, run.stdout[-3000:]
    assert "Traceback" not in run.stdout, run.stdout[-3000:]
    for said in (str(dumps), "start again to resume"):
        assert said in run.stdout, run.stdout[-3000:]


YEAR = 365 * 86400


def test_a_clock_that_is_years_ahead_and_then_in_1970_changes_no_run(healthy, toy, run_dir, uninterrupted):
    healthy.set_clock(14 * YEAR)
    healthy.trained(toy, run_dir, *SHORT, "trainer.total_training_steps=2")
    healthy.set_clock(60 - int(time.time()))
    run = healthy.train(toy, run_dir, *SHORT)
    assert run.returncode == 0, run.stdout[-3000:]
    assert "--- 1970-01-01" in (run_dir / "console.log").read_text()
    assert_equal_runs(run_dir, uninterrupted)


@SLOW
@pytest.mark.parametrize("seconds", [-YEAR, YEAR])
def test_a_clock_that_is_set_while_a_run_goes_on_changes_nothing(healthy, toy, run_dir, uninterrupted, seconds):
    run = healthy.start(toy, run_dir, *SHORT)
    wait_for_step(run, run_dir, 1)
    healthy.set_clock(seconds)
    assert run.wait().returncode == 0, run.stdout[-3000:]
    assert_equal_runs(run_dir, uninterrupted)
    times = [value for row in metrics(run_dir).values() for name, value in row.items() if name.startswith("timing_s/")]
    assert times
    assert all(0 <= each < 3600 for each in times)


@SLOW
@pytest.mark.timeout(7200)
def test_every_change_to_the_disk_may_be_the_first_that_fails(healthy, toy, run_dir, uninterrupted):
    healthy.fill_after(0)
    assert healthy.train(toy, run_dir / "counted", *SHORT).returncode == 0
    total = healthy.changes() - 10  # a run makes a few more or fewer
    # Each change of the first two saves; then every seventh, for the later steps do the same again.
    moments = [*range(1, total // 2), *range(total // 2, total, 7)]
    for changes in moments:
        assert_survives(healthy, toy, run_dir / str(changes), uninterrupted, changes)
