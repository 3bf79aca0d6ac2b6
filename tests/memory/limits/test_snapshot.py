import gc
import json

import pytest
import torch

from verl_memopt.memory.out_of_memory import MOST_TENSORS, MemorySnapshot, snapshot_path
from verl_memopt.observe.byte_tracker import DeviceLimitError
from verl_memopt.observe.phase import MemoryProbe

CPU = torch.device("cpu")
LIMIT = 600_000


@pytest.fixture
def weight():
    return torch.zeros(50_000)


@pytest.fixture
def snapshot(tmp_path, weight):
    return MemorySnapshot(tmp_path / "run", 3, CPU, lambda: [("params", weight)])


def allocate_too_much():
    kept = [torch.zeros(30_000, dtype=torch.float64)]
    kept.append(torch.zeros(1_000_000))


def run_out(snapshot, weight):
    probe = MemoryProbe(CPU, lambda: [("params", weight)], LIMIT)
    with pytest.raises(DeviceLimitError), snapshot.on_out_of_memory("update_actor"), probe.phase("update_actor", track=True):
        allocate_too_much()


def test_the_snapshot_lists_what_lived_when_memory_ran_out(snapshot, weight):
    run_out(snapshot, weight)
    read = json.loads(snapshot.path.read_text())
    assert snapshot.path.name == "out_of_memory_rank3.json"
    assert read["phase"] == "update_actor"
    assert "past the limit" in read["error"]
    assert any("allocate_too_much" in line for line in read["traceback"])
    assert {"bytes": 200_000, "kind": "params", "shape": [50_000], "dtype": "torch.float32"} in read["tensors"]
    assert {"bytes": 240_000, "kind": "other", "shape": [30_000], "dtype": "torch.float64"} in read["tensors"]
    assert read["kinds"]["params"] == 200_000
    sizes = [tensor["bytes"] for tensor in read["tensors"]]
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) <= MOST_TENSORS
    assert read["live_bytes"] >= sum(sizes)


def test_tensors_that_share_memory_count_once(snapshot, weight):
    weight = weight[:10]
    run_out(snapshot, weight)
    assert sum(tensor["bytes"] == 200_000 for tensor in json.loads(snapshot.path.read_text())["tensors"]) == 1


def test_tensors_of_a_frozen_heap_are_listed_and_stay_frozen(snapshot, weight):
    gc.freeze()
    run_out(snapshot, weight)
    assert gc.get_freeze_count() > 0
    assert any(tensor["kind"] == "params" for tensor in json.loads(snapshot.path.read_text())["tensors"])


def test_another_error_leaves_no_snapshot(snapshot):
    with pytest.raises(RuntimeError, match="shapes"), snapshot.on_out_of_memory("gen"):
        raise RuntimeError("shapes differ")
    assert not snapshot.path.exists()


def test_a_disk_that_refuses_hides_nothing_of_the_error(tmp_path, weight, caplog):
    (tmp_path / "file").write_text("")
    snapshot = MemorySnapshot(tmp_path / "file" / "run", 0, CPU, lambda: [("params", weight)])
    run_out(snapshot, weight)
    assert "cannot be written" in caplog.text


def test_ranks_write_files_of_their_own(tmp_path):
    assert snapshot_path(tmp_path, 0) != snapshot_path(tmp_path, 1)
