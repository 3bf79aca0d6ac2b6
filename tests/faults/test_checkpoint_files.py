"""Damage to any file of the newest checkpoint is found and named, and the run goes on from the one before."""

import os
import shutil

import pytest

from tests.end_to_end.runs import STARTED, assert_equal_runs, metrics
from tests.faults.conftest import SHORT

NEWEST = "global_step_4"


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1 << 4
    path.write_bytes(data)


def zero(path):
    path.write_bytes(bytes(path.stat().st_size))


def leave(path):
    """The file stays as it is; the disk will not give it."""


DAMAGES = {"truncated": truncate, "flipped": flip, "zeroed": zero, "missing": os.unlink, "unreadable": leave}


def files_of(run_dir):
    return sorted(path.relative_to(run_dir) for path in (run_dir / NEWEST).rglob("*") if path.is_file())


def assert_falls_back(machine, toy, run_dir, uninterrupted, name, damage):
    shutil.copytree(uninterrupted, run_dir)
    DAMAGES[damage](run_dir / name)
    machine.refuse_reads(damage == "unreadable")
    run = machine.train(toy, run_dir, *SHORT, FAULT_UNREADABLE=str(run_dir / name))
    machine.refuse_reads(False)
    assert run.returncode == 0, (str(name), damage, run.stdout[-3000:])
    assert "Traceback" not in run.stdout, (str(name), damage, run.stdout[-3000:])
    assert NEWEST in run.stdout
    assert f"resumed from {run_dir / 'global_step_3'}" in run.stdout, (str(name), damage, run.stdout[-3000:])
    assert_equal_runs(run_dir, uninterrupted)
    assert metrics(run_dir)[4][STARTED] != metrics(uninterrupted)[4][STARTED], "the last step is taken again"
    shutil.rmtree(run_dir)


def test_a_checkpoint_whose_disk_refuses_a_file_is_named_and_the_one_before_it_is_taken(healthy, toy, run_dir, uninterrupted):
    (name,) = [path for path in files_of(uninterrupted) if path.name == "data.pt"]
    assert_falls_back(healthy, toy, run_dir, uninterrupted, name, "unreadable")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("damage", DAMAGES)
def test_every_file_of_a_checkpoint_may_be_damaged(healthy, toy, run_dir, uninterrupted, damage):
    for name in files_of(uninterrupted):
        if (uninterrupted / name).stat().st_size or damage == "missing":
            assert_falls_back(healthy, toy, run_dir, uninterrupted, name, damage)
