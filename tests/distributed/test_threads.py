import os

import pytest
import torch

from verl_memopt.distributed import threads as module
from verl_memopt.distributed.device import limited_threads
from verl_memopt.distributed.threads import num_cores, threads_for


@pytest.fixture
def machine(monkeypatch):
    """Gives a function that makes this a machine with some cores, where nobody has asked for a number of threads."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return lambda cores: monkeypatch.setattr(module, "num_cores", lambda: cores)


@pytest.mark.parametrize(
    ("cores", "processes", "threads"), [(1, 1, 1), (2, 1, 1), (2, 4, 1), (16, 1, 15), (16, 2, 7), (64, 8, 7)]
)
def test_processes_share_the_cores_and_leave_one(machine, cores, processes, threads):
    machine(cores)
    assert threads_for(processes) == threads


def test_threads_that_were_asked_for_are_taken(machine, monkeypatch):
    machine(2)
    for wished, threads in (("6", 6), ("0", 1), ("2,1", 1)):
        monkeypatch.setenv("OMP_NUM_THREADS", wished)
        assert threads_for(1) == threads


@pytest.mark.parametrize(("before", "inside"), [(8, 3), (2, 2)])
def test_torch_gets_its_share_and_afterwards_what_it_had(machine, before, inside):
    machine(4)
    own = torch.get_num_threads()
    torch.set_num_threads(before)
    try:
        with limited_threads(1):
            assert torch.get_num_threads() == inside
        assert torch.get_num_threads() == before
    finally:
        torch.set_num_threads(own)


def test_a_container_counts_by_its_share_of_time(tmp_path):
    own = len(os.sched_getaffinity(0))
    assert num_cores(tmp_path) == own
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert num_cores(tmp_path) == own
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert num_cores(tmp_path) == 1
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    for quota, cores in (("-1", own), ("100000", 1)):
        (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota)
        assert num_cores(tmp_path) == cores
